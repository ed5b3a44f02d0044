"""Runs that save, are interrupted and resume, and how they are compared."""

import random

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, Dataset

from support.toys import Toy, dataset, trainer

BATCH = "on_train_batch_end"
SGD_ONLY = ("dist_ef_sgd", "flex_compress_sgd", "compskip_dsgd")


class Augmented(Dataset):
    """Draws from all three generators for each sample."""

    def __init__(self, n=48):
        self.data = dataset(n)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x * (1 + 0.1 * random.random()) + 0.1 * np.random.rand() + 0.1 * torch.rand(()), y


def shuffled(n=48, **options):
    return lambda: DataLoader(Augmented(n), batch_size=4, shuffle=True, **options)


class Adam(Toy):
    """With everything that has a memory: Adam, BatchNorm, dropout, a buffer that no state_dict holds, a schedule by step.

    Where a strategy is for SGD only, momentum in place of Adam.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("drift", torch.zeros(()), persistent=False)

    def loss(self, batch):
        x, y = batch
        if self.training:
            self.drift += 0.01 * x.mean()
        return super().loss((x + self.drift, y))

    def configure_optimizers(self):
        sgd_only = self.trainer.strategy.registered_name in SGD_ONLY
        kind = torch.optim.SGD if sgd_only else torch.optim.Adam
        optimizer = kind(self.parameters(), lr=0.02, **({"momentum": 0.9, "weight_decay": 0.01} if sgd_only else {}))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Saver(L.Callback):
    """Saves in one hook, every time, to a path of its own, or at some of the times."""

    def __init__(self, folder, hook=BATCH, times=None):
        self.folder, self.saved, self.times, self.calls = folder, [], times, 0
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.times is None or self.calls in self.times:
            self.saved.append(f"{self.folder}/{len(self.saved)}.ckpt")
            trainer.save_checkpoint(self.saved[-1])


def fit(rank, world, strategy, module=Adam, loader=None, path=None, callbacks=(), data=None, seed=5, **options):
    """A run's end: all its state as one vector, steps, learning rates and epochs."""
    L.seed_everything(seed + rank, verbose=False)
    model = module()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    validation = DataLoader(dataset(16), batch_size=8)
    run = trainer(strategy, world, callbacks=[*callbacks, EarlyStopping("val/loss", patience=50, strict=False)], **options)
    fed = {"datamodule": data()} if data else {"train_dataloaders": (loader or shuffled())(), "val_dataloaders": validation}
    run.fit(model, ckpt_path=path, **fed)
    tensors = [*model.state_dict().values(), *model.buffers(), torch.get_rng_state()]
    rates = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
    if (scaler := getattr(run.precision_plugin, "scaler", None)) is not None:
        rates += scaler.state_dict().values()
    return torch.cat([t.reshape(-1).double() for t in tensors]), run.global_step, rates, run.current_epoch


def resume(rank, *args, **options):
    """The same, from a checkpoint, in a process in which every seed is another one."""
    return fit(rank, *args, seed=99, **options)


def same(expected, got, *, to_train=True):
    """Bit for bit. Where nothing was left to train, Lightning steps no plateau and counts no epoch any more."""
    rest = slice(1, None if to_train else 2)
    return torch.equal(expected[0], got[0]) and expected[rest] == got[rest]
