"""SSD-SGD against its equations, worker by worker and on the server. The quadratics are those of test_cocod."""

import functools
import time
from typing import ClassVar
from unittest import mock

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
    problem,
    problems,
    quadratic,
)
from test_cocod import synchronous as ssgd
from test_cocod import unequal as unequal_weights
from torch.distributed.distributed_c10d import _get_default_store

from lightning_cocod.algorithms import GLU, ODSGD, SSDSGD, SSGD, DelayCompensation
from lightning_cocod.algorithms.background_server import BackgroundServer
from lightning_cocod.algorithms.local_update import Scales
from lightning_cocod.algorithms.when import When

SIZES = [2, 4]


def ssd_sgd(
    n,
    k,
    *,
    w=None,
    synchronous=(),
    local="glu",
    α=2.0,
    β=0.5,
    m=0.0,
    every_step=False,
    paper=False,
    momentum=0.0,
    weight_decay=0.0,
    lr=LR,
    clip=None,
    branch=False,
    fault=None,
):
    """x_i(t) and W(t), t = 0 … STEPS. k is a number or a schedule; `synchronous` are the steps of S-SGD. lr and weight_decay
    are numbers or have one for each element. With a `branch` only worker t mod 2 has a gradient of the last elements.

    What must not match: `fault` "early" uses a pull in the step that launches it, "late" a step later, "stale pull" leaves
    out the last push, "pre first" refreshes pre before the local update, "ĝ at once" reads it off before a pull, "round's k"
    divides by the length of the round that begins with it, "pull kept" has a base that is older than a synchronous step,
    "local only" and "server only" clip one of the two gradients, "first group" has the first element's options locally;
    where a gradient is missing "all" have one, "those who have one" are those whose mean it is, and "rests" moves nothing.
    """
    w = normalised(np.ones(n) if w is None else w)
    H, b = problems(n)
    W, v, x = X0, 0 * X0, np.tile(X0, (n, 1))
    pre, before, pulled, P, moved, path, server = X0, x, None, None, False, [], []
    ends, length, since, span, MS = 0, None, 0, None, 0  # the round; steps since the pull, and those before it
    schedule = k if isinstance(k, dict) else {0: k}
    server_lr, wd = lr, weight_decay
    lr, s = (n * lr, 1 / n) if paper else (lr, 1.0)
    if fault == "first group":
        lr, wd = lr[0], wd[0]
    for t in range(STEPS + 1):
        path.append(x)
        server.append(W)
        g = gradients(x, H, b)
        older, lacks = W, np.zeros((n, len(X0)), bool)
        lacks[:, BRANCH:] = branch and (np.arange(n) != t % 2)[:, None]
        g = g if fault == "all" else np.where(lacks, 0, g)
        mean = w @ g / (w @ ~lacks if fault == "those who have one" else 1)
        v = momentum * v + (mean if fault == "local only" else clipped(mean, clip)) + weight_decay * W
        W = W - server_lr * v
        g = g if fault == "server only" else clipped(g, clip)
        since += 1
        if t in synchronous:
            x, pre, before, moved, since, MS = np.tile(W, (n, 1)), W, np.tile(W, (n, 1)), False, 0, 0
            pulled = pulled if fault == "pull kept" else None
            continue
        if t >= ends:
            length = schedule[max(begin for begin in schedule if begin <= t)]
            ends = t + length
        due = t + 1 >= ends
        if fault == "early" and due:
            pulled, span = W, since
        base = x if pulled is None else np.tile(pulled, (n, 1))
        moved = moved or pulled is not None or fault == "ĝ at once"
        if pulled is not None and fault == "pre first":
            pre = pulled
        if local == "glu":
            steps = length if pulled is None or fault == "round's k" else span
            ĝ = ((1 - lr * wd) * pre - base) / (steps * lr) if moved else 0
            d = α * s * g + wd * base + β * ĝ
        elif local == "sgd":
            d = s * g + wd * base
        else:
            MS = m * MS + (1 - m) * g * g + 1e-7
            λ = 0.04 if local == "dc_asgd" else 2 / np.sqrt(MS)
            d = s * (g + λ * g * g * (base - before)) + wd * base
        if every_step or pulled is not None:
            pre = base
        d = np.where(lacks, 0, d) if fault == "rests" else d
        before, x = base, base - lr * d
        pulled, P = (P, None) if fault == "late" else (None, None)
        if due:
            arrived, span, since = older if fault == "stale pull" else W, since, 0
            pulled, P = (pulled, arrived) if fault == "late" else (None if fault == "early" else arrived, None)
    return np.stack(path), np.stack(server)


