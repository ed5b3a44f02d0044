"""What is entered into Lightning's calendar for the time of one fit: the verbs, and loops that are run in a frame."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cocod.strategies.averages import keep_consensus
from lightning_cocod.strategies.plateau import judge_together
from lightning_cocod.strategies.replaced import Replaced
from lightning_cocod.strategies.tuning import takes_part

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_cocod.strategies.base import AlgorithmStrategy
    from lightning_cocod.strategies.quiet import QuietLoop


def enter(strategy: AlgorithmStrategy, trainer: pl.Trainer, quiet: QuietLoop, replaced: Replaced) -> None:
    """Enter it; ``replaced`` takes it out again."""
    verbs, fit, batches = _Verbs(strategy, quiet), trainer.fit_loop, trainer.fit_loop.epoch_loop
    run_fit, run_validation, reset = fit.run, batches.val_loop.run, batches.reset

    def fit_or_finish() -> None:
        with takes_part(verbs, trainer, quiet):
            run_fit()
        strategy.finish_if_nothing_was_left()

    def validate_the_consensus() -> Any:
        with strategy.evaluating():
            result = run_validation()
        quiet.decide_together()
        return result

    def reset_quietly() -> None:
        with warnings.catch_warnings():  # Lightning does not know that the loaders continue
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            reset()

    quiet.install(replaced)
    keep_consensus(trainer, strategy.algorithm, strategy.saving, replaced)
    if strategy.world_size > 1:
        judge_together(trainer, replaced)
    replaced.inserted(trainer.callbacks, 1, verbs)  # type: ignore[attr-defined]  # set by Trainer.__init__
    replaced.method(fit, "run", fit_or_finish)
    replaced.method(batches.val_loop, "run", validate_the_consensus)
    replaced.method(batches, "reset", reset_quietly)


class _Verbs(Callback):
    """Comes before every callback of the user's."""

    def __init__(self, strategy: AlgorithmStrategy, quiet: QuietLoop) -> None:
        self._strategy, self._quiet = strategy, quiet

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._strategy.before_epoch()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._quiet.on_batch_start()
        self._strategy.before_batch(batch_idx)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._strategy.before_step(optimizer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._strategy.after_batch()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._strategy.algorithm.finish()
