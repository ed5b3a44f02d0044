"""Averages inside nodes, often, and rounds between them: against runs of as many workers as there are nodes, and NumPy.

Four workers, mostly in two nodes of two. Their problems are the quadratics of test_cocod, in float64.
"""

import copy
import functools
import logging
import os
import signal
import threading
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from support.ranks import run_ranks, run_ranks_raw
from support.toys import Toy, loader, parameters, trainer
from test_cocod import DIM, HEAVY, LIMIT, LR, STEPS, TOL, X0, bitwise, distance, gradients, normalised, problem, problems
from test_comm_communicator import communicating, stay_until_all_know
from torch import nn

from lightning_cocod import (
    CO2,
    DCS3GD,
    CoCoD,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    MessageMismatch,
    NonFiniteMessage,
    OverlapLocalSGD,
    PeerLost,
    PipeSGD,
    PostLocalSGD,
    SlowMo,
    StreamingDiLoCo,
)
from lightning_cocod.algorithms.node import division
from lightning_cocod.comm import Communicator, carrying
from lightning_cocod.comm.header import size_of
from lightning_cocod.comm.tracer import Recorder, Span
from lightning_cocod.strategies import CoCoDStrategy, LocalSGDStrategy, PipeSGDStrategy
from lightning_cocod.telemetry.chrome import Part, shift

PAIRS = [[0, 1], [2, 3]]
UNEQUAL = [1.0, 2.0, 3.0, 4.0]


class Problems(nn.Module):
    """Σ_j v_j f_j of some workers."""

    def __init__(self, ranks, v=(1.0,)):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(X0))
        self.parts = [(weight, *map(torch.tensor, problem(rank))) for rank, weight in zip(ranks, v, strict=True)]

    def forward(self):
        return sum(0.5 * v * (self.x - b) @ H @ (self.x - b) for v, H, b in self.parts)


@dataclass
class Path:
    """What a worker saw: x(t) before the forward of step t, and the end."""

    x: list[np.ndarray] = field(default_factory=list)
    end: np.ndarray | None = None


def train(comm, model, algorithm, *, steps=STEPS, sgd=None, evaluate=(), reweigh=None, resume_at=None, **options):
    """Train and return the Path. `reweigh` is {step: weights}; `resume_at` restarts from a state."""
    path, begin = Path(), copy.deepcopy(model)

    def run(model, stop, saved=None):
        optimizer = torch.optim.SGD(model.parameters(), LR, **(sgd or {}))
        algo = algorithm(model, optimizer, communicator=comm, **options)
        algo.start()
        if saved is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        while algo.t < stop:
            path.x.append(model.x.detach().numpy().copy())
            if algo.t in evaluate:
                with algo.consensus():
                    assert not np.array_equal(path.x[-1], model.x.detach().numpy())
            if reweigh and algo.t in reweigh:
                algo.set_weights(reweigh[algo.t])
            optimizer.zero_grad()
            model().backward()
            algo.step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict()))
        last = model.x.detach().numpy().copy()
        algo.finish()
        return saved, last

    saved = None if resume_at is None else run(copy.deepcopy(begin), resume_at)[0]
    _, last = run(model, steps, saved)
    path.x.append(last)
    path.end = model.x.detach().numpy().copy()
    return path


def alone(rank, n, configurations):
    """Each rank has a problem of its own."""
    with communicating() as comm:
        return {name: train(comm, Problems([rank]), **options) for name, options in configurations.items()}


def merged(rank, n, configurations):
    """Each rank is a node of the other run."""
    with communicating() as comm:
        return {
            name: train(comm, Problems(nodes[rank], v[rank]), **options)
            for name, (nodes, v, options) in configurations.items()
        }


