"""Overlap-Local-SGD against its equations. The quadratics are those of test_cocod."""

import functools

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from test_cocod import (
    DIM,
    HEAVY,
    LIMIT,
    LR,
    STEPS,
    TOL,
    X0,
    bitwise,
    distance,
    gradients,
    normalised,
    paths_of,
    positions,
    problems,
    synchronous,
    unequal,
)
from torch import nn

from lightning_cocod import OverlapLocalSGD
from lightning_cocod.algorithms.co2 import penalised
from lightning_cocod.algorithms.delay import Lag
from lightning_cocod.algorithms.outer import OuterRounds

SIZES = [1, 2, 4]


def anchored(n, k, w, α=0.6, β=0.7, *, momentum=0.0, weight_decay=0.0, late=True, η=1.0):
    """x_i(t), t = 0 … STEPS, before the forward of step t, and the anchor in flight. Written with v, as the specification.

    What must not match: `late=False` pulls towards the anchor of the round that has just ended.
    """
    x, m = np.tile(X0, (n, 1)), np.zeros((n, DIM))
    z, v, path, anchors = X0, np.zeros((n, DIM)), [], []
    for t in range(STEPS + 1):
        if t > 0 and t % k == 0:
            target = z if late else w @ x
            x = (1 - α) * x + α * target
            v = β * v + (z - x) / η
            z = w @ (z - η * v)
        path.append(x)
        anchors.append(z)
        m = momentum * m + gradients(x, *problems(n)) + weight_decay * x
        x = x - LR * m
    return np.stack(path), np.stack(anchors)


class Frozen(OuterRounds):
    """With the pull that is refused."""

    name = "frozen"

    def __init__(self, *args, **options):
        super().__init__(*args, outer=penalised(1.0, 0.7, 1.0, None), delay=Lag(None, 0.0), **options)


BOTH = {"period": 3, "unequal": True, "sgd": HEAVY}
CONFIGURATIONS = {
    "plain": {"period": 2},
    "heavy": BOTH,
    "other": {**BOTH, "pull": 0.3, "anchor_momentum": 0.0},
    "evaluated": {**BOTH, "evaluate": (0, 2, 3, 7, 9)},
    "resumed": {**BOTH, "resume_at": 8},
    "waiting": {**BOTH, "overlap": False},
    "warm-up": {**BOTH, "warmup_steps": 4},
    "frozen": {**BOTH, "algorithm": Frozen},
}


