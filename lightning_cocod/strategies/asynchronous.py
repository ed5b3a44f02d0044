"""Lightning's side of algorithms whose workers have different numbers of steps (see docs/asynchrony.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_cocod.algorithms.asynchronous import Asynchronous
from lightning_cocod.comm import Communicator
from lightning_cocod.strategies import coming_back, unshareable
from lightning_cocod.strategies.base import AlgorithmStrategy
from lightning_cocod.strategies.continuing import continuing
from lightning_cocod.strategies.meetings import Meetings
from lightning_cocod.strategies.proportional import WHOLE_SET
from lightning_cocod.strategies.quiet import QuietLoop
from lightning_cocod.strategies.work_sharing import KEY, WorkSharing, begin_again

if TYPE_CHECKING:
    import lightning.pytorch as pl

_log = logging.getLogger(__name__)


class AsynchronousStrategy(AlgorithmStrategy):
    """Runs an asynchronous algorithm: no step waits for another rank, and the ranks share each epoch.

    Subclasses say in their constructors what it ``runs``, and do nothing else.

    Args:
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sharing: WorkSharing | None = None
        self._regrouped: tuple[int, int] | None = None
        self._is_let_in = False  # in this epoch, which the others have begun with that

    @property
    @override
    def global_rank(self) -> int:
        """In torch's default group; another one than the cluster environment's once the ranks have regrouped."""
        return super().global_rank if self._regrouped is None else self._regrouped[0]

    @property
    @override
    def world_size(self) -> int:
        """See ``global_rank``."""
        return super().world_size if self._regrouped is None else self._regrouped[1]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self.world_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            unshareable.refuse_run(trainer, synchronous_batch_norm=self._layer_sync is not None)
            self._sharing = WorkSharing(trainer, self.global_rank, self.world_size, self._named)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self._sharing is not None:
            assert self._communicator is not None
            self._communicator.on_regroup.append(lambda: self._regroup(trainer))
            assert isinstance(self.algorithm, Asynchronous)
            self.algorithm.lets_in = False  # but where an epoch begins
            assert isinstance(self._quiet, Meetings)
            unshareable.refuse_schedules(trainer)
            self._sharing.calendar.install(self._quiet, self._sharing.reopen, self._replaced)

    @override
    def _quiet_loop(
        self, trainer: pl.Trainer, communicator: Communicator, ask_all: Callable[[str, bool], bool]
    ) -> QuietLoop:
        if self._sharing is None:
            return super()._quiet_loop(trainer, communicator, ask_all)
        return Meetings(trainer, communicator.wishes, ask_all, self._meeting)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Nobody goes on to the next batch at once: until then Lightning may need all ranks."""
        assert isinstance(self.algorithm, Asynchronous)
        with self.algorithm.meeting():
            yield
        self.algorithm.comm.needs_all(True)

    def _regroup(self, trainer: pl.Trainer) -> None:
        """Some ranks are lost: these are the numbers of the others, who share what is left of them."""
        assert self._communicator is not None
        assert self._sharing is not None
        self._regrouped = self._communicator.rank, self._communicator.world_size
        rank_zero_only.rank = self._communicator.rank  # type: ignore[attr-defined]  # Lightning sets it as well
        self._sharing.regroup(*self._regrouped)
        trainer.fit_loop.epoch_loop.val_loop._combined_loader = None  # set up again, in as many parts as there are ranks

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """While training, the order of all samples, the same on every rank."""
        kwargs = {**super().distributed_sampler_kwargs, "num_replicas": self.world_size}
        return {**kwargs, **WHOLE_SET} if self._sharing is not None and self._in_training else kwargs

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._sharing is None or not self._in_training:
            return super().process_dataloader(dataloader)
        self._sharing.share(dataloader, self.broadcast)
        return continuing(dataloader, self.root_device, None)

    @override
    def on_train_start(self) -> None:
        assert self._communicator is not None
        members = self._communicator.members
        comes_back = members is not None and members.is_waiting
        if comes_back:
            _log.warning("[rank %d] waits until the run lets it in, where an epoch begins", self.global_rank)
            self._resumed = None  # whatever it has loaded, it goes on where the others are
        super().on_train_start()
        if self._sharing is not None:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            unshareable.refuse_loaders(trainer)
            if comes_back:
                coming_back.take(trainer, self._sharing, self.broadcast(None))
                self.algorithm.t = trainer.global_step
                self._is_let_in = True
            self._sharing.open()

    @override
    def before_epoch(self) -> None:
        """The others let in who has come back."""
        let_in, self._is_let_in = self._is_let_in, False
        members = self.algorithm.comm.members
        if self._sharing is None or let_in or members is None:
            return
        assert isinstance(self.algorithm, Asynchronous)
        assert self.lightning_module is not None
        generation = members.generation
        self.algorithm.comm.needs_all(False)
        self.algorithm.lets_in = True
        with self.algorithm.meeting():
            pass
        self.algorithm.lets_in = False
        self.algorithm.comm.needs_all(True)
        if members.newcomers and members.generation != generation:
            self.broadcast(coming_back.place(self.lightning_module.trainer, self._sharing))

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._sharing is not None and self._in_training and self._communicator is not None:
            self._communicator.needs_all(False)  # from here to the next meeting ranks are at different batches
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def before_batch(self, batch_idx: int) -> None:
        super().before_batch(batch_idx)
        if self._sharing is not None:
            assert isinstance(self.algorithm, Asynchronous)
            self.algorithm.claimed(self._sharing.before_batch())

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        whole = "optimizer_states" in checkpoint
        if self._sharing is not None and self._algorithm is not None and whole and not self._algorithm.comm.failed:
            state = self._sharing.state_dict(partial(self.reduce, reduce_op="sum"))
            checkpoint = checkpoint if state is None else {**checkpoint, KEY: state}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(  # type: ignore[override]  # as in the base class
        self, checkpoint_path: _PATH, **options: Any
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, **options)
        if self._sharing is not None and (state := self.broadcast(checkpoint.get(KEY))) is not None:
            own = self.global_rank if self._resumed is not None else 0
            self._sharing.load_state_dict(state, checkpoint["loops"], own)
        elif self.world_size == 1 and KEY in checkpoint and "loops" in checkpoint:
            begin_again(checkpoint[KEY], checkpoint["loops"])
        return checkpoint

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        self._refuse_in_step("reduces over all ranks (a metric with sync_dist=True and on_step=True?)")
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        self._refuse_in_step("gathers from all ranks")
        return super().all_gather(tensor, group, sync_grads)

    def _refuse_in_step(self, what: str) -> None:
        if self._sharing is not None and isinstance(self._quiet, Meetings) and self._quiet.in_training_step:
            unshareable.refuse_in_step(what)

    @override
    def teardown(self) -> None:
        self._sharing = None
        super().teardown()
