"""Spans of time, for whoever wants to see what happens when. By default nobody does, and a span costs next to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from lightning_cocod.comm.lane import Lane

_NOTHING: AbstractContextManager[None] = nullcontext()
_PATIENCE = 3.0  # seconds in which a device must come to the end of a recording


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        name: what it was.
        row: the thread: ``training``, what comes before " of rank …" in the name of another one, or ``autograd``: on a GPU
            hooks run in a thread of its own.
        start: seconds of the host's monotonic clock; while it is recorded, a mark of the lane.
        end: likewise.
        about: what else is known, as JSON can hold it.
    """

    name: str
    row: str
    start: Any
    end: Any
    about: dict[str, Any]


class Tracer:
    """Records nothing."""

    def span(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """Around what is recorded under this name."""
        return _NOTHING

    def frame(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """Around what is recorded under this name if anything is recorded inside."""
        return _NOTHING


class Recorder(Tracer):
    """Records the spans of all threads, until it is closed.

    Times are marks of the lane. On CUDA a span therefore begins when the device comes to what was issued inside and ends
    when the device has done it. The device is waited for twice: here, to set its clock by the host's, and in ``close``.

    Args:
        lane: of the communicator. The thread that makes the recorder is the one that trains.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._training = threading.get_ident()
        self._own = threading.local()
        self._lock = threading.Lock()
        self._closed = False
        self._groups: list[list[Span]] = []
        self._zero = lane.mark()
        while lane.seconds(self._zero, self._zero) is None:
            pass  # a sleep here would be an error of the clock
        self._began = time.perf_counter()

    def span(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """Record what happens inside."""
        return self._around(name, about, always=True)

    def frame(self, name: str, **about: Any) -> AbstractContextManager[None]:
        """Record what happens inside if a span is recorded in it."""
        return self._around(name, about, always=False)

    def mark(self) -> Any:
        """A start or an end for ``add``."""
        return self._lane.mark()

    def add(self, name: str, start: Any, end: Any) -> None:
        """Record what the training thread did between two marks."""
        self._keep([Span(name, "training", start, end, {})])

    def close(self) -> list[Span]:
        """What has been recorded, in seconds. Waits for the device, at most three seconds.

        What is still open is left out with all that is inside: a message is there as a whole or not at all.
        """
        with self._lock:
            self._closed = True
        end, deadline = self._lane.mark(), time.monotonic() + _PATIENCE
        while self._lane.seconds(end, end) is None and time.monotonic() < deadline:
            time.sleep(1e-3)
        return [span for group in self._groups for span in self._timed(group)]

    @contextmanager
    def _around(self, name: str, about: dict[str, Any], *, always: bool) -> Iterator[None]:
        outermost = not hasattr(self._own, "done")
        if outermost:
            self._own.done = []
        done: list[Span] = self._own.done
        before, start = len(done), self._lane.mark()
        try:
            yield
        finally:
            if always or len(done) > before:
                done.append(Span(name, self._row(), start, self._lane.mark(), about))
            if outermost:
                del self._own.done
                self._keep(done)

    def _row(self) -> str:
        if threading.get_ident() == self._training:
            return "training"
        name = threading.current_thread().name.split(" of ")[0]
        return "autograd" if name.startswith("Dummy-") else name  # that of a thread which Python has not begun

    def _keep(self, group: list[Span]) -> None:
        with self._lock:
            if not self._closed:
                self._groups.append(group)

    def _timed(self, group: list[Span]) -> list[Span]:
        """The spans in seconds; none of them while the device has still to come to the end of one."""
        timed = []
        for span in group:
            start, end = (self._lane.seconds(self._zero, mark) for mark in (span.start, span.end))
            if start is None or end is None:
                return []
            timed.append(span._replace(start=self._began + start, end=self._began + end))
        return timed
