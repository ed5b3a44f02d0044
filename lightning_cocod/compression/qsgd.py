"""Equidistant levels up to the norm of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.blocks import HUGE, TINY, BlockCodec, Scratch, block_length
from lightning_cocod.compression.rounding import stochastic_
from lightning_cocod.options import flag, whole


@dataclass(frozen=True)
class QSGD(BlockCodec):
    """C(x) = ‖x‖ · sign(x) · ξ / s in a block, ξ being s|x|/‖x‖ rounded up or down at random so that its mean stays.

    U(ω) with ω = min(d/s², √d/s) in a block of d elements; by default C(x) / (1 + ω), a contraction with δ = 1/(1 + ω).
    ⌈log₂(2s + 1)⌉ bits a value and 32 a block.

    Source: Alistarh et al.: QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017. They call blocks
    buckets.

    Args:
        levels: s, from 1 to 127.
        block: elements that share a norm, a multiple of 8.
        unbiased: C(x) itself, which error feedback cannot wrap.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "qsgd"
    levels: int = 7
    block: int = 512
    unbiased: bool = False

    def __post_init__(self) -> None:
        if whole("levels", self.levels, least=1) > 127:
            raise ValueError(f"levels must be at most 127, got {self.levels}")
        block_length(self.block)
        flag("unbiased", self.unbiased)

    @property
    def bits(self) -> int:
        """⌈log₂(2s + 1)⌉."""
        return (2 * self.levels).bit_length()

    @property
    def unit(self) -> float:
        """1/s or 1/(s(1 + ω)): the scale of a block is its norm."""
        return 1 / self.levels if self.unbiased else 1 / (self.levels * (1 + self.omega))

    @property
    def omega(self) -> float:
        """Of a whole block."""
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)

    @property
    def contraction(self) -> bool:
        """Unless it is unbiased with an ω of at least 1."""
        return not self.unbiased or self.omega < 1

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    def _quantise(
        self, x: Tensor, scales: Tensor, levels: Tensor, scratch: Scratch, generator: torch.Generator | None
    ) -> None:
        s = self.levels
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
        scales.copy_(norm.clamp_(TINY, HUGE))
        torch.mul(x, s / scales, out=scratch.values).clamp_(-s, s)
        levels.copy_(stochastic_(scratch.values, generator))
