"""SGP and OSGP against a serial push-sum. The quadratics are those of test_cocod."""

import functools

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
    paths_of,
    positions,
    problems,
)
from test_d_psgd import lost, not_finite, uneven
from torch import nn

from lightning_cocod import DPSGD, SGP
from lightning_cocod.comm.mixing import directed

SIZES = [1, 2, 3, 4]
IRREGULAR = {
    1: {0: []},
    2: [[0.8, 0.5], [0.2, 0.5]],
    3: {0: [1, 2], 1: [2], 2: [0]},
    4: {0: [1, 2, 3], 1: [0], 2: [3], 3: [0]},
}


def simulated(n, graph, τ=0, *, momentum=0.0, weight_decay=0.0, biased=False, start=None, rate=LR):
    """z_i(t), t = 0 … STEPS, and w_i(t). Written with p x and p w. What must not match: `biased` takes gradients at x."""
    matrices = [np.array(P) for P in directed(graph, n)]
    x, w, v = np.tile(X0, (n, 1)) if start is None else start, np.ones(n), np.zeros((n, DIM))
    k, sent, path, weights = 0, None, [], []
    for t in range(STEPS + 1):
        if τ and t % τ == 0:
            if sent is not None:
                P, X, W = sent
                x, w = x + (P @ X - X), w + (P @ W - W)
            sent, k = (matrices[k % len(matrices)], x, w), k + 1
        z = x / w[:, None]
        path.append(z)
        weights.append(w)
        v = momentum * v + gradients(x if biased else z, *problems(n)) + weight_decay * x
        x = x - rate * v
        if not τ:
            P, k = matrices[k % len(matrices)], k + 1
            x, w = P @ x, P @ w
    return np.stack(path), np.stack(weights)


class Forgetful(SGP):
    """A resume without w."""

    def load_state_dict(self, state):
        ones = [1.0] * self.comm.world_size
        super().load_state_dict({**state, "push_weights": [ones, ones]})


def configurations(n):
    odd = {"algorithm": SGP, "graph": IRREGULAR[n], "sgd": HEAVY}
    return {
        "one peer": {"algorithm": SGP},
        "exponential": {"algorithm": SGP, "graph": "exponential", "sgd": HEAVY},
        "irregular": odd,
        "evaluated": {**odd, "evaluate": (0, 1, 7, 8)},
        "resumed": {**odd, "resume_at": 8},
        "forgetful": {**odd, "algorithm": Forgetful, "resume_at": 8},
        "osgp 1": {"algorithm": SGP, "delay": 1},
        "osgp 3": {**odd, "delay": 3},
        "osgp 3 waiting": {**odd, "delay": 3, "overlap": False},
        "osgp 3 resumed": {**odd, "delay": 3, "resume_at": 8},
        "osgp 3 evaluated": {**odd, "delay": 3, "evaluate": (0, 1, 7, 8, 9)},
        "full": {"algorithm": SGP, "graph": "full", "delay": 1},
        "d_psgd": {"algorithm": DPSGD, "graph": "full"},
    }


@functools.cache
def paths(n):
    ranks = run_ranks(paths_of, n, configurations(n), timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in configurations(n)}


def expected(name, n, **options):
    of = configurations(n)[name]
    return simulated(n, of.get("graph", "one_peer"), of.get("delay", 0), **of.get("sgd", {}), **options)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["one peer", "exponential", "irregular", "osgp 1", "osgp 3"])
def test_the_trajectory_is_that_of_a_serial_push_sum(n, name):
    x, of = positions(paths(n)[name]), configurations(n)[name]
    assert distance(x, expected(name, n)[0]) < TOL
    if n > 1:
        wrong = simulated(n, of.get("graph", "one_peer"), (of.get("delay", 0) + 1) % 4, **of.get("sgd", {}))[0]
        assert distance(x, wrong) > 1e-3  # another delay
        if of.get("graph") is IRREGULAR[n]:
            assert distance(x, expected(name, n, biased=True)[0]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("name", "plain"),
    [("resumed", "irregular"), ("evaluated", "irregular")]
    + [(f"osgp 3 {how}", "osgp 3") for how in ("waiting", "resumed", "evaluated")],
)
def test_waiting_resuming_and_evaluating_change_no_bit(n, name, plain):
    for other, path in zip(paths(n)[name], paths(n)[plain], strict=True):
        assert bitwise(other.x, path.x)
        assert bitwise(other.end, path.end)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_resume_without_the_weights_is_another_run(n):
    for other, path in zip(paths(n)["forgetful"], paths(n)["irregular"], strict=True):
        assert bitwise(other.x[:9], path.x[:9])
        assert distance(other.x[-1], path.x[-1]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["evaluated", "osgp 3 evaluated"])
