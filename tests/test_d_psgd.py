"""D-PSGD against a serial simulation with W. The quadratics are those of test_cocod."""

import functools
import os

import numpy as np
import pytest
import torch
from support.ranks import run_ranks, run_ranks_raw
from test_cocod import (
    DIM,
    HEAVY,
    LIMIT,
    LR,
    STEPS,
    TOL,
    X0,
    Quadratic,
    bitwise,
    distance,
    gradients,
    paper,
    paths_of,
    positions,
    problems,
)
from torch import nn

from lightning_cocod import DPSGD, SSGD, CoCoD, MessageMismatch, NonFiniteMessage
from lightning_cocod.comm.mixing import ring, undirected

SIZES = [1, 2, 3, 4]
OWN = [[0.7, 0.3, 0.0, 0.0], [0.3, 0.4, 0.3, 0.0], [0.0, 0.3, 0.3, 0.4], [0.0, 0.0, 0.4, 0.6]]
"""A path of four workers."""


def mixed(n, W, *, momentum=0.0, weight_decay=0.0, after=False, start=None, rate=LR):
    """x_i(t), t = 0 … STEPS. What must not match: `after` takes the gradient at the mixed model."""
    x, v, path = np.tile(X0, (n, 1)) if start is None else start, np.zeros((n, DIM)), []
    for _ in range(STEPS + 1):
        path.append(x)
        mean = W @ x
        at = mean if after else x
        v = momentum * v + gradients(at, *problems(n)) + weight_decay * at
        x = mean - rate * v
    return np.stack(path)


class Alone(DPSGD):
    """With the identity, which is refused."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        n = self.comm.world_size
        self.matrices = (tuple(tuple(float(i == j) for j in range(n)) for i in range(n)),)


CONFIGURATIONS = {
    "ring": {"algorithm": DPSGD},
    "exponential": {"algorithm": DPSGD, "graph": "exponential", "sgd": HEAVY},
    "full": {"algorithm": DPSGD, "graph": "full"},
    "heavy": {"algorithm": DPSGD, "sgd": HEAVY},
    "alone": {"algorithm": Alone, "sgd": HEAVY},
    "waiting": {"algorithm": DPSGD, "sgd": HEAVY, "overlap": False},
    "resumed": {"algorithm": DPSGD, "sgd": HEAVY, "resume_at": 8},
    "evaluated": {"algorithm": DPSGD, "sgd": HEAVY, "evaluate": (0, 1, 7, 8)},
    "cocod": {"algorithm": CoCoD, "period": 1},
    "ssgd": {"algorithm": SSGD},
}


@functools.cache
def paths(n):
    configurations = CONFIGURATIONS | ({"own": {"algorithm": DPSGD, "graph": OWN}} if n == 4 else {})
    ranks = run_ranks(paths_of, n, configurations, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in configurations}


def matrix(name, n):
    return np.array(OWN if name == "own" else undirected({"heavy": "ring"}.get(name, name), n)[0])


CASES = [(name, n) for n in SIZES for name in ("ring", "exponential", "full", "heavy")] + [("own", 4)]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_the_trajectory_is_that_of_a_serial_simulation_with_w(name, n):
    options, x = HEAVY if name in ("heavy", "exponential") else {}, positions(paths(n)[name])
    assert distance(x, mixed(n, matrix(name, n), **options)) < TOL
    if n > 1:
        assert distance(x, mixed(n, matrix(name, n), after=True, **options)) > 1e-3
        assert distance(x, mixed(n, np.eye(n), **options)) > 1e-3
    if n == 4 and name in ("ring", "own"):
        assert distance(x, mixed(n, matrix("full", n))) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_a_full_graph_is_cocod_with_a_period_of_1_and_no_all_reduce_of_gradients(n):
    x = positions(paths(n)["full"])
    assert distance(x, paper(n, 1)) < TOL
    assert distance(x, positions(paths(n)["cocod"])) < TOL
    # x_i(t + 1) = x̄(t) − γ G_i(t): the mean of the workers' is S-SGD's step, taken from gradients at their own x_i
    G = np.stack([gradients(row, *problems(n)) for row in x[:-1]])
    assert distance(x[1:].mean(1), (x[:-1] - LR * G).mean(1)) < TOL
    assert (distance(x, positions(paths(n)["ssgd"])) > 1e-3) == (n > 1)


@pytest.mark.parametrize("n", SIZES)
def test_the_identity_is_independent_sgd(n):
    x = positions(paths(n)["alone"])
    assert distance(x, mixed(n, np.eye(n), **HEAVY)) < TOL
    assert (distance(x, positions(paths(n)["heavy"])) > 1e-3) == (n > 1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["waiting", "resumed", "evaluated"])
def test_waiting_resuming_and_evaluating_change_no_bit(n, name):
    for other, plain in zip(paths(n)[name], paths(n)["heavy"], strict=True):
        assert bitwise(other.x, plain.x)
        assert bitwise(other.end, plain.end)


@pytest.mark.parametrize("n", SIZES)
def test_the_consensus_is_the_mean(n):
    evaluated = paths(n)["evaluated"]
    for t, seen in evaluated[0].consensus.items():
        assert all(bitwise(seen, path.consensus[t]) for path in evaluated)
        assert distance(seen, positions(evaluated)[t].mean(0)) < TOL
    assert all(bitwise(evaluated[0].end, path.end) for path in evaluated)
    assert distance(evaluated[0].end, positions(evaluated)[-1].mean(0)) < TOL


def without_gradients(rank, n, graph, alike):
    """x_i(t), from a start of this rank's own."""
    model = Quadratic(0 if alike else rank)
    path = []
    with DPSGD(model, torch.optim.SGD(model.parameters(), 0.0), graph) as algo:
        algo._drain()
        torch._foreach_zero_(algo.S.buckets)  # what has been sent is the weights of rank 0
        with torch.no_grad():
            model.x.copy_(torch.tensor(np.random.default_rng(0 if alike else rank).normal(size=DIM)))
        for _ in range(30):
            path.append(model.x.detach().numpy().copy())
            model().backward()
            algo.step()
    return np.stack(path)


