"""Lightning's side of the checks. Imported only where Lightning is."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def loader(batches: int, shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * batches, 6, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=8, shuffle=shuffle)


class Net(L.LightningModule):
    """With everything that has a memory: Adam, BatchNorm, dropout, a schedule. Momentum where a strategy is for SGD only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = (nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Tanh(), nn.Linear(64, 1))
        self.net = nn.Sequential(*layers)
        self.register_buffer("path", torch.zeros(12, dtype=torch.float64))  # the loss of every step, of ranks in step
        self.seed = self.batches = 0

    def on_fit_start(self) -> None:
        torch.manual_seed(self.seed)  # here: strategies seed once more, all ranks alike, when they begin

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss, step = self._loss(batch), self.trainer.global_step
        self.batches += 1
        if step < len(self.path):
            self.path[step] = loss.detach()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        sgd_only = self.trainer.strategy.registered_name in ("dist_ef_sgd", "flex_compress_sgd", "compskip_dsgd")
        kind = partial(torch.optim.SGD, momentum=0.9) if sgd_only else torch.optim.Adam
        optimizer = kind(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: list[Tensor]) -> Tensor:
        x, y = (t.to(self.dtype) for t in batch)
        return (self.net(x) - y).square().mean()


class Saver(L.Callback):
    """Saves after some steps."""

    def __init__(self, folder: str, at: tuple[int, ...]) -> None:
        self.folder, self.at = folder, at

    def path(self, step: int) -> str:
        return f"{self.folder}/{step}.ckpt"

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.at:
            trainer.save_checkpoint(self.path(trainer.global_step))


class Watch(L.Callback):
    """The replica's parameters after every batch."""

    def __init__(self) -> None:
        self.path: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.path.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).cpu())