BRANCH = 2
"""The number of the first element of those that a step may leave out."""
CLIP = 0.5


def clipped(g, how):
    """Rows of gradients, or one, as torch clips them."""
    if how == "norm":
        return g * np.minimum(1, CLIP / (np.linalg.norm(g, axis=-1, keepdims=True) + 1e-6))
    return np.clip(g, -CLIP, CLIP) if how == "value" else g


def clipping(algorithm, how):
    """An algorithm that clips where a user does."""

    class Clipping(algorithm):
        def before_step(self, optimizer=None):
            super().before_step(optimizer)
            for opt in self.optimizers:
                (self.clip_grad_norm_ if how == "norm" else self.clip_grad_value_)(opt, CLIP)

    return Clipping


class Interrupted(When):
    """Rounds of 3 with a synchronous step where a pull has just been launched, and one in the midst of a round."""

    def period(self, step):
        return 3

    def synchronous(self, step):
        return step in (3, 5)


ALL_STEPS = tuple(range(STEPS))
M = {"local_update": DelayCompensation(lambda_0=2.0, adaptive=True, m=0.9)}
CONFIGURATIONS = {
    "k1": {"period": 1},
    "k3": {"period": 3},
    "k3 heavy": {"period": 3, "sgd": HEAVY, "unequal": True},
    "k3 warm-up": {"period": 3, "sgd": HEAVY, "warmup_steps": 4},
    "k3 paper": {"period": 3, "sgd": {"weight_decay": 0.01}, "scaling": "paper"},
    "k3 sgd": {"period": 3, "sgd": HEAVY, "local_update": "sgd"},
    "k3 dc_asgd": {"period": 3, "sgd": HEAVY, "local_update": "dc_asgd"},
    "k1 dc_asgd_a": {"period": 1, "sgd": HEAVY, "local_update": "dc_asgd_a"},
    "k3 m": {"period": 3, "sgd": HEAVY, **M},
    "m interrupted": {"period": Interrupted(), "sgd": HEAVY, **M},
    "k3 every step": {"period": 3, "sgd": HEAVY, "pre_refresh": "every_step"},
    "schedule": {"period": {0: 1, 4: 4, 9: 2}, "sgd": HEAVY},
    "warm-up schedule": {"period": {0: 4, 4: 2}, "sgd": HEAVY, "warmup_steps": 2},
    "interrupted": {"period": Interrupted(), "sgd": HEAVY},
    "all warm-up": {"period": 3, "sgd": HEAVY, "warmup_steps": STEPS + 1, "unequal": True},
}
HOW = {
    "k1": {"k": 1},
    "k3": {"k": 3},
    "k3 heavy": {"k": 3, **HEAVY},
    "k3 warm-up": {"k": 3, **HEAVY, "synchronous": range(4)},
    "k3 paper": {"k": 3, "weight_decay": 0.01, "paper": True},
    "k3 sgd": {"k": 3, **HEAVY, "local": "sgd"},
    "k3 dc_asgd": {"k": 3, **HEAVY, "local": "dc_asgd"},
    "k1 dc_asgd_a": {"k": 1, **HEAVY, "local": "dc_asgd_a"},
    "k3 m": {"k": 3, **HEAVY, "local": "dc_asgd_a", "m": 0.9},
    "m interrupted": {"k": 3, **HEAVY, "local": "dc_asgd_a", "m": 0.9, "synchronous": (3, 5)},
    "k3 every step": {"k": 3, **HEAVY, "every_step": True},
    "schedule": {"k": {0: 1, 4: 4, 9: 2}, **HEAVY},
    "warm-up schedule": {"k": {0: 4, 4: 2}, **HEAVY, "synchronous": range(2)},
    "interrupted": {"k": 3, **HEAVY, "synchronous": (3, 5)},
    "all warm-up": {"k": 3, **HEAVY, "synchronous": range(STEPS + 1)},
}
OTHERS = {
    "k3 heavy waiting": {**CONFIGURATIONS["k3 heavy"], "overlap": False},
    "k3 heavy undisturbed": CONFIGURATIONS["k3 heavy"],
    **{f"k3 heavy resumed at {t}": {**CONFIGURATIONS["k3 heavy"], "resume_at": t} for t in (1, 3, 4, 5)},
    "k3 dc_asgd resumed at 5": {**CONFIGURATIONS["k3 dc_asgd"], "resume_at": 5},
    "k3 dc_asgd undisturbed": CONFIGURATIONS["k3 dc_asgd"],
    "k3 m undisturbed": CONFIGURATIONS["k3 m"],
    "k3 m resumed at 5": {**CONFIGURATIONS["k3 m"], "resume_at": 5},
    "schedule undisturbed": CONFIGURATIONS["schedule"],
    **{f"schedule resumed at {t}": {**CONFIGURATIONS["schedule"], "resume_at": t} for t in (4, 6, 8)},
    "od_sgd": {"algorithm": ODSGD, "sgd": HEAVY},
    "k1 dc_asgd": {**CONFIGURATIONS["k1 dc_asgd_a"], "local_update": "dc_asgd"},
    "interrupted undisturbed": CONFIGURATIONS["interrupted"],
    "interrupted resumed at 7": {**CONFIGURATIONS["interrupted"], "resume_at": 7},
}


