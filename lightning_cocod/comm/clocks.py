"""How far each worker is, and a fast one that waits for slow ones: bounded staleness, without a message of its own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_LOOK = 0.1  # seconds between looks at whether communication has failed meanwhile


class Clocks:
    """What this rank knows of the steps of all workers since they last met. It hears of them with what they send anyway.

    A worker that rests, as it does on its way to a meeting, keeps nobody waiting. When all have met, all begin anew.

    Args:
        world_size: number of workers.
    """

    def __init__(self, world_size: int) -> None:
        self._steps: list[float] = [0] * world_size
        self._changed = threading.Condition()

    def tell(self, rank: int, steps: float) -> None:
        """A worker has sent something in its ``steps``-th step."""
        with self._changed:
            self._steps[rank] = max(self._steps[rank], steps)
            self._changed.notify_all()

    def rest(self, rank: int) -> None:
        """A worker makes no steps until all have met."""
        self.tell(rank, math.inf)

    def reset(self) -> None:
        """All have met, and nothing is on its way."""
        with self._changed:
            self._steps = [0] * len(self._steps)

    def ahead(self, steps: float) -> float:
        """By how much a worker that has made so many is ahead of the slowest that does not rest."""
        return steps - min(self._steps)

    def wait(self, steps: int, bound: int, check: Callable[[], None]) -> float:
        """Until a worker that has made so many steps is ahead of nobody by more than the bound.

        Args:
            steps: after the one that waits.
            bound: at least 1, or all would wait.
            check: raises once communication has failed.

        Returns:
            Seconds waited.
        """
        began = time.perf_counter()
        with self._changed:
            while self.ahead(steps) > bound:
                self._changed.wait(_LOOK)
                check()
        return time.perf_counter() - began
