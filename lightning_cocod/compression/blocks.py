"""Codecs that give each block of values a scale of its own: small whole numbers times the scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cocod.compression.bits import pack, packed, signed, unpack
from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.memory import load, span, store
from lightning_cocod.options import whole

TINY, HUGE = 2.0**-126, 2.0**127  # scales lie between: 1 / scale is finite


class Rows(NamedTuple):
    """Whole blocks of a tensor, or its last one, which may be shorter."""

    here: slice  # elements
    blocks: slice  # blocks
    shape: tuple[int, int]  # blocks, elements of each


def rows(n: int, block: int, device: torch.device) -> Iterator[Rows]:
    """All blocks of n elements, a span at a time."""
    even, step = n - n % block, span(n, device, block)
    for start in range(0, even, step):
        stop = min(start + step, even)
        yield Rows(slice(start, stop), slice(start // block, stop // block), ((stop - start) // block, block))
    if even < n:
        yield Rows(slice(even, n), slice(even // block, even // block + 1), (1, n - even))


def block_length(value: object) -> int:
    """A block's number of elements; spans of blocks end where bytes end.

    Raises:
        ValueError: not a positive multiple of 8.
    """
    if whole("block", value, least=8) % 8:
        raise ValueError(f"block must be a multiple of 8, got {value!r}")
    return whole("block", value, least=8)


class BlockCodec(Codec):
    """A code is the packed levels of all elements, then the float32 scale of each block.

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

    def nbytes(self, n: int) -> int:
        """⌈n·bits/8⌉ + 4⌈n/block⌉."""
        return packed(n, self.bits) + 4 * -(-n // self.block)

    @abstractmethod
    def _quantise(
        self, x: Tensor, scales: Tensor, levels: Tensor, scratch: Tensor, generator: torch.Generator | None
    ) -> None:
        """Scales and levels of some blocks.

        Args:
            x: float32 of shape (blocks, elements).
            scales: (blocks, 1). Overwritten.
            levels: int8, 1-D. Overwritten.
            scratch: float32, like x. Overwritten.
            generator: see encode.
        """

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        n, device, end = x.numel(), x.device, packed(x.numel(), self.bits)
        room = max(span(n, device, self.block), min(n, self.block))
        scales = torch.empty(-(-n // self.block), dtype=torch.float32, device=device)
        scratch = torch.empty(room, dtype=torch.float32, device=device)
        memory = torch.empty(-(-room // 8) * 8, dtype=torch.int8, device=device)
        for here, blocks, shape in rows(n, self.block, device):
            levels = memory[: here.stop - here.start]
            flat = scratch[: here.stop - here.start]
            self._quantise(x[here].view(shape), scales[blocks, None], levels, flat.view(shape), generator)
            pack(levels, self.bits, code[here.start * self.bits // 8 : packed(here.stop, self.bits)])
        store(scales, code[end:])

    def _decode(self, code: Tensor, out: Tensor) -> None:
        n, device, end = out.numel(), out.device, packed(out.numel(), self.bits)
        scales = load(code[end:], torch.float32)
        memory = torch.empty(-(-max(span(n, device, self.block), self.block) // 8) * 8, dtype=torch.int8, device=device)
        for here, blocks, shape in rows(n, self.block, device):
            levels = memory[: here.stop - here.start]
            part = code[here.start * self.bits // 8 : packed(here.stop, self.bits)]
            out[here].copy_(unpack(part, self.values, levels))
            out[here].view(shape).mul_(scales[blocks, None])
