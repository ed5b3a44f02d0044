"""A-PSGD against its equations under schedules that are forced, and what holds under any schedule.

The quadratics are those of test_cocod. Turns are forced by barriers of the default group, between which one worker steps.
"""

import contextlib
import copy
import gc
import json
import os
import random
import signal
import threading
import time
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_raw
from test_cocod import DIM, HEAVY, LR, TOL, X0, Quadratic, distance, problems
from torch import nn

from lightning_cocod.algorithms import APSGD, DCASGD, EAMSGD

LIMIT = 120.0
SIZES = [2, 3]
PULL = 100
"""An event of a schedule: the worker of this number less 100 pulls."""


def schedule_of(n, length=14):
    """Turns in which some workers fall far behind."""
    p = np.arange(1, n + 1) / (n * (n + 1) / 2)
    return [int(r) for r in np.random.default_rng(n).choice(n, size=length, p=p)]


def taking_turns(rank, n, algorithm, schedule, *, sgd=None, resume_at=None, **options):
    """Worker by worker as in the schedule. Returns x_i and the consensus after each turn, x at the end, and the metrics."""

    def fresh():
        model = Quadratic(rank)
        optimizer = torch.optim.SGD(model.parameters(), LR, **(sgd or {}))
        return model, optimizer, algorithm(model, optimizer, **options)

    def run(turns):
        for turn in turns:
            if turn == PULL + rank:
                algo.pull()
            elif turn == rank:
                optimizer.zero_grad()
                model().backward()
                algo.step()
                algo._settle()
            dist.barrier()
            x.append(model.x.detach().numpy().copy())
            with algo.consensus():
                W.append(model.x.detach().numpy().copy())

    x, W = [], []
    model, optimizer, algo = fresh()
    if resume_at is not None:
        with algo:
            run(schedule[:resume_at])
            saved = copy.deepcopy((model.state_dict(), algo.optimizer_state(optimizer), algo.state_dict()))
        model, optimizer, algo = fresh()
    with algo:
        if resume_at is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        run(schedule[resume_at or 0 :])
        metrics = algo.metrics()
    return np.stack(x), np.stack(W), model.x.detach().numpy().copy(), metrics


def gradient(n):
    H, b = problems(n)
    return lambda i, x: H[i] @ (x - b[i])


def a_psgd(n, schedule, *, overlap=False, momentum=0.0, weight_decay=0.0, fault=None):
    """x_i and W after each turn, and the staleness of each gradient.

    What must not match: `fault` "fresh" takes gradients at W, "no own" brings back W without the own update.
    """
    g_of = gradient(n)
    W, v, x = X0, 0 * X0, np.tile(X0, (n, 1))
    come, version, base, come_base = {}, 0, [0] * n, {}
    path, server, τ = [], [], []
    for i in schedule:
        if i >= PULL:
            x[i - PULL], base[i - PULL] = W, version
            come.pop(i - PULL, None)
        else:
            g = g_of(i, W if fault == "fresh" else x[i])
            τ.append(version - base[i])
            if i in come:
                x[i], base[i] = come.pop(i), come_base[i]
            before = W
            v = momentum * v + g + weight_decay * W
            W = W - LR * v
            version += 1
            brought = before if fault == "no own" else W
            if overlap:
                come[i], come_base[i] = brought, version
            else:
                x[i], base[i] = brought, version
        path.append(x.copy())
        server.append(W)
    return np.stack(path), np.stack(server), τ


CONFIGURATIONS = {
    "plain": {},
    "heavy": {"sgd": HEAVY},
    "overlapped": {"sgd": HEAVY, "overlap": True},
}


def many_turns(rank, n, algorithm, schedule, configurations):
    return {name: taking_turns(rank, n, algorithm, schedule, **c) for name, c in configurations.items()}


@pytest.mark.parametrize("n", SIZES)
def test_turns_follow_the_equations(n):
    schedule = schedule_of(n)
    schedule[7:7] = [PULL]
    configurations = {name: {"overlap": False, **c} for name, c in CONFIGURATIONS.items()}
    configurations["resumed"] = {**configurations["overlapped"], "resume_at": 9}
    ranks = run_ranks(many_turns, n, APSGD, schedule, configurations, timeout=LIMIT)
    for name, c in configurations.items():
        how = {"overlap": c["overlap"], **(c.get("sgd") or {})}
        x, W, τ = a_psgd(n, schedule, **how)
        for rank, (own, seen, end, metrics) in enumerate(run[name] for run in ranks):
            assert distance(own, x[:, rank]) < TOL
            assert distance(seen, W) < TOL
            assert distance(end, W[-1]) < TOL
            if name != "resumed":
                assert metrics["algo/staleness_steps"] == pytest.approx(np.mean(τ))
                assert metrics["algo/staleness_max"] == max(τ) > 1
        for fault in ("fresh", "no own"):
            assert (
                distance(np.stack([run[name][1] for run in ranks], 1), a_psgd(n, schedule, **how, fault=fault)[1][:, None])
                > 1e-4
            )
        assert all(np.array_equal(ranks[0][name][1], run[name][1]) for run in ranks)  # bit for bit
        assert all(np.array_equal(ranks[0][name][2], run[name][2]) for run in ranks)
    assert distance(ranks[0]["overlapped"][1], ranks[0]["heavy"][1]) > 1e-4


