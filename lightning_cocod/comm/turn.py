"""A lock for several threads and a device: whoever has the turn sees all that was done in the turn before."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

from lightning_cocod.comm.lane import Lane


class Turn:
    """A lock whose holder's work, on a device as well, comes after the last holder's."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._lock = lane, threading.Lock()
        self._mark: Any = lane.mark()

    def __enter__(self) -> float:
        """Returns the seconds that were waited."""
        began = time.perf_counter()
        self._lock.acquire()
        self._lane.follow(self._mark)
        return time.perf_counter() - began

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._mark = self._lane.mark()
        self._lock.release()
