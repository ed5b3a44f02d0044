"""CO2 against its equations on 1, 2 and 4 workers. The quadratics are those of test_cocod."""

import functools

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from test_cocod import (
    DIM,
    HEAVY,
    LIMIT,
    STEPS,
    TOL,
    X0,
    bitwise,
    distance,
    normalised,
    paths_of,
    positions,
    synchronous,
    unequal,
)
from test_outer_rounds import Delayed, inner
from torch import nn

from lightning_cocod import CO2, EagerDiLoCo
from lightning_cocod.algorithms.co2 import penalised

SIZES = [1, 2, 4]
K = 3
SMALL = {"outer_lr": 0.8, "outer_momentum": 0.6, "gap_penalty": 1.5, "clip": 0.3}
BOTH = {"unequal": True, "sgd": HEAVY}


def co2(n, w, *, outer_lr=1.0, outer_momentum=0.2, gap_penalty=1.0, clip=None, steps=STEPS, wrong="", **sgd):
    """x_i(t), t = 0 … STEPS, before the forward of step t, and θ(t). What must not match: `wrong`."""
    momentum, weight_decay = sgd.get("momentum", 0.0), sgd.get("weight_decay", 0.0)
    x, u = np.tile(X0, (n, 1)), np.zeros((n, DIM))
    θ, v, late, path, outer = X0, 0 * X0, 0 * X0, [], []
    limit = np.inf if clip is None else clip
    for t in range(steps + 1):
        if t > 0 and t % K == 0:
            Δ = w @ (θ - x)
            G, late = (Δ if wrong == "not late" else late), Δ
            v = outer_momentum * v + G / (1 if wrong == "no penalty" else gap_penalty)
            v = v if wrong == "no limit" else np.clip(v, -limit, limit)
            θ = θ - outer_lr * v
            x = np.tile(θ, (n, 1))
        path.append(x)
        outer.append(θ)
        x, u = inner(x, u, n, momentum, weight_decay)
    return np.stack(path), np.stack(outer)


CONFIGURATIONS = {
    "plain": {},
    "small": {**BOTH, **SMALL},
    "unlimited": {**BOTH, **SMALL, "clip": None},
    "evaluated": {**BOTH, **SMALL, "evaluate": (0, 2, 6, 10)},
    "resumed": {**BOTH, **SMALL, "resume_at": 8},
    "resumed at a boundary": {**BOTH, **SMALL, "resume_at": 6},
    "waiting": {**BOTH, **SMALL, "overlap": False},
    "warm-up": {**BOTH, **SMALL, "warmup_steps": 4},
    "nothing": {**BOTH, "outer_momentum": 0.0},
}


def all_paths(rank, n):
    configurations = {name: {"algorithm": CO2, "period": K, **options} for name, options in CONFIGURATIONS.items()}
    delayed = {"algorithm": Delayed, "period": K, **BOTH, "own": 0.0}
    return paths_of(rank, n, {**configurations, "delayed": delayed, "delayed with own": {**delayed, "own": 1.0}})


@functools.cache
def paths(n):
    ranks = run_ranks(all_paths, n, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "options"), [("plain", {}), ("small", {**SMALL, **HEAVY})])
