"""SSD-SGD against its equations, worker by worker and on the server. The quadratics are those of test_cocod."""

import functools

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from test_cocod import (
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
)
from test_cocod import synchronous as ssgd
from test_cocod import unequal as unequal_weights

from lightning_cocod.algorithms import SSDSGD, SSGD
from lightning_cocod.algorithms.local_update import DCASGD, GLU, Scales

SIZES = [2, 4]


def ssd_sgd(n, k, *, w=None, warm_up=0, local="glu", α=2.0, β=0.5, paper=False, momentum=0.0, weight_decay=0.0, fault=None):
    """x_i(t) and W(t), t = 0 … STEPS.

    What must not match: `fault` "early" uses a pull in the step that launches it, "late" a step later, "stale pull" leaves
    out the last push, "pre first" refreshes pre before the local update, "ĝ at once" reads it off before a pull.
    """
    w = normalised(np.ones(n) if w is None else w)
    H, b = problems(n)
    W, v, x = X0, 0 * X0, np.tile(X0, (n, 1))
    pre, before, pulled, P, moved, path, server = X0, x, None, None, False, [], []
    lr, s = (n * LR, 1 / n) if paper else (LR, 1.0)
    for t in range(STEPS + 1):
        path.append(x)
        server.append(W)
        g = gradients(x, H, b)
        older = W
        v = momentum * v + w @ g + weight_decay * W
        W = W - LR * v
        if t < warm_up:
            x, pre, before, moved = np.tile(W, (n, 1)), W, np.tile(W, (n, 1)), False
            continue
        due = (t - warm_up) % k == k - 1
        if fault == "early" and due:
            pulled = W
        base = x if pulled is None else np.tile(pulled, (n, 1))
        moved = moved or pulled is not None or fault == "ĝ at once"
        if pulled is not None and fault == "pre first":
            pre = pulled
        if local == "glu":
            ĝ = ((1 - lr * weight_decay) * pre - base) / (k * lr) if moved else 0
            d = α * s * g + weight_decay * base + β * ĝ
        elif local == "sgd":
            d = s * g + weight_decay * base
        else:
            λ = 0.04 if local == "dc_asgd" else 2 / np.sqrt(g * g + 1e-7)
            d = s * (g + λ * g * g * (base - before)) + weight_decay * base
        if pulled is not None:
            pre = pulled
        before, x = base, base - lr * d
        pulled, P = (P, None) if fault == "late" else (None, None)
        if due:
            arrived = older if fault == "stale pull" else W
            pulled, P = (pulled, arrived) if fault == "late" else (None if fault == "early" else arrived, None)
    return np.stack(path), np.stack(server)


ALL_STEPS = tuple(range(STEPS))
CONFIGURATIONS = {
    "k1": {"period": 1},
    "k3": {"period": 3},
    "k3 heavy": {"period": 3, "sgd": HEAVY, "unequal": True},
    "k3 warm-up": {"period": 3, "sgd": HEAVY, "warmup_steps": 4},
    "k3 paper": {"period": 3, "sgd": {"weight_decay": 0.01}, "scaling": "paper"},
    "k3 sgd": {"period": 3, "sgd": HEAVY, "local_update": "sgd"},
    "k3 dc_asgd": {"period": 3, "sgd": HEAVY, "local_update": "dc_asgd"},
    "k1 dc_asgd_a": {"period": 1, "sgd": HEAVY, "local_update": "dc_asgd_a"},
    "all warm-up": {"period": 3, "sgd": HEAVY, "warmup_steps": STEPS + 1, "unequal": True},
}
HOW = {
    "k1": {"k": 1},
    "k3": {"k": 3},
    "k3 heavy": {"k": 3, **HEAVY},
    "k3 warm-up": {"k": 3, **HEAVY, "warm_up": 4},
    "k3 paper": {"k": 3, "weight_decay": 0.01, "paper": True},
    "k3 sgd": {"k": 3, **HEAVY, "local": "sgd"},
    "k3 dc_asgd": {"k": 3, **HEAVY, "local": "dc_asgd"},
    "k1 dc_asgd_a": {"k": 1, **HEAVY, "local": "dc_asgd_a"},
    "all warm-up": {"k": 3, **HEAVY, "warm_up": STEPS + 1},
}
OTHERS = {
    "k3 heavy waiting": {**CONFIGURATIONS["k3 heavy"], "overlap": False},
    "k3 heavy undisturbed": CONFIGURATIONS["k3 heavy"],
    **{f"k3 heavy resumed at {t}": {**CONFIGURATIONS["k3 heavy"], "resume_at": t} for t in (1, 3, 4, 5)},
    "k3 dc_asgd resumed at 5": {**CONFIGURATIONS["k3 dc_asgd"], "resume_at": 5},
    "k3 dc_asgd undisturbed": CONFIGURATIONS["k3 dc_asgd"],
}


