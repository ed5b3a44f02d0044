"""A snapshot becomes its own correction: the mean of all workers' snapshots, less this one's.

Round a ring its parts set out from where they lie, and there is no scratch bucket. What goes round is the mean over the
workers that it has passed: each takes its own part in by its share of the weights so far, in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_cocod.comm.buckets import Buffer, Part, as_part, summed_in
from lightning_cocod.comm.cargo import Cargo
from lightning_cocod.comm.collectives import AllReduce, Memory
from lightning_cocod.comm.norms import RunningNorm
from lightning_cocod.comm.ring import IN_FLIGHT, Ring
from lightning_cocod.comm.tracer import Tracer


class Correction(AllReduce):
    """S ← m - a S, where m = Σ_j w_j S_j and all w sum to 1. For one that is left out S ← m.

    In half precision the difference is taken in float32 and only then rounded: its error is relative to the correction,
    which is small where workers agree, and not to the mean.
    """

    def __init__(self, snapshot: Buffer, weights: Sequence[float], rank: int, own: float = 1.0) -> None:
        self.layout = snapshot.layout
        self._snapshot, self._own = snapshot, own
        self._distance = RunningNorm()
        self._rooms: dict[torch.dtype, Rooms] = {}
        self._is_huge = False
        self._lies_as_it_travels = not any(S.is_complex() or summed_in(S.dtype) != S.dtype for S in snapshot.buckets)
        self.weigh(rank, weights)

    def weigh(self, rank: int, weights: Sequence[float]) -> None:
        """One that is left out has weight 0."""
        self._rank, self._weights, self.weight = rank, list(weights), weights[rank]

    def is_finite(self, size: Tensor) -> bool:
        """Whether S is. Where only the norm is not, which overflows long before, a difference of values may overflow."""
        self._is_huge = not bool(torch.isfinite(size))
        return super().is_finite(size)

    def contents(self, bucket: int) -> list[Tensor]:
        """The bucket itself."""
        return self._snapshot.contents(bucket)

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """w_i S_i."""
        self._snapshot.weighed(bucket, self.weight, scratch)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """S ← m - a S."""
        self._take(self._snapshot.buckets[bucket], scratch)

    def cargo(self, bucket: int, turn: int, ring: Ring, memory: Sequence[Memory], tracer: Tracer) -> Cargo:
        """Parts of S, where all of it has the dtype in which it is added up."""
        if not self._lies_as_it_travels:
            return super().cargo(bucket, turn, ring, memory, tracer)
        dtype = (S := self._snapshot.buckets[bucket]).dtype
        if dtype not in self._rooms:
            longest = max(-(-other.numel() // ring.n) for other in self._snapshot.buckets if other.dtype == dtype)
            self._rooms[dtype] = Rooms(longest, S, memory)

        def take(S: Tensor, m: Tensor) -> None:
            with tracer.span("decode"):
                self._take(S, m)

        parts = self._snapshot.parts(bucket, ring.n)
        return RunningMean(parts, ring.place, self._weights, self._rooms[dtype], take, is_huge=self._is_huge)

    def _take(self, S: Tensor, m: Tensor) -> None:
        """S ← m - a S, and the size of m - S while it is in the cache. m stays as it is."""
        if not self.weight:
            S.copy_(m)
        elif self._own == 0:  # the mean to the last bit, the same on every rank
            self._distance.add([torch.sub(m, S, out=S)])
            S.copy_(m)
        elif self._own == 1 and m.dtype == S.dtype:
            self._distance.add([torch.sub(m, S, out=S)])
        else:
            difference = m - S
            self._distance.add([difference])
            S.copy_(difference.add_(S, alpha=1 - self._own))

    def distance(self) -> Tensor | None:
        """‖m - S‖."""
        return self._distance.value()


class Rooms:
    """Where parts land, and lie until they have been sent on. Three are enough: of two buckets that take turns one part each
    is still to be sent when the next one comes.

    Args:
        longest: values in a part.
        like: of their dtype.
        scratch: memory, a bucket's worth of which is used and half of another's at most.
    """

    def __init__(self, longest: int, like: Tensor, scratch: Sequence[Memory]) -> None:
        kind, self._free = (like.dtype, like.device), []
        for memory, count in zip(scratch, (2, 1), strict=True):
            if kind not in memory or memory[kind].numel() < count * longest:
                memory[kind] = like.new_empty(count * longest)
            self._free += [memory[kind][i * longest : (i + 1) * longest] for i in range(count)]
        assert len(self._free) == IN_FLIGHT + 1
        self._views: dict[tuple[int, int], Part] = {}

    def take(self, size: int) -> tuple[Tensor, Part] | None:
        """A room, and so much of it; None if all are taken."""
        if not self._free:
            return None
        room = self._free.pop()
        key = room.data_ptr(), size
        if key not in self._views:
            self._views[key] = as_part(room[:size])
        return room, self._views[key]

    def give_back(self, room: Tensor) -> None:
        """It is free."""
        self._free.append(room)


class RunningMean(Cargo):
    """One bucket's parts, and what they become.

    Where worker r gets part q, that has been at the workers q + 1, …, r − 1 (modulo n): it is the mean m over them, and
    becomes m + (S_r − m) v with v = w_r / (w_{q+1} + … + w_r). Where all workers agree it is what they have, to the bit. One
    that is left out starts a part with zeros, and lets others pass.

    Args:
        own: parts of this worker.
        place: of this worker.
        weights: of all.
        rooms: for what comes.
        take: told this worker's part and the mean of all, while both are in the cache. The mean may still be sent on.
        is_huge: whether S_r − m may overflow: then it is m (1 − v) + S_r v in two passes.
    """

    def __init__(
        self,
        own: list[Part],
        place: int,
        weights: Sequence[float],
        rooms: Rooms,
        take: Callable[[Tensor, Tensor], None],
        *,
        is_huge: bool,
    ) -> None:
        self._own, self._place, self._weights, self._rooms, self._take = own, place, weights, rooms, take
        self._is_huge = is_huge
        self._coming: tuple[Tensor, Part] | None = None
        self._held: dict[int, tuple[Tensor, Part]] = {}  # what has come and is to be sent on

    def leaving(self, part: int) -> memoryview:
        """What has come, or else this worker's own, from where it lies."""
        if part in self._held:
            return self._held[part][1].bytes
        own = self._own[part]
        return own.bytes if self._weights[self._place] else as_part(torch.zeros_like(own.values)).bytes

    def left(self, part: int) -> None:
        """Its room is free."""
        if part in self._held:
            room, _ = self._held.pop(part)
            self._rooms.give_back(room)

    def landing(self, part: int, under_way: bool) -> memoryview | None:
        """A room."""
        self._coming = self._rooms.take(self._own[part].values.numel())
        return None if self._coming is None else self._coming[1].bytes

    def landed(self, part: int, under_way: bool) -> None:
        """Take this worker's own in. If it is the mean of all, nobody needs that any more. The last one is not sent on."""
        assert self._coming is not None
        self._held[part], self._coming = self._coming, None
        mean, own = self._held[part][1].values, self._own[part].values
        n, place = len(self._weights), self._place
        if under_way and (w := self._weights[place]):
            before = sum(self._weights[(part + step) % n] for step in range(1, (place - part) % n or n))
            v = w / (before + w)
            if self._is_huge:
                mean.mul_(1 - v).add_(own, alpha=v)
            else:
                mean.lerp_(own, v)
        if not under_way or part == place:
            self._take(own, mean)
        if not under_way and part == (place + 1) % n:
            self.left(part)