FAMILIES = {
    "cocod": {"algorithm": CoCoD, "period": 3},
    "local_sgd": {"algorithm": LocalSGD, "period": 3},
    "post_local_sgd": {"algorithm": PostLocalSGD, "period": 3, "warmup_steps": 4},
    "dc_s3gd": {"algorithm": DCS3GD, "period": 2},
    "diloco": {"algorithm": DiLoCo, "period": 3},
    "slowmo": {"algorithm": SlowMo, "period": 3},
    "eager_diloco": {"algorithm": EagerDiLoCo, "period": 3},
    "co2": {"algorithm": CO2, "period": 3},
    "streaming_diloco": {"algorithm": StreamingDiLoCo, "period": 4, "delay": 2, "fragments": 1},
    "overlap_local_sgd": {"algorithm": OverlapLocalSGD, "period": 3},
}
NODES = {
    "plain": (PAIRS, None, {}),
    "heavy and unequal": (PAIRS, UNEQUAL, {"sgd": HEAVY}),
    "three and one": ([[0, 1, 2], [3]], UNEQUAL, {"sgd": HEAVY}),
}
TWO_LEVELS = {"algorithm": CoCoD, "period": 6, "ranks_per_node": 2, "weights": UNEQUAL, "sgd": HEAVY}
MORE = {
    "not in nodes": {"algorithm": CoCoD, "period": 3},
    "h=2": {**TWO_LEVELS, "intra_node": 2},
    "h=4": {**TWO_LEVELS, "intra_node": 4},
    "h=k": {**TWO_LEVELS, "intra_node": 6},
    "h=2 blocking": {**TWO_LEVELS, "algorithm": LocalSGD, "intra_node": 2},
    "h=2 diloco": {**TWO_LEVELS, "algorithm": DiLoCo, "intra_node": 2},
    "h=2 eager_diloco": {**TWO_LEVELS, "algorithm": EagerDiLoCo, "intra_node": 2},
    "h=2 overlap_local_sgd": {**TWO_LEVELS, "algorithm": OverlapLocalSGD, "intra_node": 2},
    "h=1 waits": {**TWO_LEVELS, "intra_node": 1, "overlap": False},
    "h=1": {**TWO_LEVELS, "intra_node": 1},
    "h=2 waits": {**TWO_LEVELS, "intra_node": 2, "overlap": False},
    "h=1 evaluated": {**TWO_LEVELS, "intra_node": 1, "evaluate": (1, 6, 7, 9, 12)},
    "h=2 evaluated": {**TWO_LEVELS, "intra_node": 2, "evaluate": (1, 6, 7, 9, 12)},
    "h=1 resumed": {**TWO_LEVELS, "intra_node": 1, "resume_at": 8},
    "h=2 resumed": {**TWO_LEVELS, "intra_node": 2, "resume_at": 9},
    "h=1 warm-up": {**TWO_LEVELS, "intra_node": 1, "warmup_steps": 5},
    "h=2 warm-up": {**TWO_LEVELS, "intra_node": 2, "warmup_steps": 5},
    "warm-up": {**TWO_LEVELS, "intra_node": None, "ranks_per_node": None, "warmup_steps": 5},
    "reweighed": {**TWO_LEVELS, "intra_node": 1, "reweigh": {3: [4.0, 1.0, 1.0, 2.0]}, "steps": 20},
    "other name": {**{k: v for k, v in TWO_LEVELS.items() if k != "period"}, "intra_node": 1, "inter_node": 6},
}


def hierarchy(family, case):
    nodes, weights, options = NODES[case]
    sizes = 2 if nodes is PAIRS else [len(node) for node in nodes]
    return {**FAMILIES[family], **options, "weights": weights, "intra_node": 1, "ranks_per_node": sizes}


@functools.cache
def four():
    """Every configuration on four workers: {name: array [t, i, :]}, and the ends."""
    configurations = {(family, case): hierarchy(family, case) for family in FAMILIES for case in NODES} | MORE
    ranks = run_ranks(alone, 4, configurations, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in configurations}


@functools.cache
def two():
    """The same where each node is a worker."""

    def configuration(family, case):
        nodes, weights, options = NODES[case]
        w = [1.0] * 4 if weights is None else weights
        return (*as_workers(nodes, w), {**FAMILIES[family], **options, "weights": [sum(w[r] for r in V) for V in nodes]})

    configurations = {(family, case): configuration(family, case) for family in FAMILIES for case in NODES}
    ranks = run_ranks(merged, 2, configurations, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in configurations}


def as_workers(nodes, w):
    return nodes, [normalised([w[r] for r in V]) for V in nodes]


