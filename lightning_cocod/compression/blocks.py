"""Codecs that give each block of values a scale of its own: small whole numbers times the scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cocod.compression.bits import pack, packed, signed, unpack
from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.memory import load, new, span, store
from lightning_cocod.options import whole

TINY, HUGE = 2.0**-119, 2.0**128 * (1 - 2.0**-20)  # scales lie between: 127 / scale and 127 · (scale / 127) are finite


class Part(NamedTuple):
    """Elements from ``start`` on: ``spans`` spans of ``blocks`` blocks of ``length`` elements."""

    start: int
    spans: int
    blocks: int
    length: int


def parts(n: int, block: int, device: torch.device) -> Iterator[Part]:
    """All of n elements: in equal spans, then the other whole blocks, then the last block where it is shorter."""
    whole, step = n // block, span(n, device, block) // block
    spans = whole // step
    for part in (
        Part(0, spans, step, block),
        Part(spans * step * block, 1, whole - spans * step, block),
        Part(whole * block, 1, 1, n % block),
    ):
        if part.spans * part.blocks * part.length:
            yield part


def block_length(value: object) -> int:
    """A block's number of elements; spans of blocks end where bytes end.

    Raises:
        ValueError: not a positive multiple of 8.
    """
    if whole("block", value, least=8) % 8:
        raise ValueError(f"block must be a multiple of 8, got {value!r}")
    return whole("block", value, least=8)


class BlockCodec(Codec):
    """C(x) = level · scale · unit. A code is the packed levels of all elements, then the float32 scale of each block.

    Attributes:
        block: elements of a block; the last one may have fewer.
        bits: of a level.
    """

    block: int

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a level."""

    @property
    def values(self) -> tuple[int, ...]:
        """What a level's codes stand for: by default two's complement."""
        return signed(self.bits)

    @property
    def unit(self) -> float:
        """What level 1 is in scales."""
        return 1.0

    @abstractmethod
    def _quantise(
        self, x: Tensor, scales: Tensor, levels: Tensor, scratch: Tensor, generator: torch.Generator | None
    ) -> None:
        """Scales and levels of some blocks.

        Args:
            x: float32 of shape (blocks, elements).
            scales: (blocks, 1). Overwritten.
            levels: int8, like x. Overwritten.
            scratch: float32, like x. Overwritten.
            generator: see encode.
        """

    def nbytes(self, n: int) -> int:
        """⌈n·bits/8⌉ + 4⌈n/block⌉."""
        return packed(n, self.bits) + 4 * -(-n // self.block)

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        end = packed(x.numel(), self.bits)
        scales = x.new_empty(-(-x.numel() // self.block))
        for part, xs, ss, cs in self._spans(x, scales, code[:end]):
            shape = (part.blocks, part.length)
            scratch = new(x, torch.float32, part.blocks * part.length).view(shape)
            levels = new(x, torch.int8, part.blocks * part.length)
            for values, s, c in zip(xs, ss, cs, strict=True):
                if self.bits == 8:
                    self._quantise(values, s, c.view(torch.int8).view(shape), scratch, generator)
                else:
                    self._quantise(values, s, levels.view(shape), scratch, generator)
                    pack(levels, self.bits, c)
        store(scales, code[end:])

    def _decode(self, code: Tensor, out: Tensor) -> None:
        end = packed(out.numel(), self.bits)
        scales = load(code[end:], torch.float32) * self.unit
        for part, outs, ss, cs in self._spans(out, scales, code[:end]):
            levels = new(out, torch.int8, part.blocks * part.length)
            for values, s, c in zip(outs, ss, cs, strict=True):
                values.copy_(unpack(c, self.values, levels).view_as(values)).mul_(s)

    def _spans(
        self, x: Tensor, scales: Tensor, code: Tensor
    ) -> Iterator[tuple[Part, tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Each part with its spans of values, scales and code. A view takes a microsecond, so there are as few as can be."""
        for part in parts(x.numel(), self.block, x.device):
            size, first = part.spans * part.blocks * part.length, part.start // self.block
            here = slice(part.start * self.bits // 8, packed(part.start + size, self.bits))
            yield (
                part,
                x[part.start : part.start + size].view(part.spans, part.blocks, part.length).unbind(),
                scales[first : first + part.spans * part.blocks].view(part.spans, part.blocks, 1).unbind(),
                code[here].view(part.spans, -1).unbind(),
            )
