"""Two bits a value: up, down, or not yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.bits import pack, packed, signed, unpack
from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.memory import new, span, spans
from lightning_cocod.options import above_zero


@dataclass(frozen=True)
class Threshold(Codec):
    """C(x) = θ where x ≥ θ, −θ where x ≤ −θ, 0 elsewhere. 2 bits a value.

    To be used with error feedback, which keeps what is not sent: a residual stays within ±θ as long as no value that comes
    in is larger than θ. It is no contraction: without error feedback what is below θ is lost, and with it a value that is
    always above θ makes the residual grow, by what is above it.

    Source: the 2-bit compression of MXNet, as in Dai et al.: CD-SGD, 2021.

    Args:
        threshold: θ, in the unit of the values.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "threshold"
    threshold: float = 0.5

    def __post_init__(self) -> None:
        above_zero("threshold", self.threshold)

    @property
    def contraction(self) -> bool:
        """False."""
        return False

    @property
    def needs_feedback(self) -> bool:
        """True."""
        return True

    def nbytes(self, n: int) -> int:
        """⌈n/4⌉."""
        return packed(n, 2)

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        room = span(x.numel(), x.device)
        scratch = torch.empty(2, room, dtype=torch.float32, device=x.device)
        memory = new(x, torch.int8, room)
        for here in spans(x.numel(), x.device):
            up, down = scratch[:, : here.stop - here.start]
            torch.ge(x[here], self.threshold, out=up)
            torch.le(x[here], -self.threshold, out=down)
            levels = memory[: here.stop - here.start].copy_(up.sub_(down))
            pack(levels, 2, code[here.start // 4 : packed(here.stop, 2)])

    def _decode(self, code: Tensor, out: Tensor) -> None:
        for here in spans(out.numel(), out.device):
            part = code[here.start // 4 : packed(here.stop, 2)]
            out[here].copy_(unpack(part, signed(2), here.stop - here.start)).mul_(self.threshold)
