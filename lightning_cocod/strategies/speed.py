"""How fast a rank computes: samples per second of its own work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_cocod.comm.lane import Lane
from lightning_cocod.comm.ledger import Ledger

SKIPPED, NEEDED, KEPT = 3, 8, 24
"""Batches: the first of a size are left out (warm-up, compilation); for a speed so many are needed; of so many it is."""


class Speedometer:
    """Times batches from the beginning of one to the beginning of the next, waiting for other ranks left out.

    Of the data's loading that counts for which the rank has waited. On CUDA times are the device's.

    Args:
        lane: in which the training thread works.
        waited: seconds that training has waited for messages so far.
    """

    def __init__(self, lane: Lane, waited: Callable[[], float]) -> None:
        self._lane, self._waited = lane, waited
        self._apart = Ledger()
        self._depth = 0
        self._begun: deque[tuple[Any, int]] = deque()  # mark and size of batches whose time is not known yet
        self._idle = 0.0
        self._planned = 0
        self._skip = SKIPPED
        self._timed: deque[tuple[int, float]] = deque(maxlen=KEPT)

    @property
    def speed(self) -> float:
        """Samples per second; 0 while too few batches have been timed."""
        samples, seconds = (sum(column) for column in zip(*self._timed, strict=True)) if self._timed else (0, 0.0)
        return samples / seconds if len(self._timed) >= NEEDED and seconds > 0 else 0.0

    def begin(self, size: int, planned: int) -> None:
        """A batch begins. One that is smaller than planned, at the end of an epoch, is not timed."""
        if planned != self._planned:
            self._planned, self._skip = planned, SKIPPED
            self._begun.clear()
            self._timed.clear()
        if not self._begun:
            self._idle = self._idle_so_far()
        self._begun.append((self._lane.mark(), size))
        self._settle()

    def interrupt(self) -> None:
        """Something else than training begins, or has taken place: the batch under way is not timed."""
        self._begun.clear()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, training waits for other ranks."""
        self._depth += 1
        before = self._lane.mark()
        try:
            yield
        finally:
            self._depth -= 1
            after = self._lane.mark()
            if not self._depth:
                self._apart.add_when_known("exposed", lambda: self._lane.seconds(before, after))

    def _settle(self) -> None:
        while len(self._begun) > 1:
            (begin, size), (end, _) = self._begun[0], self._begun[1]
            seconds = self._lane.seconds(begin, end)
            if seconds is None:
                return
            self._begun.popleft()
            idle, self._idle = self._idle, self._idle_so_far()
            if size != self._planned:
                continue
            if self._skip:
                self._skip -= 1
                continue
            self._timed.append((size, seconds - (self._idle - idle)))

    def _idle_so_far(self) -> float:
        return self._waited() + self._apart.totals().exposed
