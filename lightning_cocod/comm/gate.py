"""A gate for each bucket: a message sets out while later parts of it are still being computed, and parts of what it brings
are used while others are still on their way.
"""

from __future__ import annotations

import threading
from typing import Any

from lightning_cocod.comm.errors import TransportError
from lightning_cocod.comm.lane import Lane

Wait = tuple[Any, Any]
"""From a mark of a lane to another one."""
_PATIENCE = 0.5  # seconds between two looks at whether communication is over; opening wakes at once


class Gate:
    """Between the training thread and the communication thread: one opens it for the buckets that it is done with, in any
    order, and the other passes.

    Args:
        buckets: how many there are.
        lane: of the communication thread.
    """

    def __init__(self, buckets: int, lane: Lane) -> None:
        self._lane = lane
        self.lacking = False
        """Whether this worker has not computed all of it, and zeros stand for the rest; set before the last opening."""
        self._marks: list[Any] = [None] * buckets
        self._opened = threading.Condition()

    def open(self, bucket: int) -> None:
        """What the bucket holds once this thread's work so far is done is what travels. It must rest from now on."""
        mark = self._lane.mark()
        with self._opened:
            self._marks[bucket] = mark
            self._opened.notify()

    def is_open(self, bucket: int) -> bool:
        """Whether passing would not wait."""
        return self._marks[bucket] is not None

    def pass_(self, bucket: int, over: threading.Event) -> None:
        """Wait for it.

        Raises:
            TransportError: communication, or the message, is over, and it will not be opened any more.
        """
        with self._opened:
            while self._marks[bucket] is None:
                if over.is_set():
                    raise TransportError("communication ended before a bucket's gate was opened")
                self._opened.wait(_PATIENCE)
        self._lane.follow(self._marks[bucket])

    def wait(self, bucket: int, over: threading.Event) -> Wait:
        """Pass, and when this thread's lane had nothing to do. Raises as ``pass_`` does."""
        before = self._lane.mark()
        self.pass_(bucket, over)
        return before, self._lane.mark()
