"""Pipe-SGD against its equation on 1, 2 and 4 workers. The quadratics are those of test_cocod."""

import copy
import functools
import threading
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.ranks import run_ranks
from support.toys import Toy, loader, trainer
from test_cocod import (
    HEAVY,
    LIMIT,
    LR,
    STEPS,
    TOL,
    X0,
    bitwise,
    buckets_of,
    distance,
    gradients,
    jitter,
    normalised,
    paths_of,
    positions,
    problems,
    same_bits,
    snapshot,
    synchronous,
    unequal,
)
from torch import nn

from lightning_cocod import CO2, NonFiniteMessage, PipeSGD, PipeSGDStrategy
from lightning_cocod.comm import carrying
from lightning_cocod.comm.buckets import Layout

SIZES = [1, 2, 4]


def pipe_sgd(n, w, *, momentum=0.0, weight_decay=0.0, delay=1, warm_up=0, first="nothing"):
    """x(t), t = 0 … STEPS. What must not match: another `delay`, and a gradient of "zero" while none has come."""
    x, v, path, G = X0, 0 * X0, [], [None] * delay
    for t in range(STEPS + 1):
        path.append(x)
        g = w @ gradients(x, *problems(n))
        if t >= warm_up:
            G.append(g)
            g = G.pop(0)
        if g is None and first == "zero":
            g = 0 * x
        if g is not None:
            v = momentum * v + g + weight_decay * x
            x = x - LR * v
    return np.stack(path)


CONFIGURATIONS = {
    "plain": {},
    "heavy": {"unequal": True, "sgd": HEAVY},
    "momentum": {"unequal": True, "sgd": {"momentum": 0.9}},
    "waiting": {"unequal": True, "sgd": HEAVY, "overlap": False},
    "evaluated": {"unequal": True, "sgd": HEAVY, "evaluate": (0, 1, 2, 7)},
    "resumed": {"unequal": True, "sgd": HEAVY, "resume_at": 6},
    "resumed at once": {"unequal": True, "sgd": HEAVY, "resume_at": 1},
    "warm-up": {"unequal": True, "sgd": HEAVY, "warmup_steps": 4},
    "warm-up resumed": {"unequal": True, "sgd": HEAVY, "warmup_steps": 4, "resume_at": 4},
    "all warm-up": {"unequal": True, "sgd": HEAVY, "warmup_steps": STEPS + 1},
}


def all_paths(rank, n):
    found = paths_of(rank, n, {name: {**options, "algorithm": PipeSGD} for name, options in CONFIGURATIONS.items()})
    reweighed = {"algorithm": PipeSGD, "reweigh": {5: list(range(n, 0, -1))}}
    outer = {"algorithm": CO2, "unequal": True, "outer_momentum": 0.9}
    others = {"outer": {**outer, "period": 1}, "outer, longer": {**outer, "period": 2}}
    return {**found, **paths_of(rank, n, {"reweighed": reweighed, **others})}


@functools.cache
def paths(n):
    ranks = run_ranks(all_paths, n, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "options"), [("plain", {}), ("heavy", HEAVY)])
