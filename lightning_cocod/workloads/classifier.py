"""Training and evaluating an image classifier under any strategy."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_cocod.workloads.errors import InputError

Batch = tuple[Tensor, Tensor]  # images [N, C, H, W] and labels [N]


class ImageClassifier(L.LightningModule):
    """Cross-entropy and accuracy around any module that maps images [N, C, H, W] to logits [N, classes].

    Logs `train/loss`, `train/acc`, `val/loss`, `val/acc`, `test/loss` and `test/acc`: means over the samples of all
    ranks, reduced once an epoch. A training step issues no collective: one would lock the ranks in step and undo what
    the strategies hide. `train/loss_step` is rank 0's own loss, for the curve within an epoch.

    Args:
        model: the network.
        num_classes: how many classes its logits have.
        optimizer: makes an optimizer from parameters, e.g. `functools.partial(torch.optim.SGD, lr=0.1)`.
        schedule: makes a scheduler from the optimizer and the number of steps in the run; stepped once per step.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1).

    Raises:
        InputError: `label_smoothing` is out of range, or a schedule is asked for in a run without an end.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        optimizer: Callable[[Iterator[nn.Parameter]], Optimizer],
        schedule: Callable[[Optimizer, int], LRScheduler] | None = None,
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise InputError(f"label_smoothing must lie in [0, 1), got {label_smoothing}")
        self.save_hyperparameters(ignore=["model", "optimizer", "schedule"], logger=False)
        self.model = model
        self.label_smoothing = label_smoothing
        self._make_optimizer, self._make_schedule = optimizer, schedule
        metrics = MetricCollection(
            {
                # Checks of the values would read them on the host, which makes it wait for the device on every step.
                "loss": MeanMetric(nan_strategy="disable"),
                "acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
            },
            compute_groups=False,
        )
        self.metrics = nn.ModuleDict({f"{stage}_metrics": metrics.clone(f"{stage}/") for stage in ("train", "val", "test")})

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] to logits [N, classes]."""
        return self.model(images)  # type: ignore[no-any-return]  # a module's call is untyped

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean loss of this rank's batch."""
        loss = self._measure("train", batch)
        self.log("train/loss_step", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a validation batch."""
        self._measure("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a test batch."""
        self._measure("test", batch)

    def configure_optimizers(self) -> Any:
        """The optimizer, with the schedule stepped once per optimizer step."""
        optimizer = self._make_optimizer(self.parameters())
        if self._make_schedule is None:
            return optimizer
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise InputError("a schedule needs the length of the run: set trainer.max_epochs or trainer.max_steps")
        schedule = self._make_schedule(optimizer, int(total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _measure(self, stage: str, batch: Batch) -> Tensor:
        images, labels = batch
        logits = self(images)
        smoothing = self.label_smoothing if stage == "train" else 0.0
        losses = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
        metrics = self.metrics[f"{stage}_metrics"]
        assert isinstance(metrics, MetricCollection)
        metrics["loss"].update(losses.detach())  # sample by sample: the last batch may be smaller
        metrics["acc"].update(logits.detach(), labels)
        for name, metric in metrics.items():
            self.log(name, metric, on_step=False, on_epoch=True, prog_bar=name == "val/acc")
        return losses.mean()