def test_the_consensus_is_the_mean_of_all_that_there_is(n, name):
    evaluated = paths(n)[name]
    z, w = expected(name, n)
    for t, seen in evaluated[0].consensus.items():
        assert all(bitwise(seen, path.consensus[t]) for path in evaluated)
        assert distance(seen, (w[t][:, None] * z[t]).mean(0)) < TOL  # what is in flight changes no sum
        assert n == 1 or t < 2 or distance(seen, z[t].mean(0)) > 1e-5
    assert all(bitwise(evaluated[0].end, path.end) for path in evaluated)
    assert distance(evaluated[0].end, (w[-1][:, None] * z[-1]).mean(0)) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_a_full_graph_with_a_delay_of_1_is_d_psgd(n):
    assert bitwise(positions(paths(n)["full"]), positions(paths(n)["d_psgd"]))


def without_gradients(rank, n, graph, delay):
    """z_i(t) and all w(t), from a start of this rank's own."""
    model, path, weights = Quadratic(rank), [], []
    with SGP(model, torch.optim.SGD(model.parameters(), 0.0), graph, delay=delay) as algo:
        algo._drain()
        if algo.S is not None:
            torch._foreach_zero_(algo.S.buckets)  # what has been sent is the weights of rank 0
            algo._after = algo.push_weights
        with torch.no_grad():
            model.x.copy_(torch.tensor(np.random.default_rng(rank).normal(size=DIM)))
        for _ in range(120):
            path.append(model.x.detach().numpy().copy())
            weights.append(list(algo.push_weights))
            model().backward()
            algo.step()
    return np.stack(path), np.array(weights)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_without_gradients_every_z_goes_to_the_mean_and_the_weights_add_up_whatever_the_graph(n, delay):
    ranks = run_ranks(without_gradients, n, IRREGULAR[n], delay, timeout=LIMIT)
    z, w = np.stack([path for path, _ in ranks], axis=1), ranks[0][1]
    assert all(bitwise(w, of) for _, of in ranks)
    mean = z[0].mean(0)
    assert distance(w.sum(1), n) < TOL
    assert distance((w[:, :, None] * z).mean(1), mean) < TOL  # Σx stays
    assert distance(z[-1], mean) < 1e-10
    assert np.abs(w[-1] - 1).max() > 0.1
    assert distance(w[-1][:, None] * z[-1], mean) > 1e-2  # the negative control: x does not
    assert distance(z[-1].mean(0), mean) < 1e-10 < distance((w[-1][:, None] * z[0]).mean(0), mean)


@pytest.mark.parametrize("graph", ["one_peer", "exponential", "full"])
@pytest.mark.parametrize("n", [3, 4])
def test_in_a_regular_graph_weights_are_exactly_1(n, graph):
    for _, w in run_ranks(without_gradients, n, graph, 0, timeout=LIMIT):
        assert (w == 1).all()


@pytest.mark.parametrize("graph", ["one_peer", {0: [1, 2], 1: [2], 2: [0]}])
@pytest.mark.parametrize("delay", [0, 2])
def test_a_rank_that_is_not_finite_goes_on_from_a_sound_one(graph, delay):
    options = {"graph": graph, "delay": delay}
    ranks = run_ranks(not_finite, 3, "skip", SGP, options, timeout=LIMIT)
    for state, forgotten, w in ranks:
        assert forgotten
        assert abs(sum(w) - 3) < TOL
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(state, ranks[0][0], strict=True))


def test_ranks_with_different_numbers_of_steps_are_both_named():
    for text in run_ranks(uneven, 2, SGP, {}, leftovers_ok=True, timeout=LIMIT, grace=40):
        assert "rank 0" in text
        assert "rank 1" in text
        assert "sgp/finish at step 6" in text
        assert "sgp/round at step 7" in text


def test_a_peer_that_is_lost_is_named_by_all_others():
    first, second, third = run_ranks_raw(lost, 3, SGP, {"delay": 1}, leftovers_ok=True, timeout=LIMIT, grace=40)
    assert second.status == "died"
    assert all("PeerLost" in end.traceback and "rank 1" in end.traceback for end in (first, third))


def steps_by_the_optimizer(rank, n):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with SGP(model, optimizer, IRREGULAR[2]):
        model(torch.ones(2)).backward()
        with pytest.raises(RuntimeError, match=r"call step\(\) of the algorithm .* holds z = x / w"):
            optimizer.step()


def test_a_plain_loop_on_an_irregular_graph_needs_the_explicit_form():
    run_ranks(steps_by_the_optimizer, 2, timeout=LIMIT)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"graph": "ring"}, "graph must be 'one_peer', 'exponential', 'full' or a matrix"),
        ({"delay": -1}, "delay must be a whole number of at least 0"),
        ({"compression": "int8"}, "sgp sends models"),
        ({"weights": [1.0]}, "sgp weighs all workers alike"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, text):
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=text):
        SGP(model, torch.optim.SGD(model.parameters(), 0.1), **options)
