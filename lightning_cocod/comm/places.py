"""Where shards come from and where they belong: this worker's shard of every bucket, and the tensors that lie there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_cocod.comm.buckets import Layout, Part, as_part, in_memory_order, is_dense


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


class Places:
    """Of a pull: x ← the shards s of all workers.

    Args:
        s: this worker's shard of each bucket.
        x: tensors of the layout.
        layout: theirs.
        rank: of this worker.
    """

    def __init__(self, s: Sequence[Tensor], x: Sequence[Tensor], layout: Layout, rank: int) -> None:
        self.layout, self.s, self._x, self._rank = layout, s, x, rank
        self.pieces = layout.pieces(x, keep=False)
        """Of x, in every bucket."""
        self._memory = _memory_of(s, x)
        self._ends: dict[int, tuple[dict[int, Part], list[Rest]] | None] = {}

    def are_of(self, s: Sequence[Tensor], x: Sequence[Tensor], layout: Layout) -> bool:
        """Whether they have the same memory."""
        return self.layout is layout and self._memory == _memory_of(s, x)

    def ends(self, bucket: int, n: int) -> tuple[dict[int, Part], list[Rest]] | None:
        """Of a bucket's n shards those that need not be copied on their way round a ring, and the rest.

        This worker's sets out from where it lies, and one that is within a single tensor lands there. Finding them takes
        longer than copying does, so they are kept. None where a tensor has gaps.
        """
        if bucket not in self._ends:
            self._ends[bucket] = self._find(bucket, n)
        return self._ends[bucket]

    def _find(self, bucket: int, n: int) -> tuple[dict[int, Part], list[Rest]] | None:
        s, at, rest = self.s[bucket], {}, []
        if not all(is_dense(self._x[number]) for number in self.layout.numbers(bucket)):
            return None
        for shard, pieces in enumerate(self.layout.shares(bucket, n)):
            for piece in pieces:
                to = in_memory_order(self._x[piece.index])[piece.start : piece.stop]
                if shard != self._rank and to.numel() == s.numel():
                    at[shard] = as_part(to)
                else:
                    rest.append(Rest(shard, slice(piece.offset, piece.end), to))
        return {**at, self._rank: as_part(s)}, rest


def _memory_of(s: Sequence[Tensor], x: Sequence[Tensor]) -> list[int]:
    return [t.data_ptr() for t in (*s, *x)]