# One worker, and identities


def network(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    net.register_parameter("scale", nn.Parameter(torch.tensor(1.5, dtype=torch.float64)))
    net.register_parameter("unused", nn.Parameter(torch.ones(7, dtype=torch.float64)))
    return net


def loss_of(net, x):
    return (net(x) * net.scale).square().mean()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "betas": (0.8, 0.99)}, {"params": p[2:], "weight_decay": 0.0}], 0.01
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, torch.tensor(0.01), momentum=0.5, centered=True),
}


def only_one_steps(rank, n, name, algorithm, options):
    """Rank n − 1 trains, the others only serve it. Returns parameters and optimizer state of plain training, and its own."""

    def train(step_of, optimizer, net):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = torch.Generator().manual_seed(0)
        for _ in range(9):
            optimizer.zero_grad()
            loss_of(net, torch.randn(8, 6, generator=data, dtype=torch.float64)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            step_of()
            schedule.step()

    def state(net, optimizer):
        return [p.detach().clone() for p in net.parameters()], optimizer.state_dict()["state"]

    plain = network()
    optimizer = OPTIMIZERS[name](list(plain.parameters()))
    train(optimizer.step, optimizer, plain)
    served = network()
    with algorithm(served, other := OPTIMIZERS[name](list(served.parameters())), overlap=False, **options) as algo:
        if rank == n - 1:
            train(algo.step, other, served)
            assert not any(other.state.values()) or n == 1
        mid = algo.optimizer_state(other)["state"]
    return state(plain, optimizer), state(served, other), mid


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def all_optimizers(rank, n, algorithm, options):
    return {name: only_one_steps(rank, n, name, algorithm, options) for name in OPTIMIZERS}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_worker_is_the_users_optimizer_bit_for_bit(n):
    for rank, run in enumerate(run_ranks(all_optimizers, n, APSGD, {}, timeout=LIMIT)):
        for plain, served, mid in run.values():
            assert same(plain[0], served[0])  # on those that only serve, too
            assert same(mid, served[1])
            if rank == n - 1:
                assert same(plain[1], served[1])


def test_with_overlap_one_worker_is_not_the_users_optimizer():  # a gradient is computed before the last one has come back
    schedule = [1] * 6
    overlapped, blocking = (a_psgd(2, schedule, overlap=overlap)[1] for overlap in (True, False))
    assert distance(overlapped, blocking) > 1e-3


def applied(rank, n, overlap, algorithm, options):
    """Free training with random pauses. Returns W's way and the sum of this worker's gradients."""
    rng = random.Random(rank)
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), LR / 4)
    total = np.zeros(DIM)
    with algorithm(model, optimizer, overlap=overlap, **options) as algo:
        for t in range(40):
            optimizer.zero_grad()
            model().backward()
            total += model.x.grad.numpy()
            algo.step()
            time.sleep(rng.random() * 0.004 * (1 + 3 * (rank == 0)))
            if t in (7, 30):
                with algo.consensus():
                    time.sleep(rng.random() * 0.01)
        metrics, t = algo.metrics(), algo.t
    return model.x.detach().numpy().copy(), total, metrics, t, threading.active_count()


def free(rank, n, cases):
    return [applied(rank, n, *case) for case in cases]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_under_any_schedule_all_gradients_are_applied_once(n):
    cases = [(False, APSGD, {}), (True, APSGD, {}), (True, APSGD, {"max_staleness": 1}), (True, DCASGD, {"lambda_0": 0.0})]
    for runs in zip(*run_ranks(free, n, cases, timeout=LIMIT), strict=True):
        end, total = runs[0][0], np.sum([run[1] for run in runs], axis=0)
        assert all(np.array_equal(end, run[0]) for run in runs)
        assert distance(X0 - LR / 4 * total, end) < TOL
        assert distance(X0 - LR / 4 * (total - runs[-1][1] / 40), end) > 1e-4  # one gradient of 40 n less
        if n > 1:
            assert all(run[2]["algo/staleness_max"] > 0 for run in runs)
            assert all(run[2]["comm/sent_bytes"] > 0 for run in runs)


# A bound of staleness