CLIPPED = {
    f"{name} {how}": {**CONFIGURATIONS[of], "algorithm": clipping(algorithm, how)}
    for how in ("norm", "value")
    for name, of, algorithm in (("ssd", "k3 warm-up", SSDSGD), ("ssd unequal", "k3 heavy", SSDSGD))
} | {f"od {how}": {"sgd": HEAVY, "algorithm": clipping(ODSGD, how)} for how in ("norm", "value")}
CLIPPED_HOW = {"ssd": HOW["k3 warm-up"], "ssd unequal": HOW["k3 heavy"], "od": HOW["k1 dc_asgd_a"]}


def watched_paths(rank, n):
    watched = {name: {**options, "algorithm": SSDSGD, "evaluate": ALL_STEPS} for name, options in CONFIGURATIONS.items()}
    return paths_of(rank, n, watched)


def other_paths(rank, n):
    others = {name: {"algorithm": SSDSGD, **options} for name, options in OTHERS.items()}
    synchronous = {"s-sgd": {"algorithm": SSGD, "sgd": HEAVY, "unequal": True}}
    return paths_of(rank, n, {**others, **synchronous})


@functools.cache
def paths(n):
    launches = [run_ranks(some, n, timeout=LIMIT) for some in (watched_paths, other_paths)]
    return {name: [rank[name] for rank in ranks] for ranks in launches for name in ranks[0]}


def all_clipped(rank, n):
    return paths_of(rank, n, {name: {**options, "evaluate": ALL_STEPS} for name, options in CLIPPED.items()})


