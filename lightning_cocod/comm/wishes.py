"""Wishes of single workers that all hear of, where the workers are not in step and no common step can be agreed on.

Heartbeats carry them. Whoever hears of one comes to a meeting at the end of its next batch, and there all see to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

Note = dict[str, Any]


class Wishes:
    """One worker's side: what it wishes, and what it has heard that others do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: list[str] = []
        self._heard: set[str] = set()
        self._met = 0

    def request(self, what: str) -> None:
        """Wish it. Again changes nothing. Callable from a signal handler, so it takes no lock."""
        if what not in self._own:
            self._own.append(what)

    @property
    def wishes(self) -> tuple[str, ...]:
        """What this worker wishes."""
        return tuple(self._own)

    def reached(self, _: int) -> str | None:
        """Something that somebody wishes, as far as this worker has heard: its step does not matter. Never blocks."""
        with self._lock:
            return next(iter([*self._own, *sorted(self._heard)]), None)

    def granted(self, names: Iterable[str]) -> None:
        """All workers have met and seen to these wishes; what was said of them before is no wish any more."""
        with self._lock:
            for what in (names := set(names)):
                while what in self._own:
                    self._own.remove(what)  # in place: a signal handler may be adding another
            self._heard -= names
            self._met += 1

    def forget(self) -> None:
        """The workers are others than before: what was heard is not theirs, and all count their meetings anew."""
        with self._lock:
            self._heard, self._met = set(), 0

    def note(self) -> Note:
        """This worker's part of its heartbeat note."""
        with self._lock:
            return {"wishes": list(self._own), "met": self._met}

    def receive(self, notes: dict[int, Note]) -> bool:
        """Take in the workers' notes. Returns whether there are open wishes, so that beats should follow quickly."""
        with self._lock:
            for note in notes.values():
                if note.get("met", 0) >= self._met:
                    self._heard.update(note.get("wishes", ()))
            return bool(self._own or self._heard)