@functools.cache
def paths(n):
    configurations = {name: {"algorithm": OverlapLocalSGD, **options} for name, options in CONFIGURATIONS.items()}
    ranks = run_ranks(paths_of, n, configurations, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in CONFIGURATIONS}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("name", "k", "options"), [("plain", 2, {}), ("heavy", 3, HEAVY), ("other", 3, {"α": 0.3, "β": 0.0, **HEAVY})]
)
def test_the_trajectory_is_that_of_the_equations(n, name, k, options):
    w = normalised(np.ones(n)) if name == "plain" else unequal(n)
    x = positions(paths(n)[name])
    for η in (1.0, 0.1):  # which cancels
        assert distance(x, anchored(n, k, w, η=η, **options)[0]) < TOL
    for wrong in ({"α": 0.5}, {"β": 0.5}, {"late": False}):
        assert distance(x, anchored(n, k, w, **{**options, **wrong})[0]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_a_full_pull_freezes_and_is_refused(n):
    x = positions(paths(n)["frozen"])
    assert all(distance(x[t], np.tile(X0, (n, 1))) < TOL for t in (3, 6, 9, 12))
    assert all(distance(positions(paths(n)["heavy"])[t], np.tile(X0, (n, 1))) > 1e-2 for t in (3, 6, 9, 12))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for options, text in [
        ({"pull": 1, "anchor_momentum": 0}, "pull=1 takes every round back"),
        ({"pull": 1}, "pull=1 takes every round back"),
        ({"pull": 0}, "pull must be greater than 0"),
        ({"pull": 1.5}, "pull must be"),
        ({"anchor_momentum": 1}, "anchor_momentum must be less than 1"),
    ]:
        with pytest.raises(ValueError, match=text):
            OverlapLocalSGD(model, optimizer, **options)


@pytest.mark.parametrize("n", SIZES)
def test_the_consensus_is_the_anchor_and_looking_at_it_changes_nothing(n):
    plain, evaluated = paths(n)["heavy"], paths(n)["evaluated"]
    assert bitwise(positions(plain), positions(evaluated))
    z = anchored(n, 3, unequal(n), **HEAVY)[1]
    for t, seen in evaluated[0].consensus.items():
        assert all(bitwise(seen, path.consensus[t]) for path in evaluated)
        assert distance(seen, z[t]) < TOL
    assert all(bitwise(plain[0].end, path.end) for path in plain)
    assert distance(plain[0].end, z[-1]) < TOL
    assert distance(plain[0].end, unequal(n) @ positions(plain)[-1]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["resumed", "waiting"])
def test_resuming_and_waiting_give_the_same_trajectory_bit_for_bit(n, name):
    for other, plain in zip(paths(n)[name], paths(n)["heavy"], strict=True):
        assert bitwise(other.x, plain.x)
        assert bitwise(other.end, plain.end)


@pytest.mark.parametrize("n", SIZES)
def test_the_warm_up_is_synchronous(n):
    x = positions(paths(n)["warm-up"])
    assert distance(x[:5], synchronous(n, unequal(n), **HEAVY)[:5, None]) < TOL
    assert distance(x[8:], synchronous(n, unequal(n), **HEAVY)[8:, None]) > 1e-3


def late_parameters(rank, n):
    """One is freed in mid-round, one is added later. x after each step."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3)])
    model[1].requires_grad_(False)
    optimizer, path = torch.optim.SGD(list(model)[:2], 0.1), []
    with OverlapLocalSGD(model, optimizer, period=2) as algo:
        for t in range(14):
            if t == 3:
                model[1].requires_grad_()
            if t == 5:
                optimizer.add_param_group({"params": [model[2]]})
            for p in model:
                p.grad = torch.full((3,), rank + 1.0 + t, dtype=torch.float64) if p.requires_grad else None
            algo.step()
            path.append(torch.stack([p.detach()[0].clone() for p in model]))
    return torch.stack(path), torch.stack([p.detach()[0] for p in model])


def joined():
    """The same in one process; a parameter joins where x, z ← Σ w x, u ← 0 at a boundary."""
    x, z, u = np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 3))
    path = []
    for t in range(15):
        if t % 2 == 0 and t > 0:
            for j, joins in ((0, 0), (1, 4), (2, 6)):
                if t > joins:
                    x[:, j] = 0.4 * x[:, j] + 0.6 * z[:, j]
                    u[:, j] = 0.7 * u[:, j] + x[:, j] - z[:, j]
                    z[:, j] = (z[:, j] + u[:, j]).mean()
                elif t == joins:
                    x[:, j] = z[:, j] = x[:, j].mean()
        if t > 0:
            path.append(x.copy())
        x = x - 0.1 * np.array([True, t >= 3, t >= 5]) * (np.arange(2.0)[:, None] + 1 + t)
    return np.stack(path), z[0]


def test_parameters_that_come_later_join_the_next_round():
    path, z = joined()
    for rank, (x, end) in enumerate(run_ranks(late_parameters, 2, timeout=LIMIT)):
        assert distance(x.numpy(), path[:, rank]) < TOL
        assert distance(end.numpy(), z) < TOL


def not_finite(rank, n):
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with OverlapLocalSGD(model, optimizer, period=2, on_nonfinite="skip") as algo:
        for t in range(7):
            optimizer.zero_grad()
            (model(torch.full((3,), 1.0 + rank)) - 1).square().sum().backward()
            if t == 2 and rank == 0:
                model.weight.grad[0, 0] = torch.nan
            algo.step()
            if t == 3:
                assert all(p.isfinite().all() for p in model.parameters()) == (rank == 1)
        assert all(p.isfinite().all() for p in model.parameters())
        assert all(θ_p.isfinite().all() for θ_p in algo.θ.values())
    return [p.detach().clone() for p in model.parameters()]


def test_a_rank_that_is_left_out_goes_on_from_the_others_anchor():
    first, second = run_ranks(not_finite, 2, timeout=LIMIT)
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(first, second, strict=True))