@functools.cache
def clipped_paths(n):
    ranks = run_ranks(all_clipped, n, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in CLIPPED}


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
        faults += ["round's k"] if name in ("schedule", "warm-up schedule", "interrupted") else []
        faults += ["pull kept"] if name == "interrupted" else []
        for fault in faults:
            if fault == "ĝ at once" and not HOW[name].get("weight_decay"):
                continue  # nothing to read off then
            if fault == "pre first" and HOW[name].get("every_step"):
                continue  # pre is another
            assert distance(positions(paths(n)[name])[:-1], ssd_sgd(n, w=w, **HOW[name], fault=fault)[0][:-1]) > 1e-4, fault


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_is_done_to_the_mean_and_to_the_own_gradient(n, name):
    kind, how = name.rsplit(" ", 1)
    equations = functools.partial(ssd_sgd, n, w=unequal_weights(n) if "unequal" in name else None, **CLIPPED_HOW[kind])
    ranks, (x, W) = clipped_paths(n)[name], equations(clip=how)
    assert distance(positions(ranks)[:-1], x[:-1]) < 1e-6  # a norm has the precision of float32
    assert distance(servers(ranks), W[:-1, None]) < 1e-6
    for fault in ("local only", "server only"):
        assert distance(servers(ranks), equations(clip=how, fault=fault)[1][:-1, None]) > 1e-3, fault


TWO_GROUPS = {"lr": np.repeat([LR, LR / 4], [2, 3]), "weight_decay": np.repeat([0.01, 0.3], [2, 3])}


def in_two_groups(rank, n, algorithm=SSDSGD, *, branch=False, **options):
    """x before every step: one problem, whose elements are two parameters, in a group each.

    With a `branch` only worker t mod 2 has a gradient of the second one.
    """
    H, b = map(torch.tensor, problem(rank))
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.tensor(part)) for part in (X0[:BRANCH], X0[BRANCH:]))
    groups = [{"params": [p], **{key: float(of[3 * i]) for key, of in TWO_GROUPS.items()}} for i, p in enumerate(model)]
    optimizer, path = torch.optim.SGD(groups, momentum=0.9), []
    with algorithm(model, optimizer, **options) as algo:
        for t in range(STEPS):
            lacks = branch and rank != t % 2
            x = torch.cat([model[0], model[1].detach() if lacks else model[1]])
            path.append(x.detach().numpy().copy())
            optimizer.zero_grad()
            (0.5 * (x - b) @ H @ (x - b)).backward()
            assert (model[1].grad is None) == lacks
            algo.step()
    return np.stack(path)


def all_in_two_groups(rank, n, branch=False):
    return {local: in_two_groups(rank, n, branch=branch, period=3, local_update=local) for local in ("glu", "dc_asgd")}


