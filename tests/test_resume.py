"""A run that is interrupted anywhere and resumed equals the run that was not, bit for bit."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from support.toys import Toy, TwoOptimizers, dataset, parameters, trainer
from torch.utils.data import DataLoader, Dataset

from lightning_cocod.strategies import STRATEGIES

NAMES = [strategy.registered_name for strategy in STRATEGIES]


class Augmented(Dataset):
    """Draws from all three generators for each sample."""

    def __init__(self, n):
        self.data = dataset(n)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x * (1 + 0.1 * random.random()) + 0.1 * np.random.rand() + 0.1 * torch.rand(()), y


class Adam(Toy):
    """With everything that has a memory: Adam, BatchNorm, dropout, a schedule by step."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAlways(L.Callback):
    """After every batch."""

    def __init__(self, folder):
        self.folder, self.saved = folder, []

    def save(self, trainer):
        path = f"{self.folder}/{len(self.saved)}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append(path)

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer)


def run(rank, strategy, module, loader, path=None, callbacks=(), validate=False, **options):
    L.seed_everything(5 + rank, verbose=False)
    model = module()
    options = {"max_epochs": 3, **options}
    fit = trainer(strategy, 2, callbacks=list(callbacks), num_sanity_val_steps=0, **options)
    fit.fit(model, loader(), DataLoader(dataset(16), batch_size=8) if validate else None, ckpt_path=path)
    state = [torch.cat([v.reshape(-1).double() for v in model.state_dict().values()]), torch.get_rng_state().double()]
    return torch.cat(state), fit.global_step


def every_checkpoint(rank, world, folder, strategy, module, loader, options, left_out=None):
    """How many checkpoints there are, and from which of them the run ended elsewhere than the uninterrupted one."""
    saver = SaveAlways(folder)
    expected = run(rank, strategy, module, loader, callbacks=[saver], **options)
    undisturbed = run(rank, strategy, module, loader, **options)
    assert torch.equal(expected[0], undisturbed[0])  # saving has disturbed nothing
    wrong = []
    for path in saver.saved:
        L.seed_everything(99, verbose=False)
        got = run(rank, strategy, module, loader, path, **options)
        if not torch.equal(got[0], expected[0]) or got[1] != expected[1]:
            wrong.append(path)
    return len(saver.saved), wrong


def plain():
    return DataLoader(Augmented(80), batch_size=8, shuffle=True)


@pytest.mark.parametrize("strategy", NAMES)
def test_every_step(strategy, tmp_path):
    for number, wrong in run_ranks(every_checkpoint, 2, str(tmp_path), strategy, Adam, plain, {}, init=False, timeout=200):
        assert number == 15
        assert not wrong
