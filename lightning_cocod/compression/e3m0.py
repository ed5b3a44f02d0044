"""Four bits: a sign and three bits of exponent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.blocks import BlockCodec, Scratch, block_length

_SIZES = (0, 1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class E3M0(BlockCodec):
    """C(x) = ±2ʲ, the power of two nearest to |x|, or 0: FP4 without mantissa. The largest of a block's seven powers is 2ᵐ,
    the one nearest to the block's max|x|. 4 bits a value and 32 a block.

    |C(x) − x| ≤ |x|/3 in the range |x| ≥ ¾·2ᵐ⁻⁶; what is smaller becomes 0, and what is beyond 1.5·2¹²⁷ becomes 2¹²⁷.
    A contraction with δ ≥ 8/(9·block), as no value gets farther than 0 is, and the largest only by a third.

    Args:
        block: elements that share a largest exponent, a multiple of 8.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "e3m0"
    block: int = 256

    def __post_init__(self) -> None:
        block_length(self.block)

    @property
    def bits(self) -> int:
        """4."""
        return 4

    @property
    def values(self) -> tuple[int, ...]:
        """64ths of the largest power; the highest bit is the sign."""
        return _SIZES + tuple(-size for size in _SIZES)

    @property
    def unit(self) -> float:
        """2⁻⁶: the scale of a block is its largest power of two."""
        return 2.0**-6

    @property
    def contraction(self) -> bool:
        """True: δ ≥ 8/(9·block)."""
        return True

    def _quantise(
        self, x: Tensor, scales: Tensor, levels: Tensor, scratch: Scratch, generator: torch.Generator | None
    ) -> None:
        exponent = scratch.words
        torch.abs(x, out=scratch.values)
        exponent.add_(1 << 22).bitwise_right_shift_(23)  # of the nearest power of two, biased by 127
        top = exponent.amax(dim=1, keepdim=True).clamp_(7, 254)
        exponent.sub_(top - 7).clamp_(0, 7).sub_(x.view(torch.int32).bitwise_right_shift(31), alpha=8)
        levels.copy_(exponent)
        scales.view(torch.int32).copy_(top.bitwise_left_shift_(23))
