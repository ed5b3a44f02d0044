"""ModelCheckpoint where ranks have different numbers of steps: rank 0's decide, and are in the name of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cocod.strategies.own_state import begun
from lightning_cocod.strategies.replaced import Replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl


def save_together(trainer: pl.Trainer, replaced: Replaced) -> None:
    """From now on all ranks save where rank 0 does, under the same name. Collective wherever they could save."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by Trainer.__init__
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            _save_together(callback, replaced)


def _save_together(callback: ModelCheckpoint, replaced: Replaced) -> None:
    skips, candidates = callback._should_skip_saving_checkpoint, callback._monitor_candidates

    def skips_on_rank_0(trainer: pl.Trainer) -> bool:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        within = begun(trainer) or batches.ready != batches.completed  # it asks after every batch, and does not save there
        return skips(trainer) if within else bool(trainer.strategy.broadcast(skips(trainer)))

    def candidates_of_rank_0(trainer: pl.Trainer) -> dict[str, Any]:
        found = candidates(trainer)
        return {**found, "step": torch.tensor(trainer.strategy.broadcast(int(found["step"])))}

    replaced.method(callback, "_should_skip_saving_checkpoint", skips_on_rank_0)
    replaced.method(callback, "_monitor_candidates", candidates_of_rank_0)
