"""Training alone, and post-local SGD: alone but for a blocking mean of the parameters once a period."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job


def alone(job: Job) -> None:
    """No communication: the ceiling. Every rank trains by itself, all at the same time."""
    job.fit(by_itself())


def plain(job: Job) -> None:
    """The same, but that memory which has been freed goes back to the system, as without this package (see ``process``)."""
    job.fit(by_itself())


def by_itself() -> SingleDeviceStrategy:
    """Lightning's strategy without communication."""
    return SingleDeviceStrategy(torch.device("cpu"), accelerator=None)


class _Averages(L.Callback):
    """Torch's averager after every step; it does something once a period."""

    def __init__(self, averager: PeriodicModelAverager) -> None:
        self._averager = averager

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._averager.average_parameters(pl_module.parameters())


def torch_post_local_sgd(job: Job) -> None:
    """Torch's, after its warm-up of synchronous steps, which is left out here."""
    job.join()
    job.fit(by_itself(), _Averages(PeriodicModelAverager(period=job.plan.period)))
