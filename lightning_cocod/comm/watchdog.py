"""The watchdog: a collective of somebody else's cannot be interrupted, so after a loss it ends the whole process."""

from __future__ import annotations

import os
import sys
import threading


class Watchdog:
    """Ends the process when a loss has been reported and the training thread has not noticed it within ``grace`` seconds."""

    def __init__(self, rank: int, grace: float = 5.0) -> None:
        self.rank, self.grace = rank, grace
        self._noticed = threading.Event()

    def alarm(self, reason: BaseException) -> None:
        """A peer is lost: start to count."""
        threading.Thread(target=self._watch, args=(str(reason),), name="watchdog", daemon=True).start()

    def noticed(self) -> None:
        """The training thread has been told: it ends the process in the ordinary way."""
        self._noticed.set()

    def _watch(self, reason: str) -> None:
        if not self._noticed.wait(self.grace):
            print(
                f"[rank {self.rank}] {reason}; this rank is blocked elsewhere, so its process ends now",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