def all_paths(rank, n):
    watched = {name: {**options, "algorithm": SSDSGD, "evaluate": ALL_STEPS} for name, options in CONFIGURATIONS.items()}
    others = {name: {**options, "algorithm": SSDSGD} for name, options in OTHERS.items()}
    synchronous = {"s-sgd": {"algorithm": SSGD, "sgd": HEAVY, "unequal": True}}
    return paths_of(rank, n, {**watched, **others, **synchronous})


@functools.cache
def paths(n):
    ranks = run_ranks(all_paths, n, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def servers(ranks):
    """W before every step, which is what is evaluated."""
    return np.stack([[path.consensus[t] for t in ALL_STEPS] for path in ranks], axis=1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_workers_and_server_follow_the_equations(n, name):
    w = unequal_weights(n) if CONFIGURATIONS[name].get("unequal") else None
    x, W = ssd_sgd(n, w=w, **HOW[name])
    assert distance(positions(paths(n)[name])[:-1], x[:-1]) < TOL  # at the end all have W
    assert distance(servers(paths(n)[name]), W[:-1, None]) < TOL
    for path in paths(n)[name]:
        assert distance(path.end, W[-1]) < TOL
    if "all" not in name:
        faults = ["early", "late", "stale pull", *(["pre first", "ĝ at once"] if HOW[name].get("local") is None else [])]
        for fault in faults:
            if fault == "ĝ at once" and not HOW[name].get("weight_decay"):
                continue  # nothing to read off then
            assert distance(positions(paths(n)[name])[:-1], ssd_sgd(n, w=w, **HOW[name], fault=fault)[0][:-1]) > 1e-4, fault


@pytest.mark.parametrize("n", SIZES)
def test_a_warm_up_is_s_sgd_bit_for_bit(n):
    both = paths(n)["all warm-up"], paths(n)["s-sgd"]
    assert bitwise(*(positions(found) for found in both))
    assert distance(positions(both[1]), ssgd(n, unequal_weights(n), **HEAVY)[:, None]) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_waiting_resuming_and_evaluating_change_no_bit(n):
    for kind in ("k3 heavy", "k3 dc_asgd"):
        undisturbed = paths(n)[f"{kind} undisturbed"]
        for name in paths(n):
            if name.startswith(f"{kind} ") or name == kind:
                found, first = paths(n)[name], OTHERS.get(name, {}).get("resume_at", 0)
                assert bitwise(positions(found), positions(undisturbed)[first * (len(positions(found)) <= STEPS) :]), name


# Exact tests 2 to 4 and 7: what it comes to


def same_batches(rank, n, k, weight_decay):
    """α = 1, β = 0: a network whose workers have the same batches. Theirs and the server's parameters, step by step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, weight_decay=weight_decay)
    data, x, W = torch.Generator().manual_seed(0), [], []

    def flat():
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def train(step, consensus):
        for _ in range(11):
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=data)).square().mean().backward()
            step()
            x.append(flat())
            with consensus():
                W.append(flat())

    if k:
        with SSDSGD(model, optimizer, period=k, local_update=GLU(α=1.0, β=0.0)) as algo:
            train(algo.step, algo.consensus)
    else:
        with SSGD(model, optimizer) as algo:
            train(algo.step, algo.consensus)
    return torch.stack(x), torch.stack(W)


def all_same_batches(rank, n):
    return [same_batches(rank, n, k, weight_decay) for weight_decay in (0.0, 0.01) for k in (0, 1, 4)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_with_identical_batches_it_is_sgd_exactly(n):
    for rank in run_ranks(all_same_batches, n, timeout=LIMIT):
        for first in (0, 3):
            plain = rank[first][0]
            for x, W in rank[first + 1 : first + 3]:
                assert torch.equal(x, plain)
                assert torch.equal(W, plain)


@pytest.mark.parametrize(("k", "weight_decay"), [(1, 0.0), (1, 0.1), (5, 0.0)])
def test_what_is_read_off_the_movement_of_a_server_without_momentum_is_the_mean_gradient(k, weight_decay):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(20, generator=generator, dtype=torch.float64)
    pre, gradients_seen = W.clone(), []
    for _ in range(k):
        g = torch.randn(20, generator=generator, dtype=torch.float64)
        gradients_seen.append(g)
        W = W - LR * (g + weight_decay * W)
    update, p = GLU(α=0.0, β=1.0), torch.nn.Parameter(pre.clone())
    update.begin([p])
    update.step(p, W, torch.zeros_like(W), Scales(LR, 1.0, weight_decay, k), pulled=True)
    read = (W - p.detach()) / LR - weight_decay * W
    torch.testing.assert_close(read, torch.stack(gradients_seen).mean(0), rtol=1e-9, atol=1e-9)
    assert torch.equal(update.before[p], W)  # pre is the pull, from now on


@pytest.mark.parametrize("n", SIZES)
def test_without_pulls_workers_are_alone_and_the_server_follows_the_mean_gradient(n):
    def alone():
        x, path = np.tile(X0, (n, 1)), []
        for _ in range(STEPS + 1):
            path.append(x)
            x = x - LR * gradients(x, *problems(n))
        return np.stack(path)

    x, _ = ssd_sgd(n, 1000, local="sgd")
    assert distance(x, alone()) < TOL
    ranks = run_ranks(never_pulled, n, timeout=LIMIT)
    assert distance(positions(ranks)[:-1], alone()[:-1]) < TOL
    W = X0 - LR * np.cumsum(gradients_along(alone(), n), axis=0)
    assert distance(servers(ranks)[1:], W[: STEPS - 1, None]) < TOL


def gradients_along(x, n):
    return np.stack([normalised(np.ones(n)) @ gradients(at, *problems(n)) for at in x])


def never_pulled(rank, n):
    options = {"period": 1000, "local_update": "sgd", "algorithm": SSDSGD, "evaluate": ALL_STEPS}
    return paths_of(rank, n, {"alone": options})["alone"]


# What is refused


def test_options_are_refused_in_one_line():
    model = torch.nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
    for optimizer, options, words in [
        (adam, {}, "needs SGD, not Adam: choose sgd, dc_asgd or dc_asgd_a"),
        ([sgd, torch.optim.SGD(model.parameters(), 0.1)], {}, "without a parameter in common"),
        (sgd, {"local_update": "global"}, "local_update must be"),
        (sgd, {"scaling": "huge"}, "scaling must be"),
        (sgd, {"pre_refresh": "every_step", "local_update": "sgd"}, "pre_refresh is for local_update='glu'"),
        (sgd, {"compression": "int8"}, "leave compression out"),
        (sgd, {"period": 0}, "period"),
    ]:
        with pytest.raises(ValueError, match=words):
            SSDSGD(model, optimizer, **options)
    for wrong in ({"α": -1.0}, {"β": float("nan")}):
        with pytest.raises(ValueError, match="must be a number of at least 0"):
            GLU(**wrong)
    with pytest.raises(ValueError, match="m must be less than 1"):
        DCASGD(m=1.0)
    assert SSDSGD(model, adam, local_update="sgd").local_update.needs_sgd is False


def test_an_update_that_is_given_twice_has_two_memories_and_begins_anew():
    model = torch.nn.Linear(2, 2)
    given = DCASGD(adaptive=True, m=0.5)
    one, two = (SSDSGD(model, torch.optim.SGD(model.parameters(), 0.1), local_update=given).local_update for _ in range(2))
    x = list(model.parameters())
    for update in (one, given):
        update.begin(x)
        update.step(x[0], x[0].detach(), torch.ones(2, 2), Scales(0.1, 1.0, 0.0, 1), pulled=False)
        assert update.MS
        assert not two.MS
    one.begin(x)
    assert not one.MS
