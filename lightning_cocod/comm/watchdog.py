"""The watchdog: a collective of somebody else's cannot be interrupted, so after a loss it ends the whole process."""

from __future__ import annotations

import os
import sys
import threading


class Watchdog:
    """Ends the process if a loss does not end it in the ordinary way.

    After an alarm the training thread has ``grace`` seconds to notice, and then ``patience`` seconds to leave: a callback
    that reacts to the exception may block in a collective as well.
    """

    def __init__(self, rank: int, grace: float = 5.0, patience: float = 30.0) -> None:
        self.rank, self.grace, self.patience = rank, grace, patience
        self._noticed, self._over = threading.Event(), threading.Event()
        self._watching = threading.Lock()

    @property
    def was_noticed(self) -> bool:
        """Whether the training thread knows."""
        return self._noticed.is_set()

    def alarm(self, reason: BaseException) -> None:
        """A peer is lost: start to count."""
        if self._watching.acquire(blocking=False):
            threading.Thread(target=self._watch, args=(str(reason),), name="watchdog", daemon=True).start()

    def noticed(self) -> None:
        """The training thread has been told."""
        self._noticed.set()

    def over(self) -> None:
        """The training thread has left all that communicates."""
        self._over.set()
        self._noticed.set()

    def _watch(self, reason: str) -> None:
        if self._noticed.wait(self.grace) and self._over.wait(self.patience):
            return
        print(
            f"[rank {self.rank}] {reason}; this rank is blocked elsewhere, so its process ends now",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