def test_the_trajectory_is_that_of_the_equation(n, name, options):
    w, x = unequal(n) if name == "heavy" else normalised(np.ones(n)), positions(paths(n)[name])
    assert distance(x, pipe_sgd(n, w, **options)[:, None]) < TOL
    assert distance(x, synchronous(n, w, **options)[:, None]) > 1e-3  # the delay
    assert distance(x, pipe_sgd(n, w, delay=2, **options)[:, None]) > 1e-3
    if options:
        assert distance(x, pipe_sgd(n, w, first="zero", **options)[:, None]) > 1e-4
    if n > 1:
        assert distance(x, pipe_sgd(n, unequal(n) if name == "plain" else w[::-1], **options)[:, None]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_it_is_the_member_of_the_family_with_rounds_of_one_step_a_round_of_delay_and_the_users_momentum_outside(n):
    x = positions(paths(n)["momentum"])
    assert distance(x, positions(paths(n)["outer"])) < TOL
    assert distance(x, positions(paths(n)["outer, longer"])) > 1e-3
    assert distance(x, positions(paths(n)["plain"])) > 1e-3


def test_of_one_worker_it_is_sgd_with_a_delay_of_one_step():
    x, v, late = torch.tensor(X0), torch.zeros(len(X0), dtype=torch.float64), None
    H, b = (torch.tensor(part[0]) for part in problems(1))
    for seen in paths(1)["heavy"][0].x:
        torch.testing.assert_close(torch.tensor(seen), x, rtol=TOL, atol=TOL)
        g = H @ (x - b)
        if late is not None:
            v = 0.9 * v + late + 0.01 * x
            x = x - LR * v
        late = g


@pytest.mark.parametrize("n", SIZES)
def test_the_first_step_moves_nothing_and_all_replicas_are_equal_bit_for_bit(n):
    for name, ranks in paths(n).items():
        if name.startswith("outer"):
            continue
        x = positions(ranks)
        assert bitwise(x, np.repeat(x[:, :1], n, axis=1)), name
        assert all(bitwise(path.end, x[-1, 0]) for path in ranks), name  # the last mean is not applied
        still = [t for t in range(STEPS) if bitwise(x[t], x[t + 1])]
        assert still == {"warm-up": [4], "warm-up resumed": [4], "all warm-up": []}.get(name, [0]), name


@pytest.mark.parametrize("n", SIZES)
def test_evaluating_changes_nothing_and_sees_x_bit_for_bit(n):
    plain, evaluated = paths(n)["heavy"], paths(n)["evaluated"]
    assert bitwise(positions(plain), positions(evaluated))
    for path in evaluated:
        assert list(path.consensus) == [0, 1, 2, 7]
        assert all(bitwise(seen, path.x[t]) for t, seen in path.consensus.items())


@pytest.mark.parametrize("n", SIZES)
def test_waiting_at_the_launch_gives_the_same_trajectory_bit_for_bit(n):
    assert bitwise(positions(paths(n)["waiting"]), positions(paths(n)["heavy"]))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("name", "whole"), [("resumed", "heavy"), ("resumed at once", "heavy"), ("warm-up resumed", "warm-up")]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(n, name, whole):
    assert bitwise(positions(paths(n)[name]), positions(paths(n)[whole]))
    assert not bitwise(positions(paths(n)["resumed"]), pipe_sgd(n, unequal(n), delay=0, **HEAVY)[:, None])


@pytest.mark.parametrize("n", SIZES)
def test_the_warm_up_is_synchronous_and_then_the_pipe_fills(n):
    x = positions(paths(n)["warm-up"])
    assert distance(x, pipe_sgd(n, unequal(n), warm_up=4, **HEAVY)[:, None]) < TOL
    assert distance(x[:5], synchronous(n, unequal(n), **HEAVY)[:5, None]) < TOL
    assert distance(positions(paths(n)["all warm-up"]), synchronous(n, unequal(n), **HEAVY)[:, None]) < TOL


@pytest.mark.parametrize("n", [2, 4])
def test_new_weights_are_those_of_the_next_gradients(n):
    x, old, new = positions(paths(n)["reweighed"])[:, 0], normalised(np.ones(n)), unequal(n)[::-1]
    G = np.stack([gradients(row, *problems(n)) for row in x])
    for t, w, other in ((4, old, new), (5, new, old), (6, new, old)):  # set before step 5, applied in step 6
        assert distance(x[t + 2], x[t + 1] - LR * w @ G[t]) < TOL
        assert distance(x[t + 2], x[t + 1] - LR * other @ G[t]) > 1e-4


# Gradients that are missing, parameters that come and go, several optimizers

MISSING = 4  # parameters: of everybody; of rank 0 alone; frozen from 3 on, and again free from 6 on; added before step 5
EVENTS = 10


def gradient(rank, parameter, t):
    """Of a worker in a step; None where it has none."""
    if (parameter == 1 and rank != 0) or (parameter == 0 and t == 7):
        return None
    return (rank + 1.0) * (parameter + 1) + np.cos(t)


def is_free(parameter, t):
    return {2: not 3 <= t < 6, 3: t >= 5}.get(parameter, True)


def moved(n, adam):
    """The parameters after every step, from the rule: what some worker had in the step before, if it was and is free."""
    x, late, path = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(MISSING)], {}, []
    optimizers = [made([p], adam) for p in x]
    for t in range(EVENTS):
        steps = [j for j in range(MISSING) if is_free(j, t)]
        for j in steps:
            if late.get(j) is not None:
                x[j].grad = torch.full((2,), late[j], dtype=torch.float64)
                optimizers[j].step()
        late = {}
        for j in steps:
            of = [gradient(rank, j, t) for rank in range(n)]
            late[j] = None if all(g is None for g in of) else sum(g or 0.0 for g in of) / n
        path.append(torch.stack([p.detach().clone() for p in x]))
    return torch.stack(path)


