"""Logs the metric vocabulary, live, to whatever logger the Trainer has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.rank_zero import WarningCache
from typing_extensions import override

from lightning_cocod.comm.ledger import Reading, Totals
from lightning_cocod.options import whole
from lightning_cocod.strategies import AlgorithmStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


_warnings = WarningCache()  # once is enough


class CommunicationMonitor(Callback):
    """Logs ``comm/…``, ``algo/…`` and ``throughput/…`` every n optimizer steps.

    Values are means over the steps since the last time, bytes are totals since the start of the fit. Time spent in
    validation is not training's. Nothing in here blocks: no collective, no device synchronisation; the samples of the other
    ranks come with their heartbeats. Under a strategy that is not of this package (``ddp``) only the throughput is known.

    Args:
        every_n_steps: optimizer steps between two rows.

    Attributes:
        summary: the same metrics over the whole fit, on every rank, once training has ended. Where the ranks are other
            processes than the script's (``_spawn``, ``_fork``, ``_notebook``), it stays there.

    Raises:
        ValueError: every_n_steps is not a whole number of at least 1.

    Example::

        L.Trainer(strategy="cocod", callbacks=[CommunicationMonitor(every_n_steps=20)])
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = whole("every_n_steps", every_n_steps, least=1)
        self.summary: dict[str, float] = {}
        self._samples = 0
        self._steps = 0
        self._idle = 0.0  # seconds spent in validation
        self._paused_at = 0.0
        self._first = self._last = Reading()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._samples, self._steps, self._idle = 0, 0, 0.0
        self._first = self._last = self._read(trainer)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._samples += self._size(batch)
        if isinstance(trainer.strategy, AlgorithmStrategy):
            trainer.strategy.algorithm.comm.samples = self._samples

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        if trainer.fit_loop._should_accumulate() or steps % self.every_n_steps:
            return
        metrics = self._metrics(trainer, self._last)
        self._last = self._read(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=steps - 1)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused_at = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._idle += time.perf_counter() - self._paused_at

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.summary = self._metrics(trainer, self._first)

    def _size(self, batch: Any) -> int:
        try:
            return extract_batch_size(batch)
        except MisconfigurationException:
            _warnings.warn("The batches hold no tensor to count samples by: throughput/samples_per_sec is unknown.")
            return 0

    def _read(self, trainer: pl.Trainer) -> Reading:
        now = time.perf_counter() - self._idle
        if isinstance(trainer.strategy, AlgorithmStrategy):
            reading = trainer.strategy.algorithm.reading()
            return Reading(now, reading.steps, reading.samples, reading.totals)
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped
        return Reading(now, steps, self._samples * trainer.world_size, Totals())

    def _metrics(self, trainer: pl.Trainer, since: Reading) -> dict[str, float]:
        metrics = self._read(trainer).since(since)
        if isinstance(trainer.strategy, AlgorithmStrategy):
            return {**trainer.strategy.metrics(since), **metrics}
        return {name: value for name, value in metrics.items() if name.startswith("throughput/")}
