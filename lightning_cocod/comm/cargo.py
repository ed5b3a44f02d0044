"""What goes round a ring: where the bytes of a bucket's parts lie while they travel, and what is done with what has come.

Most buckets are ``Filled`` scratch memory. What is ``Gathered``, as a ``Table`` of headers is, is sent on from where it
lands. Buckets of a snapshot are a ``RunningMean`` (``correction.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_cocod.comm.buckets import Part


class Cargo(ABC):
    """A bucket on its way round a ring: where the bytes of each of its parts lie, and what is done with them.

    Attributes:
        unload: to be called once it has come as far as it goes, if anything is.
    """

    unload: Callable[[], None] | None = None

    @abstractmethod
    def leaving(self, part: int) -> memoryview:
        """What is to be sent of a part: what this worker puts in, or what has landed last."""

    @abstractmethod
    def left(self, part: int) -> None:
        """It has been sent."""

    @abstractmethod
    def landing(self, part: int, under_way: bool) -> memoryview | None:
        """Where what comes of a part goes: a sum that is ``under_way`` to those who have still to add to it, as this worker
        has, or that of all. None where there is no room before something has left.
        """

    @abstractmethod
    def landed(self, part: int, under_way: bool) -> None:
        """It has come."""


class Filled(Cargo):
    """A scratch bucket with what this worker puts in; the sums come to lie there.

    Args:
        memory: the bucket.
        parts: of it.
        rooms: for what is to be added to each part.
        ends: parts that go no further, and where their sums come to lie in place of the bucket.
    """

    def __init__(self, memory: Tensor, parts: list[Part], rooms: list[Part], ends: dict[int, Tensor]) -> None:
        self.memory, self._parts, self._rooms, self._ends = memory, parts, rooms, ends

    def leaving(self, part: int) -> memoryview:
        """In the bucket."""
        return self._parts[part].bytes

    def left(self, part: int) -> None:
        """It stays as well."""

    def landing(self, part: int, under_way: bool) -> memoryview:
        """Beside the bucket, or in its place there."""
        return (self._rooms if under_way else self._parts)[part].bytes

    def landed(self, part: int, under_way: bool) -> None:
        """Add."""
        if not under_way:
            return
        own, arrived = self._parts[part].values, self._rooms[part].values
        end = self._ends.get(part, own)
        if end.dtype == own.dtype:
            torch.add(own, arrived, out=end)
        else:  # out of another dtype is new memory each time
            end.copy_(own.add_(arrived))


class Gathered(Cargo):
    """A bucket that is all-gathered: its parts are sent on from where they land.

    Args:
        parts: the bytes of each.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts

    def leaving(self, part: int) -> memoryview:
        """Where it lies."""
        return self._parts[part]

    def left(self, part: int) -> None:
        """It stays as well."""

    def landing(self, part: int, under_way: bool) -> memoryview:
        """Where it lies then."""
        return self._parts[part]

    def landed(self, part: int, under_way: bool) -> None:
        """Nothing is to be done."""


class Table(Gathered):
    """A row of bytes of every worker, each as long. This worker's own is there.

    Args:
        row: this worker's.
        place: of this worker.
        n: how many workers there are.
    """

    def __init__(self, row: bytes, place: int, n: int) -> None:
        super().__init__([memoryview(bytearray(len(row))) for _ in range(n)])
        self._parts[place][:] = row

    @property
    def rows(self) -> list[bytes]:
        """Of all workers, once they have come."""
        return [bytes(row) for row in self._parts]
