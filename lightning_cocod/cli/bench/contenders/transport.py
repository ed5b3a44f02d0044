"""The transport by itself: what the link and the system take for the bytes of a round, whoever asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cocod.cli.bench.contenders.local import by_itself

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job

BUCKET = 25 << 20  # bytes, as in DDP


def _buckets(model: nn.Module) -> list[Tensor]:
    return list(torch.split(torch.zeros(sum(p.numel() for p in model.parameters())), BUCKET // 4))


def _launch(buckets: list[Tensor]) -> list[dist.Work | None]:
    return [dist.all_reduce(bucket, async_op=True) for bucket in buckets]


def transport(job: Job) -> None:
    """All-reduces of as many bytes as the parameters have, round after round, and nothing else."""
    job.join()
    buckets = _buckets(job.module)
    job.together()
    for _ in range(job.plan.warmup + job.plan.rounds):
        for work in _launch(buckets):
            assert work is not None
            work.wait()
        job.meter.boundary()


class _Beside(L.Callback):
    """One round's all-reduces are in flight while the next round computes; what they bring is not used."""

    def __init__(self, buckets: list[Tensor], period: int) -> None:
        self._buckets, self._period, self._steps = buckets, period, 0
        self._flying: list[dist.Work | None] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._flying = _launch(self._buckets)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._steps += 1
        if self._steps % self._period == 0:
            self._wait()
            self._flying = _launch(self._buckets)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._wait()

    def _wait(self) -> None:
        for work in self._flying:
            assert work is not None
            work.wait()


def bare(job: Job) -> None:
    """Training alone beside the bare transport: no copy, no arithmetic, no result. What no algorithm can undercut."""
    job.join()
    job.fit(by_itself(), _Beside(_buckets(job.module), job.plan.period))
