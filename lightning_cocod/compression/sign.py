"""One bit a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.blocks import HUGE, BlockCodec, block_length


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
        self, x: Tensor, scales: Tensor, levels: Tensor, scratch: Tensor, generator: torch.Generator | None
    ) -> None:
        n = x.shape[1]
        down = 1 << (n - 1).bit_length()  # a power of two, exactly: the sum itself may overflow
        torch.sum(torch.abs(x, out=scratch).mul_(1 / down), dim=1, keepdim=True, out=scales)
        scales.div_(n / down).clamp_(max=HUGE)
        levels.copy_(torch.bitwise_right_shift(x.view(torch.int32), 31, out=scratch.view(torch.int32)))