def test_the_trajectory_is_that_of_the_equations(n, name, options):
    w, x = unequal(n) if name == "small" else normalised(np.ones(n)), positions(paths(n)[name])
    assert distance(x, co2(n, w, **options)[0]) < TOL
    wrongs = [{"outer_lr": 0.7}, {"outer_momentum": 0.5}, {"gap_penalty": 1.2}, {"wrong": "not late"}]
    if options:
        wrongs += [{"wrong": text} for text in ("no penalty", "no limit")]
    for wrong in wrongs:
        assert distance(x, co2(n, w, **{**options, **wrong})[0]) > 1e-3, wrong
    if n > 1:
        assert distance(x, co2(n, w[::-1] if name == "small" else unequal(n), **options)[0]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_without_penalty_limit_and_momentum_it_is_the_mean_a_round_late(n):
    for mine, theirs in zip(paths(n)["nothing"], paths(n)["delayed"], strict=True):
        assert bitwise(mine.x, theirs.x)
        assert bitwise(mine.end, theirs.end)
    assert distance(positions(paths(n)["nothing"]), positions(paths(n)["unlimited"])) > 1e-3
    if n > 1:
        assert distance(positions(paths(n)["nothing"]), positions(paths(n)["delayed with own"])) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_all_workers_begin_every_round_with_the_same_model_bit_for_bit(n):
    x = positions(paths(n)["small"])
    together = [t for t in range(STEPS + 1) if bitwise(x[t], np.repeat(x[t, :1], n, axis=0))]
    assert together == (list(range(STEPS + 1)) if n == 1 else list(range(0, STEPS + 1, K)))
    assert bitwise(x[0], x[K])  # nothing has come yet


@pytest.mark.parametrize("n", SIZES)
def test_the_limit_bounds_every_element_of_a_step(n):
    for name, bounded in (("small", True), ("unlimited", False)):
        x = positions(paths(n)[name])[::K]
        steps = np.abs(np.diff(x, axis=0)).max()
        assert (steps <= SMALL["outer_lr"] * SMALL["clip"] * (1 + 1e-12)) == bounded


def test_the_limit_is_one_on_the_momentum_which_forgets_what_is_cut_off():
    θ = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    outer = penalised(lr=0.5, momentum=0.5, penalty=2.0, clip=1.0)([θ])
    for G in ([10.0, 1.0], [-1.0, 1.0]):
        θ.grad = torch.tensor(G, dtype=torch.float64)
        outer.step()
    assert θ.tolist() == [-0.5 * (1 + (0.5 - 0.5)), -0.5 * (0.5 + 0.75)]  # not 1 and 0.5 · 5 − 0.5, which is 1 again


@pytest.mark.parametrize("n", SIZES)
def test_the_consensus_is_theta_and_looking_at_it_changes_nothing(n):
    plain, evaluated = paths(n)["small"], paths(n)["evaluated"]
    assert bitwise(positions(plain), positions(evaluated))
    θ = co2(n, unequal(n), **SMALL, **HEAVY)[1]
    for t, seen in evaluated[0].consensus.items():
        assert all(bitwise(seen, path.consensus[t]) for path in evaluated)
        assert distance(seen, θ[t]) < TOL
    assert distance(plain[0].end, θ[-1]) < TOL
    assert distance(plain[0].end, unequal(n) @ positions(plain)[-1]) > 1e-3  # not the mean of the replicas


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["resumed", "resumed at a boundary", "waiting"])
def test_resumed_or_waiting_the_trajectory_is_the_same_bit_for_bit(n, name):
    for other, plain in zip(paths(n)[name], paths(n)["small"], strict=True):
        assert bitwise(other.x, plain.x)
        assert bitwise(other.end, plain.end)


@pytest.mark.parametrize("n", SIZES)
def test_the_warm_up_is_synchronous(n):
    x = positions(paths(n)["warm-up"])
    assert distance(x[:5], synchronous(n, unequal(n), **HEAVY)[:5, None]) < TOL
    assert distance(x[7], x[4]) < TOL  # the first round ends where it began


def replicas(rank, n, algorithm, dtype):
    """θ after every round, and what is kept of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data, seen = torch.Generator().manual_seed(rank), []
    with algorithm(model, optimizer, period=2, weights=[3, 1, 2][:n]) as algo:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=data).to(dtype)).square().mean().backward()
            algo.step()
            seen.append(torch.cat([θ.flatten() for θ in algo.θ.values()]))
    return torch.stack(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_theta_is_the_same_everywhere_also_where_means_are_rounded(dtype):
    first, *others = run_ranks(replicas, 3, CO2, dtype, timeout=LIMIT)
    assert all(torch.equal(first, other) for other in others)
    assert (first[-1] != first[0]).float().mean() > 0.5
    first, *others = run_ranks(replicas, 3, EagerDiLoCo, dtype, timeout=LIMIT)  # the negative control
    assert not torch.equal(first, others[0])


def test_complex_parameters_are_cut_off_part_by_part():
    model = nn.ParameterList([torch.zeros(2, dtype=torch.complex128)])
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with CO2(model, optimizer, period=1, clip=0.5) as algo:
        for _ in range(2):
            model[0].grad = torch.tensor([3 - 0.2j, 0.1 + 4j], dtype=torch.complex128)
            algo.step()
        torch.testing.assert_close(model[0].detach(), -torch.tensor([0.5 - 0.2j, 0.1 + 0.5j], dtype=torch.complex128))


def test_options_out_of_range_are_refused_by_name():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for options, text in [
        ({"outer_lr": -1}, "outer_lr must be a number of at least 0, got -1"),
        ({"outer_momentum": 1.0}, "outer_momentum must be less than 1, got 1.0"),
        ({"gap_penalty": 0.5}, "gap_penalty must be at least 1, got 0.5"),
        ({"gap_penalty": "a"}, "gap_penalty must be a number"),
        ({"clip": 0}, "clip must be greater than 0, or None for no limit, got 0"),
        ({"clip": float("inf")}, "clip must be a number"),
        ({"overlap": 1}, "overlap must be True or False"),
        ({"period": 0}, "period must be"),
        ({"on_nonfinite": "skip"}, "does not go together"),
    ]:
        with pytest.raises(ValueError, match=text):
            CO2(model, optimizer, **options)
