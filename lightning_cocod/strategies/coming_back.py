"""Where a run is, for a rank that has come back to it at the beginning of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_cocod.strategies.work_sharing import WorkSharing


def place(trainer: pl.Trainer, sharing: WorkSharing) -> dict[str, Any]:
    """Of a rank that has been there: what it counts, its schedules, and what its callbacks know. No tensors of the model."""
    return {
        "loop": trainer.fit_loop.state_dict(),
        "sharing": sharing.place(),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "groups": [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        "folders": [callback.dirpath for callback in _checkpoints(trainer)],
        "callbacks": call._call_callbacks_state_dict(trainer),
    }


def take(trainer: pl.Trainer, sharing: WorkSharing, place: dict[str, Any]) -> None:
    """Before the first batch: go on from there, with whatever state the optimizers have."""
    loop = trainer.fit_loop
    loop.load_state_dict(place["loop"])
    loop.restarting = loop.epoch_loop.restarting = loop._loaded_from_state_dict = False
    loop.update_restart_stage()
    for progress in (loop.epoch_progress.total, loop.epoch_progress.current):
        progress.ready -= 1  # the epoch begins here as well
    sharing.take(place["sharing"])
    for config, state in zip(trainer.lr_scheduler_configs, place["schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    for optimizer, groups in zip(trainer.optimizers, place["groups"], strict=True):
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)
    for callback, folder in zip(_checkpoints(trainer), place["folders"], strict=True):
        callback.dirpath = folder
    call._call_callbacks_load_state_dict(trainer, {"callbacks": place["callbacks"]})


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return trainer.checkpoint_callbacks  # type: ignore[return-value]  # all that there are
