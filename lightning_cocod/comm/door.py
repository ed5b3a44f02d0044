"""At the door of a run that is under way: whether it is, and who waits there to be let in."""

from __future__ import annotations

import json
import time

from torch.distributed.distributed_c10d import Store

LOOK = 0.05  # seconds between two looks
_STEADY = 10  # looks in which somebody who waits has looked as well, or is gone
_SIGNS = 20.0  # seconds without a sign after which a run is over; a busy store has been seen to take 5 for an answer


class Signs:
    """Whether a run is under way: its members say so all the time."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._key = store, f"{run}/signs"
        self._count, self._at = self._store.add(self._key, 0), time.monotonic()

    def go_on(self, patience: float = _SIGNS) -> bool:
        """Whether there has been a sign in the last so many seconds."""
        count, now = self._store.add(self._key, 0), time.monotonic()
        if count != self._count:
            self._count, self._at = count, now
        return now - self._at < patience

    def are_seen(self) -> bool:
        """Whether there is one soon."""
        before = self._count
        while self.go_on():
            if self._count != before:
                return True
            time.sleep(LOOK)
        return False


class Door:
    """Who waits there, and is still there: somebody who waits looks as often as others do."""

    def __init__(self, store: Store, run: str, let_in: int, *, opens: bool) -> None:
        self._store, self._run, self._let_in, self._opens = store, run, let_in, opens
        self._counts: dict[int, int] = {}
        self._looks = 0

    def look(self) -> tuple[int, dict[int, tuple[int, str]]] | None:
        """The last arrival that is seen to and, by number, name and fingerprint of who is there; None if not known yet."""
        if not self._opens:
            return self._let_in, {}
        last = self._store.add(f"{self._run}/arrivals", 0)
        for number in range(self._let_in + 1, last + 1):
            self._counts.setdefault(number, self._count(number))
        self._looks += bool(self._counts)
        if self._counts and self._looks < _STEADY:
            return None
        there = [number for number, count in self._counts.items() if self._count(number) != count]
        return last, {number: tuple(json.loads(self._store.get(f"{self._run}/arrival {number}"))) for number in there}

    def _count(self, number: int) -> int:
        return self._store.add(f"{self._run}/arrival {number} waits", 0)
