"""Each rank trains on its own share of the data, and at its own pace within a round."""

import time

import lightning as L
import pytest
import torch
from support.ranks import run_ranks, run_ranks_raw
from support.toys import STRATEGIES, Toy, dataset, loader, made, trainer
from torch.utils.data import DataLoader, TensorDataset


class Reads(Toy):
    """Notes which samples it trains on, epoch by epoch."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_train_epoch_start(self):
        self.read.append([])

    def training_step(self, batch, batch_idx):
        x, y, number = batch
        self.read[-1] += number.tolist()
        return self.loss((x, y))


def read(rank, world, strategy):
    L.seed_everything(5, verbose=False)
    model = Reads()
    numbered = TensorDataset(*dataset().tensors, torch.arange(96))
    trainer(strategy, world).fit(model, DataLoader(numbered, batch_size=8, shuffle=True))
    return model.read


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_sample_is_seen_once_an_epoch_by_exactly_one_rank(strategy):
    first, second = run_ranks(read, 2, strategy, init=False)
    for mine, theirs in zip(first, second, strict=True):
        assert len(mine) == len(theirs) == 48
        assert sorted(mine + theirs) == list(range(96))
    assert first[0] != first[1]  # another order, and other shares, in the next epoch
    assert set(first[0]) != set(first[1])


class Waits(Toy):
    """In each round of four steps one rank stands before its first step until the other has begun its last one."""

    def __init__(self, folder, patience):
        super().__init__()
        self.folder, self.patience, self.steps = folder, patience, 0

    def training_step(self, batch, batch_idx):
        step, rank = self.steps, self.trainer.global_rank
        self.steps += 1
        (self.folder / f"{rank}-{step}").touch()
        if step % 4 == 0 and step // 4 % 2 == rank:
            self.wait_for(self.folder / f"{1 - rank}-{step + 3}")
        return super().training_step(batch, batch_idx)

    def wait_for(self, sign):
        deadline = time.monotonic() + self.patience
        while not sign.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the other rank stands still as well")
            time.sleep(0.005)


def skewed(rank, world, strategy, folder, patience):
    model = Waits(folder, patience)
    trainer(strategy, world, max_steps=16, max_epochs=-1, limit_train_batches=16).fit(model, loader(256))
    return model.steps


@pytest.mark.parametrize("strategy", made(period=4), ids=STRATEGIES)
def test_a_rank_that_is_ahead_is_not_held_up_within_a_round(strategy, tmp_path):  # field report 17
    assert run_ranks(skewed, 2, strategy, tmp_path, 60, init=False) == [16, 16]


def test_under_ddp_every_step_holds_up_the_rank_that_is_ahead(tmp_path):
    """The negative control."""
    assert "TimeoutError" in run_ranks_raw(skewed, 2, "ddp", tmp_path, 1, init=False)[0].traceback
