"""EAMSGD against its equations under forced schedules, and what an elastic band conserves under any."""

import contextlib
import random
import signal
import time
from unittest import mock

import numpy as np
import pytest
import torch
from support.ranks import run_ranks, run_ranks_raw
from test_a_psgd import fatal, gradient, many_turns, run_away, schedule_of
from test_cocod import LR, TOL, X0, Quadratic, bitwise, distance
from torch import nn

from lightning_cocod.algorithms import EAMSGD
from lightning_cocod.algorithms.eamsgd import Centre

LIMIT = 120.0
NESTEROV = {"momentum": 0.9, "nesterov": True}


def eamsgd(n, schedule, *, k, α, overlap=False, momentum=0.0, nesterov=False, fault=None):
    """x_i and x̃ after each turn. With overlap, d comes back with the worker's next turn.

    What must not match: `fault` "one-sided" leaves the centre without d, "before" exchanges before the step, "moved twice"
    moves the centre first and takes d anew.
    """
    g_of = gradient(n)
    c, x, v, t, come = X0, np.tile(X0, (n, 1)), np.zeros((n, X0.size)), [0] * n, {}
    path, centre = [], []
    for i in schedule:

        def exchange(i):
            nonlocal c
            d = α * (x[i] - c)
            c = c if fault == "one-sided" else c + d
            return α * (x[i] - c) if fault == "moved twice" else d

        if fault == "before" and (t[i] + 1) % k == 0:
            x[i] = x[i] - exchange(i)
        g = g_of(i, x[i])
        v[i] = momentum * v[i] + g
        x[i] = x[i] - LR * (g + momentum * v[i] if nesterov else v[i])
        t[i] += 1
        if i in come:
            x[i] = x[i] - come.pop(i)
        if t[i] % k == 0 and fault != "before":
            d = exchange(i)
            if overlap:
                come[i] = d
            else:
                x[i] = x[i] - d
        path.append(x.copy())
        centre.append(c)
    return np.stack(path), np.stack(centre)


CONFIGURATIONS = {
    "k1": {"period": 1, "alpha": 0.3},
    "k2 nesterov": {"period": 2, "alpha": 0.3, "sgd": NESTEROV},
    "k3 default": {"period": 3, "sgd": NESTEROV},
    "k2 overlapped": {"period": 2, "alpha": 0.3, "sgd": NESTEROV, "overlap": True},
    "k1 overlapped": {"period": 1, "alpha": 0.3, "overlap": True},
    "resumed": {"period": 2, "alpha": 0.3, "sgd": NESTEROV, "overlap": True, "resume_at": 9},
}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_turns_follow_the_equations(n):
    schedule = schedule_of(n, 18)
    configurations = {name: {"overlap": False, **c} for name, c in CONFIGURATIONS.items()}
    ranks = run_ranks(many_turns, n, EAMSGD, schedule, configurations, timeout=LIMIT)
    for name, options in configurations.items():
        how = {"k": options["period"], "α": options.get("alpha", 0.9 / n), "overlap": options["overlap"]}
        how |= options.get("sgd", {})
        x, c = eamsgd(n, schedule, **how)
        for rank, run in enumerate(ranks):
            assert distance(run[name][0], x[:, rank]) < TOL
            assert distance(run[name][1], c) < TOL
            assert distance(run[name][2], c[-1]) < TOL
            assert bitwise(run[name][1], ranks[0][name][1])
        for fault in ("one-sided", "before", "moved twice"):
            assert distance(ranks[0][name][1], eamsgd(n, schedule, **how, fault=fault)[1]) > 1e-4


def apart(rank, n, overlap, gradients, bound):
    """Workers that begin in different places, with random pauses. Returns x̃ + x_i before and after, as x_i and x̃."""
    rng = random.Random(rank)
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), LR if gradients else 0.0)
    moved = np.zeros(X0.size)
    with EAMSGD(model, optimizer, period=2, overlap=overlap, max_staleness=bound) as algo:
        with torch.no_grad():
            model.x.add_(rank + 1)
        begun = model.x.detach().numpy().copy()
        for t in range(21):
            optimizer.zero_grad()
            model().backward()
            moved -= (LR if gradients else 0.0) * model.x.grad.numpy()
            algo.step()
            time.sleep(rng.random() * 0.004)
            if t == 8:
                before = model.x.detach().numpy().copy()
                with algo.consensus():
                    inside = model.x.detach().numpy().copy()
                assert bitwise(before, model.x.detach().numpy())
        algo._settle()
        if algo._asked is not None:
            algo._subtract()
        x = model.x.detach().numpy().copy()
        with algo.consensus():
            centre = model.x.detach().numpy().copy()
    return begun, x, centre, moved, inside


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_bands_conserve_the_sum_under_any_schedule(n, overlap):
    for gradients, bound in ((False, None), (True, None), (True, 1)):
        runs = run_ranks(apart, n, overlap, gradients, bound, timeout=LIMIT)
        begun, x, _, moved, _ = (np.sum([run[part] for run in runs], axis=0) for part in range(5))
        centre = runs[0][2]
        assert all(bitwise(centre, run[2]) for run in runs)
        assert all(bitwise(runs[0][4], run[4]) for run in runs)
        assert distance(X0 + begun + moved, centre + x) < TOL * 10
        if not gradients:  # they come together
            assert max(distance(run[1], centre) for run in runs) < max(distance(run[0], X0) for run in runs) / 2


