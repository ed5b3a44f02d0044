"""Codecs that give each block of values a scale of its own: small whole numbers times the scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cocod.compression import compiled
from lightning_cocod.compression.bits import pack, packed, signed, unpack
from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.memory import constant, load, new, span, store
from lightning_cocod.options import whole

TINY, HUGE = 2.0**-119, 2.0**128 * (1 - 2.0**-20)  # scales lie between: 127 / scale and 127 · (scale / 127) are finite


class Rows(NamedTuple):
    """Elements from ``start`` on: ``blocks`` blocks of ``length`` elements, a row each."""

    start: int
    blocks: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """These elements, one being an element of ``flat``. A view in a single call: a span's calls show."""
        return flat.as_strided((self.blocks, self.length), (self.length, 1), flat.storage_offset() + self.start)

    def scales_of(self, flat: Tensor, block: int) -> Tensor:
        """Their scales, of shape (blocks, 1)."""
        return flat.as_strided((self.blocks, 1), (1, 1), flat.storage_offset() + self.start // block)


def spans_of_rows(n: int, block: int, device: torch.device) -> Iterator[Rows]:
    """All of n elements: the whole blocks, a span at a time, then the last block where it is shorter."""
    whole, step = n - n % block, span(n, device, block)
    for start in range(0, whole, step):
        yield Rows(start, min(step, whole - start) // block, block)
    if whole < n:
        yield Rows(whole, 1, n - whole)


class Scratch(NamedTuple):
    """Memory for one span. Whatever is in it is overwritten.

    Attributes:
        values: float32 of shape (blocks, elements).
        words: int32, the same memory.
        sizes: float32 of shape (blocks, 1).
    """

    values: Tensor
    words: Tensor
    sizes: Tensor


def scratch_for(x: Tensor, rows: Rows) -> Scratch:
    """On the device of x."""
    values = x.new_empty(rows.blocks, rows.length)
    return Scratch(values, values.view(torch.int32), x.new_empty(rows.blocks, 1))


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
        self, x: Tensor, scales: Tensor, levels: Tensor, scratch: Scratch, generator: torch.Generator | None
    ) -> None:
        """Scales and levels of some blocks.

        Args:
            x: float32 of shape (blocks, elements).
            scales: (blocks, 1). Overwritten.
            levels: int8, like x. Overwritten.
            scratch: for as many.
            generator: see encode.
        """

    def _levels(self, code: Tensor, n: int) -> Tensor:
        """n levels out of a code, as int8."""
        return unpack(code, self.values, n)

    def nbytes(self, n: int) -> int:
        """⌈n·bits/8⌉ + 4⌈n/block⌉."""
        return packed(n, self.bits) + 4 * -(-n // self.block)

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        if (loops := compiled.kernels_for(self.name, x)) and not self.stochastic:
            compiled.encode(loops, self.block, x, code)
            return
        bits, end, scales, scratch = self.bits, packed(x.numel(), self.bits), x.new_empty(-(-x.numel() // self.block)), None
        packing = bits < 8
        memory = new(x, torch.int8, span(x.numel(), x.device, self.block)) if packing else code[:end].view(torch.int8)
        for rows in spans_of_rows(x.numel(), self.block, x.device):
            if scratch is None or scratch.values.shape != rows[1:]:
                scratch = scratch_for(x, rows)
            levels = (rows._replace(start=0) if packing else rows).of(memory)
            self._quantise(rows.of(x), rows.scales_of(scales, self.block), levels, scratch, generator)
            if packing:
                pack(levels.view(-1), bits, self._code(code, rows))
        store(scales, code[end:])

    def _decode(self, code: Tensor, out: Tensor) -> None:
        if loops := compiled.kernels_for(self.name, out):
            compiled.decode(loops, self.block, self.unit, code, out)
            return
        end = packed(out.numel(), self.bits)
        scales = load(code[end:], torch.float32) * constant(self.unit, torch.float32, out.device)
        for rows in spans_of_rows(out.numel(), self.block, out.device):
            levels = self._levels(self._code(code, rows), rows.blocks * rows.length)
            values = rows.of(out)
            values.copy_(levels.view_as(values)).mul_(rows.scales_of(scales, self.block))

    def _code(self, code: Tensor, rows: Rows) -> Tensor:
        """The levels' part of a code that stands for these elements."""
        return code[rows.start * self.bits // 8 : packed(rows.start + rows.blocks * rows.length, self.bits)]
