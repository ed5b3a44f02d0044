"""A run that is interrupted anywhere and resumed equals the run that was not, bit for bit."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from support.ranks import run_ranks
from support.toys import Toy, TwoOptimizers, dataset, trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_cocod.strategies import STRATEGIES

NAMES = [strategy.registered_name for strategy in STRATEGIES]


class Augmented(Dataset):
    """Draws from all three generators for each sample."""

    def __init__(self, n=48):
        self.data = dataset(n)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x * (1 + 0.1 * random.random()) + 0.1 * np.random.rand() + 0.1 * torch.rand(()), y


class Stream(IterableDataset):
    """The same, without a length."""

    def __iter__(self):
        data = Augmented(24)
        return (data[i] for i in torch.randperm(len(data)).tolist())


class Adam(Toy):
    """With everything that has a memory: Adam, BatchNorm, dropout, a buffer that no state_dict holds, a schedule by step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("drift", torch.zeros(()), persistent=False)

    def loss(self, batch):
        x, y = batch
        if self.training:
            self.drift += 0.01 * x.mean()
        return super().loss((x + self.drift, y))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OnPlateau(Toy):
    """The learning rate falls when the loss on the validation data, the same on all ranks, does not."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss", "interval": "epoch"}}


class NeverZeroed(Adam):
    """Gradients are zeroed by the user, every third step."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


class Two(Adam):
    """A batch is a dictionary of two."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch["a"]) + self.loss(batch["b"])


class Thaws(Adam):
    """The first layer is frozen at first, and again in the end."""

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].requires_grad_(2 <= self.trainer.global_step < 7)


def shuffled(**options):
    return lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, **options)


def own_generator():
    return DataLoader(
        Augmented(), batch_size=4, sampler=RandomSampler(Augmented(), generator=torch.Generator().manual_seed(4))
    )


def pair():
    return {"a": shuffled()(), "b": DataLoader(Augmented(16), batch_size=4, shuffle=True)}


class Saver(L.Callback):
    """Saves in one hook, every time."""

    def __init__(self, folder, hook):
        self.folder, self.saved = folder, []
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.sanity_checking:
            return
        self.saved.append(f"{self.folder}/{len(self.saved)}.ckpt")
        trainer.save_checkpoint(self.saved[-1])


BATCH, VALIDATION, EPOCH = "on_train_batch_end", "on_validation_end", "on_train_epoch_end"
CASES = {
    "every step": (Adam, shuffled(), BATCH, {}),
    "workers": (Adam, shuffled(num_workers=2), BATCH, {"limit_train_batches": 4}),
    "within an accumulation": (Adam, shuffled(), BATCH, {"accumulate_grad_batches": 4}),
    "manual optimization": (TwoOptimizers, shuffled(), BATCH, {}),
    "gradients that the user zeroes": (NeverZeroed, shuffled(), BATCH, {}),
    "clipping": (Adam, shuffled(), BATCH, {"gradient_clip_val": 0.1}),
    "after a validation": (Adam, shuffled(), VALIDATION, {"val_check_interval": 2}),
    "after the last validation": (OnPlateau, shuffled(), VALIDATION, {"max_epochs": 4}),
    "after an epoch": (OnPlateau, shuffled(), EPOCH, {"max_epochs": 4}),
    "a plateau in mid-epoch": (OnPlateau, shuffled(), BATCH, {"limit_train_batches": 3}),
    "a limit on steps": (Adam, shuffled(), BATCH, {"max_epochs": -1, "max_steps": 9}),
    "a limit on batches": (Adam, shuffled(), BATCH, {"limit_train_batches": 4}),
    "no length": (Adam, lambda: DataLoader(Stream(), batch_size=4), BATCH, {}),
    "no length, workers": (Adam, lambda: DataLoader(Stream(), batch_size=4, num_workers=1), BATCH, {"max_epochs": 1}),
    "a generator of its own": (Adam, own_generator, BATCH, {"use_distributed_sampler": False}),
    "two loaders": (Two, pair, BATCH, {}),
    "loaders made anew": (Adam, shuffled(), BATCH, {"reload_dataloaders_every_n_epochs": 1}),
    "parameters that freeze and thaw": (Thaws, shuffled(), BATCH, {}),
}
EXCEPT = {"a plateau in mid-epoch": [2, 5], "no length": [5]}
"""Checkpoints from which Lightning does not go on as it should: saved by a callback's batch hook at an epoch's last batch.
It leaves out the validation that follows, and with it what a plateau is judged by; without a length it does not see that
the epoch is over. The documentation says so.
"""


def fit(rank, world, strategy, module, loader, path=None, callbacks=(), **options):
    L.seed_everything(5 + rank, verbose=False)
    model = module()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    validation = DataLoader(dataset(16), batch_size=8)
    run = trainer(strategy, world, callbacks=[*callbacks, EarlyStopping("val/loss", patience=50, strict=False)], **options)
    run.fit(model, loader(), validation, ckpt_path=path)
    tensors = [*model.state_dict().values(), *model.buffers(), torch.get_rng_state()]
    rates = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
    return torch.cat([t.reshape(-1).double() for t in tensors]), run.global_step, rates, run.current_epoch


def same(expected, got, *, to_train=True):
    """Bit for bit. Where nothing was left to train, Lightning steps no plateau and counts no epoch any more."""
    rest = slice(1, None if to_train else 2)
    return torch.equal(expected[0], got[0]) and expected[rest] == got[rest]


def every_checkpoint(rank, world, folder, strategy, case):
    """Whether saving changes nothing, and from which checkpoints a resumed run ends where the uninterrupted one does."""
    module, loader, hook, options = CASES[case]
    saver = Saver(folder, hook)
    expected = fit(rank, world, strategy, module, loader, callbacks=[saver], **options)
    undisturbed = same(expected, fit(rank, world, strategy, module, loader, **options))
    resumed = []
    for path in saver.saved:
        L.seed_everything(99, verbose=False)
        got = fit(rank, world, strategy, module, loader, path, **options)
        to_train = torch.load(path, weights_only=True)["global_step"] < expected[1]
        resumed.append(same(expected, got, to_train=to_train))
    return undisturbed, resumed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", NAMES)
def test_resumed_equals_uninterrupted(strategy, case, tmp_path):
    for undisturbed, resumed in run_ranks(every_checkpoint, 2, str(tmp_path), strategy, case, init=False, timeout=200):
        assert undisturbed
        assert len(resumed) >= 4
        assert [number for number, equal in enumerate(resumed) if not equal] == EXCEPT.get(case, [])