def run_away(rank, n, bound, algorithm, options):
    """Rank 0 is slow. Returns by how much rank 1 has been ahead of it, at most, when it has made a step."""
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), LR / 10)
    ahead = []
    with algorithm(model, optimizer, max_staleness=bound, **options) as algo:
        for _ in range(8 if rank == 0 else 24):
            optimizer.zero_grad()
            model().backward()
            algo.step()
            if rank == 0:
                time.sleep(0.05)
            else:
                ahead.append(algo.service.clocks.ahead(algo.clock))
        # a worker that has come to a meeting keeps nobody waiting: rank 1 makes its other steps meanwhile
    return [a for a in ahead if a != -np.inf]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_fast_worker_waits_instead_of_running_away(overlap):
    for bound in (1, 3):
        assert 0 < max(run_ranks(run_away, 2, bound, APSGD, {"overlap": overlap}, timeout=LIMIT)[1]) <= bound
    assert max(run_ranks(run_away, 2, None, APSGD, {"overlap": overlap}, timeout=LIMIT)[1]) > 3


# What is not finite


def poisoned(rank, n, on_nonfinite, value):
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), LR / 4, momentum=0.9)
    seen = []
    with APSGD(model, optimizer, on_nonfinite=on_nonfinite) as algo:
        for t in range(12):
            optimizer.zero_grad()
            model().backward()
            if rank == 1 and t == 5:
                model.x.grad[0] = value  # in one shard
            algo.step()
            seen.append(bool(model.x.isfinite().all()))
        with algo.consensus():
            seen.append(bool(model.x.isfinite().all()))
        versions = [server.version for server in algo.servers.values()]
    return all(seen), versions, algo.skipped


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_dropped_on_all_shards_alike(value):
    for rank, (finite, versions, skipped) in enumerate(run_ranks(poisoned, 3, "skip", value, timeout=LIMIT)):
        assert finite
        assert versions == [3 * 12 - 1]
        assert skipped == (rank == 1)


def test_or_ends_the_run_and_names_its_rank():
    outcomes = run_ranks_raw(poisoned, 3, "raise", float("nan"), timeout=LIMIT)
    assert [o.status for o in outcomes] == ["error"] * 3
    assert all("NonFiniteMessage: rank 1 has NaN or infinity in its gradient at its step 5" in o.traceback for o in outcomes)
    assert "lightning_cocod.comm.errors.NonFiniteMessage" in outcomes[1].traceback
    assert all("comm.errors.PeerLost: rank 1 failed" in outcomes[rank].traceback for rank in (0, 2))


def unseen(rank, n):
    with mock.patch("lightning_cocod.algorithms.a_psgd.finite", return_value=True):
        poisoned(rank, n, "skip", float("nan"))


def test_without_the_look_the_server_has_it_and_says_so():  # the negative control
    outcomes = run_ranks_raw(unseen, 3, timeout=LIMIT)
    assert [o.status for o in outcomes] == ["error"] * 3
    assert any("NonFiniteMessage: the shard of rank " in o.traceback for o in outcomes)


# What is left behind, and what is sent


def sockets():
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


def booked(ledger, before, tolerance):
    """What has been sent and received since, once it is known of all: what has gone out is counted a moment later."""
    deadline = time.monotonic() + 10
    while abs((moved := ledger.totals() - before).sent - moved.received) > tolerance and time.monotonic() < deadline:
        time.sleep(0.01)
    return moved


def again_and_again(rank, n):
    """Whether there are more sockets or threads after each run than before; bytes sent and received by pushes alone."""
    left = []
    dist.barrier()
    begun = sockets(), threading.active_count()
    for _ in range(3):
        model = Quadratic(rank)
        with APSGD(model, torch.optim.SGD(model.parameters(), LR), overlap=False) as algo:
            before = algo.comm.ledger.totals()
            dist.barrier()  # nobody asks before all have looked
            model().backward()
            algo.step()
            own = algo.comm.ledger.totals() - before
            dist.barrier()
            moved = booked(algo.comm.ledger, before, 2 * (n - 1))
            dist.barrier()  # nobody is on its way to the meeting before
            told = [[server.options(), []] for server in algo.servers.values()]
            words = sum(len(json.dumps({"base": 0, "told": of_one}).encode()) for of_one in told)

        def is_left():
            gc.collect()  # a connection may hang on a cycle
            return sockets() > begun[0] or threading.active_count() > begun[1]

        deadline = time.monotonic() + 10  # the store closes its own when it comes to that
        while is_left() and time.monotonic() < deadline:
            time.sleep(0.02)
        left.append(is_left())
        dist.barrier()  # nobody begins again while others still look
    return left, moved.sent, moved.received, words, own.messages