@pytest.mark.parametrize("n", SIZES)
def test_every_group_has_its_own_rate_and_weight_decay_in_the_local_update_too(n):
    ranks = run_ranks(all_in_two_groups, n, timeout=LIMIT)
    for local in ranks[0]:
        equations = functools.partial(ssd_sgd, n, 3, local=local, momentum=0.9)
        found = np.stack([rank[local] for rank in ranks], axis=1)
        assert distance(found, equations(**TWO_GROUPS)[0][:-1]) < TOL
        assert distance(found, equations(**TWO_GROUPS, fault="first group")[0][:-1]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_a_gradient_that_a_worker_lacks_counts_as_zero(n):
    ranks = run_ranks(all_in_two_groups, n, True, timeout=LIMIT)
    for local in ranks[0]:
        equations = functools.partial(ssd_sgd, n, 3, local=local, momentum=0.9, branch=True, **TWO_GROUPS)
        found = np.stack([rank[local] for rank in ranks], axis=1)
        assert distance(found, equations()[0][:-1]) < TOL
        for fault in ("all", "those who have one", "rests"):
            assert distance(found, equations(fault=fault)[0][:-1]) > 1e-3, fault


@pytest.mark.parametrize("n", SIZES)
def test_with_a_pull_every_step_and_the_update_of_dc_asgd_a_it_is_od_sgd(n):
    ssd, od, other = (paths(n)[name] for name in ("k1 dc_asgd_a", "od_sgd", "k1 dc_asgd"))
    assert bitwise(positions(ssd), positions(od))
    assert distance(positions(od), positions(other)) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_options_that_change_little_are_not_left_out(n):
    for name, options in (("k3 every step", {"every_step": False}), ("k3 m", {"m": 0.0})):
        assert distance(positions(paths(n)[name])[:-1], ssd_sgd(n, **{**HOW[name], **options})[0][:-1]) > 1e-3


def with_a_parameter_of_no_use(rank, n, algorithm, **options):
    """Trained for four steps, and used in the first only by rank 1, then by nobody."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    with algorithm(model, optimizer, **options) as algo:
        for t in range(4):
            optimizer.zero_grad()
            x = torch.full((1, 3), rank + t + 1.0)
            used = model if rank == 1 and t == 0 else model[:1]
            sum(layer(x).square().mean() for layer in used).backward()
            algo.step()
    return [p.detach() for p in model.parameters()]


def test_in_a_warm_up_what_nobody_uses_rests_as_under_s_sgd():
    plain, warm_up, delayed = (
        run_ranks(functools.partial(with_a_parameter_of_no_use, algorithm=algorithm, **options), 2, timeout=LIMIT)[0]
        for algorithm, options in ((SSGD, {}), (SSDSGD, {"warmup_steps": 9}), (SSDSGD, {"warmup_steps": 1}))
    )
    assert all(map(torch.equal, plain, warm_up))
    assert not torch.equal(plain[2], delayed[2])  # the control: there it counts as a gradient of zero, and weights decay


@pytest.mark.parametrize("n", SIZES)
def test_a_warm_up_is_s_sgd_bit_for_bit(n):
    both = paths(n)["all warm-up"], paths(n)["s-sgd"]
    assert bitwise(*(positions(found) for found in both))
    assert distance(positions(both[1]), ssgd(n, unequal_weights(n), **HEAVY)[:, None]) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_waiting_resuming_and_evaluating_change_no_bit(n):
    for kind in ("k3 heavy", "k3 dc_asgd", "k3 m", "schedule", "interrupted"):
        undisturbed = paths(n)[f"{kind} undisturbed"]
        for name in paths(n):
            if name.startswith(f"{kind} ") or name == kind:
                found, first = paths(n)[name], OTHERS.get(name, {}).get("resume_at", 0)
                assert bitwise(positions(found), positions(undisturbed)[first * (len(positions(found)) <= STEPS) :]), name


# However long a round is, gradients of 1 are read off as 1


class Seen(GLU):
    """Notes what it reads off a pull, k, and how many steps the round has that begins."""

    notes: ClassVar[list] = []

    def step(self, p, b, g, scales, *, pulled):
        super().step(p, b, g, scales, pulled=pulled)
        if pulled:
            self.notes.append((((b - p.detach()) / scales.lr).tolist(), scales.k, self.rounds.length))


def read_off(rank, n, period, event, warmup_steps=0, scaling="plain"):
    """What has been seen in 14 steps, after five of which something happens."""
    Seen.notes.clear()
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], 0.125) for p in model]
    update = Seen(alpha=0.0, beta=1.0)
    with SSDSGD(model, optimizers, period, local_update=update, warmup_steps=warmup_steps, scaling=scaling) as algo:
        algo.local_update.rounds = algo.rounds
        for t in range(14):
            if t == 5 and event == "rewritten":
                with algo.rewriting():
                    pass
            if t == 5 and event == "joined":
                model.append(torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)))
                optimizers[0].add_param_group({"params": [model[2]]})
            for optimizer in optimizers if event != "every other" or t % 2 == 0 else optimizers[:1]:
                optimizer.zero_grad()
                sum(p.sum() for p in model).backward()
                algo.before_step(optimizer)
                algo.step(optimizer.step)
            algo.after_step()
    return list(Seen.notes)


def all_read_off(rank, n):
    longer, shorter = {0: 1, 4: 4}, {0: 4, 4: 1}
    cases = [(longer, ""), (shorter, ""), (shorter, "", 2), (3, "rewritten"), (3, "joined"), (3, "every other")]
    cases += [(longer, "", 0, "paper")]
    return {str(case): read_off(rank, n, *case) for case in cases}


def test_a_constant_gradient_is_read_off_as_it_is_whatever_happens_to_rounds():
    for rank in run_ranks(all_read_off, 2, timeout=LIMIT):
        for case, notes in rank.items():
            assert len(notes) > 4
            for ĝ, _, _ in notes:
                assert ĝ == pytest.approx([1 / 2 if "paper" in case else 1.0] * len(ĝ), abs=1e-12), case
            assert any(k != length for _, k, length in notes) == (case != "(3, 'rewritten')")  # another divisor would not do


# Exact tests 2 to 4 and 7: what it comes to


def same_batches(k, weight_decay, β=0.0, seed=0):
    """α = 1: a network whose workers have the same batches, if the seed is. Their x and W, step by step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, weight_decay=weight_decay)
    data, x, W = torch.Generator().manual_seed(seed), [], []

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
        with SSDSGD(model, optimizer, period=k, local_update=GLU(alpha=1.0, beta=β)) as algo:
            train(algo.step, algo.consensus)
    else:
        with SSGD(model, optimizer) as algo:
            train(algo.step, algo.consensus)
    return torch.stack(x), torch.stack(W)


