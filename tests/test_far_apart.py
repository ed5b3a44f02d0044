"""The warning that replicas are far apart: its rule, and trainings on digits that are shuffled, or split by class."""

import functools
import inspect
import warnings

import lightning as L
import pytest
import torch
from sklearn.datasets import load_digits
from support.ranks import run_ranks
from support.toys import trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cocod import ADPSGD, DPSGD, CoCoD, CoCoDStrategy, OverlapLocalSGDStrategy
from lightning_cocod.strategies.far_apart import FAR, FarApart

# The rule, without training


def warned_at(distances, repeats=1):
    """Numbers of the messages at which it would warn, each looked at so many times, as after every step of a round."""
    rule = FarApart()
    return [n for n, d in enumerate(distances) for _ in range(repeats) if rule.is_far(8 * n, d)]


@pytest.mark.parametrize("repeats", [1, 8])
@pytest.mark.parametrize(
    ("distances", "first"),
    [
        ([], None),
        ([0.0, 0.0, 0.1, 0.2], None),
        ([0.0, 0.9, 0.1, 0.05], None),  # an initial transient, one message long
        ([0.9, 0.1] * 20, None),  # never twice in a row
        ([FAR] * 9, None),
        ([0.01 * n for n in range(25)], None),  # a warm-up of the learning rate: growing is not being far
        ([0.0, 0.39, 0.34, 0.2], 2),
        ([0.1, 0.2, 0.3, 0.4, 0.8], 3),  # divergence
        ([0.1, float("inf"), float("inf")], 2),
    ],
)
def test_the_rule(distances, first, repeats):
    found = warned_at(distances, repeats)
    assert found[:1] == ([] if first is None else [first])


# Trainings


class Digits(L.LightningModule):
    def __init__(self, lr, warm):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.lr, self.warm, self.distances = lr, warm, []

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, *_):
        self.distances.append(self.trainer.strategy.metrics().get("algo/replica_distance", 0.0))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / max(1, self.warm)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def images_and_labels():
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(digits.target)


def share(rank, world, by_class):
    """Which of the digits are this rank's: some of the classes, or some of all."""
    y = images_and_labels()[1]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(5))
    return y * world // 10 == rank if by_class else order % world == rank


def own_part(rank, mine):
    x, y = images_and_labels()
    data = TensorDataset(x[mine], y[mine])
    return DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(rank))


TRAININGS = {
    "shuffled": {},
    "shuffled, warm-up": {"warm": 40},
    "by class": {"by_class": True},
    "by class, short rounds": {"by_class": True, "period": 2},
    "shuffled, rate too high": {"lr": 0.5},
}


def train(rank, world, strategy, by_class=False, lr=0.1, warm=0, mine=None, batches=48):
    model = Digits(lr, warm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t = trainer(strategy, world, max_epochs=2, limit_train_batches=batches, use_distributed_sampler=False)
        t.fit(model, own_part(rank, share(rank, world, by_class) if mine is None else mine))
    says = [str(w.message) for w in caught if "far apart" in str(w.message)]
    period = strategy._make.keywords["period"]
    x, y = images_and_labels()
    accuracy = (model.net(x).argmax(1) == y).float().mean().item()
    return says, [round(d, 3) for d in model.distances[period - 1 :: period]], accuracy


def trainings(rank, world):
    return {
        name: train(rank, world, CoCoDStrategy(options.pop("period", 8)), **options)
        for name, options in ((name, dict(options)) for name, options in TRAININGS.items())
    }


@functools.cache
def found():
    """With ``pytest -s`` this prints what docs/metrics.md tells."""
    ranks = run_ranks(trainings, 2, init=False, timeout=120)
    for name in TRAININGS:
        print(f"{name:24} accuracy {ranks[0][name][2]:.2f}, distances", *ranks[0][name][1])
    return ranks


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("shuffled", False),
        ("shuffled, warm-up", False),
        ("by class", True),
        ("by class, short rounds", False),  # the remedy
        ("shuffled, rate too high", True),  # the other cause: the number cannot tell them apart
    ],
)
def test_who_is_told(name, is_told):
    for number, rank in enumerate(found()):
        says, path, _ = rank[name]
        assert len(says) == is_told, path
        rule = FarApart()
        assert any(rule.is_far(n, d) for n, d in enumerate(path)) == is_told  # what the metric shows is what is judged
        for text in says:
            assert f"that of rank {number} was" in text
            assert "rounds of 8 steps" in text
            assert "period=" in text
            assert "strategy='overlap_local_sgd'" in text
            assert "\n" not in text


def odd_one_last(rank, world, is_odd):
    """The last of four ranks has two classes for itself, or a share of all as the others have."""
    y = images_and_labels()[1]
    mine = share(rank, world, False)
    if is_odd:
        mine = y >= 8 if rank == world - 1 else (y < 8) & share(rank, world - 1, False)
    return train(rank, world, CoCoDStrategy(8), mine=mine, batches=20)  # the last one has 22


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("is_odd", "told"), [(True, [3]), (False, [])])
def test_the_rank_that_is_far_from_the_others_says_so_whichever_it_is(is_odd, told):
    ranks = run_ranks(odd_one_last, 4, is_odd, init=False, timeout=120)
    assert [rank for rank, (says, _, _) in enumerate(ranks) if says] == told, [path for _, path, _ in ranks]
    for rank in told:
        assert [f"that of rank {rank} was" in text for text in ranks[rank][0]] == [True]


def test_growth_would_tell_nothing():
    """Why the rule is no growth over the first rounds: the distance falls where data differs, and grows in a warm-up."""
    by_class, warm_up = (found()[0][name][1] for name in ("by class", "shuffled, warm-up"))
    assert max(by_class[6:]) < max(by_class[:4])
    assert max(warm_up[6:]) > 2 * max(warm_up[:4])


def pulled(rank, world):
    return train(rank, world, OverlapLocalSGDStrategy(8), by_class=True, lr=0.2)


def test_where_replicas_are_pulled_already_it_says_what_else_there_is():
    for says, path, _ in run_ranks(pulled, 2, init=False, timeout=60):
        assert len(says) == 1, path
        assert "raise pull" in says[0]
        assert "strategy=" not in says[0]


@pytest.mark.parametrize(("algorithm", "option"), [(ADPSGD, "topology="), (DPSGD, "graph="), (CoCoD, "period=")])
def test_the_option_that_it_names_is_one_of_the_algorithms(algorithm, option, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(algorithm, "measured", lambda self: (self.t, 2 * FAR))
        algo, far = algorithm(model, torch.optim.SGD(model.parameters(), 0.1)), FarApart()
        far.after_step(algo)
        algo.t = 1
        with pytest.warns(UserWarning, match="The replicas are far apart") as said:
            far.after_step(algo)
    assert f"({option})" in str(said[0].message)
    assert option.strip("=") in inspect.signature(algorithm).parameters
