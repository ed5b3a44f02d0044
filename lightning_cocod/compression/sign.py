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
    torch.abs(x, out=scratch)
    if on_cpu(x):  # where it costs little to have a look
        torch.mean(scratch, dim=1, keepdim=True, out=means)
        if math.isfinite(means.sum()):
            return
    n = x.shape[1]
    down = 1 << (n - 1).bit_length()  # a power of two, exactly
    torch.sum(scratch.mul_(1 / down), dim=1, keepdim=True, out=means)
    means.div_(n / down).clamp_(max=HUGE)