def all_same_batches(rank, n):
    return [
        (
            [same_batches(k, weight_decay) for k in (0, 1, 4)],
            [same_batches(k, weight_decay, seed=rank) for k in (0, 1, 4)],
            [same_batches(k, weight_decay, β=0.5) for k in (1, 4)],
        )
        for weight_decay in (0.0, 0.01)
    ]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_with_identical_batches_it_is_sgd_exactly(n):
    for without, with_decay in run_ranks(all_same_batches, n, timeout=LIMIT):
        for ((plain, _), *exact), ((synchronous, _), *own), with_global in (without, with_decay):
            for x, W in exact:
                assert torch.equal(x, plain)
                assert torch.equal(W, plain)
            if n > 1:  # one worker trains plainly whatever it is told
                for reference, others in ((synchronous, own), (plain, with_global)):
                    for x, W in others:
                        assert (x - reference).abs().max() > 1e-3
                        assert (W - reference).abs().max() > 1e-5  # in float32, whose rounding is far less
        assert (with_decay[0][0][0] - without[0][0][0]).abs().max() > 1e-4


@pytest.mark.parametrize(("k", "weight_decay"), [(1, 0.0), (1, 0.1), (5, 0.0)])
def test_what_is_read_off_the_movement_of_a_server_without_momentum_is_the_mean_gradient(k, weight_decay):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(20, generator=generator, dtype=torch.float64)
    pre, gradients_seen = W.clone(), []
    for _ in range(k):
        g = torch.randn(20, generator=generator, dtype=torch.float64)
        gradients_seen.append(g)
        W = W - LR * (g + weight_decay * W)
    mean, plain = torch.stack(gradients_seen).mean(0), Scales(LR, 1.0, weight_decay, k)
    torch.testing.assert_close(read_between(pre, W, plain), mean, rtol=1e-9, atol=1e-9)
    for wrong in (read_between(W, W, plain), read_between(pre, W, plain._replace(k=k + 1))):  # pre too new, k too large
        assert (wrong - mean).abs().max() > 0.1
    if weight_decay == 0:
        for n in SIZES:
            paper = read_between(pre, W, Scales(n * LR, 1 / n, 0.0, k))
            torch.testing.assert_close(paper, mean / n, rtol=1e-9, atol=1e-9)


def read_between(pre, W, scales):
    """ĝ of GLU, as its step shows it."""
    update, p = GLU(alpha=0.0, beta=1.0), torch.nn.Parameter(pre.clone())
    update.begin([p])
    update.step(p, W, torch.zeros_like(W), scales, pulled=True)
    assert torch.equal(update.before[p], W)  # pre is the pull, from now on
    return (W - p.detach()) / scales.lr - scales.wd * W


