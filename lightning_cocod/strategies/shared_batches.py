"""A batch sampler for ranks whose batches differ in size: one order for all of them, cut into global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import NamedTuple, Protocol

from torch.utils.data import Sampler

from lightning_cocod.strategies.shares import Plan, shares, totals


class Order(Sized, Protocol):
    """A sampler over the whole data set, which gives the same order on every rank."""

    def __iter__(self) -> Iterator[int]: ...


class Place(NamedTuple):
    """Where an iterator begins.

    Attributes:
        origin: number, counted over the whole run, of the first batch of its epoch.
        accumulated: batches of an optimizer step.
    """

    origin: int
    accumulated: int


class SharedBatches(Sampler[list[int]]):
    """This rank's part of each global batch.

    Global batches are cut from the order one after the other, whatever the shares, so an epoch sees each sample once as
    long as all ranks have the same plan at the same batch. The shares stay the same within an optimizer step.

    Args:
        sampler: the order.
        total: samples of a global batch.
        drop_last: whether to leave out what remains at the end.
        plan: of the run.
        rank: this rank.
        begin: called when an iterator is made.
    """

    def __init__(
        self, sampler: Order, total: int, *, drop_last: bool, plan: Plan, rank: int, begin: Callable[[], Place]
    ) -> None:
        self.sampler, self.total, self.drop_last = sampler, total, drop_last
        self._plan, self._rank, self._begin = plan, rank, begin
        self._place = Place(0, 1)
        self.drawn = 0
        """Number of the next batch to be drawn, counted over the whole run."""

    def __len__(self) -> int:
        return len(self._totals())

    def __iter__(self) -> Iterator[list[int]]:
        self._place = self._begin()
        return self._batches(list(self.sampler))

    def sizes(self, batch: int) -> list[int]:
        """Of all ranks, in this batch of the epoch."""
        return self._shares(batch, self._totals()[batch])

    def planned(self, batch: int) -> list[int]:
        """The same, were it a full one."""
        origin, accumulated = self._place
        return self._plan.sizes(origin + batch - batch % accumulated)

    def _batches(self, order: list[int]) -> Iterator[list[int]]:
        start = 0
        for batch, total in enumerate(self._totals()):
            sizes = self._shares(batch, total)
            self.drawn = self._place.origin + batch + 1
            mine = start + sum(sizes[: self._rank])
            yield order[mine : mine + sizes[self._rank]]
            start += total

    def _shares(self, batch: int, total: int) -> list[int]:
        sizes = self.planned(batch)
        return list(sizes) if sum(sizes) == total else shares(sizes, total)

    def _totals(self) -> list[int]:
        return totals(len(self.sampler), self.total, len(self._plan.latest), drop_last=self.drop_last)
