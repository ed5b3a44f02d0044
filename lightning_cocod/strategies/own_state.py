"""What one rank needs to continue exactly, beside the consensus model: its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.strategies.continuing import Continuing, Position
from lightning_cocod.strategies.randomness import set_random_state

if TYPE_CHECKING:
    import lightning.pytorch as pl


def take(
    trainer: pl.Trainer, algorithm: Algorithm, checkpoint: Mapping[str, Any], randomness: dict[str, Any], sampler_seed: int
) -> dict[str, Any]:
    """This rank's part. Tensors are those of the run, not copies: write it before the next step.

    Args:
        trainer: in a fit.
        algorithm: waits for its message in flight and folds nothing.
        checkpoint: Lightning's, as dumped on this rank: its optimizers, schedulers, scaler, callbacks, loops.
        randomness: training's random state.
        sampler_seed: from which the samplers that Lightning inserts draw the order of every epoch.
    """
    return {
        "lightning": {name: value for name, value in checkpoint.items() if name != "state_dict"},
        "replica": algorithm.replica.values(),
        "algorithm": algorithm.state_dict() if algorithm.started else None,
        "gradients": _gradients(trainer),
        "metrics": dict(trainer.callback_metrics),
        "positions": _positions(trainer),
        "random": randomness,
        "sampler_seed": sampler_seed,
    }


class OwnState:
    """A part that has been read, handed out piece by piece where Lightning restores the like."""

    def __init__(self, part: dict[str, Any]) -> None:
        self._part = part
        self._positions: list[Position | None] = list(part["positions"])

    @property
    def sampler_seed(self) -> int:
        """From which the samplers that Lightning inserts drew."""
        return int(self._part["sampler_seed"])

    @property
    def batch_sizes(self) -> dict[str, Any] | None:
        """What is known of the ranks' batch sizes, where they are not equal."""
        sizes: dict[str, Any] | None = self._part.get("batch_sizes")
        return sizes

    def merge_into(self, checkpoint: dict[str, Any]) -> None:
        """This rank's optimizers, schedulers, scaler, callbacks and loops in place of rank 0's."""
        checkpoint.update(self._part["lightning"])

    def next_position(self) -> Position | None:
        """Where the next loader of training begins."""
        return self._positions.pop(0) if self._positions else None

    def continue_(self, trainer: pl.Trainer, algorithm: Algorithm, device: torch.device) -> None:
        """The last things, immediately before the next batch."""
        self._finish_epoch(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Trainer.__init__
            if isinstance(callback, GradientAccumulationScheduler):  # which acts where an epoch starts, and this one has
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        algorithm.replica.load(self._part["replica"])
        if self._part["algorithm"] is not None:
            algorithm.load_state_dict(self._part["algorithm"])
        parameters = dict(trainer.lightning_module.named_parameters())
        for name, gradient in self._part["gradients"].items():
            parameters[name].grad = gradient.to(parameters[name].device)
        set_random_state(self._part["random"], device)
        self._draw_ahead_again(trainer)

    def _finish_epoch(self, trainer: pl.Trainer) -> None:
        """What an epoch's end does with logged values, which Lightning does not keep and therefore leaves out."""
        loop = trainer.fit_loop
        trainer._logger_connector._callback_metrics.update(self._part["metrics"])
        if loop.restarted_on_epoch_end or loop.resumed_on_epoch_end:
            loop.epoch_progress.current.completed -= 1  # it was not when the schedulers should have been stepped
            loop.epoch_loop._update_learning_rates("epoch", update_plateau_schedulers=True)
            loop.epoch_progress.current.completed += 1
        loop._restarting = False  # what is left of the epoch ends like any other
        if loop.restarted_on_epoch_start or self._epoch_was_complete:
            loop.epoch_loop.restarting = False  # the batches that are counted are those of the epoch before

    @property
    def _epoch_was_complete(self) -> bool:
        """At a SIGTERM that has been agreed on at an epoch's end it is, and Lightning would go on with an empty one."""
        epochs = self._part["lightning"]["loops"]["fit_loop"]["epoch_progress"]["current"]
        return bool(epochs["completed"] == epochs["ready"])

    def _draw_ahead_again(self, trainer: pl.Trainer) -> None:
        """Without a length Lightning has drawn the first batch of an epoch already, when nothing was where it should be."""
        loop = trainer.fit_loop
        ended = self._epoch_was_complete or loop.restarted_on_epoch_end or loop.resumed_on_epoch_end
        between_epochs = ended or loop.restarted_on_epoch_start
        if not between_epochs or not getattr(loop._data_fetcher, "batches", ()):
            return
        assert loop._combined_loader is not None
        assert loop._data_fetcher is not None
        for loader, position in zip(loop._combined_loader.flattened, self._part["positions"], strict=True):
            if isinstance(loader, Continuing):
                loader.begin_at(position)
        iter(loop._data_fetcher)


def _gradients(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Those that the next backward adds to: within an accumulation, or where the user decides when to zero them."""
    module = trainer.lightning_module
    users = not module.automatic_optimization or is_overridden("optimizer_zero_grad", module)
    if not users and not trainer.fit_loop._should_accumulate() and not begun(trainer):
        return {}
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _positions(trainer: pl.Trainer) -> list[Position | None]:
    """Of every loader of training; None for the beginning, and for one that is left to Lightning."""
    loop, under_way = trainer.fit_loop, begun(trainer)
    if loop._combined_loader is None:
        return []
    between_epochs = loop.epoch_loop._num_ready_batches_reached() and not under_way
    batches = getattr(loop._data_fetcher, "batches", None)  # drawn to see whether there is another one
    ahead = 0 if batches is None else under_way + len(batches)  # None: the module draws its batches itself

    def position(loader: Any) -> Position | None:
        if not isinstance(loader, Continuing):
            return None
        return loader.next_epoch() if between_epochs else loader.position(ahead)

    return [position(loader) for loader in loop._combined_loader.flattened]


def begun(trainer: pl.Trainer) -> int:
    """1 in the middle of a batch, which a resumed run does again from its start; else 0."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(batches.ready - batches.processed)  # type: ignore[attr-defined]  # declared as one of its base class