def made(parameters, adam):
    if adam:
        return torch.optim.Adam(parameters, 0.1, weight_decay=0.1)
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)


def missing(rank, n, adam, resume_at=None):
    def fresh():
        model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(MISSING)])
        optimizer = made(list(model)[:3], adam)
        return model, optimizer, PipeSGD(model, optimizer)

    def event(t, model, optimizer):
        model[2].requires_grad_(is_free(2, t))
        if t == 5:
            optimizer.add_param_group({"params": [model[3]]})

    def run(start, stop):
        for t in range(start, stop):
            event(t, model, optimizer)
            for j, p in enumerate(model):
                g = gradient(rank, j, t) if is_free(j, t) else None
                p.grad = None if g is None else torch.full((2,), g, dtype=torch.float64)
            algo.step()
            path.append(torch.stack([p.detach().clone() for p in model]))

    path = []
    model, optimizer, algo = fresh()
    if resume_at is not None:
        with algo:
            run(0, resume_at)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict()))
        model, optimizer, algo = fresh()
        for t in range(resume_at):
            event(t, model, optimizer)
    with algo:
        if resume_at is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        run(resume_at or 0, EVENTS)
    return torch.stack(path)


def all_missing(rank, n):
    resumed = [missing(rank, n, True, at) for at in (3, 5, 7)]
    return {"sgd": missing(rank, n, False), "adam": missing(rank, n, True), "resumed": resumed}


@pytest.mark.parametrize("n", [1, 2])
def test_what_nobody_has_a_gradient_of_rests_and_what_comes_later_joins(n):
    for found in run_ranks(all_missing, n, timeout=LIMIT):
        torch.testing.assert_close(found["sgd"], moved(n, False), rtol=TOL, atol=TOL)
        torch.testing.assert_close(found["adam"], moved(n, True), rtol=TOL, atol=TOL)  # it counts its steps
        assert all(torch.equal(resumed, found["adam"]) for resumed in found["resumed"])
    still = (moved(n, True)[1:] == moved(n, True)[:-1]).all(-1).T  # not everything always moves: parameter, step before
    assert [row.nonzero().flatten().tolist() for row in still] == [[7], [], [2, 3, 4, 5], [0, 1, 2, 3, 4]]