def positions(paths):
    return np.stack([path.x for path in paths], axis=1)


# h = 1: a node is a worker


@pytest.mark.parametrize("case", NODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_gradients_averaged_in_it_a_node_is_one_worker(family, case):
    x, of_nodes = positions(four()[family, case]), positions(two()[family, case])
    for number, node in enumerate(NODES[case][0]):
        for rank in node:
            assert distance(x[:, rank], of_nodes[:, number]) < TOL
            assert distance(four()[family, case][rank].end, two()[family, case][number].end) < TOL
            assert bitwise(x[:, rank], x[:, node[0]])
    assert distance(of_nodes[-1, 0], of_nodes[-1, 1]) > 1e-3 or family in ("diloco", "slowmo", "co2")


def test_without_nodes_the_same_workers_go_elsewhere():
    assert distance(positions(four()["not in nodes"])[:, 0], positions(two()["cocod", "plain"])[:, 0]) > 1e-3


def test_new_weights_hold_in_a_node_from_the_round_on_that_begins_next():
    x = positions(four()["reweighed"])
    reference = two_levels(6, 1, reweigh={3: [4.0, 1.0, 1.0, 2.0]}, steps=20)
    assert distance(x, reference) < TOL
    assert distance(x, two_levels(6, 1, steps=20)) > 1e-3
    assert distance(x[:7], two_levels(6, 1)[:7]) < TOL  # from the merge at step 6 on


# h > 1


def cocod(x, w, D=0.0):
    """How a round of all workers ends: x, and what is kept until the next one does, D = A − S."""
    x = x + D
    return x, (w @ x - x,)


def local_sgd(x, w):
    return np.tile(w @ x, (4, 1)), ()


def diloco(x, w, θ=X0, m=0.0, η=0.7, β=0.9):
    Δ = w @ (θ - x)
    m = β * m + Δ
    θ = θ - η * (Δ + β * m)
    return np.tile(θ, (4, 1)), (θ, m)


def eager_diloco(x, w, θ=X0, m=0.0, late=0.0, η=0.7, β=0.9):
    """A worker's own part weighs as much as its node."""
    a = np.concatenate([np.full((len(V), 1), w[V].sum()) for V in PAIRS])
    Δ = θ - x
    G, late = a * Δ + late, w @ Δ - a * Δ
    m = β * m + G
    θ = θ - η * (G + β * m)
    return θ, (θ, m, late)


def overlap_local_sgd(x, w, z=X0, u=0.0, α=0.6, β=0.7):
    x = (1 - α) * x + α * z
    u = β * u + (x - z)
    return x, (z + w @ u, u)


def two_levels(k, h, *, steps=STEPS, ends=cocod, at_the_end=True, off=0, reweigh=None):
    """Averages in pairs, and rounds of all that `ends` ends: x_i(t), array [t, i, :]. What must not match: without the
    average at the end of a round, and with the others `off` by some steps. Gradients if h = 1."""
    w, new = normalised(UNEQUAL), normalised(UNEQUAL)  # of the round under way, and of the next
    x, m = np.tile(X0, (4, 1)), np.zeros((4, DIM))

    def in_pairs(rows, w):
        return np.concatenate([np.tile(normalised(w[V]) @ rows[V], (len(V), 1)) for V in PAIRS])

    kept, path = (), []
    for t in range(steps + 1):
        since = t % k or k
        if t and h > 1 and (since == k if at_the_end and since == k else (since + off) % h == 0 and since < k):
            x = in_pairs(x, w)
        if t and since == k:
            x, kept = ends(x, w, *kept)
            w = new
        path.append(x)
        if reweigh and t in reweigh:
            new = normalised(reweigh[t])
        g = gradients(x, *problems(4))
        m = HEAVY["momentum"] * m + (in_pairs(g, w) if h == 1 else g) + HEAVY["weight_decay"] * x
        x = x - LR * m
    return np.stack(path)


@pytest.mark.parametrize(
    ("name", "h", "ends"),
    [
        ("h=2", 2, cocod),
        ("h=4", 4, cocod),
        ("h=k", 6, cocod),
        ("h=2 blocking", 2, local_sgd),
        ("h=2 diloco", 2, diloco),
        ("h=2 eager_diloco", 2, eager_diloco),
        ("h=2 overlap_local_sgd", 2, overlap_local_sgd),
    ],
)
def test_parameters_are_averaged_in_a_node_every_h_steps_of_a_round_and_at_its_end(name, h, ends):
    x = positions(four()[name])
    assert distance(x, two_levels(6, h, ends=ends)) < TOL
    if h < 6:
        assert distance(x, two_levels(6, h, ends=ends, off=1)) > 1e-3
        assert distance(x, two_levels(6, 1, ends=ends)) > 1e-3
    if ends not in (local_sgd, diloco):  # whose mean is that of all anyway
        assert distance(x, two_levels(6, h, ends=ends, at_the_end=False)) > 1e-3
    for t in (0, 6, 12):
        assert bitwise(x[t, 0], x[t, 1])
        assert bitwise(x[t, 2], x[t, 3])
    assert distance(x[7, 0], x[7, 1]) > 1e-3


# What is as it is without nodes


@pytest.mark.parametrize("name", ["h=1", "h=2"])
@pytest.mark.parametrize("how", ["waits", "evaluated", "resumed"])
def test_neither_overlap_nor_evaluation_nor_a_resume_changes_a_bit(name, how):
    for one, other in zip(four()[name], four()[f"{name} {how}"], strict=True):
        assert bitwise(one.x, other.x[-len(one.x) :])
        assert bitwise(one.end, other.end)


def test_synchronous_steps_have_nothing_left_to_average_in_a_node():
    for name in ("h=1 warm-up", "h=2 warm-up"):
        for one, other in zip(four()[name], four()["warm-up"], strict=True):
            assert bitwise(one.x[:6], other.x[:6])
            assert distance(one.x[8], other.x[8]) > 1e-3


def test_the_period_has_another_name():
    for one, other in zip(four()["h=1"], four()["other name"], strict=True):
        assert bitwise(one.x, other.x)


class Seen(CoCoD):
    """Notes x before each merge."""

    def _merge(self):
        self.model.seen.append(self.model.x.detach().numpy().copy())
        super()._merge()


def with_a_codec(rank, n):
    model = Problems([rank])
    model.seen = []
    with communicating() as comm:
        options = {"intra_node": 1, "ranks_per_node": 2, "compression": "int4", "sgd": HEAVY}
        path = train(comm, model, Seen, period=5, steps=22, **options)
    return model.seen, path


def test_what_a_codec_drops_does_not_separate_a_node_for_longer_than_a_round():
    merges, paths = zip(*run_ranks(with_a_codec, 4, timeout=LIMIT), strict=True)
    x = positions(paths)
    for first, second in PAIRS:
        assert len(merges[first]) == 5
        assert all(bitwise(*pair) for pair in zip(merges[first], merges[second], strict=True))
    assert all(distance(x[t, 0], x[t, 1]) > 1e-2 for t in (10, 14, 15, 19))  # one of them has what the mean's code drops
    assert distance(merges[0][3], merges[2][3]) > 1e-2


# Messages of a node do not wait for those between nodes


def held_up(rank, n):
    gate, run = threading.Event(), carrying.run
    gate.set()

    def later(collective, group, *rest):
        if group.size() == n:
            assert gate.wait(30)
        return run(collective, group, *rest)

    model, steps = Problems([rank]), []
    optimizer = torch.optim.SGD(model.parameters(), LR)
    with mock.patch.object(carrying, "run", later), CoCoD(model, optimizer, 6, intra_node=1, ranks_per_node=2) as algo:
        algo.comm.tracer = recorder = Recorder(algo.comm.lane)
        for t in range(12):
            if t == 5:
                algo.A.wait()
                gate.clear()  # the next one is launched at the end of this step
            if t == 11:
                gate.set()  # and waited for at the end of this one
            optimizer.zero_grad()
            model().backward()
            algo.before_step()
            algo.step(optimizer.step)
            if 6 <= t < 11:
                steps.append(algo.A._handle.done())
            algo.after_step()
        rows = {span.row: span.about.get("message") for span in recorder.close() if span.name == "transfer"}
        names = sorted(t.name for t in threading.enumerate() if t.name.startswith("communication"))
    gate.set()
    return steps, rows, names, model.x.detach().numpy()


def test_the_steps_of_a_node_go_on_while_a_message_between_nodes_is_held_up():
    ranks = run_ranks(held_up, 4, timeout=LIMIT)
    for rank, (steps, rows, names, _) in enumerate(ranks):
        assert steps == [False] * 5
        assert set(rows) == {"communication", "communication in the node"}
        assert "gradients in the node" in rows["communication in the node"]
        assert names == [f"communication in the node of rank {rank}", f"communication of rank {rank}"]
    assert all(bitwise(x, ranks[0][-1]) for *_, x in ranks)


def counted(rank, n, algorithm, options, steps):
    model = Problems([rank])
    optimizer = torch.optim.SGD(model.parameters(), LR)
    with algorithm(model, optimizer, ranks_per_node=2, **options) as algo:
        before, seen = algo.comm.ledger.totals(), []
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            algo.step()
            seen.append(algo.comm.ledger.totals() - before)
    return seen


def test_messages_in_a_node_count_as_bytes_and_as_time_that_training_waits():
    for seen in run_ranks(counted, 4, LocalSGD, {"period": 3, "intra_node": 1}, 2, timeout=LIMIT):
        gradient = 8 * DIM + 4  # and whether there is one
        assert [(s.messages, s.sent, s.received) for s in seen] == [
            (m, m * (gradient + size_of(2)), m * (gradient + size_of(2))) for m in (1, 2)
        ]
        assert 0 < seen[0].busy <= seen[1].busy
        assert seen[0].exposed + seen[0].skew > 0


# Failure


def poisoned(rank, n, how, h, where):
    """NaN in gradients of the rank `where` in step 4. x(t), what the optimizer remembers of it, and the buffer."""
    model = Problems([rank])
    model.register_buffer("seen", torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    seen = []
    algo = CoCoD(model, optimizer, 6, intra_node=h, ranks_per_node=2, on_nonfinite=how)
    try:
        with algo:
            for t in range(8):
                optimizer.zero_grad()
                model().backward()
                if t == 4 and rank in where:
                    model.x.grad[0] = float("nan")
                    model.seen.fill_(float("nan"))
                algo.before_step()
                algo.step(optimizer.step)
                algo.after_step()
                seen.append((model.x.detach().numpy().copy(), model.seen.item(), len(optimizer.state)))
    except (NonFiniteMessage, PeerLost) as error:
        dist.barrier()  # rank 0 hosts the store
        return type(error).__name__, str(error)
    return seen


@pytest.mark.parametrize("h", [1, 2])
def test_nan_of_a_rank_ends_the_run_and_is_named(h):
    ends = run_ranks(poisoned, 4, "raise", h, [3], timeout=LIMIT)
    what, step = ("gradients in the node", 4) if h == 1 else ("node", 6)
    assert "NonFiniteMessage" in {ends[rank][0] for rank in (2, 3)}  # the first to see it may end the other one
    for rank in (2, 3):
        assert f"cocod/{what} at step {step}: NaN or infinity in the message of rank 3; nobody" in ends[rank][1]
    for rank in (0, 1):
        assert ends[rank][0] == "PeerLost"
        assert "failed: NonFiniteMessage: cocod/" in ends[rank][1]


@pytest.mark.parametrize("h", [1, 2])
def test_a_rank_with_nan_is_left_out_of_its_nodes_mean_and_repaired(h):
    (*_, two_, three), healthy = run_ranks(poisoned, 4, "skip", h, [3], timeout=LIMIT), run_ranks(poisoned, 4, "skip", h, [])
    at = 4 if h == 1 else 5  # the mean that meets the NaN comes after this step
    for t in range(at, 8):
        assert np.isfinite(three[t][0]).all()
        assert three[t][1] == 0.0
        assert (h > 1 and t == 6) or bitwise(two_[t][0], three[t][0])
    assert three[at][2] == h % 2  # gradients that were replaced leave the optimizer sound
    assert distance(two_[at][0], healthy[2][at][0]) > 1e-4
    if h == 1:
        H, b = problem(2)
        x = [seen[0] for seen in two_]
        momentum = (x[3] - x[2]) * 0.9  # -γ v
        assert distance(x[4] - x[3], momentum - LR * H @ (x[3] - b)) < TOL


def dies(rank, n, folder):
    """Rank 3 is killed in an average of its node."""
    run = carrying.run

    def fatal(collective, group, *rest):
        if rank == 3 and group.size() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(collective, group, *rest)

    model = Problems([rank])
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def for_ever():
        with CoCoD(model, optimizer, 1000, intra_node=3, ranks_per_node=2) as algo:
            while True:
                optimizer.zero_grad()
                model().backward()
                algo.step()

    with mock.patch.object(carrying, "run", fatal), pytest.raises(PeerLost) as caught:
        for_ever()
    stay_until_all_know(rank, n, folder)
    return str(caught.value)


def test_a_rank_that_dies_in_an_average_of_its_node_ends_all_and_is_named(tmp_path):
    outcomes = run_ranks_raw(dies, 4, str(tmp_path), timeout=LIMIT, grace=40)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "ok", "died"]
    for outcome in outcomes[:3]:
        assert outcome.value.startswith("rank 3 is lost: "), outcome.traceback


def at_odds(rank, n):
    """Machines tell different things."""
    model = Problems([rank])
    os.environ["LOCAL_WORLD_SIZE"] = "3" if rank < 3 else "2"
    with (
        pytest.raises((MessageMismatch, PeerLost)),
        CoCoD(model, torch.optim.SGD(model.parameters(), LR), intra_node=1),
    ):
        pass
    dist.barrier()


def test_ranks_that_see_different_nodes_do_not_begin():
    run_ranks(at_odds, 6, timeout=LIMIT)


# Options


def refusals(rank, n):
    model = Problems([rank])

    def why(algorithm=CoCoD, *args, **options):
        try:
            algorithm(model, torch.optim.SGD(model.parameters(), LR), *args, **options)
        except ValueError as error:
            return str(error)
        return None

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    told = CoCoD(model, torch.optim.SGD(model.parameters(), LR), intra_node=1).node.nodes
    del os.environ["LOCAL_WORLD_SIZE"]
    return told, [
        why(intra_node=1),
        why(intra_node=0, ranks_per_node=2),
        why(intra_node=1, ranks_per_node=3),
        why(intra_node=1, ranks_per_node=[3, 2]),
        why(ranks_per_node=2),
        why(period=3, intra_node=1, inter_node=3, ranks_per_node=2),
        why(CoCoD, 3, intra_node=1, inter_node=3, ranks_per_node=2),
        why(DCS3GD, inter_node=3),
        why(PipeSGD, intra_node=1, ranks_per_node=2),
        why(PipeSGD, intra_node=1, inter_node=3, ranks_per_node=2),
    ]


def test_options_that_say_too_little_or_too_much():
    for told, reasons in run_ranks(refusals, 4, timeout=LIMIT):
        assert told == [range(0, 2), range(2, 4)]
        assert reasons == [
            "intra_node needs to know which ranks share a node: start with torchrun, or give ranks_per_node=",
            "intra_node must be a whole number of at least 1, got 0",
            "4 ranks do not fill nodes of 3 ranks: set ranks_per_node=",
            "4 ranks do not fill nodes of [3, 2] ranks: set ranks_per_node=",
            "ranks_per_node is for intra_node=: give both or neither",
            "period and inter_node are two names of one option: give one of them",
            "period and inter_node are two names of one option: give one of them",
            "inter_node goes together with intra_node: without it, the option is called period",
            "pipe_sgd has no rounds at whose ends all workers average: leave intra_node out",
            "pipe_sgd has no rounds at whose ends all workers average: leave intra_node out",
        ]


def test_nodes_are_runs_of_ranks():
    assert division(5, [3, 2]) == [range(0, 3), range(3, 5)]
    assert division(1, 4) == [range(1)]


def one_rank_each(rank, n):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lightning_cocod.algorithms.node").addHandler(handler)
    with communicating() as comm:
        x, messages = [], []
        for options in ({"intra_node": 1, "ranks_per_node": 1}, {}):
            before = comm.ledger.totals().messages
            x.append(train(comm, Problems([rank]), CoCoD, period=3, **options).x)
            messages.append(comm.ledger.totals().messages - before)
    return said, *x, messages


def test_one_rank_on_each_node_has_nothing_to_do_and_that_is_said_once():
    (first, *_), (second, *_) = ranks = run_ranks(one_rank_each, 2, timeout=LIMIT)
    assert first == ["intra_node=1 has nothing to do: every node has one rank"]
    assert second == []
    for _, x, without, (messages, of_those) in ranks:
        assert bitwise(x, without)
        assert messages == of_those


def by_hook(rank, n):
    model = Problems([rank])
    optimizer = torch.optim.SGD(model.parameters(), LR)
    with CoCoD(model, optimizer, intra_node=1, ranks_per_node=2) as algo:
        model().backward()
        with pytest.raises(RuntimeError, match=r"call step.. of the algorithm instead .* intra_node=1 averages"):
            optimizer.step()
        with pytest.raises(ValueError, match=r"intra_node=1 and a gradient scaler do not .* or intra_node=2"):
            algo.step(scaler=torch.amp.GradScaler("cpu"))


def test_gradients_are_averaged_before_the_optimizers_step_or_not_at_all():
    run_ranks(by_hook, 2, timeout=LIMIT)


def test_messages_inside_a_node_do_not_tell_the_time_of_another_one():
    def part(rank, host, clock):
        def span(row, message, end):
            return Span("headers", row, end - 1, end, {"message": message})

        node = span("communication in the node", "node at step 2", 100.0 * rank)
        return Part(rank, 1, spans=[node, span("communication", "round at step 4", 10 + clock)], host=host)

    assert shift(part(0, "a", 0.0), part(1, "b", 3.0)) == -3.0


# Under Lightning


class Replicas(Callback):
    """The parameters after every batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(parameters(module))


def two_machines(rank, n):
    """Two machines of two ranks, as torchrun starts them there; and a division of one's own."""
    os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2), NODE_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    made = {
        "cocod": CoCoDStrategy(intra_node=1, inter_node=4),
        "by hand": LocalSGDStrategy(8, intra_node=1, ranks_per_node=[3, 1]),
    }
    seen = {}
    for name, strategy in made.items():
        replicas, model = Replicas(), Toy(dropout=0.0)
        run = trainer(strategy, 2, num_nodes=2, max_epochs=1, callbacks=[replicas])
        nodes = []
        replicas.on_train_start = lambda trainer, module, nodes=nodes: nodes.extend(trainer.strategy.algorithm.node.nodes)
        run.fit(model, loader(n=128), loader(shuffle=False))
        seen[name] = [list(node) for node in nodes], replicas.seen, parameters(model)
    return seen


