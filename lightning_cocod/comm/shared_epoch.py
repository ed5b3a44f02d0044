"""Epochs that workers share: over when they have seen the data once together, however much of it each of them has done."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from lightning_cocod.options import flag, whole

_PREFIX = "lightning_cocod/shared epochs"
_FEW = 2
"""Batches that a worker may always hold and not have begun."""


class Store(Protocol):
    """What counts the claims: torch's stores do, atomically over all workers."""

    def add(self, key: str, amount: int, /) -> int:
        """The sum of all that has been added to the key."""


class Order(Sized, Protocol):
    """A sampler over the whole data set."""

    def __iter__(self) -> Iterator[int]: ...


class SharedEpoch(Sampler[list[int]]):
    """A batch sampler for workers of any speed: who is done with a batch claims the next one.

    The order of the samples follows from the seed and the number of the epoch, on every worker the same, and is cut into
    numbered batches. The first one of a worker is the batch whose number is its rank; from then on a counter in the store
    of the process group tells it the next number. So an epoch has each sample exactly once, over all workers, and ends for
    all of them within a batch of the slowest::

        batches = SharedEpoch(len(data), batch_size=32)
        loader = DataLoader(data, batch_sampler=batches)
        for epoch in range(10):
            for x, y in loader:
                ...

    Each iterator is an epoch. A loader with worker processes draws batches long before they are trained on; say how many in
    ``ahead``. Near the end of an epoch such a loader is told that there are no more for the moment, so that no worker sits
    on a stock of batches that others could train on.

    Creating one is the same act on all ranks, as it is for a process group.

    Args:
        samples: how many there are, or a sampler of theirs. What it draws at random is the same on all ranks: it draws from
            a state that is seeded for the epoch, and torch's, NumPy's and Python's own states are left as they were.
        batch_size: samples of a batch.
        drop_last: whether to leave out an incomplete batch at the end.
        shuffle: of a number of samples.
        seed: the same on all ranks.
        ahead: batches that a loader draws before the first one is asked for: ``num_workers * prefetch_factor``.
        generators: of the sampler's own, if it has any. They are seeded for the epoch too.
        rank: of this worker; by default that in the process group, 0 without one. If the group is another one when an epoch
            begins, since the workers have regrouped, so are rank, number and store that are those of the group.
        world_size: number of workers; by default that of the process group, 1 without one.
        store: by default that of the process group.

    Raises:
        ValueError: a batch size that is not positive.
        RuntimeError: an epoch begins, the workers have regrouped, and the store is not that of the group.
    """

    def __init__(
        self,
        samples: int | Order,
        batch_size: int,
        *,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        ahead: int = 0,
        generators: Sequence[torch.Generator] = (),
        rank: int | None = None,
        world_size: int | None = None,
        store: Store | None = None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._order = _whole(samples, shuffle) if isinstance(samples, int) else samples
        self.batch_size, self.drop_last = whole("batch_size", batch_size, least=1), flag("drop_last", drop_last)
        self.seed, self.ahead = whole("seed", seed, least=0), whole("ahead", ahead, least=0)
        self._generators = list(generators)
        self._given_store = store
        self._join(_group_store())
        self.epoch = 0
        """Number of the epoch that the next iterator is."""
        self.limit: int | None = None
        """Batches of an epoch, if they are to be fewer than there are."""
        self.claimed: list[int] = []
        """Numbers of the batches that this worker has had in the epoch under way, in their order."""
        self._trained: frozenset[int] = frozenset()  # in the next epoch, before it is taken up again
        self._todo: list[int] = []
        self._key = ""
        self._samples: list[int] = []

    @property
    def total(self) -> int:
        """Batches of an epoch, of all workers together."""
        whole, rest = divmod(len(self._order), self.batch_size)
        there_are = whole + (rest > 0 and not self.drop_last)
        return there_are if self.limit is None else min(self.limit, there_are)

    def __iter__(self) -> Iterator[list[int]]:
        self.begin()
        return Claims(self)

    def begin(self) -> None:
        """The next epoch begins; every rank has to. What is left of the one before is left out."""
        if (store := _group_store()) is not self._group:
            if self._given_store is not None:
                raise RuntimeError(
                    "the workers have regrouped, and a SharedEpoch follows them in their own store: leave store out"
                )
            self._join(store)
        self._begun += 1
        self._key = f"{_PREFIX}/life {self._life}/{self._begun}, epoch {self.epoch}"
        self._todo = [number for number in range(self.total) if number not in self._trained]
        self._samples = self._draw()
        self.claimed, self._trained = [], frozenset()
        self.epoch += 1

    def among(self, rank: int, world_size: int) -> None:
        """The workers regroup, and this one has another rank among them when the next epoch begins."""
        self._rank, self._world_size = rank, world_size

    def _join(self, group: Store | None) -> None:
        """The workers of a process group, or this one alone."""
        self._group = group
        self._store = self._given_store or group or _Alone()
        self.rank = (0 if group is None else dist.get_rank()) if self._rank is None else self._rank
        self.world_size = (1 if group is None else dist.get_world_size()) if self._world_size is None else self._world_size
        # Each rank counts its own, so the number is the same everywhere, and new where ranks are started again.
        self._life = self._store.add(f"{_PREFIX}/samplers of rank {self.rank}", 1)
        self._begun = 0  # epochs in this life, each with a counter of its own

    def resume(self, epoch: int, trained: Iterable[int]) -> None:
        """The next iterator is the rest of an epoch, on the same number of workers or another one.

        Args:
            epoch: its number.
            trained: the numbers of its batches that have been trained on, by all workers together; the same on all ranks.
        """
        self.epoch, self._trained = epoch, frozenset(trained)

    def claim(self) -> int | None:
        """The number of a batch that nobody else has or gets in this epoch; None if there is none left."""
        place = self.rank if not self.claimed else self._store.add(self._key, 1) - 1 + self.world_size
        if place >= len(self._todo):
            return None
        self.claimed.append(self._todo[place])
        return self.claimed[-1]

    def left(self) -> int:
        """Batches that nobody has claimed yet."""
        return max(0, len(self._todo) - self.world_size - self._store.add(self._key, 0))

    def samples(self, number: int) -> list[int]:
        """Of a batch of the epoch under way."""
        return self._samples[number * self.batch_size : (number + 1) * self.batch_size]

    def _draw(self) -> list[int]:
        if (set_epoch := getattr(self._order, "set_epoch", None)) is not None:
            set_epoch(self.epoch)
        with _seeded((self.seed + 0x9E3779B97F4A7C15 * self.epoch) % 2**63, self._generators):
            return list(self._order)


class Claims(Iterator[list[int]]):
    """The batches of one worker in one epoch, one claim at a time.

    After StopIteration there may be more of them again: loaders with worker processes ask anew with each batch that they
    give out.

    Args:
        epoch: that has begun.
        again: numbers of batches that have been claimed already, and are given out first.
    """

    def __init__(self, epoch: SharedEpoch, again: Collection[int] = ()) -> None:
        self._epoch, self._again = epoch, deque(again)
        self._given = self._asked = 0
        self._over = False

    def __next__(self) -> list[int]:
        self._asked += 1
        if self._again:
            number: int | None = self._again.popleft()
        elif self._over or self._has_enough():
            raise StopIteration
        else:
            number = self._epoch.claim()
        if number is None:
            self._over = True
            raise StopIteration
        self._given += 1
        return self._epoch.samples(number)

    def _has_enough(self) -> bool:
        """Whether what this worker holds and has not begun is more than half of its share of what nobody has claimed."""
        held = self._given - max(0, self._asked - self._epoch.ahead)  # the batch that is given out meanwhile has begun
        return held > _FEW and held > self._epoch.left() / self._epoch.world_size / 2


class _Alone:
    """The store of a worker without others."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}

    def add(self, key: str, amount: int, /) -> int:
        self._sums[key] = self._sums.get(key, 0) + amount
        return self._sums[key]


def _group_store() -> Store | None:
    return _get_default_store() if dist.is_available() and dist.is_initialized() else None


def _whole(samples: int, shuffle: bool) -> Order:
    return RandomSampler(range(samples)) if shuffle else SequentialSampler(range(samples))


@contextmanager
def _seeded(seed: int, generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Inside, all generators begin at this seed; on leaving, they are where they were."""
    states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    own = [(generator, generator.get_state()) for generator in generators]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for generator, _ in own:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for generator, state in own:
            generator.set_state(state)
