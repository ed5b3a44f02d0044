"""Flat buckets over a list of tensors: the shape in which parameters travel.

A bucket is a run of elements of one dtype on one device, at most ``cap`` bytes long. Tensors fill the buckets one after
the other and are cut where a bucket ends, so a tensor of any size works. A piece is the part of a tensor that lies in one
bucket. The layout depends only on the tensors' shapes, strides, dtypes and order, so it is the same on every worker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cocod.comm import pages
from lightning_cocod.comm.link import memory_of
from lightning_cocod.comm.norms import RunningNorm

BUCKET_BYTES = 2 << 20
"""To hand a bucket over costs the same whatever its size; what is larger than a core's cache is slower to work on. With
4 MiB steps of ``ssgd`` with ResNet-18 over 200 Mbit/s are a tenth longer, with 1 MiB those over a loopback a twentieth."""
_MANY = 128  # buckets of that size. Of more, each is twice as large: they weigh as little beside all of them
_LARGEST = 4  # times that size: no bucket is larger
_FEW = 8  # parts of every bucket of a buffer, whose views take next to no memory beside it


class Part(NamedTuple):
    """Of a bucket."""

    values: Tensor
    bytes: memoryview


def as_part(values: Tensor) -> Part:
    """Of contiguous memory on the CPU. Making the views takes longer than handing bytes over: keep them."""
    return Part(values, memory_of(values))


def parts_of(bucket: Tensor, n: int) -> list[Part]:
    """A bucket in n parts, as even as may be."""
    ends = [bucket.numel() * part // n for part in range(n + 1)]
    return [as_part(bucket[start:stop]) for start, stop in pairwise(ends)]


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of this dtype travel and are added up: halves as float32, rounded once, at the end."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def weigh(x: Tensor, w: float, out: Tensor) -> None:
    """out ← w x, and the product, too, in the dtype of ``out``."""
    if out.dtype == x.dtype:
        torch.mul(x, w, out=out)
    else:
        out.copy_(x).mul_(w)


def bucket_bytes(nbytes: int, n: int) -> int:
    """The most bytes of each bucket of so many, if n workers cut it into parts.

    With more workers it is larger, for the parts not to be smaller: to send and receive one takes a busy machine some 0.2 ms
    beside its bytes. With four workers and ResNet-18 a communication thread takes a fifth less for it.
    """
    many = nbytes > _MANY * BUCKET_BYTES
    return BUCKET_BYTES * min(_LARGEST, max(1, n // 2) * (2 if many else 1))


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of tensor ``index``, in memory order, at [offset, end) of the bucket."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """In the bucket."""
        return self.offset + self.stop - self.start


def form_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shape, and strides where they decide the order in memory: not those of dimensions of one element."""
    strides = tuple(0 if n == 1 else s for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return tuple(tensor.shape), strides if is_dense(tensor) else None


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's memory has neither gaps nor overlaps, whatever the order of its dimensions."""
    expected = 1
    if tensor.numel() == 0:
        return True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """A one-dimensional view of a dense tensor's memory; works for channels_last and transposed tensors alike."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def in_the_order_of(like: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it whose elements lie in memory as those of another one of its shape do."""
    if form_of(tensor) == form_of(like):
        return tensor
    return torch.empty_strided(like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Layout:
    """How tensors lie in buckets.

    Args:
        tensors: what travels. Dense tensors are cut anywhere; a tensor with gaps in its memory stays in one piece.
        cap: the most bytes of a bucket as its values are summed (``summed_in``); see ``bucket_bytes`` otherwise.
        among: workers that cut buckets into parts for each other.
        apart: a label for each tensor; those of different labels share no bucket. One label by default.
        multiple: of which the number of elements of each bucket is one; the rest is padding, zero in buffers.

    Attributes:
        nbytes: of the tensors.
        multiple: see above.
        summed_nbytes: of the same values as they are summed.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        cap: int | None = None,
        *,
        among: int = 2,
        apart: Sequence[int] | None = None,
        multiple: int = 1,
    ) -> None:
        self.nbytes = sum(t.numel() * t.element_size() for t in tensors)
        self.summed_nbytes = sum(t.numel() * summed_in(t.dtype).itemsize for t in tensors)
        cap = cap or bucket_bytes(self.summed_nbytes, among)
        self._kinds: list[tuple[torch.dtype, torch.device]] = []
        self._sizes: list[int] = []
        self._pieces: list[list[Piece]] = []
        labels = [0] * len(tensors) if apart is None else list(apart)
        self.multiple = multiple
        digest = hashlib.sha256(repr((cap, labels, multiple) if multiple > 1 or any(labels) else cap).encode())
        self._forms = [form_of(t) for t in tensors]
        kinds = [(t.dtype, t.device, label) for t, label in zip(tensors, labels, strict=True)]
        for kind in dict.fromkeys(kind for t, kind in zip(tensors, kinds, strict=True) if t.numel() > 0):
            room = max(1, cap // summed_in(kind[0]).itemsize)
            self._open(kind[:2])
            for index, tensor in enumerate(tensors):
                if kinds[index] != kind:
                    continue
                dense = is_dense(tensor)
                digest.update(repr((index, self._forms[index], str(tensor.dtype))).encode())
                start, size = 0, tensor.numel()
                while start < size:
                    if self._sizes[-1] >= room:
                        self._open(kind[:2])
                    step = min(size - start, room - self._sizes[-1]) if dense else size
                    self._pieces[-1].append(Piece(index, start, start + step, self._sizes[-1]))
                    self._sizes[-1] += step
                    start += step
        self._sizes = [-(-size // multiple) * multiple for size in self._sizes]
        self.fingerprint = int.from_bytes(digest.digest()[:7], "big")
        self._cache: tuple[tuple[int, ...], list[list[Tensor]]] = ((), [])

    def _open(self, kind: tuple[torch.dtype, torch.device]) -> None:
        self._kinds.append(kind)
        self._sizes.append(0)
        self._pieces.append([])

    def __len__(self) -> int:
        return len(self._sizes)

    def pieces(self, tensors: Sequence[Tensor], *, keep: bool = True) -> list[list[Tensor]]:
        """Views of the tensors' memory, one list a bucket. ``keep`` them, and so the memory, for the next call."""
        key = tuple(t.data_ptr() for t in tensors)
        if self._cache[0] != key:
            if [form_of(t) for t in tensors] != self._forms:
                raise ValueError("the memory order of a tensor has changed since its layout was made; convert models before")
            flat = [in_memory_order(t) if is_dense(t) else t.detach() for t in tensors]
            views = [
                [flat[p.index][p.start : p.stop] if flat[p.index].dim() == 1 else flat[p.index] for p in bucket]
                for bucket in self._pieces
            ]
            if not keep:
                return views
            self._cache = (key, views)
        return self._cache[1]

    def parts(self, bucket: int) -> list[Piece]:
        """What lies in a bucket."""
        return self._pieces[bucket]

    def shares(self, bucket: int, n: int) -> list[list[Piece]]:
        """What lies in each of n equal parts of a bucket, with offsets there. n divides its size; all is dense."""
        size = self._sizes[bucket] // n
        shares: list[list[Piece]] = [[] for _ in range(n)]
        for piece in self._pieces[bucket]:
            start, offset = piece.start, piece.offset
            while start < piece.stop:
                share, within = divmod(offset, size)
                step = min(piece.stop - start, size - within)
                shares[share].append(Piece(piece.index, start, start + step, within))
                start, offset = start + step, offset + step
        return shares

    def numbers(self, bucket: int) -> list[int]:
        """Of the tensors whose pieces lie in a bucket, piece by piece."""
        return [p.index for p in self._pieces[bucket]]

    def kind(self, bucket: int) -> tuple[torch.dtype, torch.device]:
        """Of the values in a bucket."""
        return self._kinds[bucket]

    def form(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Shape of a tensor, and the strides that decide its order in memory; None if it has gaps."""
        return self._forms[index]

    def matrix(self, index: int) -> tuple[int, int]:
        """Rows and columns of a tensor as it lies in memory, row by row; one row if it has gaps or only one dimension.

        Rows are along the dimension that changes slowest: the first, unless the tensor is transposed.
        """
        shape, strides = self._forms[index]
        n = math.prod(shape)
        rows = shape[max(range(len(shape)), key=lambda d: strides[d])] if strides and n else 1
        return (rows, n // rows) if rows < n else (1, n)

    def sizes(self) -> list[int]:
        """Real numbers in each bucket: a complex one is two."""
        return [n * (2 if kind[0].is_complex else 1) for n, kind in self._each()]

    def buffer(self, *, summed: bool = False) -> Buffer:
        """New, uninitialised buckets for a copy of all the tensors, or for ``summed`` values."""
        kinds = [(n, summed_in(dtype) if summed else dtype, device) for n, (dtype, device) in self._each()]
        return Buffer(self, pages.buckets(kinds, zero=self.multiple > 1))

    def shard(self, n: int, *, summed: bool = False) -> list[Tensor]:
        """New zeros for one of n equal parts of each bucket."""
        kinds = [(size // n, summed_in(dtype) if summed else dtype, device) for size, (dtype, device) in self._each()]
        return [torch.zeros(size, dtype=dtype, device=device) for size, dtype, device in kinds]

    def scratch(self, bucket: int, memory: dict[tuple[torch.dtype, torch.device], Tensor], *, summed: bool) -> Tensor:
        """One bucket's worth of reusable memory, for its ``summed`` values or for its bytes, out of a pool that grows to the
        largest bucket and stays.
        """
        (dtype, device), size = self._kinds[bucket], self._sizes[bucket]
        kind = (summed_in(dtype) if summed else dtype, device)
        if kind not in memory or memory[kind].numel() < size:
            memory[kind] = torch.empty(size, dtype=kind[0], device=kind[1])
        return memory[kind][:size]

    def cut(self, bucket: int, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Views of a flat bucket, shaped like the pieces that lie in it."""
        return [flat[p.offset : p.end].view(piece.shape) for p, piece in zip(self._pieces[bucket], like, strict=True)]

    def _each(self) -> list[tuple[int, tuple[torch.dtype, torch.device]]]:
        return list(zip(self._sizes, self._kinds, strict=True))


class Buffer:
    """Buckets that hold a copy of the tensors of a layout.

    On the CPU everything is done bucket by bucket, so that what is done to a bucket finds it in the cache.
    """

    def __init__(self, layout: Layout, buckets: list[Tensor]) -> None:
        self.layout = layout
        self.buckets = buckets
        self._views: list[list[Tensor]] = []
        self._spare: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._parts: dict[tuple[int, int], list[Part]] = {}

    def contents(self, bucket: int) -> list[Tensor]:
        """The bucket."""
        return [self.buckets[bucket]]

    def weighed(self, bucket: int, w: float, out: Tensor) -> None:
        """out ← w times the bucket."""
        weigh(self.buckets[bucket], w, out)

    def parts(self, bucket: int, n: int) -> list[Part]:
        """A bucket on the CPU in n parts. They are kept, unless they are many."""
        if n > _FEW:
            return parts_of(self.buckets[bucket], n)
        if (bucket, n) not in self._parts:
            self._parts[bucket, n] = parts_of(self.buckets[bucket], n)
        return self._parts[bucket, n]

    def _spans(
        self, tensors: Sequence[Tensor], keep: bool = True
    ) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """Buckets, views of them and the pieces of the tensors that lie there: one by one or, off the CPU, all at once."""
        pieces = self.layout.pieces(tensors, keep=keep)
        if not self._views:
            self._views = [self.layout.cut(j, flat, pieces[j]) for j, flat in enumerate(self.buckets)]
        if all(flat.device.type == "cpu" for flat in self.buckets):
            return (([b], v, p) for b, v, p in zip(self.buckets, self._views, pieces, strict=True) if v)
        return iter([(self.buckets, [v for views in self._views for v in views], [p for bucket in pieces for p in bucket])])

    def beside(self, *lists: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Every piece: the number of its tensor, the part of the buffer, and those of each list's tensor with that number.

        Raises:
            ValueError: the tensors of a list are not in the layout's memory order.
        """
        cut = [self.layout.pieces(tensors, keep=False) for tensors in lists]
        for j, flat in enumerate(self.buckets):
            here = [pieces[j] for pieces in cut]
            for number, *parts in zip(self.layout.numbers(j), self.layout.cut(j, flat, here[0]), *here, strict=True):
                yield number, tuple(parts)

    @torch.no_grad()
    def copy_(self, tensors: Sequence[Tensor], *, keep: bool = True) -> None:
        """buffer ← tensors. Their views are kept for the next call, and so is their memory, unless told."""
        for _, views, pieces in self._spans(tensors, keep):
            torch._foreach_copy_(views, pieces)

    @torch.no_grad()
    def copy_to(self, tensors: Sequence[Tensor], *, keep: bool = True) -> None:
        """tensors ← buffer. Views and memory are kept as in ``copy_``."""
        for _, views, pieces in self._spans(tensors, keep):
            torch._foreach_copy_(pieces, views)

    @torch.no_grad()
    def add_to(self, tensors: Sequence[Tensor], *, keep: bool = True) -> None:
        """tensors ← tensors + buffer. Their views are kept for the next call, and so is their memory, unless told."""
        for _, views, pieces in self._spans(tensors, keep):
            torch._foreach_add_(pieces, views)

    @torch.no_grad()
    def add_(self, tensors: Sequence[Tensor], *, keep: bool = True) -> None:
        """buffer ← buffer + tensors. Views and memory are kept as in ``copy_``."""
        for _, views, pieces in self._spans(tensors, keep):
            torch._foreach_add_(views, pieces)

    @torch.no_grad()
    def swap(self, tensors: Sequence[Tensor]) -> None:
        """buffer ↔ tensors, with one bucket more of memory, which is kept. The tensors' is not: gradients come and go."""
        pieces = self.layout.pieces(tensors, keep=False)
        for j, (flat, theirs) in enumerate(zip(self.buckets, pieces, strict=True)):
            spare = self.layout.scratch(j, self._spare, summed=False).copy_(flat)
            torch._foreach_copy_(self.layout.cut(j, flat, theirs), theirs)
            torch._foreach_copy_(theirs, self.layout.cut(j, spare, theirs))

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> Tensor:
        """buffer ← tensors. Returns its norm."""
        size = RunningNorm()
        for buckets, views, pieces in self._spans(tensors):
            torch._foreach_copy_(views, pieces)
            size.add(buckets)
        return size.value()

    @torch.no_grad()
    def fold(self, tensors: Sequence[Tensor]) -> Tensor:
        """tensors ← tensors + buffer; buffer ← tensors. Returns its norm. One pass over memory in place of three."""
        size = RunningNorm()
        for buckets, views, pieces in self._spans(tensors):
            torch._foreach_add_(pieces, views)
            torch._foreach_copy_(views, pieces)
            size.add(buckets)
        return size.value()


def real(flat: Tensor) -> Tensor:
    """A view of a bucket as real numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
