"""Equidistant levels up to the largest magnitude of a block: int8, int4 and, with a single level, TernGrad."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.bits import unpack_nibbles
from lightning_cocod.compression.blocks import HUGE, TINY, BlockCodec, Scratch, block_length
from lightning_cocod.compression.memory import constant
from lightning_cocod.compression.rounding import stochastic_
from lightning_cocod.options import flag


class Absmax(BlockCodec):
    """C(x) = u · round(x / u), u = max|x| / Q in a block.

    Rounded to the nearest: |C(x) − x| ≤ u / 2, and no value gets farther than 0 is, the largest not at all, so that this
    is a contraction with δ ≥ 1/block.

    Rounded up or down at random: unbiased, U(ω) with ω = (√(1 + (d − 1)/Q²) − 1)/2 in a block of d elements. Equality is
    where one value is ±max|x| and all others are ±u/(2 + 2ω).
    """

    Q: ClassVar[int]

    @property
    def bits(self) -> int:
        """Those of a level from −Q to Q."""
        return (2 * self.Q).bit_length()

    @property
    def omega(self) -> float:
        """Of a whole block, where rounding is stochastic."""
        return (math.sqrt(1 + (self.block - 1) / self.Q**2) - 1) / 2

    @property
    def contraction(self) -> bool:
        """Rounded to the nearest: True. At random: where ω < 1."""
        return not self.stochastic or self.omega < 1

    @property
    def unit(self) -> float:
        """1/Q: the scale of a block is max|x|."""
        return 1 / self.Q

    def _quantise(
        self, x: Tensor, scales: Tensor, levels: Tensor, scratch: Scratch, generator: torch.Generator | None
    ) -> None:
        values, words, factors = scratch
        least, most, Q = (constant(value, torch.float32, x.device) for value in (TINY, HUGE, self.Q))
        torch.abs(x, out=values)  # magnitudes have the order of their bits, as whole numbers, which compare faster
        torch.amax(words, dim=1, keepdim=True, out=scales.view(torch.int32))
        torch.clamp(scales, least, most, out=scales)
        torch.div(Q, scales, out=factors)
        if self.stochastic:
            torch.mul(x, factors, out=values).clamp_(-self.Q, self.Q)
            levels.copy_(stochastic_(values, generator))
        else:
            torch.addcmul(_rounding(self.block, x.device)[:, : x.shape[1]], x, factors, out=values)
            levels.copy_(words)  # the lowest byte of each


@cache
def _rounding(length: int, device: torch.device) -> Tensor:
    """A row of 1.5·2²³. What is added to it is rounded to a whole number, the lowest bits of the sum.

    A row, as a sum with one number of two dimensions less is not vectorised.
    """
    return torch.full((1, length), 1.5 * 2.0**23, device=device)


@dataclass(frozen=True)
class Int8(Absmax):
    """Levels from −127 to 127 times max|x|/127 of the block. 8 bits a value and 32 a block.

    Args:
        block: elements that share a scale, a multiple of 8.
        stochastic: round up or down at random, unbiased, instead of to the nearest.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "int8"
    Q: ClassVar[int] = 127
    block: int = 1024
    stochastic: bool = False

    def __post_init__(self) -> None:
        block_length(self.block)
        flag("stochastic", self.stochastic)


@dataclass(frozen=True)
class Int4(Absmax):
    """Levels from −7 to 7 times max|x|/7 of the block. 4 bits a value and 32 a block.

    Args:
        block: elements that share a scale, a multiple of 8.
        stochastic: round up or down at random, unbiased, instead of to the nearest. A contraction up to block=392.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "int4"
    Q: ClassVar[int] = 7
    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        block_length(self.block)
        flag("stochastic", self.stochastic)

    @property
    def unit(self) -> float:
        """1/16Q: levels are decoded 16 times as large."""
        return super().unit / 16

    def _levels(self, code: Tensor, n: int) -> Tensor:
        return unpack_nibbles(code, n)


@dataclass(frozen=True)
class TernGrad(Absmax):
    """C(x) = max|x| · sign(x) · Bernoulli(|x| / max|x|) in a block. 2 bits a value and 32 a block.

    E‖C(x) − x‖² = ‖x‖∞‖x‖₁ − ‖x‖² ≤ ω‖x‖² in a block, ω = (√block − 1)/2; by default C(x) / (1 + ω), a contraction with
    δ = 1/(1 + ω).

    Source: Wen et al.: TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, 2017.

    Args:
        block: elements that share a scale, a multiple of 8.
        unbiased: C(x) itself, which error feedback cannot wrap.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "terngrad"
    Q: ClassVar[int] = 1
    block: int = 1024
    unbiased: bool = False

    def __post_init__(self) -> None:
        block_length(self.block)
        flag("unbiased", self.unbiased)

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    @property
    def contraction(self) -> bool:
        """Unless it is unbiased with an ω of at least 1, from block=16 on."""
        return not self.unbiased or self.omega < 1

    @property
    def unit(self) -> float:
        """1 or 1/(1 + ω)."""
        return 1.0 if self.unbiased else 1 / (1 + self.omega)
