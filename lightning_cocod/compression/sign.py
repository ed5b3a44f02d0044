"""One bit a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.blocks import HUGE, BlockCodec, Scratch, block_length
from lightning_cocod.compression.memory import on_cpu
from lightning_cocod.compression.numpy_ops import signs


@dataclass(frozen=True)
class ScaledSign(BlockCodec):
    """C(x) = mean|x| · sign(x) in each block; the sign of a zero is its sign bit.

    ‖C(x) − x‖² = ‖x‖² − ‖x‖₁²/d in a block of d elements: a contraction with δ = ‖x‖₁²/(d‖x‖²) ≥ 1/d, with equality.
    1 bit a value and 32 a block.

    Source: Zheng, Huang, Kwok: Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, 2019.

    Args:
        block: elements that share a scale, a multiple of 8.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "sign"
    block: int = 1024

    def __post_init__(self) -> None:
        block_length(self.block)

    @property
    def bits(self) -> int:
        """1."""
        return 1

    @property
    def values(self) -> tuple[int, ...]:
        """A sign bit's."""
        return (1, -1)

    @property
    def contraction(self) -> bool:
        """True: δ ≥ 1/block."""
        return True

    def _quantise(
        self, x: Tensor, scales: Tensor, levels: Tensor, scratch: Scratch, generator: torch.Generator | None
    ) -> None:
        mean_size(x, scales, scratch.values)
        signs(x, levels)


def mean_size(x: Tensor, means: Tensor, scratch: Tensor) -> None:
    """means ← mean|x| of each row, finite also where the sum is not."""
    n = x.shape[1]
    torch.abs(x, out=scratch)
    if on_cpu(x):  # where it costs little to have a look
        torch.div(totals(scratch), n, out=means)
        if math.isfinite(means.sum()):
            return
    down = 1 << (n - 1).bit_length()  # a power of two, exactly
    scaled = totals(scratch.mul_(1 / down)).div_(n / down).clamp_(max=HUGE)
    if on_cpu(x):  # each block on its own
        torch.where(means.isfinite(), means, scaled, out=means)
    else:
        means.copy_(scaled)


def totals(rows: Tensor) -> Tensor:
    """The sum of each row, in the same order on all processors: torch adds up long rows as suits the processor, but up to
    four, and up to sixteen that are 64 numbers or more, from first to last. So a row is cut into that many, again and again.

    Returns:
        (rows, 1).
    """
    n = max(8, 1 << (rows.shape[1] - 1).bit_length())
    if more := n - rows.shape[1]:
        rows = torch.nn.functional.pad(rows, (0, more))
    while n > 1:
        parts = 16 if n >= 1024 else min(4, n)
        n //= parts
        rows = rows.view(-1, parts, n).sum(1)
    return rows