def mistaken(rank, n, overlap):
    answer = Centre.answer

    def one_sided(self, question, content):  # the centre moves by 1.01 d, the worker by d
        version = answer(self, question, content)
        for x̃, minus_d in zip(self.x̃, content, strict=True):
            x̃.sub_(minus_d, alpha=0.01)
        return version

    with mock.patch.object(Centre, "answer", one_sided):
        return apart(rank, n, overlap, True, None)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_sum_shows_a_band_that_pulls_at_one_end_only(overlap):  # the negative control
    runs = run_ranks(mistaken, 2, overlap, timeout=LIMIT)
    begun, x, _, moved, _ = (np.sum([run[part] for run in runs], axis=0) for part in range(5))
    assert distance(X0 + begun + moved, runs[0][2] + x) > 1e-3


def test_a_fast_worker_waits_in_exchanges():
    for bound in (1, 2):
        assert 0 < max(run_ranks(run_away, 2, bound, EAMSGD, {"period": 2}, timeout=LIMIT)[1]) <= bound
    assert max(run_ranks(run_away, 2, None, EAMSGD, {"period": 2}, timeout=LIMIT)[1]) > 2


def poisoned(rank, n, on_nonfinite):
    model = Quadratic(rank)
    optimizer = torch.optim.SGD(model.parameters(), LR, **NESTEROV)
    with EAMSGD(model, optimizer, period=3, overlap=False, on_nonfinite=on_nonfinite) as algo:
        for t in range(9):
            optimizer.zero_grad()
            model().backward()
            if rank == 1 and t == 3:
                model.x.grad[0] = float("nan")
            algo.step()
            if t == 5:
                left = bool(model.x.isfinite().all()), len(optimizer.state)
    return left, bool(model.x.isfinite().all()), algo.skipped


def test_a_worker_that_is_not_finite_begins_anew_at_the_centre():
    runs = run_ranks(poisoned, 3, "skip", timeout=LIMIT)
    assert [run[0] for run in runs] == [(True, 1), (True, 0), (True, 1)]
    assert all(run[1] for run in runs)
    assert [run[2] for run in runs] == [0, 1, 0]


def test_or_ends_the_run_and_names_its_rank():
    outcomes = run_ranks_raw(poisoned, 3, "raise", timeout=LIMIT)
    assert [o.status for o in outcomes] == ["error"] * 3
    assert all("rank 1 has NaN or infinity in its weights at its step 6" in o.traceback for o in outcomes)


def test_the_loss_of_a_worker_ends_the_run_on_all_and_names_it():
    outcomes = run_ranks_raw(fatal, 3, signal.SIGKILL, EAMSGD, {"period": 2}, timeout=LIMIT, grace=20.0)
    assert [o.status for o in outcomes] == ["error", "died", "error"]
    assert all("PeerLost: rank 1 is lost" in outcomes[rank].traceback for rank in (0, 2))


def joins(rank, n):
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    algo = EAMSGD(model, torch.optim.SGD(model.parameters(), 0.1), period=2)
    with contextlib.suppress(RuntimeError), algo:
        model.bias.requires_grad_(True)
        model(torch.ones(3)).sum().backward()
        with pytest.raises(RuntimeError, match="have joined the optimizer"):
            algo.step()
        raise RuntimeError("the end of the test")
    return True


def test_parameters_that_the_centre_does_not_have_are_refused():
    assert all(run_ranks(joins, 2, timeout=LIMIT))


def unfrozen_before_the_start(rank, n):
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    algo = EAMSGD(model, torch.optim.SGD(model.parameters(), 0.1), period=1)
    model.bias.requires_grad_(True)
    with algo:
        (model(torch.ones(3)) * (rank + 1)).sum().backward()
        algo.step()
    return model.bias.detach()


def test_parameters_that_join_before_the_start_are_in_the_centre():
    first, second = run_ranks(unfrozen_before_the_start, 2, timeout=LIMIT)
    assert torch.equal(first, second)
