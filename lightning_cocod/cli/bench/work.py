"""What is trained: the same model on the same batch, already in memory, for every contender."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cocod.workloads import gpt, resnet18, resnet20, vgg16

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


def _mlp(layers: int, width: int) -> nn.Module:
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


WORK = {
    "resnet18": Work(resnet18, _images(32), 10, batch_size=16, period=8),
    "resnet18_64": Work(partial(torchvision.models.resnet18, num_classes=10), _images(64), 10, batch_size=16, period=8),
    "resnet20": Work(resnet20, _images(32), 10, batch_size=16, period=8),
    "vgg16": Work(vgg16, _images(32), 10, batch_size=16, period=8),
    "gpt": Work(gpt, lambda count: torch.randint(256, (count, 64)), 256, batch_size=16, period=8),
    "huge": Work(partial(nn.Linear, 10_000, 10_000), _numbers(10_000), 10_000, batch_size=4, period=8),
    "mlp": Work(partial(_mlp, 8, 256), _numbers(256), 10, batch_size=16, period=8),
    "tiny": Work(partial(_mlp, 2, 64), _numbers(64), 10, batch_size=16, period=8),
}
"""By name. With ImageNet's stem `resnet18_64` has short steps. `resnet20` has little to send; `vgg16` and `huge` have a
tensor of 400 MB. Most of a step of `tiny` is the Trainer's.
"""


class Training(L.LightningModule):
    """Cross-entropy and SGD with momentum.

    Attributes:
        computed: CPU seconds so far of the thread that trains, in forward, backward and the optimizer's update alone.
    """

    def __init__(self, work: Work, batch_size: int) -> None:
        super().__init__()
        self.model = work.model()
        inputs = work.inputs(batch_size)
        outputs = (batch_size, *inputs.shape[1:]) if inputs.dtype == torch.int64 else (batch_size,)  # tokens have one each
        self.batch: Batch = inputs, torch.randint(work.classes, outputs)
        self.computed = self._begun = 0.0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss."""
        self._begun = time.thread_time()
        inputs, labels = batch
        return F.cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())

    def on_after_backward(self) -> None:
        """Gradients are complete."""
        self.computed += time.thread_time() - self._begun

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """The update begins when the closure has returned; it ends where the optimizer calls its first hook."""

        def closure() -> Any:
            loss = optimizer_closure()
            self._begun = time.thread_time()
            return loss

        optimizer.step(closure=closure)

    def _updated(self, *_: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # hivemind's is another one
            self.on_after_backward()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same for all contenders."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
        optimizer.register_step_post_hook(self._updated)
        return optimizer


class Batches:
    """The same batch so many times. A loader of its own, as Lightning would take a list for a list of loaders.

    It costs less than a ``DataLoader``, which only batches that are claimed need: see ``numbered``.
    """

    def __init__(self, batch: Batch, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return (self._batch for _ in range(self._count))


def numbered(batch: Batch, count: int) -> DataLoader[Batch]:
    """The same batch under so many numbers, for ranks that claim them."""
    same: Any = [batch] * count  # a list is a data set
    return DataLoader(same, collate_fn=itemgetter(0))
