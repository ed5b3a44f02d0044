"""One rank's recording: an algorithm's verbs are timed for a few rounds, and are themselves again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.comm.tracer import Recorder, Tracer
from lightning_cocod.strategies.replaced import Replaced
from lightning_cocod.telemetry.chrome import Part

_recorded: WeakSet[Algorithm] = WeakSet()


class Recording:
    """Waits for the end of a round, records so many whole rounds from there on, and stops.

    The merge and the launch at that end are recorded too: the first round's message is launched there. A synchronous step is
    a round, and so is each step of an algorithm that has none.

    Args:
        algorithm: that trains.
        rounds: how many.
        start_step: optimizer steps before the first; 0 begins at once.
        on_end: called once, when the last round has been recorded.

    Raises:
        ValueError: the algorithm is being recorded already.
    """

    def __init__(self, algorithm: Algorithm, rounds: int, start_step: int, on_end: Callable[[], None]) -> None:
        if algorithm in _recorded:
            raise ValueError("there is a trace of this run already: one with more rounds shows as much as two")
        _recorded.add(algorithm)
        self._algorithm, self._comm = algorithm, algorithm.comm
        self._start_step, self._on_end = start_step, on_end
        self._original_after_step = algorithm.after_step
        self._first: int | None = None
        self._replaced = Replaced()
        self.recorder: Recorder | None = None
        """While it records."""
        self.part = Part(self._comm.rank, asked=rounds)
        """What has been recorded; complete once closed."""
        self.step_is_over: Callable[[], None] = lambda: None
        """Called before the algorithm hears of a step."""
        self._replaced.method(algorithm, "after_step", self._after_step)
        self.time(algorithm, "before_step", "before_step", framed=True)
        self.time(algorithm, "finish", "finish", framed=True)
        if start_step == 0:
            self.recorder = self._comm.tracer = Recorder(self._comm.lane)  # a resumed run learns its step later

    def time(self, owner: Any, method: str, name: str, *, framed: bool = False) -> None:
        """While it records, calls of this method are seen under this name; if ``framed``, those that communicate."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            tracer = self._comm.tracer
            with tracer.frame(name) if framed else tracer.span(name):
                return original(*args, **kwargs)

        self._replaced.method(owner, method, timed)

    def close(self) -> None:
        """Stop recording and put everything back. Idempotent."""
        self._replaced.put_back()
        _recorded.discard(self._algorithm)
        if self.recorder is not None:
            self._comm.tracer = Tracer()
            self.part.spans = self.recorder.close()
            self.part.steps = (self._first or 0, self._algorithm.t)
            self.recorder = None

    def _begin(self, step: int) -> None:
        self.recorder = self._comm.tracer = Recorder(self._comm.lane)
        self._first = step

    def _after_step(self) -> None:
        self.step_is_over()
        step, ends = self._algorithm.t + 1, self._algorithm.rounds.ends
        if self.recorder is not None and self._first is None:
            self._first = step - 1
        if ends is None or step >= ends:
            if self.recorder is not None:
                self.part.rounds += 1
            elif step >= self._start_step:
                self._begin(step)
        with self._comm.tracer.frame("merge", step=step):
            self._original_after_step()
        if self.part.rounds == self.part.asked:
            self.close()
            self._on_end()
