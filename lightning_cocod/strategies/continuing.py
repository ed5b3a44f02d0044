"""Loaders that continue in the middle of an epoch.

Lightning resumes in mid-epoch with the first batches again, unless a loader has a state of its own. A loader's order and
its random augmentations follow from the random state at the birth of its iterator, so a position is that state and the
number of batches drawn: a resumed iterator is born in the same state, and as many batches are drawn and dropped.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.types import _Stateful
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_cocod.strategies.randomness import random_state, set_random_state

Position = dict[str, Any]


def continuing(loader: Any, device: torch.device, position: Position | None) -> Any:
    """The loader, at a position. One that has a state of its own is left to Lightning, which saves and restores it."""
    return loader if isinstance(loader, _Stateful) else Continuing(loader, device, position)


class Continuing:
    """Stands in for a loader, or any iterable, in everything; ``isinstance`` says so too.

    Args:
        loader: what it stands in for.
        device: of this rank; its generator's state is part of a position.
        position: where the first iterator begins; None is the beginning.
    """

    def __init__(self, loader: Any, device: torch.device, position: Position | None) -> None:
        self.__dict__.update(_loader=loader, _device=device, _start=position, _current=None)

    @property  # type: ignore[misc]  # as mocks do it
    def __class__(self) -> type:
        return type(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = _Batches(self._loader, self._device, self._take_start)
        self.__dict__["_current"] = weakref.ref(batches)  # it owns worker processes, which must end with the epoch
        return batches

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def begin_at(self, position: Position | None) -> None:
        """Where the next iterator to begin begins."""
        self.__dict__["_start"] = position

    def position(self, ahead: int) -> Position | None:
        """Where the current iterator is; None is the beginning.

        Args:
            ahead: batches, at most 2, that have been drawn and not trained on yet.
        """
        batches = None if self._current is None else self._current()
        position: Position | None = self._start if batches is None or not batches.begun else batches.position(ahead)
        return position

    def next_epoch(self) -> Position:
        """The beginning of the epoch that follows."""
        generators = [generator.get_state() for generator in _generators(self._loader)]
        return {"birth": {"random": None, "generators": generators}, "drawn": 0, "again": []}

    def _take_start(self) -> Position | None:
        """Where the first iterator to begin begins; the others begin at the beginning."""
        start: Position | None = self._start
        self.begin_at(None)
        return start


class _Batches:
    """Iterates over a loader, from a position.

    The loader's own iterator is made with the first batch, not before: Lightning asks for iterators at different moments
    in a fresh and in a resumed run, and their birth draws random numbers.
    """

    def __init__(self, loader: Any, device: torch.device, take_start: Callable[[], Position | None]) -> None:
        self._loader, self._device, self._take_start = loader, device, take_start
        self._generators = _generators(loader)
        self._iterator: Iterator[Any] | None = None
        self._birth: dict[str, Any] = {}
        self._before: deque[dict[str, Any]] = deque(maxlen=2)  # the random state before each of the last batches
        self._again: list[dict[str, Any]] = []  # the same of those that were drawn before the checkpoint, not trained on
        self._drawn = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            start = self._take_start()
            self._iterator = self._born() if start is None else self._reborn(start)
        if self._again:
            set_random_state(self._again.pop(0), self._device)
        before = random_state(self._device)
        batch = next(self._iterator)
        self._before.append(before)
        self._drawn += 1
        return batch

    @property
    def begun(self) -> bool:
        return self._iterator is not None

    def position(self, ahead: int) -> Position:
        return {"birth": self._birth, "drawn": self._drawn - ahead, "again": list(self._before)[len(self._before) - ahead :]}

    def _born(self) -> Iterator[Any]:
        self._birth = {
            "random": random_state(self._device),
            "generators": [generator.get_state() for generator in self._generators],
        }
        return iter(self._loader)

    def _reborn(self, start: Position) -> Iterator[Any]:
        """An iterator that has given ``drawn`` batches already.

        Raises:
            RuntimeError: the loader has become shorter.
        """
        if getattr(self._loader, "persistent_workers", False):
            rank_zero_warn(
                "persistent_workers=True: the workers begin anew, and what is drawn at random in them, or for the order, is "
                "not what it would have been; only without persistent workers is a resumed run exact"
            )
        for generator, state in zip(self._generators, start["birth"]["generators"], strict=True):
            generator.set_state(state)
        if start["birth"]["random"] is None:
            return self._born()
        now = random_state(self._device)
        set_random_state(start["birth"]["random"], self._device)
        iterator = self._born()
        for _ in range(start["drawn"]):
            if next(iterator, _END) is _END:
                raise RuntimeError(
                    f"the checkpoint was saved after {start['drawn']} batches of an epoch, and the training data has only "
                    f"{self._drawn} now; resume with the data that it was saved with"
                )
            self._drawn += 1
        set_random_state(now, self._device)
        self._again = list(start["again"])
        return iterator


_END = object()


def _generators(loader: Any) -> list[torch.Generator]:
    """Those that a loader has been given instead of torch's own, each once."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    given = dict.fromkeys(getattr(owner, "generator", None) for owner in (loader, sampler, batches))
    return [generator for generator in given if isinstance(generator, torch.Generator)]
