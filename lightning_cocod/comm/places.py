"""Where shards come from and where they belong: this worker's shard of every bucket, and the tensors that lie there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_cocod.comm.buckets import Layout, Part, as_part, in_memory_order


class Rest(NamedTuple):
    """Values of a shard that are to be copied.

    Attributes:
        shard: its number.
        values: which ones.
        to: that part of a tensor.
    """

    shard: int
    values: slice
    to: Tensor


class Landings(NamedTuple):
    """Of one bucket's shards round a ring.

    Attributes:
        at: those that are where they are to be: this worker's, which sets out from there, and any that is all of it within
            one tensor.
        rest: what is copied, of this worker's shard and of those that land in scratch memory.
    """

    at: dict[int, Part]
    rest: list[Rest]


class Places:
    """Those of a pull, x ← the shards s of all workers. They keep the memory of both.

    Args:
        s: this worker's shard of each bucket.
        x: tensors of the layout.
        layout: theirs. Its ``multiple`` is the number of workers.
        rank: of this worker.

    Raises:
        ValueError: the memory order of a tensor has changed since the layout was made.
    """

    def __init__(self, s: Sequence[Tensor], x: Sequence[Tensor], layout: Layout, rank: int) -> None:
        self.s, self._x, self._layout, self._rank = s, x, layout, rank
        self.pieces = layout.pieces(x, keep=False)
        """What of x lies in every bucket."""
        self._forms = _forms(s, x)
        self._landings: dict[int, Landings | None] = {}

    def are_of(self, s: Sequence[Tensor], x: Sequence[Tensor], layout: Layout) -> bool:
        """Whether these have the same memory, in the same form."""
        return self._layout is layout and self._forms == _forms(s, x)

    def landings(self, bucket: int) -> Landings | None:
        """Round a ring. Found once, as that takes as long as to copy what they spare. None where a tensor has gaps."""
        if bucket not in self._landings:
            self._landings[bucket] = self._find(bucket)
        return self._landings[bucket]

    def _find(self, bucket: int) -> Landings | None:
        if any(self._layout.form(number)[1] is None for number in self._layout.numbers(bucket)):
            return None
        s = self.s[bucket]
        at, rest = {self._rank: as_part(s)}, []
        for shard, pieces in enumerate(self._layout.shares(bucket, self._layout.multiple)):
            for piece in pieces:
                to = in_memory_order(self._x[piece.index])[piece.start : piece.stop]
                if shard not in at and (to.numel(), to.dtype) == (s.numel(), s.dtype):
                    at[shard] = as_part(to)
                else:
                    rest.append(Rest(shard, slice(piece.offset, piece.end), to))
        return Landings(at, rest)


def _forms(s: Sequence[Tensor], x: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (*s, *x)]
