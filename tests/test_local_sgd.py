"""Local SGD: the blocking average. Exact test 5 of the specification; the workers' quadratics are those of test_cocod."""

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
    AdamW,
    bitwise,
    branches,
    distance,
    gradients,
    network_run,
    normalised,
    paper,
    paths_of,
    positions,
    problems,
    synchronous,
    unequal,
)

from lightning_cocod import SSGD, LocalSGD, PostLocalSGD

SIZES = [1, 2, 4]


def local_sgd(n, k, w, *, momentum=0.0, weight_decay=0.0, lag=0):
    """x_i(t), t = 0 … steps, before the forward of step t: array [t, i, :]."""
    x, v, path = np.tile(X0, (n, 1)), np.zeros((n, DIM)), []
    for t in range(STEPS + 1):
        if t > 0 and t % (k + lag) == 0:
            x = np.tile(w @ x, (n, 1))
        path.append(x)
        v = momentum * v + gradients(x, *problems(n)) + weight_decay * x
        x = x - LR * v
    return np.stack(path)


def one_step_rounds_of(n, w, update, *, synchronous=False):
    """x(t) where all average their parameters after every step, or, if it is `synchronous`, the gradients before it."""
    x, path = X0, []
    for _ in range(STEPS + 1):
        path.append(x)
        g = gradients(x, *problems(n))
        x = w @ update(x, np.tile(w @ g, (n, 1)) if synchronous else g)
    return np.stack(path)


def clipped(x, g):
    """A step of SGD along gradients that are at most 1 long."""
    return x - LR * g * np.minimum(1, 1 / (np.linalg.norm(g, axis=1, keepdims=True) + 1e-6))


CONFIGURATIONS = {
    "k1": {"period": 1, "sgd": HEAVY},
    "k1 unequal": {"period": 1, "unequal": True, "sgd": HEAVY},
    "k1 adam": {"period": 1, "unequal": True, "adamw": {"weight_decay": 0.0}},
    "k1 clipped": {"period": 1, "unequal": True, "clip_norm": 1.0},
    "s-sgd adam": {"algorithm": SSGD, "unequal": True, "adamw": {"weight_decay": 0.0}},
    "k3": {"period": 3},
    "k3 unequal": {"period": 3, "unequal": True, "sgd": HEAVY},
    "k3 evaluated": {"period": 3, "unequal": True, "sgd": HEAVY, "evaluate": (0, 2, 3, 7)},
    "k3 resumed": {"period": 3, "unequal": True, "sgd": HEAVY, "resume_at": 5},
    "schedule": {"period": {0: 1, 4: 3}},
    "warm-up": {"period": 3, "warmup_steps": 4, "unequal": True, "sgd": HEAVY},
    "post": {"period": 3, "warmup_steps": 4, "unequal": True, "sgd": HEAVY, "algorithm": PostLocalSGD},
    "reweighed": {"period": 3, "reweigh": {4: "new"}, "evaluate": (5, 8)},
    "reweighed late": {"period": 3, "reweigh": {10: "new"}},
}


def with_weights(configuration, n):
    return {"algorithm": LocalSGD, **configuration} | (
        {"reweigh": {t: list(range(n, 0, -1)) for t in configuration["reweigh"]}} if "reweigh" in configuration else {}
    )


@functools.cache
def paths(n):
    configurations = {name: with_weights(options, n) for name, options in CONFIGURATIONS.items()}
    ranks = run_ranks(paths_of, n, configurations, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in CONFIGURATIONS}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["k1", "k1 unequal"])
def test_period_one_is_synchronous_sgd(n, name):  # field report 14
    w = unequal(n) if "unequal" in name else normalised(np.ones(n))
    x = positions(paths(n)[name])
    assert distance(x, synchronous(n, w, **HEAVY)[:, None]) < TOL
    assert all(bitwise(x[:, 0], x[:, i]) for i in range(n))
    if n > 1:
        assert distance(x, paper(n, 1, w, **HEAVY)) > 1e-3  # with the delay it would be CoCoD


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "update"), [("k1 adam", lambda: AdamW().step), ("k1 clipped", lambda: clipped)])
def test_that_holds_only_where_a_step_is_linear_in_the_gradient(n, name, update):
    """Not with Adam, nor where each worker clips its own gradient."""
    x, w = positions(paths(n)[name]), unequal(n)
    assert distance(x, one_step_rounds_of(n, w, update())[:, None]) < TOL
    synchronous = one_step_rounds_of(n, w, update(), synchronous=True)[:, None]
    assert distance(x, synchronous) < TOL if n == 1 else distance(x, synchronous) > 1e-3
    if name == "k1 adam":
        assert distance(positions(paths(n)["s-sgd adam"]), synchronous) < TOL


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "options"), [("k3", {}), ("k3 unequal", HEAVY)])
def test_longer_periods_are_local_sgd(n, name, options):
    w = unequal(n) if "unequal" in name else normalised(np.ones(n))
    x = positions(paths(n)[name])
    assert distance(x, local_sgd(n, 3, w, **options)) < TOL
    if n > 1:
        assert distance(x, local_sgd(n, 3, w, lag=1, **options)) > 1e-3
        assert distance(x, synchronous(n, w, **options)[:, None]) > 1e-3
        assert distance(x, local_sgd(n, 3, unequal(n)[::-1], **options)) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