@pytest.mark.parametrize("update", [GLU(), DelayCompensation()])
def test_the_base_of_a_step_with_a_rate_of_zero_is_known_later(update):
    p, P = torch.nn.Parameter(torch.zeros(3)), torch.ones(3)
    update.begin([p])
    assert torch.equal(update.before[p], torch.zeros(3))
    update.step(p, P, torch.ones(3), Scales(0.0, 1.0, 0.1, 1), pulled=True)
    assert torch.equal(p, P)
    assert torch.equal(update.before[p], P)


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
    W = X0 - LR * np.cumsum(gradients_along(alone(), n), axis=0)
    never, at_last = zip(*run_ranks(hardly_ever_pulled, n, timeout=LIMIT), strict=True)
    assert distance(positions(never)[:-1], alone()[:-1]) < TOL
    assert distance(servers(never)[1:], W[: STEPS - 1, None]) < TOL
    assert distance(positions(at_last)[:-1], alone()[:-1]) > 1e-3
    assert distance(servers(at_last)[1:], W[: STEPS - 1, None]) > 1e-3


def gradients_along(x, n):
    return np.stack([normalised(np.ones(n)) @ gradients(at, *problems(n)) for at in x])


def hardly_ever_pulled(rank, n):
    options = {"local_update": "sgd", "algorithm": SSDSGD, "evaluate": ALL_STEPS}
    return [quadratic(rank, n, period=k, **options) for k in (1000, STEPS - 4)]


# How far workers drift apart


def running_ahead(rank, n, waits):
    """The steps whose push rank 0 begins before rank 1 has begun the one before. Without waiting for pushes, rank 1 stands
    still at its third step until rank 0 is two steps further.
    """
    store, ahead = _get_default_store(), []
    begin, acknowledged = BackgroundServer.begin, BackgroundServer.acknowledged

    def watched(server, subject):
        t = subject.step
        if rank == 0:
            if t > 0 and not store.check([f"begun {t - 1}"]):
                ahead.append(t)
            store.set(f"first begun {t}", "")
        else:
            while t == 2 and not waits and not store.check(["first begun 4"]):
                time.sleep(0.01)
            store.set(f"begun {t}", "")
        begin(server, subject)

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with SSDSGD(model, optimizer, period=100, local_update="sgd") as algo:
        waiting = acknowledged if waits or rank == 1 else lambda server: None
        with (
            mock.patch.object(BackgroundServer, "begin", watched),
            mock.patch.object(BackgroundServer, "acknowledged", waiting),
        ):
            for _ in range(6):
                model(torch.ones(1, 3)).sum().backward()
                algo.step()
    return ahead


def test_a_push_waits_for_the_push_before():
    """So no worker is more than a step ahead of another one."""
    assert run_ranks(running_ahead, 2, True, timeout=LIMIT)[0] == []


def test_without_that_a_worker_would_run_ahead():
    """Negative control."""
    assert {3, 4}.issubset(run_ranks(running_ahead, 2, False, timeout=LIMIT)[0])


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
    for wrong in ({"alpha": -1.0}, {"beta": float("nan")}):
        with pytest.raises(ValueError, match="must be a number of at least 0"):
            GLU(**wrong)
    with pytest.raises(ValueError, match="m must be less than 1"):
        DelayCompensation(m=1.0)
    with pytest.raises(ValueError, match="adaptive must be True or False"):
        DelayCompensation(adaptive="false")
    assert SSDSGD(model, adam, local_update="sgd").local_update.needs_sgd is False


def test_an_update_that_is_given_twice_has_two_memories_and_begins_anew():
    model = torch.nn.Linear(2, 2)
    given = DelayCompensation(adaptive=True, m=0.5)
    one, two = (SSDSGD(model, torch.optim.SGD(model.parameters(), 0.1), local_update=given).local_update for _ in range(2))
    x = list(model.parameters())
    for update in (one, given):
        update.begin(x)
        update.step(x[0], x[0].detach(), torch.ones(2, 2), Scales(0.1, 1.0, 0.0, 1), pulled=False)
        assert update.MS
        assert not two.MS
    one.begin(x)
    assert not one.MS
