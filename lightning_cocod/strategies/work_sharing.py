"""Epochs that ranks of any speed share: who is done with a batch claims the next one (comm/shared_epoch.py).

Lightning counts the batches of each rank by itself. Here they are counted together: the loader has a length, that of an
equal share, as long as a run is set up, so that whatever is computed from it comes out as for ranks in step, and none from
the first batch on. Then Lightning looks one batch ahead, and knows the last batch of a rank when it comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cocod.comm.shared_epoch import Claims, SharedEpoch
from lightning_cocod.strategies import unshareable
from lightning_cocod.strategies.own_state import begun
from lightning_cocod.strategies.shared_calendar import SharedCalendar

if TYPE_CHECKING:
    import lightning.pytorch as pl

KEY = "shared_epoch"
"""Under which a checkpoint says which batches of its epoch have been trained on."""


class WorkSharing:
    """One fit in which ranks share epochs.

    Args:
        trainer: in a fit.
        rank: of this process.
        world_size: N.
        named: around what fails if a peer is lost, and is told what that is; says which peer it was.
    """

    def __init__(
        self, trainer: pl.Trainer, rank: int, world_size: int, named: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._trainer, self._rank, self._n, self._named = trainer, rank, world_size, named
        self._batches: _Batches | None = None
        self._before: set[int] = set()  # batches of this epoch that were trained on before the run was resumed
        self._count = 0  # those that this rank has begun to train on since
        self._resumed: dict[str, Any] | None = None
        self.calendar = SharedCalendar(trainer, world_size)

    @property
    def batches(self) -> _Batches:
        """Of the loader in use."""
        assert self._batches is not None
        return self._batches

    def share(self, loader: Any, same: Callable[[Any], Any]) -> None:
        """The loader's batches become claims.

        Args:
            loader: of training, as Lightning has prepared it.
            same: gives rank 0's value on every rank.

        Raises:
            MisconfigurationException: the batches cannot be claimed.
        """
        unshareable.refuse_loader(loader, self._n)
        sampler = loader.sampler
        seed = same(getattr(sampler, "seed", 0))  # one order for all, however the user has seeded the ranks
        inside = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # the user's own, in Lightning's wrapper
        generators = [getattr(owner, "generator", None) for owner in (sampler, inside)]
        self._batches = _Batches(
            self._begin,
            self._named,
            sampler,
            int(loader.batch_size),
            drop_last=bool(loader.drop_last),
            ahead=loader.num_workers * (loader.prefetch_factor or 0),
            generators=[generator for generator in generators if isinstance(generator, torch.Generator)],
            rank=self._rank,
            world_size=self._n,
        )
        self._batches.begin_with(seed)
        object.__setattr__(loader, "batch_sampler", self._batches)  # loaders forbid it to all but their constructor

    def open(self) -> None:
        """From here on batches are claimed, and the loader has no length."""
        fit = self._trainer.fit_loop
        assert fit._combined_loader is not None
        assert fit._data_fetcher is not None
        self.calendar.measure(fit._combined_loader.limits, self.batches.total)
        self.batches.is_open = True
        fit._combined_loader.limits = [math.inf]
        iter(fit._data_fetcher)

    def reopen(self) -> None:
        """The data may have been set up anew, between epochs."""
        if self.calendar.is_running and not self.batches.is_open:
            self.open()

    def regroup(self, rank: int, world_size: int) -> None:
        """From the next epoch on the ranks are others. A step of a schedule has as many batches as before."""
        self._rank, self._n = rank, world_size
        self.batches.among(rank, world_size)

    def place(self) -> dict[str, Any]:
        """Where the run is between two epochs, for a rank that has come back."""
        calendar, batches = self.calendar, self.batches
        state = {"trained": [], "positions": [calendar.position], "calendar": calendar.state_dict()}
        return {**state, "batches": batches.there_are, "seed": batches.seed}

    def take(self, place: dict[str, Any]) -> None:
        """Before ``open``: go on from there."""
        self._resumed, self.calendar.position = place, place["positions"][0]
        self.batches.begin_with(place["seed"])

    def before_batch(self) -> int:
        """A batch begins.

        Returns:
            Its number, counted over the whole run.
        """
        self._count += 1
        claimed = self.batches.claimed
        self.calendar.go_on(claimed[self._count] if self._count < len(claimed) else math.inf)
        return self.calendar.origin + claimed[self._count - 1]

    def _begin(self) -> Iterator[list[int]]:
        """An iterator over the loader is born: an epoch begins, or goes on where its iterator is made anew."""
        calendar, batches = self.calendar, self.batches
        epochs = self._trainer.fit_loop.epoch_progress.current
        epoch: int = epochs.processed  # type: ignore[attr-defined]  # declared as one of its base class
        if epoch == calendar.epoch and batches.claimed:
            return Claims(batches, batches.claimed[self._count :])
        if epoch != calendar.epoch:
            self._count, self._before = 0, set()
            calendar.begin(epoch)
            state, self._resumed = self._resumed, None
            if state is not None:
                self._check(state)
                calendar.load_state_dict(state["calendar"])
                if state["calendar"]["epoch"] == epoch:
                    self._before = set(state["trained"])
        batches.limit = calendar.limit
        batches.resume(epoch, self._before)
        batches.begin()
        return Claims(batches)

    def _check(self, state: dict[str, Any]) -> None:
        if state["batches"] != self.batches.there_are:
            raise RuntimeError(
                f"the checkpoint was saved in an epoch of {state['batches']} batches, and there are "
                f"{self.batches.there_are} now; resume with the data and the batch size that it was saved with"
            )

    # Checkpoints

    def state_dict(self, total: Callable[[Tensor], Any]) -> dict[str, Any] | None:
        """What a run on any number of ranks continues with. Collective; None before the first batch.

        Args:
            total: adds a tensor up over the ranks.
        """
        calendar = self.calendar
        if calendar.epoch < 0:
            return self._resumed
        trained = self.batches.claimed[: self._count - begun(self._trainer)]
        numbers = torch.zeros(calendar.limit + self._n, dtype=torch.int64, device=self._trainer.strategy.root_device)
        numbers[trained] = 1
        if self._rank == 0:
            numbers[list(self._before)] = 1
        numbers[calendar.limit + self._rank] = calendar.position
        numbers = total(numbers)
        return {
            "trained": numbers[: calendar.limit].nonzero().flatten().tolist(),
            "positions": numbers[calendar.limit :].tolist(),
            "calendar": calendar.state_dict(),
            "batches": self.batches.there_are,
        }

    def load_state_dict(self, state: dict[str, Any], loops: dict[str, Any], rank: int) -> None:
        """Before the loader is set up.

        Args:
            state: from a checkpoint.
            loops: Lightning's, from the same. A rank whose last batch it was may get another one now.
            rank: whose schedules this rank continues with.
        """
        self._resumed = state
        fit = loops["fit_loop"]
        self.calendar.position = state["positions"][rank]
        if len(state["trained"]) < state["calendar"]["limit"]:
            state["calendar"]["closed"] = False
            fit["epoch_loop.batch_progress"]["is_last_batch"] = False


def begin_again(state: dict[str, Any], loops: dict[str, Any]) -> None:
    """One rank alone does not share: the epoch begins again, whatever rank 0 had had of it.

    Args:
        state: from a checkpoint.
        loops: Lightning's, from the same.
    """
    if len(state["trained"]) < state["calendar"]["limit"]:
        batches = loops["fit_loop"]["epoch_loop.batch_progress"]
        batches["total"] = dict.fromkeys(batches["total"], batches["total"]["ready"])
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


class _Batches(SharedEpoch):
    """Of a loader that Lightning sets up: with the length of an equal share and no batch until it is open.

    Lightning's epoch is that of all ranks only if each has a batch in it: one without any has nothing to reduce where the
    others reduce their metrics. Where a resumed epoch has fewer batches left than there are ranks, these share them.

    Args:
        begin: makes an iterator.
        named: see ``WorkSharing``.
        *args: see ``SharedEpoch``.
        **options: see ``SharedEpoch``.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[list[int]]],
        named: Callable[[str], AbstractContextManager[None]],
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._begin, self._named, self.is_open = begin, named, False
        self.there_are = self.total
        """Batches of the whole data set."""

    def begin_with(self, seed: int) -> None:
        """Of all epochs from the next one on."""
        self.seed = seed
        if hasattr(self._order, "seed"):
            self._order.seed = seed

    def __len__(self) -> int:
        if self.is_open:
            raise TypeError("nobody knows how many batches of a shared epoch will be this rank's")
        return math.ceil(self.total / self.world_size)

    @override
    def claim(self) -> int | None:
        few = len(self._todo)
        if self.claimed or not 0 < few <= self.rank:
            with self._named("the claim of a batch"):  # the store may be gone, and the rank that hosts it
                return super().claim()
        self.claimed.append(self._todo[self.rank % few])
        return self.claimed[-1]

    @override
    def left(self) -> int:
        with self._named("the claim of a batch"):
            return super().left()

    @override
    def samples(self, number: int) -> list[int]:
        """Of a batch, or this rank's part of it. Who would have none, since there are so few, has the whole batch."""
        batch, few = super().samples(number), len(self._todo)
        if few >= self.world_size:
            return batch
        part, parts = self.rank // few, math.ceil((self.world_size - self.rank % few) / few)
        return batch[part::parts] or batch

    @override
    def __iter__(self) -> Iterator[list[int]]:
        return self._begin() if self.is_open else iter(())