def two(rank, n):
    """The second optimizer steps in every other step. Returns the parameters after every step."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)])
    optimizers = [torch.optim.SGD([p], 1.0) for p in model]
    path = []
    with PipeSGD(model, optimizers) as algo:
        for t in range(8):
            for j, opt in enumerate(optimizers):
                if j == 0 or t % 2:
                    model[j].grad = torch.tensor([10.0**t * (rank + 1)], dtype=torch.float64)
                    algo.before_step(opt)
                    algo.step(opt.step)
            algo.after_step()
            path.append([p.item() for p in model])
    return path


def test_every_optimizer_has_a_pipe_of_its_own():
    for path in run_ranks(two, 2, timeout=LIMIT):
        first = [-1.5 * sum(10.0**s for s in range(t)) for t in range(8)]
        second = [-1.5 * sum(10.0**s for s in range(1, t - 1, 2)) for t in range(8)]
        assert path == [list(both) for both in zip(first, second, strict=True)]


# A model of many buckets


@contextmanager
def held_back():
    """Yields a semaphore: every message waits for a permit of its own."""
    permits, run = threading.Semaphore(0), carrying.run

    def later(*args):
        assert permits.acquire(timeout=30)
        return run(*args)

    with mock.patch.object(carrying, "run", later):
        yield permits


def convnet(rank, n, *, overlap=True, race="", evaluate=(), steps=7):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data, seen, memory = torch.Generator().manual_seed(rank), {}, set()
    with buckets_of(256), jitter(rank) if race == "jitter" else nullcontext(), held_back() as permits:
        if race != "held back":
            permits.release(100)
        permits.release()  # the initial weights
        with PipeSGD(model, optimizer, overlap=overlap) as algo:
            assert len(algo.comm.layout(algo.x)) > 8
            for t in range(steps):
                if t in evaluate:
                    own = snapshot(model)
                    with algo.consensus():
                        seen[t] = own, snapshot(model)
                optimizer.zero_grad(set_to_none=bool(t % 2))
                model(torch.randn(6, 3, 6, 6, generator=data)).square().sub(1).square().mean().backward()
                if t > 0:
                    permits.release()  # for what was launched in the step before: all this was computed behind it
                algo.step()
                memory.add(tuple(bucket.data_ptr() for bucket in algo.pipes[optimizer].G.buckets))
            permits.release(10)
            last, metrics = snapshot(model), algo.metrics()
    return {"last": last, "end": snapshot(model), "seen": seen, "memory": len(memory), "metrics": metrics}


def convnets(rank, n):
    return {
        "plain": convnet(rank, n),
        "no overlap": convnet(rank, n, overlap=False),
        "held back": convnet(rank, n, race="held back"),
        "jitter": convnet(rank, n, race="jitter"),
        "evaluated": convnet(rank, n, evaluate=(0, 3)),
    }


@functools.cache
def convnet_runs():
    return run_ranks(convnets, 2, timeout=LIMIT)


@pytest.mark.parametrize("other", ["no overlap", "held back", "jitter", "evaluated"])
def test_neither_overlap_nor_timing_nor_evaluation_changes_a_bit(other):
    for runs in convnet_runs():
        assert same_bits(runs["plain"]["last"], runs[other]["last"])
        assert same_bits(runs["plain"]["end"], runs[other]["end"])


def test_parameters_are_equal_all_the_time_and_statistics_are_averaged_for_evaluation():
    first, second = convnet_runs()
    for name, mine in first["plain"]["last"].items():
        theirs = second["plain"]["last"][name]
        assert torch.equal(mine, theirs) == ("running" not in name), name
        if name == "1.running_mean":
            torch.testing.assert_close(first["plain"]["end"][name], (mine + theirs) / 2)
    assert same_bits(first["plain"]["end"], second["plain"]["end"])
    for t in (0, 3):
        (mine, seen), (theirs, other) = (runs["evaluated"]["seen"][t] for runs in (first, second))
        assert same_bits(seen, other)
        assert all(torch.equal(seen[name], mine[name]) for name in seen if "running" not in name)
        torch.testing.assert_close(seen["1.running_var"], (mine["1.running_var"] + theirs["1.running_var"]) / 2)


def test_the_memory_of_the_message_is_allocated_once_and_the_metrics_tell_the_delay():
    for runs in convnet_runs():
        assert runs["plain"]["memory"] == 1
        metrics = runs["plain"]["metrics"]
        assert metrics["algo/staleness_steps"] == 1
        assert metrics["algo/period"] == 1
        assert "algo/replica_distance" not in metrics
        assert metrics["comm/sent_bytes"] > 0


def test_swapping_exchanges_a_buffer_and_tensors_of_any_layout():
    for dtypes in ([torch.float32], [torch.float64, torch.bfloat16]):
        tensors = [
            torch.randn(5, 7).t().to(dtypes[0]),
            torch.randn(3, 2, 4, 4).to(dtypes[-1], memory_format=torch.channels_last),
        ]
        before = [t.clone() for t in tensors]
        buffer = Layout(tensors, cap=100).buffer()
        buffer.copy_([torch.empty_like(t).copy_(t.flip(0)) for t in tensors], keep=False)
        other = [torch.empty_like(t) for t in tensors]
        buffer.copy_to(other)
        buffer.swap(tensors)
        assert all(map(torch.equal, tensors, other))
        buffer.swap(other)
        assert all(map(torch.equal, other, before))


# NaN


def loss(model, data):
    x = torch.randn(4, 3, generator=data, dtype=torch.float64)
    return (model(x) - x[:, :2]).square().sum()


def not_finite(rank, n, on_nonfinite, resume_at=None):
    """In step 3 rank 1's gradient and running mean are not finite. The parameters after every step, and the end."""
    path = []

    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, optimizer, PipeSGD(model, optimizer, on_nonfinite=on_nonfinite)

    def run(start, stop):
        for t in range(start, stop):
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(10 * t + rank)
            loss(model, data).backward()
            if t == 3 and rank == 1:
                model[0].weight.grad[0, 0] = torch.nan
                model[1].running_mean[0] = torch.nan
            algo.step()
            path.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    model, optimizer, algo = fresh()
    if resume_at is not None:
        with algo:
            run(0, resume_at)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict()))
            algo.repair_buffers((1,))  # so that this run, which is left here, may end
        del path[:]
        model, optimizer, algo = fresh()
    try:
        with algo:
            if resume_at is not None:
                for part, state in zip((model, optimizer, algo), saved, strict=True):
                    part.load_state_dict(state)
            run(resume_at or 0, 7)
    except NonFiniteMessage as error:
        return torch.stack(path), str(error)
    return torch.stack(path), snapshot(model)


