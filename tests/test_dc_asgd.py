"""DC-ASGD against its equations under forced schedules, and its limits: A-PSGD, SGD, no correction, λ₀ |g| ⊙ (W − w_bak)."""

import numpy as np
import pytest
from support.ranks import run_ranks
from test_a_psgd import PULL, all_optimizers, free, gradient, many_turns, same, schedule_of
from test_cocod import HEAVY, LR, TOL, X0, distance

from lightning_cocod.algorithms import APSGD, DCASGD

LIMIT = 120.0
SIZES = [2, 3]


def dc_asgd(
    n, schedule, *, overlap=False, λ=0.04, adaptive=False, β=0.95, ε=1e-7, momentum=0.0, weight_decay=0.0, fault=None
):
    """x_i and W after each turn.

    What must not match: `fault` "late v" uses v before its update, "one v" has one for all workers, "own pull" corrects from
    the worker's newest pull, "decay inside" counts weight decay as part of g, "sign" corrects the other way.
    """
    g_of = gradient(n)
    W, mom, x, base = X0, 0 * X0, np.tile(X0, (n, 1)), np.tile(X0, (n, 1))
    newest, v, come = np.tile(X0, (n, 1)), np.zeros((n, X0.size)), {}
    path, server = [], []
    for i in schedule:
        if i >= PULL:
            i -= PULL
            x[i] = base[i] = newest[i] = W
            come.pop(i, None)
        else:
            g, w_bak = g_of(i, x[i]), (newest if fault == "own pull" else base)[i].copy()
            if i in come:
                x[i] = base[i] = come.pop(i)
            if fault == "decay inside":
                g = g + weight_decay * W
            m = 0 if fault == "one v" else i
            before = v[m].copy()
            v[m] = β * v[m] + (1 - β) * g * g
            factor = λ / np.sqrt((before if fault == "late v" else v[m]) + ε) if adaptive else λ
            g = g + (-1 if fault == "sign" else 1) * factor * g * g * (W - w_bak)
            mom = momentum * mom + g + (0 if fault == "decay inside" else weight_decay * W)
            W = W - LR * mom
            newest[i] = W
            if overlap:
                come[i] = W
            else:
                x[i] = base[i] = W
        path.append(x.copy())
        server.append(W)
    return np.stack(path), np.stack(server)


CONFIGURATIONS = {
    "constant": {"lambda_0": 0.4},
    "default": {},
    "adaptive": {"adaptive": True},
    "constant heavy": {"lambda_0": 0.4, "sgd": HEAVY},
    "adaptive overlapped": {"adaptive": True, "sgd": HEAVY, "overlap": True},
    "constant overlapped": {"lambda_0": 0.4, "overlap": True},
}
RESUMED = {"resumed": {**CONFIGURATIONS["adaptive overlapped"], "resume_at": 9}}
FAULTS = {
    "constant": ["sign"],
    "default": ["sign"],
    "adaptive": ["sign", "late v", "one v"],
    "constant heavy": ["sign", "decay inside"],
    "adaptive overlapped": ["sign", "late v", "one v", "own pull"],
    "constant overlapped": ["sign", "own pull"],
}


def reference(n, schedule, options, fault=None):
    options = {"overlap": False, **options}
    how = {"overlap": options["overlap"], "adaptive": options.get("adaptive", False), **options.get("sgd", {})}
    how["λ"] = options.get("lambda_0", 2.0 if how["adaptive"] else 0.04)
    given = {symbol: options[name] for symbol, name in (("β", "beta"), ("ε", "epsilon")) if name in options}
    return dc_asgd(n, schedule, **how, **given, fault=fault)


@pytest.mark.parametrize("n", SIZES)
def test_turns_follow_the_equations(n):
    schedule = schedule_of(n)
    schedule[7:7] = [PULL]
    configurations = {name: {"overlap": False, **c} for name, c in (CONFIGURATIONS | RESUMED).items()}
    ranks = run_ranks(many_turns, n, DCASGD, schedule, configurations, timeout=LIMIT)
    for name, options in configurations.items():
        x, W = reference(n, schedule, options)
        for rank, run in enumerate(ranks):
            assert distance(run[name][0], x[:, rank]) < TOL
            assert distance(run[name][1], W) < TOL
            assert np.array_equal(run[name][1], ranks[0][name][1])
        for fault in FAULTS.get(name, ()):
            assert distance(ranks[0][name][1], reference(n, schedule, options, fault)[1]) > 1e-6


def both(rank, n, schedule, options):
    return [many_turns(rank, n, a, schedule, c) for a, c in ((APSGD, options["a"]), (DCASGD, options["dc"]))]


def test_without_λ_it_is_a_psgd_bit_for_bit():
    schedule = schedule_of(3)
    sgd = {"sgd": HEAVY, "overlap": True}
    without = {**sgd, "lambda_0": 0.0}
    options = {"a": {"it": sgd}, "dc": {"it": without, "adaptive": {**without, "adaptive": True}, "with λ": sgd}}
    for a, dc in run_ranks(both, 3, schedule, options, timeout=LIMIT):
        assert np.array_equal(a["it"][1], dc["it"][1])
        assert np.array_equal(a["it"][1], dc["adaptive"][1])
        assert not np.array_equal(a["it"][1], dc["with λ"][1])


def test_without_delay_there_is_no_correction():
    schedule = [event for i in schedule_of(3, 10) for event in (PULL + i, i)]
    late = schedule_of(3, 10)
    blocking = {"overlap": False, "sgd": HEAVY}
    options = {"a": {"it": blocking}, "dc": {"it": {**blocking, "lambda_0": 5.0}, "a": {**blocking, "adaptive": True}}}
    for a, dc in run_ranks(both, 3, schedule, options, timeout=LIMIT):
        assert np.array_equal(a["it"][1], dc["it"][1])
        assert np.array_equal(a["it"][1], dc["a"][1])
        assert a["it"][3]["algo/staleness_max"] == 0
    a, dc = run_ranks(both, 3, late, options, timeout=LIMIT)[0]
    assert not np.array_equal(a["it"][1], dc["it"][1])


def test_one_worker_is_the_users_optimizer_bit_for_bit():
    for n, options in ((1, {}), (2, {}), (2, {"adaptive": True})):
        for run in run_ranks(all_optimizers, n, DCASGD, options, timeout=LIMIT):
            assert all(same(plain[0], served[0]) for plain, served, _ in run.values())


def test_without_memory_the_adaptive_correction_is_of_the_size_of_g():
    n, schedule = 2, [1, 1, 1, 0, 0, 1]
    options = {"adaptive": True, "beta": 0.0, "epsilon": 1e-30, "overlap": False}
    W = run_ranks(many_turns, n, DCASGD, schedule, {"it": options}, timeout=LIMIT)[0]["it"][1]
    g = gradient(n)(0, X0)  # of rank 0's first turn, whose pull is from before the others'
    λ0 = 2.0
    assert distance(W[3], W[2] - LR * (g + λ0 * np.abs(g) * (W[2] - X0))) < TOL
    assert distance(W[3], W[2] - LR * (g + λ0 * g * g * (W[2] - X0))) > 1e-4
    assert distance(W, reference(n, schedule, options)[1]) < TOL


def test_the_sum_of_applied_gradients_needs_a_λ_of_0():  # the negative control of the sum under any schedule
    cases = [(True, DCASGD, {"lambda_0": 0.3})]
    runs = [run[0] for run in run_ranks(free, 2, cases, timeout=LIMIT)]
    assert distance(X0 - LR / 4 * np.sum([run[1] for run in runs], axis=0), runs[0][0]) > 1e-6