@pytest.mark.parametrize("n", [1, 3])
def test_no_socket_and_no_thread_is_left_and_bytes_are_those_of_the_shards(n):
    for left, sent, received, words, messages in run_ranks(again_and_again, n, timeout=LIMIT):
        assert left == [False] * 3
        if n > 1:
            shard = -(-DIM // n) * 8
            question, answer = 24 + words + shard, 24 + shard
            assert sent == pytest.approx((n - 1) * (question + answer), abs=2 * (n - 1))  # a base has one digit or two
            assert received == pytest.approx((n - 1) * (question + answer), abs=2 * (n - 1))
            assert messages == 1


# A worker that is lost


def fatal(rank, n, fault, algorithm, options):
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), LR / 4)
    with algorithm(model, optimizer, timeout=5.0 if fault == signal.SIGSTOP else 20.0, **options) as algo:
        for t in range(400):
            optimizer.zero_grad()
            model().backward()
            algo.step()
            time.sleep(0.005)
            if rank == 1 and t == 20:
                if fault == "raises":
                    raise ValueError("my own bug")
                os.kill(os.getpid(), fault)


FAULTS = ["raises", signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_loss_of_a_worker_ends_the_run_on_all_and_names_it(fault):
    outcomes = run_ranks_raw(fatal, 3, fault, APSGD, {}, timeout=LIMIT, grace=20.0)
    assert outcomes[1].status == ("error" if fault == "raises" else "died")
    for rank in (0, 2):
        assert outcomes[rank].status == "error"
        assert "PeerLost: rank 1 " in outcomes[rank].traceback
        assert "left" not in outcomes[rank].traceback.splitlines()[-1]


def test_a_waiting_worker_learns_of_the_loss():
    outcomes = run_ranks_raw(fatal, 2, signal.SIGKILL, APSGD, {"max_staleness": 1}, timeout=LIMIT, grace=20.0)
    assert [o.status for o in outcomes] == ["error", "died"]
    assert "PeerLost: rank 1 is lost" in outcomes[0].traceback


# Options


def refusals(rank, n):
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    said = []
    for make in (
        lambda: APSGD(model, optimizer, max_staleness=0),
        lambda: APSGD(model, optimizer, overlap=1),
        lambda: APSGD(model, optimizer, compression="sign"),
        lambda: APSGD(model, [optimizer, torch.optim.SGD(model.parameters(), LR)]),
        lambda: APSGD(model, torch.optim.Adafactor(model.parameters())).__enter__(),
        lambda: DCASGD(model, optimizer, lambda_0=-1.0),
        lambda: DCASGD(model, optimizer, beta=1.0),
        lambda: EAMSGD(model, optimizer, alpha=2.0),
        lambda: EAMSGD(model, optimizer, period=0),
        lambda: APSGD(model, optimizer, weights=[1.0, 3.0]),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            make()
        said.append(str(error.value))
    with APSGD(model, optimizer) as algo:
        model().backward()
        with pytest.raises(RuntimeError, match="the server steps"):
            optimizer.step()
        with pytest.raises(ValueError, match="gradient scaler"):
            algo.step(scaler=torch.amp.GradScaler("cpu"))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
        with pytest.raises(RuntimeError, match="have joined the optimizer"):
            algo.step()
    return said


def test_wrong_input_is_told_in_one_line():
    for said in run_ranks(refusals, 2, timeout=LIMIT):
        assert all("\n" not in text for text in said)
        for text, word in zip(
            said,
            ["max_staleness", "overlap", "compression", "common", "whole", "lambda_0", "beta", "alpha", "period", "weights"],
            strict=True,
        ):
            assert word in text


def other_options(rank, n):
    model = Quadratic(rank)
    with DCASGD(model, torch.optim.SGD(model.parameters(), LR), lambda_0=0.1 * rank):
        pass


def test_other_options_on_another_rank_are_noticed():
    outcomes = run_ranks_raw(other_options, 2, timeout=LIMIT)
    assert [o.status for o in outcomes] == ["error"] * 2
    assert any("MessageMismatch" in o.traceback for o in outcomes)


def started_again(rank, n):
    model = Quadratic(rank)
    algo = APSGD(model, torch.optim.SGD(model.parameters(), LR))
    algo.start()
    first = weakref.ref(algo.service)
    algo.finish()
    gc.collect()
    gone = first() is None
    algo.close()
    return gone


def test_a_service_that_has_ended_is_not_kept():
    assert all(run_ranks(started_again, 2, timeout=LIMIT))


def numpys_rate(rank, n):
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    with APSGD(model, optimizer, overlap=False) as algo:
        before = model.x.detach().clone()
        optimizer.param_groups[0]["lr"] = np.float32(0.0)
        model().backward()
        algo.step()
        return torch.equal(model.x, before)


def test_a_rate_of_numpys_is_told_as_well():
    assert all(run_ranks(numpys_rate, 2, timeout=LIMIT))