def serial(lacks):
    """The same in one process; without rank 1's gradient of step 3 if that is what `lacks`."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double())
    optimizer, late, path = torch.optim.SGD(models[0].parameters(), 0.1, momentum=0.9), None, []
    for t in range(7):
        grads = []
        for rank, model in enumerate(models):
            data = torch.Generator().manual_seed(10 * t + rank)
            grads.append(torch.autograd.grad(loss(model, data), list(model.parameters())))
        if late is not None:
            for p, g in zip(models[0].parameters(), late, strict=True):
                p.grad = g
            optimizer.step()
            models[1].load_state_dict({**models[1].state_dict(), **dict(models[0].named_parameters())})
        late = grads[0] if lacks and t == 3 else [(a + b) / 2 for a, b in zip(*grads, strict=True)]
        path.append(torch.cat([p.detach().flatten() for p in models[0].parameters()]))
    return torch.stack(path)


def test_a_gradient_that_is_not_finite_is_left_out_of_the_mean_and_replicas_stay_equal():
    (first, end), (second, other) = run_ranks(not_finite, 2, "skip", timeout=LIMIT)
    assert torch.equal(first, second)
    assert same_bits(end, other)
    assert all(value.isfinite().all() for value in end.values())
    torch.testing.assert_close(first, serial(lacks=True), rtol=TOL, atol=TOL)
    assert (first[3] - serial(lacks=False)[3]).abs().max() < TOL  # applied in step 4
    assert (first[4] - serial(lacks=False)[4]).abs().max() > 1e-3


def test_resumed_while_such_a_mean_is_in_flight_the_run_is_the_same():
    whole, resumed = (run_ranks(not_finite, 2, "skip", at, timeout=LIMIT) for at in (None, 4))
    for (path, end), (again, other) in zip(whole, resumed, strict=True):
        assert torch.equal(path[4:], again)
        assert same_bits(end, other)


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_applied():
    for path, text in run_ranks(not_finite, 2, "raise", timeout=LIMIT):
        assert len(path) == 4
        assert path.isfinite().all()
        assert "gradients at step 3" in text
        assert "rank 1" in text


# What is refused


def scaled(rank, n):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, texts = snapshot(model), []
    for scaler in (torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
        try:
            with PipeSGD(model, optimizer) as algo:
                for _ in range(3):
                    optimizer.zero_grad()
                    scaler.scale(model(torch.ones(2)).sum()).backward()
                    algo.step(scaler=scaler)
        except ValueError as error:
            texts.append(str(error))
            assert same_bits(before, snapshot(model))
    assert not same_bits(before, snapshot(model))  # one that is off does nothing
    return texts


def test_a_scaler_is_refused():
    (texts,) = run_ranks(scaled, 1, timeout=LIMIT)
    assert texts == [
        "pipe_sgd and a gradient scaler do not go together: each rank's scaler decides on its own whether to skip a step; "
        "use bfloat16"
    ]


def scaled_fit(rank, n):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    says = "pipe_sgd and precision='16-mixed' do not go together: .*; use precision='bf16-mixed'$"
    with pytest.raises(Exception, match=says):
        trainer(PipeSGDStrategy(), n, plugins=[plugin]).fit(Toy(), loader())


def test_a_fit_with_a_scaler_is_refused():
    run_ranks(scaled_fit, 2, init=False)


def sparse(rank, n):
    model = nn.Embedding(4, 2, sparse=True)
    with PipeSGD(model, torch.optim.SGD(model.parameters(), 0.1)) as algo:
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match="sparse gradients cannot be averaged; use sparse=False"):
            algo.step()
        model.weight.grad = None


def test_sparse_gradients_are_refused():
    run_ranks(sparse, 1, timeout=LIMIT)


def plain_step(rank, n):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PipeSGD(model, optimizer), pytest.raises(RuntimeError, match="of the algorithm instead of optimizer"):
        optimizer.step()


def test_a_plain_loop_needs_the_explicit_form():
    run_ranks(plain_step, 1, timeout=LIMIT)


def test_options_out_of_range_are_refused_by_name():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="overlap must be True or False, got 1"):
        PipeSGD(model, torch.optim.SGD(model.parameters(), 0.1), overlap=1)
    with pytest.raises(TypeError, match="PipeSGDStrategy has no option period"):
        PipeSGDStrategy(period=4)
