"""ReduceLROnPlateau judges one number on all ranks.

Each rank would judge its own metric where that is not synchronised. Learning rates that split, on one rank only, stay so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_cocod.strategies.replaced import Replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl


def judge_together(trainer: pl.Trainer, replaced: Replaced) -> None:
    """From now on, what the trainer's plateau schedulers monitor is its mean over the ranks.

    A collective whenever such a scheduler steps, which is once an epoch by default.
    """
    batches = trainer.fit_loop.epoch_loop
    own = batches._get_monitor_value

    def mean(key: str) -> Any:
        value = own(key)
        if value is None:
            return None  # Lightning says what is missing
        number = torch.tensor(float(value), device=trainer.strategy.root_device)  # a copy: the reduction is in place
        return trainer.strategy.reduce(number, reduce_op="mean")

    if any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs):
        rank_zero_warn(
            "ReduceLROnPlateau with interval='step' compares its metric over all ranks in a step: a blocking collective, "
            "behind which no communication can be hidden; use interval='epoch' or a longer frequency"
        )
    replaced.method(batches, "_get_monitor_value", mean)
