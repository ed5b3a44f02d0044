"""Batches in proportion to the ranks' speeds: measured, agreed without a collective, and weighed.

Each message tells how fast its sender is. Once training has waited for one, all ranks know the same speeds after the same
batch and decide alike, for the first batch that no loader can have drawn yet. That ranks have decided alike is seen in the
next message: the weights in its header are what all ranks have computed according to each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.comm import Communicator, Pace
from lightning_cocod.strategies.batch_sizes import BatchSizes
from lightning_cocod.strategies.continuing import Position
from lightning_cocod.strategies.replaced import Replaced
from lightning_cocod.strategies.shared_batches import Place, SharedBatches
from lightning_cocod.strategies.shares import Plan, improved
from lightning_cocod.strategies.speed import Speedometer

if TYPE_CHECKING:
    import lightning.pytorch as pl

_log = logging.getLogger(__name__)

EQUAL, PROPORTIONAL = "equal", "proportional"
WHOLE_SET = {"num_replicas": 1, "rank": 0}
"""Of the sampler that Lightning inserts into the loader of training: the order of all samples, the same on every rank."""
_MEANS = ("mean", "avg", torch.distributed.ReduceOp.AVG)


class Proportional(BatchSizes):
    """The sizes of all ranks' batches in one fit.

    Args:
        trainer: in a fit.
        communicator: of the ranks.
    """

    def __init__(self, trainer: pl.Trainer, communicator: Communicator) -> None:
        self._trainer, self._comm = trainer, communicator
        self._plan: Plan | None = None
        self._batches: SharedBatches | None = None
        self._ahead = 0  # batches that a loader may have drawn and not given out
        self._skipped = 0  # batches that the next iterator gives out again, and that are dropped
        self._place, self._lag = Place(0, 1), 0
        self._now: list[int] | None = None  # sizes of the batch under way
        self._size = 0  # of this rank's batches, but for the last ones of an epoch
        self._weighed = 0  # number of the first batch that the algorithm has not been told
        self.speedometer = Speedometer(communicator.lane, self._waited)

    # The loader

    @override
    def cut(self, loader: Any, position: Position | None, same: Callable[[Any], Any]) -> None:
        """The loader's batches become this rank's shares.

        Args:
            loader: of training, as Lightning has prepared it.
            position: at which it continues.
            same: gives rank 0's value on every rank.

        Raises:
            MisconfigurationException: the batches are not this package's to cut.
        """
        _refuse(loader)
        sampler: DistributedSampler[Any] = loader.sampler
        sampler.seed = same(sampler.seed)  # one order for all, however the user has seeded the ranks
        if self._plan is None:
            self._plan = Plan([(0, [loader.batch_size] * self._comm.world_size)])
        self._batches = SharedBatches(
            sampler,
            loader.batch_size * self._comm.world_size,
            drop_last=loader.drop_last,
            plan=self._plan,
            rank=self._comm.rank,
            begin=self._begin_epoch,
        )
        len(self._batches)  # too few samples are noticed here
        object.__setattr__(loader, "batch_sampler", self._batches)  # loaders forbid it to all but their constructor
        self._skipped = 0 if position is None else position["drawn"]
        self._ahead = loader.num_workers * (loader.prefetch_factor or 0) + 1

    def _begin_epoch(self) -> Place:
        """An iterator over the loader is born, immediately before the first batch that is trained on."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        skipped, self._skipped = self._skipped, 0
        self._lag = progress.current.ready - skipped
        self._place = Place(progress.total.completed - skipped, self._trainer.accumulate_grad_batches)
        return self._place

    # The calendar

    @override
    def sampler_kwargs(self) -> dict[str, Any]:
        """The order of all samples, the same on every rank."""
        return WHOLE_SET

    @override
    def install(self, algorithm: Algorithm, replaced: Replaced) -> None:
        """Know where a batch of training ends."""
        algorithm.deterministic = False
        loop = self._trainer.fit_loop.epoch_loop
        advance = loop.advance

        def advance_and_forget(*args: Any) -> None:
            try:
                advance(*args)
            finally:
                self._now = None

        replaced.method(loop, "advance", advance_and_forget)

    @override
    def on_train_start(self) -> None:
        """Before the first batch.

        Raises:
            MisconfigurationException: there is not one loader, or the module draws its batches itself.
        """
        loop = self._trainer.fit_loop
        loaders = 0 if loop._combined_loader is None else len(loop._combined_loader.flattened)
        if loaders != 1 or isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise _refusal("one DataLoader for training, whose batches training_step is given")

    @override
    def on_batch_start(self, algorithm: Algorithm, batch_idx: int) -> None:
        """A batch begins."""
        assert self._batches is not None
        rank, batch = self._comm.rank, batch_idx - self._lag
        self._now = self._batches.sizes(batch)
        self._size = self._batches.planned(batch)[rank]
        number = self._place.origin + batch
        if number >= self._weighed:  # a resumed run does the batch again in which it has been interrupted
            algorithm.weigh_batch(self._now)
        self._weighed = number + 1
        if batch == 0:
            self.speedometer.interrupt()
        self.speedometer.begin(self._now[rank], self._size)

    @override
    def before_verb(self) -> None:
        """Whatever is sent from here on tells this rank's pace."""
        self._comm.pace = Pace(self._weighed, self.speedometer.speed)

    @override
    def after_step(self) -> None:
        """Where speeds have been heard, decide.

        Raises:
            RuntimeError: the ranks do not train in step, or a loader draws further ahead than it should.
        """
        heard, self._comm.heard = self._comm.heard, []
        if not all(pace.speed for pace in heard) or not heard:
            return
        if len({pace.batches for pace in heard}) > 1:
            raise RuntimeError(
                f"batch_sizes='{PROPORTIONAL}' needs optimizer steps after the same batches on all ranks, and they are at "
                f"batch {', '.join(str(pace.batches) for pace in heard)}: use batch_sizes='{EQUAL}'"
            )
        assert self._batches is not None
        assert self._plan is not None
        sizes = improved(self._plan.latest, [pace.speed for pace in heard])
        if sizes is None:
            return
        first = self._weighed + self._ahead
        if self._batches.drawn > first:
            raise RuntimeError(
                f"the loader has drawn batch {self._batches.drawn - 1} already, further ahead than its num_workers and "
                f"prefetch_factor say: batch_sizes='{PROPORTIONAL}' needs a loader that keeps to them"
            )
        self._plan.change(first, sizes)
        if self._comm.rank == 0:
            _log.warning("batch sizes of the ranks from batch %d on: %s", first, ", ".join(map(str, sizes)))

    # What else depends on the sizes

    @override
    def apart(self) -> AbstractContextManager[None]:
        """Time that is not this rank's own."""
        return self.speedometer.apart()

    @override
    def interrupt(self) -> None:
        """The batch under way is not timed."""
        self.speedometer.interrupt()

    @override
    def reduce(self, tensor: Any, group: Any, reduce_op: Any, reduction: Callable[..., Any]) -> Any:
        """A mean over the ranks is, inside a batch, weighted by the samples that each has of it."""
        if group is not None or reduce_op not in _MEANS or not isinstance(tensor, Tensor):
            return reduction(tensor, group, reduce_op)
        if self._now is not None:
            return reduction(tensor * (self._now[self._comm.rank] / sum(self._now)), None, "sum")
        total = reduction(tensor, None, "sum")
        return total / self._comm.world_size  # of counts too, which Lightning's own mean rounds down

    @override
    def metrics(self) -> dict[str, float]:
        """The size of this rank's batches."""
        return {"algo/batch_size": float(self._size)}

    @override
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues with."""
        return {**({} if self._plan is None else self._plan.state_dict()), "weighed": self._weighed}

    @override
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Before the loader is cut."""
        if state is not None:
            self._plan, self._weighed = Plan(state["changes"]), state["weighed"]

    def _waited(self) -> float:
        totals = self._comm.ledger.totals()
        return totals.exposed + totals.skew


def _refuse(loader: Any) -> None:
    """Raises MisconfigurationException for a loader whose batches cannot be cut anew."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
        raise _refusal(f"a DataLoader of torch, not {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
        raise _refusal("a data set with a length and a loader with a batch_size: it cuts the batches itself")
    if type(loader.sampler) is not DistributedSampler or loader.sampler.num_replicas != 1:
        raise _refusal("use_distributed_sampler=True and a loader without a sampler of its own: all ranks share one order")


def _refusal(needs: str) -> MisconfigurationException:
    return MisconfigurationException(f"batch_sizes='{PROPORTIONAL}' needs {needs}; use batch_sizes='{EQUAL}'")
