"""Methods of Lightning's objects that are replaced while a run lasts, on the instances of its trainer only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replaced:
    """What has been replaced, and how it is put back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def method(self, owner: object, name: str, value: Any) -> None:
        """From now on ``owner.name`` is this, be it a method or a value; put back, what was there before shows again."""
        before = vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))

    def inserted(self, entries: list[Any], place: int, entry: Any) -> None:
        """From now on the entry is in the list."""
        entries.insert(place, entry)
        self._undo.append(lambda: entries.remove(entry))

    def put_back(self) -> None:
        """Everything, the last first. Idempotent."""
        while self._undo:
            self._undo.pop()()


def then(first: Callable[..., Any], second: Callable[[], None]) -> Callable[..., Any]:
    """A method that is followed by something; the result is its own."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        second()
        return result

    return both