def test_all_replicas_are_equal_bit_for_bit_after_a_round_and_at_the_end(n):
    ranks = paths(n)["k3 unequal"]
    x = positions(ranks)
    together = [t for t in range(STEPS + 1) if all(bitwise(x[t, 0], x[t, i]) for i in range(n))]
    assert together == [0, 3, 6, 9, 12]
    assert all(bitwise(ranks[0].end, path.end) for path in ranks)
    assert distance(ranks[0].end, unequal(n) @ x[-1]) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_evaluating_changes_nothing_and_sees_the_weighted_mean(n):
    plain, evaluated = paths(n)["k3 unequal"], paths(n)["k3 evaluated"]
    x = positions(plain)
    assert bitwise(x, positions(evaluated))
    for t, seen in evaluated[0].consensus.items():
        assert all(bitwise(seen, path.consensus[t]) for path in evaluated)
        assert distance(seen, unequal(n) @ x[t]) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_a_run_resumed_from_its_state_is_the_uninterrupted_run_bit_for_bit(n):
    for whole, resumed in zip(paths(n)["k3 unequal"], paths(n)["k3 resumed"], strict=True):
        assert bitwise(whole.x, resumed.x)


@pytest.mark.parametrize("n", SIZES)
def test_new_weights_are_those_of_the_rounds_that_begin_with_the_next_average(n):
    x, old, new = positions(paths(n)["reweighed"]), normalised(np.ones(n)), unequal(n)[::-1]
    G = np.stack([gradients(row, *problems(n)) for row in x])
    for t, w, other in ((3, old, new), (6, old, new), (9, new, old)):  # the round that ends at 6 began before the change
        assert distance(x[t], w @ (x[t - 1] - LR * G[t - 1])) < TOL
        assert n == 1 or distance(x[t], other @ (x[t - 1] - LR * G[t - 1])) > 1e-4


@pytest.mark.parametrize("n", [2, 4])
def test_before_the_next_average_the_consensus_has_the_weights_of_the_round_under_way(n):
    ranks, old = paths(n)["reweighed"], normalised(np.ones(n))
    assert distance(ranks[0].consensus[5], old @ positions(ranks)[5]) < TOL


@pytest.mark.parametrize("n", [2, 4])
def test_in_a_round_with_new_weights_consensus_and_end_have_them_too(n):
    ranks, new = paths(n)["reweighed"], unequal(n)[::-1]  # the rounds from 6 on have the new weights
    assert distance(ranks[0].consensus[8], new @ positions(ranks)[8]) < TOL
    ranks = paths(n)["reweighed late"]  # and here the one from 12 to the end
    assert distance(ranks[0].end, new @ positions(ranks)[-1]) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_a_schedule_changes_the_length_of_rounds(n):
    x = positions(paths(n)["schedule"])
    together = [t for t in range(STEPS + 1) if all(bitwise(x[t, 0], x[t, i]) for i in range(n))]
    assert together == (list(range(STEPS + 1)) if n == 1 else [0, 1, 2, 3, 4, 7, 10, 13])


@pytest.mark.parametrize("n", SIZES)
def test_post_local_sgd_is_synchronous_first_and_then_local(n):
    x = positions(paths(n)["warm-up"])
    assert distance(x[:5], synchronous(n, unequal(n), **HEAVY)[:5, None]) < TOL
    together = [t for t in range(STEPS + 1) if all(bitwise(x[t, 0], x[t, i]) for i in range(n))]
    assert together == (list(range(STEPS + 1)) if n == 1 else [0, 1, 2, 3, 4, 7, 10, 13])


def identical_batches(rank, n):
    return [network_run(rank, n, False, k, LocalSGD) for k in (0, 1, 3)]


@pytest.mark.parametrize("n", SIZES)
def test_identical_batches_are_plain_sgd_exactly_for_any_period(n):
    for plain, *averaged in run_ranks(identical_batches, n, timeout=LIMIT):
        assert all(torch.equal(plain, x) for x in averaged)


def one_step_rounds(rank, n):
    return branches(rank, n, algorithm=LocalSGD, branching=False, period=1)


def test_period_one_is_one_process_on_the_concatenated_batch():
    single = branches(0, 1, concatenated=True, branching=False)
    for worker in run_ranks(one_step_rounds, 2, timeout=LIMIT):
        torch.testing.assert_close(worker["shared"], single["shared"], rtol=TOL, atol=TOL)


@pytest.mark.parametrize("n", SIZES)
def test_post_local_sgd_is_local_sgd_after_a_synchronous_start(n):
    for post, plain in zip(paths(n)["post"], paths(n)["warm-up"], strict=True):
        assert bitwise(post.x, plain.x)
    assert distance(positions(paths(n)["post"])[:5], synchronous(n, unequal(n), **HEAVY)[:5, None]) < TOL


def test_post_local_sgd_without_a_start_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="warmup_steps must be a whole number of at least 1, got 0"):
        PostLocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), warmup_steps=0)
