"""Powers of two: a sign and an exponent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.bits import pack, packed, unpack
from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.memory import new, span, spans
from lightning_cocod.compression.numpy_ops import signs


@dataclass(frozen=True)
class Natural(Codec):
    """C(x) = x rounded to the power of two below or above at random, so that its mean stays. 9 bits a value.

    U(1/8), with equality at 4/3 of a power of two; so it is a contraction with δ = 7/8 as it is. That holds from 2⁻¹²⁶ to
    2¹²⁷ in magnitude; it is unbiased below as well, and saturates above. A code is n exponents, then n sign bits.

    Source: Horváth et al.: Natural Compression for Distributed Deep Learning, 2019.
    """

    name: ClassVar[str] = "natural"

    @property
    def contraction(self) -> bool:
        """True: δ = 7/8."""
        return True

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    def nbytes(self, n: int) -> int:
        """n + ⌈n/8⌉."""
        return n + packed(n, 1)

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        n, room = x.numel(), span(x.numel(), x.device)
        random = new(x, torch.int32, room)
        memory = new(x, torch.int8, room)
        for here in spans(n, x.device):
            r, levels, bits = random[: here.stop - here.start], memory[: here.stop - here.start], x[here].view(torch.int32)
            # A random mantissa, added, carries into the exponent with the probability of rounding up.
            r.random_(0, 1 << 23, generator=generator).add_(bits & 0x7FFFFFFF).bitwise_right_shift_(23)
            code[here] = r.clamp_(0, 254)
            signs(x[here], levels)
            pack(levels, 1, code[n + here.start // 8 : n + packed(here.stop, 1)])

    def _decode(self, code: Tensor, out: Tensor) -> None:
        n = out.numel()
        for here in spans(n, out.device):
            levels = unpack(code[n + here.start // 8 : n + packed(here.stop, 1)], (0, -1), here.stop - here.start)
            bits = out[here].view(torch.int32)
            bits.copy_(levels).bitwise_left_shift_(31).bitwise_or_(code[here].int().bitwise_left_shift_(23))
