"""A rank fails inside a fit: the others end as well, with an error that names it."""

import os

import pytest
import torch
from support.ranks import run_ranks_raw
from support.toys import STRATEGIES, Toy, dataset, loader, trainer
from torch.utils.data import DataLoader, Subset


class Fails(Toy):
    """Rank 1 does something in its fifth training step."""

    def __init__(self, what):
        super().__init__(dropout=0.0)
        self.what, self.steps = what, 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        if self.steps == 5 and self.trainer.global_rank == 1:
            self.what(self)
        return super().training_step(batch, batch_idx)


def raises(module):
    raise ValueError("my own bug")


def leaves(module):
    os._exit(0)


def diverges(module):
    with torch.no_grad():
        module.net[0].weight.fill_(float("nan"))


def fit(rank, world, strategy, what):
    trainer(strategy, world, max_epochs=100).fit(Fails(what), loader())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exception_on_one_rank_ends_all_and_is_told(strategy):
    peer, culprit = run_ranks_raw(fit, 2, strategy, raises, init=False, grace=30)
    assert culprit.status == peer.status == "error"
    assert "ValueError: my own bug" in culprit.traceback
    assert "PeerLost: rank 1 failed: ValueError: my own bug" in peer.traceback


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_leaves_with_exit_code_zero_is_a_loss(strategy):
    peer, culprit = run_ranks_raw(fit, 2, strategy, leaves, init=False, grace=30)
    assert culprit.status == "died"
    assert peer.status == "error"
    assert "PeerLost: rank 1 is lost" in peer.traceback


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_are_not_finite_reach_nobody(strategy):
    for rank in run_ranks_raw(fit, 2, strategy, diverges, init=False, grace=30):
        assert rank.status == "error"
        assert "NaN or infinity in the message of rank 1" in rank.traceback


def uneven(rank, world, strategy):
    """Rank 1 has a batch more in each epoch, and Lightning is told not to share the data out."""
    mine = Subset(dataset(), range(40 + 8 * rank))
    model = Toy(dropout=0.0)
    trainer(strategy, world, max_epochs=20, use_distributed_sampler=False).fit(model, DataLoader(mine, batch_size=8))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unequal_numbers_of_batches_are_named_and_hang_nobody(strategy):
    outcomes = run_ranks_raw(uneven, 2, strategy, init=False, grace=30)
    assert all(rank.status == "error" for rank in outcomes)
    assert any("workers are out of step" in rank.traceback for rank in outcomes)
