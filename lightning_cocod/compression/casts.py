"""Fewer bits for each value, whatever the others are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.memory import load, new, span, spans, store


@dataclass(frozen=True)
class Identity(Codec):
    """C(x) = x, bit for bit. 32 bits a value. What compression costs apart from what it does."""

    name: ClassVar[str] = "none"

    @property
    def contraction(self) -> bool:
        """True: the error is 0."""
        return True

    def nbytes(self, n: int) -> int:
        """4n."""
        return 4 * n

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        store(x, code)

    def _decode(self, code: Tensor, out: Tensor) -> None:
        out.view(torch.uint8).copy_(code)


class _Half(Codec):
    """16 bits a value."""

    dtype: ClassVar[torch.dtype]

    @property
    def contraction(self) -> bool:
        """True where values are in the format's range; below it the error is bounded, and so is a residual.

        Above it a residual grows by what is beyond, step by step.
        """
        return True

    def nbytes(self, n: int) -> int:
        """2n."""
        return 2 * n

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        most = torch.finfo(self.dtype).max
        scratch = new(x, torch.float32, span(x.numel(), x.device))
        halves = new(x, self.dtype, scratch.numel())
        for here in spans(x.numel(), x.device):
            size = here.stop - here.start
            halves[:size].copy_(torch.clamp(x[here], -most, most, out=scratch[:size]))
            store(halves[:size], code[2 * here.start : 2 * here.stop])

    def _decode(self, code: Tensor, out: Tensor) -> None:
        out.copy_(load(code, self.dtype))


@dataclass(frozen=True)
class FP16(_Half):
    """C(x) = x rounded to float16; saturates: what is beyond ±65504 becomes ±65504, never infinite.

    |C(x) − x| ≤ 2⁻¹¹ |x| from 2⁻¹⁴ to 65504 in magnitude, and ≤ 2⁻²⁵ below.
    """

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class BF16(_Half):
    """C(x) = x rounded to bfloat16; saturates: the largest float32 values become ±3.39e38, never infinite.

    |C(x) − x| ≤ 2⁻⁸ |x| from 2⁻¹²⁶ to 3.39e38 in magnitude, and ≤ 2⁻¹³⁴ below.
    """

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
