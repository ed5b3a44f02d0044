"""Learning rates are the same on all ranks, ReduceLROnPlateau's too, also on a metric that differs from rank to rank."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, loader, trainer


class Plateau(Toy):
    """The metric improves by 1 an epoch on rank 0 and gets worse by 3 on rank 1, and so by 1 on the average."""

    def __init__(self, sync_dist, interval="epoch"):
        super().__init__()
        self.sync_dist, self.interval = sync_dist, interval

    def validation_step(self, batch, batch_idx):
        slope = (-1.0, 3.0)[self.trainer.global_rank]
        self.log("val/score", slope * self.current_epoch, sync_dist=self.sync_dist)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/score", "interval": self.interval},
        }


class Rates(Callback):
    def __init__(self):
        self.rates = []

    def on_train_epoch_start(self, trainer, *_):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def plateau(rank, world, strategy, sync_dist):
    rates = Rates()
    options = {"max_epochs": 4, "limit_train_batches": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer(strategy, world, callbacks=[rates], **options).fit(Plateau(sync_dist), loader(), loader(shuffle=False))
    return rates.rates


@pytest.mark.parametrize("sync_dist", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plateau_lowers_the_rate_of_all_ranks(strategy, sync_dist):
    assert run_ranks(plateau, 2, strategy, sync_dist, init=False) == [[1.0, 1.0, 0.5, 0.25]] * 2


def test_under_ddp_the_rates_split_on_an_unsynchronised_metric():
    """The negative control."""
    assert run_ranks(plateau, 2, "ddp", False, init=False) == [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.5, 0.25]]


def plateau_of_steps(rank, world, strategy):
    options = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 1, "val_check_interval": 1}
    t = trainer(strategy, world, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(Plateau(False, "step"), loader(), loader(shuffle=False))
    told = sum("ReduceLROnPlateau with interval='step'" in str(warning.message) for warning in caught)
    return told, t.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plateau_that_is_judged_in_steps_works_and_warns_that_it_blocks(strategy):
    assert run_ranks(plateau_of_steps, 2, strategy, init=False) == [(1, 0.25), (0, 0.25)]  # rank 0 speaks
