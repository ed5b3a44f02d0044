"""What is trained: the same model on the same batch, already in memory, for every contender."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cocod.workloads import gpt, resnet18, vgg16

Batch = tuple[Tensor, Tensor]


class Work(NamedTuple):
    """A model and what it is fed with."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]  # of so many samples
    classes: int
    batch_size: int  # of a rank, by default
    period: int  # likewise


def _images(size: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, 3, size, size)


def _numbers(size: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, size)


def _mlp() -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10))


WORK = {
    "resnet18": Work(resnet18, _images(32), 10, batch_size=16, period=8),
    "resnet18_64": Work(resnet18, _images(64), 10, batch_size=16, period=8),
    "vgg16": Work(vgg16, _images(32), 10, batch_size=16, period=8),
    "gpt": Work(gpt, lambda count: torch.randint(256, (count, 64)), 256, batch_size=16, period=8),
    "huge": Work(partial(nn.Linear, 10_000, 10_000), _numbers(10_000), 10_000, batch_size=4, period=8),
    "tiny": Work(_mlp, _numbers(256), 10, batch_size=16, period=8),
}
"""By name. One tensor of `vgg16` and the one of `huge` have 400 MB; in steps of `tiny` much time is the Trainer's."""


class Training(L.LightningModule):
    """Cross-entropy and SGD with momentum."""

    def __init__(self, work: Work, batch_size: int) -> None:
        super().__init__()
        self.model = work.model()
        inputs = work.inputs(batch_size)
        outputs = (batch_size, *inputs.shape[1:]) if inputs.dtype == torch.int64 else (batch_size,)  # tokens have one each
        self.batch: Batch = inputs, torch.randint(work.classes, outputs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss."""
        inputs, labels = batch
        return F.cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same for all contenders."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Batches:
    """The same batch so many times. A loader of its own, as Lightning would take a list for a list of loaders."""

    def __init__(self, batch: Batch, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return (self._batch for _ in range(self._count))