def test_lightning_knows_the_nodes():
    ranks = run_ranks(two_machines, 4, init=False, timeout=LIMIT)
    for name, nodes in {"cocod": PAIRS, "by hand": [[0, 1, 2], [3]]}.items():
        told, replicas, ends = zip(*(rank[name] for rank in ranks), strict=True)
        assert told == (nodes,) * 4
        for x in zip(*replicas, strict=True):
            assert all(torch.equal(x[V[0]], x[rank]) for V in nodes for rank in V)
        assert not torch.equal(replicas[0][2], replicas[3][2])
        assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize(
    ("strategy", "options", "says"),
    [
        (CoCoDStrategy, {"inter_node": 3}, "inter_node goes together with intra_node"),
        (CoCoDStrategy, {"period": 4, "intra_node": 1, "inter_node": 4}, "two names of one option"),
        (CoCoDStrategy, {"intra_node": 0}, "intra_node must be a whole number"),
        (CoCoDStrategy, {"ranks_per_node": 2}, "ranks_per_node is for intra_node"),
        (PipeSGDStrategy, {"intra_node": 1}, "pipe_sgd has no rounds"),
    ],
)
def test_strategies_refuse_the_same_when_they_are_made(strategy, options, says):
    with pytest.raises(ValueError, match=says):
        strategy(**options)


def test_a_communicator_is_not_divided_before_it_has_started():
    with pytest.raises(RuntimeError, match="before start"):
        Communicator().within([[0]])