@pytest.mark.parametrize("graph", ["ring", "exponential", "full", OWN])
def test_without_gradients_the_mean_stays_and_the_distance_shrinks_as_the_second_eigenvalue_says(graph):
    x = np.stack(run_ranks(without_gradients, 4, graph, False, timeout=LIMIT), axis=1)
    W = np.array(undirected(graph, 4)[0])
    λ = np.sort(np.abs(np.linalg.eigvalsh(W)))[-2]
    assert distance(x.mean(1), x[0].mean(0)) < TOL
    apart = np.linalg.norm(x - x.mean(1, keepdims=True), axis=(1, 2))
    assert apart[0] > 1
    assert all(apart[t + 1] <= λ * apart[t] + TOL for t in range(1, 29))  # from the first merge of the own start on
    if λ > 0.1:  # the negative control: a smaller one is no bound
        assert any(apart[t + 1] > 0.95 * λ * apart[t] + TOL for t in range(1, 29))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_where_all_have_the_same_mixing_is_exactly_nothing(n):
    for x in run_ranks(without_gradients, n, "ring", True, timeout=LIMIT):
        assert all(bitwise(x[0], row) for row in x)
    W = np.array(ring(3))
    x = np.random.default_rng(0).normal(size=1000)
    assert not bitwise(W[0, 0] * x + W[0, 1] * x + W[0, 2] * x, x)  # the negative control: a sum of products is not


# What goes wrong


def model_and_optimizer(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def not_finite(rank, n, rule, algorithm, options):
    """Rank 1 has a NaN in its weights after the fourth step; what all see six steps later."""
    model, optimizer = model_and_optimizer(rank)
    generator = torch.Generator().manual_seed(rank)
    with algorithm(model, optimizer, on_nonfinite=rule, **options) as algo:
        for t in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=generator)).square().sum().backward()
            if t == 3 and rank == 1:
                model[0].weight.grad[0, 0] = torch.nan
            algo.step()
            with torch.no_grad():
                broken = [not p.isfinite().all() for p in model.parameters()]
            assert not any(broken) or (rank == 1 and t < 8)
        assert not any(broken)
        forgotten = len(optimizer.state) == 0 or all(s["momentum_buffer"].isfinite().all() for s in optimizer.state.values())
        weights = getattr(algo, "push_weights", [1.0] * n)
    return [t.detach().clone() for t in model.state_dict().values()], forgotten, weights


@pytest.mark.parametrize("options", [{}, {"graph": "full"}])
def test_a_rank_that_is_not_finite_goes_on_from_a_sound_one(options):
    ranks = run_ranks(not_finite, 3, "skip", DPSGD, options, timeout=LIMIT)
    for state, forgotten, _ in ranks:
        assert forgotten
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(state, ranks[0][0], strict=True))


def test_or_ends_all_ranks_which_name_it():
    for end in run_ranks_raw(not_finite, 3, "raise", DPSGD, {}, leftovers_ok=True, timeout=LIMIT):
        assert end.status == "error"
        assert NonFiniteMessage.__name__ in end.traceback
        assert "in the message of rank 1" in end.traceback


def uneven(rank, n, algorithm, options):
    model, optimizer = model_and_optimizer(rank)
    try:
        with algorithm(model, optimizer, **options):
            for _ in range(6 + (rank == 1)):
                optimizer.zero_grad()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
    except MessageMismatch as error:
        return str(error)
    raise AssertionError("nobody has noticed")


def test_ranks_with_different_numbers_of_steps_are_both_named():
    for text in run_ranks(uneven, 2, DPSGD, {}, leftovers_ok=True, timeout=LIMIT):
        assert "rank 0" in text
        assert "rank 1" in text
        assert "d_psgd/finish at step 6" in text
        assert "d_psgd/round at step 7" in text


def different_matrices(rank, n):
    model, optimizer = model_and_optimizer(rank)
    a = 0.5 + 0.1 * rank
    graph = [[a, 1 - a], [1 - a, a]]
    try:
        with DPSGD(model, optimizer, graph) as algo:
            model(torch.ones(4, 3)).sum().backward()
            algo.step()
    except MessageMismatch as error:
        return str(error)
    raise AssertionError("nobody has noticed")


def test_ranks_that_mix_by_different_matrices_are_out_of_step():
    for text in run_ranks(different_matrices, 2, leftovers_ok=True, timeout=LIMIT):
        assert "d_psgd/round at step 0" in text
        assert "the same options" in text


def lost(rank, n, algorithm, options):
    """Rank 1 leaves without a word."""
    model, optimizer = model_and_optimizer(rank)
    with algorithm(model, optimizer, timeout=20.0, **options):
        for t in range(100):
            if t == 5 and rank == 1:
                os._exit(3)
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()


def test_a_peer_that_is_lost_is_named_by_all_others():
    first, second, third = run_ranks_raw(lost, 3, DPSGD, {}, leftovers_ok=True, timeout=LIMIT, grace=40)
    assert second.status == "died"
    for end in (first, third):
        assert end.status == "error"
        assert "PeerLost" in end.traceback
        assert "rank 1" in end.traceback


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"graph": "star"}, "graph must be 'ring', 'exponential', 'full' or a matrix"),
        ({"compression": "int8"}, "d_psgd sends models, in which a codec's error would stay: leave compression out"),
        ({"weights": [1.0]}, "d_psgd weighs all workers alike: leave weights out"),
        ({"intra_node": 2}, "d_psgd has no rounds at whose ends all workers average"),
        ({"overlap": 1}, "overlap must be True or False"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, text):
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=text) as error:
        DPSGD(model, torch.optim.SGD(model.parameters(), 0.1), **options)
    assert "\n" not in str(error.value)
