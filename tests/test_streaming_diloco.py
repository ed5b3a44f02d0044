"""Streaming DiLoCo: fragments with clocks of their own, merged some steps after their launch, with a part kept.

The quadratics are those of test_cocod; their vector lies in three parameters. The reference is written from the paper's
equations, with numpy, for all workers at once.
"""

import copy
import functools
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from test_cocod import (
    DIM,
    HEAVY,
    LIMIT,
    LR,
    TOL,
    X0,
    bitwise,
    distance,
    gradients,
    normalised,
    problem,
    problems,
    synchronous,
    unequal,
)
from test_compressed_rounds import encoded
from torch import nn

from lightning_cocod import DiLoCo, StreamingDiLoCo
from lightning_cocod.algorithms.delay import Delay, Lag
from lightning_cocod.algorithms.outer import OuterRounds
from lightning_cocod.algorithms.when import Every, Schedule, WarmUp, When
from lightning_cocod.comm import NonFiniteMessage

SIZES = [1, 2, 4]
STEPS = 17
PIECES = [2, 2, 1]
ENDS = np.cumsum([0, *PIECES])


# The paper's equations


def ends_of(p, fragments, lengths, warmup=0):
    """The steps at which the rounds of fragment p = 1 … P end, given the length of a round that begins at a step."""
    steps, begins = [], warmup
    while begins <= STEPS:
        k = lengths(begins)
        steps.append(begins + int(np.ceil(p * k / fragments)))
        begins += k
    return steps


def int4(p):
    """C(p) of a block: the nearest seventh of the largest."""
    p = p.astype(np.float32)
    unit = np.abs(p).max(initial=1e-30) / np.float32(7)
    return (np.round(p / unit) * unit).astype(np.float64)


def e3m0(p):
    """C(p) of a block: the nearest power of two, of the seven largest."""
    with np.errstate(divide="ignore"):
        powers = np.floor(np.log2(np.abs(p.astype(np.float32)) / 0.75))
    return np.where(powers < powers.max(initial=-126) - 6, 0.0, np.sign(p) * 2.0**powers)


def streaming(
    n,
    k,
    w,
    cut,
    *,
    delay=0,
    keep=0.0,
    lr=0.7,
    beta=0.9,
    momentum=0.0,
    weight_decay=0.0,
    warmup=0,
    reweigh=None,
    at_once=False,
    from_x=False,
    code=None,
    forgets=False,
):
    """x_i(t) and θ(t), t = 0 … STEPS, before the forward of step t, θ as it will be once what is in flight has been merged.
    `cut` is the fragment of each of the three parameters.

    With a `code` its values travel, and what it drops stays in θ − x_i. What must not match: `at_once` ends the rounds of
    all fragments together; `from_x` counts from the launch, not from θ; `forgets` what was dropped.
    """
    lengths = k if callable(k) else lambda t: k
    fragments = max(cut)
    rows = [np.flatnonzero(np.repeat(cut, PIECES) == p) for p in range(1, fragments + 1)]
    x, v = np.tile(X0, (n, 1)), np.zeros((n, DIM))
    θ, m, sent, path, outer, outer_alone = X0.copy(), np.zeros(DIM), {}, [], [], []
    anchor = x.copy()

    def merge(p):
        (_, Δ, e), i = sent.pop(p), rows[p - 1]
        m[i] = beta * m[i] + Δ
        θ[i] -= lr * (Δ + beta * m[i])
        x[:, i] = keep * x[:, i] + (1 - keep) * (θ[i] - e)
        anchor[:, i] = x[:, i]

    for t in range(STEPS + 1):
        if t == warmup:
            θ, anchor = x[0].copy(), x.copy()
        for p in sorted(sent):
            if sent[p][0] == t:
                merge(p)
        for p in range(1, fragments + 1):
            if t > warmup and t in ends_of(fragments if at_once else p, fragments, lengths, warmup):
                i = rows[p - 1]
                Δ, of = (anchor if from_x else θ)[..., i] - x[:, i], reweigh(t) if reweigh else w
                c, mean = (Δ, of @ Δ) if code is None else encoded(Δ, of, code=code)
                sent[p] = t + delay, mean, 0.0 if forgets else Δ - c
                if delay == 0:
                    merge(p)
        path.append(x.copy())
        outer.append(θ.copy())
        for p, (_, Δ, _) in sent.items():
            i = rows[p - 1]
            outer[-1][i] -= lr * (Δ + beta * (beta * m[i] + Δ))
        outer_alone.append(θ.copy())
        g = gradients(x, *problems(n))
        if t < warmup:
            g = np.tile(w @ g, (n, 1))
        v = momentum * v + g + weight_decay * x
        x = x - LR * v
    return np.stack(path), np.stack(outer), np.stack(outer_alone)


# The same on workers


class Pieces(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.x = nn.ParameterList(torch.tensor(X0).split(PIECES))
        self.H, self.b = map(torch.tensor, problem(rank))

    def forward(self):
        r = torch.cat(list(self.x)) - self.b
        return 0.5 * r @ self.H @ r

    def flat(self):
        return torch.cat(list(self.x)).detach().numpy().copy()


@dataclass
class Path:
    """x(t), what was evaluated, the state at each step, the messages in the order of their launch, and the end: when the
    rounds ended that are in it, and x."""

    x: list = field(default_factory=list)
    consensus: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)
    launched: list = field(default_factory=list)
    metrics: list = field(default_factory=list)
    ended: list = field(default_factory=list)
    end: np.ndarray | None = None


def trained(
    rank,
    n,
    algorithm=StreamingDiLoCo,
    *,
    sgd=None,
    unequal=False,
    evaluate=(),
    reweigh=None,
    save=(),
    resumed=None,
    sleeper=None,
    **options,
):
    """Train the quadratic of a worker. `resumed` is a step and what was saved then; `sleeper` a rank that is slow."""
    model, path = Pieces(rank), Path()
    optimizer = torch.optim.SGD(model.parameters(), LR, **(sgd or {}))
    weights = list(range(1, n + 1)) if unequal else None
    algo = algorithm(model, optimizer, weights=weights, **options)
    submit = algo.comm._submit

    def noted(subject, collective, **more):
        path.launched.append((subject.kind, subject.step, collective.layout.nbytes))
        return submit(subject, collective, **more)

    with mock.patch.object(algo.comm, "_submit", noted), algo:
        first = 0
        if resumed is not None:
            first, saved = resumed
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        for t in range(first, STEPS):
            path.x.append(model.flat())
            if t in evaluate:
                with algo.consensus():
                    path.consensus[t] = model.flat()
            if t in save:
                path.states[t] = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict()))
            if reweigh and t in reweigh:
                algo.set_weights(reweigh[t])
            if sleeper is not None and rank == sleeper and t % 2:
                time.sleep(0.02)
            optimizer.zero_grad()
            model().backward()
            algo.step()
            path.metrics.append(algo.metrics())
        path.x.append(model.flat())
        path.ended = [fragment.ended for fragment in algo.fragments]
    path.end = model.flat()
    return path


NAMED = [["x.0", "x.2"], ["x.1"]]
OUTER = {"outer_lr": 0.5, "outer_momentum": 0.6}
BOTH = {"unequal": True, "sgd": HEAVY, **OUTER}
PLAIN = {"fragments": 1, "delay": 0, "keep": 0.0}
MANY = {"period": 4, "fragments": 3, "delay": 2, "keep": 0.3, **BOTH}
CONFIGURATIONS = {
    "diloco": {"algorithm": DiLoCo, "period": 3, **BOTH},
    "one fragment": {"period": 3, **PLAIN, **BOTH},
    "one fragment, late": {"period": 3, **PLAIN, **BOTH, "delay": 1},
    "one fragment, kept": {"period": 3, **PLAIN, **BOTH, "keep": 0.5},
    "two fragments": {"period": 3, **PLAIN, **BOTH, "fragments": 2},
    "defaults": {"period": 5},
    "many": MANY,
    "many, waiting": {**MANY, "overlap": False},
    "many, evaluated": {**MANY, "evaluate": (0, 1, 3, 4, 7, 8, 9, 14)},
    "more than a step apart": {"period": 2, "fragments": 3, "delay": 1, "keep": 0.0, **BOTH},
    "all in flight": {"period": 5, "fragments": 3, "delay": 4, "keep": 0.5, **BOTH},
    "named": {"period": 4, "fragments": NAMED, "delay": 1, "keep": 0.3, **BOTH},
    "schedule": {**MANY, "period": {0: 3, 6: 5}},
    "warm-up": {**MANY, "warmup_steps": 4},
    "int4": {**MANY, "fragments": 1, "compression": "int4"},
    "e3m0": {**MANY, "compression": "e3m0"},
    **{f"rank {r} sleeps": {**MANY, "sleeper": r} for r in range(2)},
}


def everything(rank, n):
    return {name: trained(rank, n, **options) for name, options in CONFIGURATIONS.items()}


@functools.cache
def paths(n):
    ranks = run_ranks(everything, n, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def positions(name, n):
    return np.stack([path.x for path in paths(n)[name]], axis=1)


SMALL = {"lr": 0.5, "beta": 0.6, **HEAVY}
EQUATIONS = {  # name of a configuration: period, fragments of the three parameters, options
    "many": (4, [1, 2, 3], {"delay": 2, "keep": 0.3, **SMALL}),
    "two fragments": (3, [1, 2, 2], SMALL),
    "more than a step apart": (2, [1, 2, 3], {"delay": 1, **SMALL}),
    "all in flight": (5, [1, 2, 3], {"delay": 4, "keep": 0.5, **SMALL}),
    "named": (4, [1, 2, 1], {"delay": 1, "keep": 0.3, **SMALL}),
    "schedule": (lambda t: 3 if t < 6 else 5, [1, 2, 3], {"delay": 2, "keep": 0.3, **SMALL}),
    "warm-up": (4, [1, 2, 3], {"delay": 2, "keep": 0.3, "warmup": 4, **SMALL}),
    "defaults": (5, [1, 2, 3], {"delay": 1, "keep": 0.5}),
}


def weights(name, n):
    return unequal(n) if CONFIGURATIONS[name].get("unequal") else normalised(np.ones(n))


@pytest.mark.parametrize("n", SIZES)
def test_one_fragment_that_is_waited_for_is_diloco_bit_for_bit(n):
    for one, diloco in zip(paths(n)["one fragment"], paths(n)["diloco"], strict=True):
        assert bitwise(one.x, diloco.x)
        assert bitwise(one.end, diloco.end)
        measured = [[m.get("algo/replica_distance") for m in path.metrics] for path in (one, diloco)]
        assert measured[0] == measured[1]
    for other in ("one fragment, late", "one fragment, kept", "two fragments"):
        assert distance(positions(other, n), positions("diloco", n)) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", EQUATIONS)
def test_the_fragments_follow_the_equations(n, name):
    k, cut, options = EQUATIONS[name]
    x = positions(name, n)
    assert distance(x, streaming(n, k, weights(name, n), cut, **options)[0]) < TOL
    wrong = [{"beta": 0.7}, {"lr": 0.6}, {"delay": 3 - options.get("delay", 0)}, {"keep": 0.4}, {"at_once": True}]
    for other in [*wrong, {"keep": 1.0}, *([{"from_x": True}] if options.get("keep") else [])]:
        assert distance(x, streaming(n, k, weights(name, n), cut, **{**options, **other})[0]) > 1e-3
    assert distance(x, streaming(n, k, weights(name, n), [1, 1, 1], **options)[0]) > 1e-3
    if n > 1:
        other = weights(name, n)[::-1] if CONFIGURATIONS[name].get("unequal") else unequal(n)
        assert distance(x, streaming(n, k, other, cut, **options)[0]) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("name", "cut", "code"), [("int4", [1, 1, 1], int4), ("e3m0", [1, 2, 3], e3m0)])
def test_with_four_bits_for_a_value_they_follow_the_equations_with_what_was_dropped(n, name, cut, code):
    x, options = positions(name, n), {"delay": 2, "keep": 0.3, **SMALL}
    assert distance(x, streaming(n, 4, unequal(n), cut, **options, code=code)[0]) < 1e-6  # codes are float32
    for other in ({"code": None}, {"code": code, "forgets": True}):
        assert distance(x, streaming(n, 4, unequal(n), cut, **options, **other)[0]) > 1e-3, other


@pytest.mark.parametrize("n", SIZES)
def test_a_replica_that_keeps_all_of_its_own_would_learn_nothing_from_the_others(n):
    """So α = 1 is refused: it is training alone."""
    alone = streaming(n, 4, unequal(n), [1, 2, 3], delay=2, keep=1.0, **SMALL)[0]
    assert distance(alone[:, 0], synchronous(1, steps=STEPS, **HEAVY)) < TOL
    assert distance(positions("many", n), alone) > 1e-3
    with pytest.raises(ValueError, match="keep must be less than 1, got 1"):
        StreamingDiLoCo(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), keep=1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("other", ["many, waiting", "many, evaluated"])
def test_neither_overlap_nor_evaluation_changes_a_bit(n, other):
    for plain, changed in zip(paths(n)["many"], paths(n)[other], strict=True):
        assert bitwise(plain.x, changed.x)
        assert bitwise(plain.end, changed.end)


@pytest.mark.parametrize("n", SIZES)
def test_the_consensus_and_the_end_are_the_outer_parameters_with_what_is_in_flight(n):
    _, θ, alone = streaming(n, 4, unequal(n), [1, 2, 3], delay=2, keep=0.3, **SMALL)
    evaluated = paths(n)["many, evaluated"]
    for t, seen in evaluated[0].consensus.items():
        assert all(distance(seen, path.consensus[t]) == 0 for path in evaluated)
        assert distance(seen, θ[t]) < TOL
    assert all(bitwise(path.end, evaluated[0].end) for path in evaluated)
    assert distance(evaluated[0].end, θ[-1]) < TOL
    assert distance(evaluated[0].end, alone[-1]) > 1e-3
    assert distance(evaluated[0].consensus[9], alone[9]) > 1e-3
    assert distance(evaluated[0].end, unequal(n) @ positions("many", n)[-1]) > 1e-3


class Noting(torch.optim.SGD):
    """Writes into gradients, as torch's does for all tensors at once, and counts steps in its groups."""

    def __init__(self, params):
        super().__init__(params, lr=0.5, momentum=0.6)
        for group in self.param_groups:
            group.setdefault("steps", 0)

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.zero_()


class Noted(OuterRounds):
    name = "noted"

    def __init__(self, *args, **options):
        super().__init__(*args, period=4, outer=Noting, delay=Lag(2, 0.3), fragments=3, **options)


@pytest.mark.parametrize("algorithm", [Noted, functools.partial(StreamingDiLoCo, period=4, fragments=3, delay=2)])
def test_what_an_evaluation_does_with_a_mean_in_flight_is_done_to_copies(algorithm):
    def run(look):
        model = Pieces(0)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        with algorithm(model, optimizer) as algo:
            for _ in range(STEPS):
                with torch.inference_mode() if look else nullcontext(), algo.consensus() if look else nullcontext():
                    pass
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
            in_flight = [f.launched for f in algo.fragments]
            return model.flat(), in_flight, [g.get("steps") for g in algo.outer.param_groups], len(algo.outer.state)

    (x, *rest), (looked, *same) = run(False), run(True)
    assert bitwise(x, looked)
    assert rest == same


@pytest.mark.parametrize("n", [2, 4])
def test_messages_are_launched_in_one_order_whoever_is_slow(n):
    rounds = [(kind, step) for kind, step, _ in paths(n)["many"][0].launched if kind == "round"]
    assert rounds == [("round", t) for t in sorted(t for p in (1, 2, 3) for t in ends_of(p, 3, lambda t: 4) if t <= STEPS)]
    for name in ("many", "many, waiting", "rank 0 sleeps", "rank 1 sleeps"):
        for path, plain in zip(paths(n)[name], paths(n)["many"], strict=True):
            assert path.launched == paths(n)["many"][0].launched
            assert bitwise(path.x, plain.x)


def test_a_message_is_that_of_one_fragment():
    sizes = [nbytes for kind, _, nbytes in paths(2)["many"][0].launched if kind == "round"]
    assert sizes == [8 * PIECES[i % 3] for i in range(len(sizes))]
    assert {nbytes for kind, _, nbytes in paths(2)["diloco"][0].launched if kind == "round"} == {8 * DIM}


def test_metrics_tell_the_delay_and_the_distance():
    for path in paths(2)["many"]:
        stale = [m["algo/staleness_steps"] for m in path.metrics]
        assert stale == [0.0] * 3 + [2.0] * (STEPS - 3)  # the first launch is at 2, after two steps, its merge at 4
        assert {m["algo/period"] for m in path.metrics} == {4.0}
        assert "algo/replica_distance" not in path.metrics[2]
        assert all(m["algo/replica_distance"] > 0 for m in path.metrics[4:])


# Resuming, weights that change, rules that do what they like


def resumed_everywhere(rank, n):
    whole = trained(rank, n, **MANY, save=range(STEPS))
    again = {t: trained(rank, n, **MANY, resumed=(t, state)) for t, state in whole.states.items()}
    t = next(t for t, state in whole.states.items() if any(f["message"] for f in state[2]["fragments"]))
    lossy = copy.deepcopy(whole.states[t])
    for f in lossy[2]["fragments"]:
        for value in f["message"] or []:
            value.zero_()
    return whole, again, (t, trained(rank, n, **MANY, resumed=(t, lossy)))


def test_a_run_resumed_at_any_step_is_the_uninterrupted_one_bit_for_bit():
    for whole, again, (t, lossy) in run_ranks(resumed_everywhere, 2, timeout=LIMIT):
        in_flight = [sum(f["message"] is not None for f in state[2]["fragments"]) for state in whole.states.values()]
        assert set(in_flight) == {0, 1, 2}  # that is put to the test
        for step, path in again.items():
            assert bitwise(path.x, whole.x[step:])
            assert bitwise(path.end, whole.end)
            assert path.ended == whole.ended
        assert distance(np.stack(lossy.x), np.stack(whole.x[t:])) > 1e-3


def test_a_state_with_other_fragments_is_refused():
    saved = trained(0, 1, **MANY, save=[5]).states[5]
    with pytest.raises(ValueError, match="this state has fragments=3, not 2"):
        trained(0, 1, **{**MANY, "fragments": 2}, resumed=(5, saved))


class Shorter(When):
    """A round of 6 steps, then rounds of 2, shorter than the delay."""

    def period(self, step):
        return 6 if step == 0 else 2


def odd_clocks(rank, n):
    return {
        "reweighed": trained(rank, n, **MANY, reweigh={5: [5.0, 1.0]}),
        "shorter": trained(rank, n, **{**MANY, "period": Shorter(), "delay": 3}),
        "shorter, waiting": trained(rank, n, **{**MANY, "period": Shorter(), "delay": 3, "overlap": False}),
        "own terms": trained(rank, n, Delayed, unequal=True, sgd=HEAVY, period=4, fragments=3),
        "own terms, one fragment": trained(rank, n, Delayed, unequal=True, sgd=HEAVY, period=4),
    }


class Delayed(OuterRounds):
    """CoCoD's parts, in fragments."""

    name = "delayed"

    def __init__(self, *args, **options):
        super().__init__(*args, outer=functools.partial(torch.optim.SGD, lr=1.0), delay=Delay(1.0), **options)


@functools.cache
def odd():
    ranks = run_ranks(odd_clocks, 2, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_new_weights_are_those_of_the_rounds_that_the_period_counts_from_then_on():
    x = np.stack([path.x for path in odd()["reweighed"]], axis=1)
    old, new = unequal(2), normalised([5, 1])
    options = {"delay": 2, "keep": 0.3, **SMALL}
    # Set at 5: the round that begins at 8 is the first with them. What ends at 8 reports the one before.
    assert distance(x, streaming(2, 4, old, [1, 2, 3], reweigh=lambda t: old if t <= 8 else new, **options)[0]) < TOL
    assert distance(x, streaming(2, 4, old, [1, 2, 3], reweigh=lambda t: old if t < 8 else new, **options)[0]) > 1e-4


def test_a_message_is_merged_before_the_next_one_of_its_fragment_is_launched():
    for path, waiting in zip(odd()["shorter"], odd()["shorter, waiting"], strict=True):
        assert bitwise(path.x, waiting.x)
        assert path.metrics[-1]["algo/staleness_steps"] == 2.0
    first, second = odd()["shorter"]
    assert bitwise(first.end, second.end)


def test_the_parts_compose_a_delay_of_a_round_in_fragments():
    """A worker takes in the others' part of its fragment's last round: the weighted mean of what was there at its ends."""
    x = np.stack([path.x for path in odd()["own terms"]], axis=1)
    w, cut = unequal(2), [slice(*ENDS[p : p + 2]) for p in range(3)]
    reference, v, θ = np.tile(X0, (2, 1)), np.zeros((2, DIM)), np.tile(X0, (2, 1))
    late, path = {}, []
    for t in range(STEPS + 1):
        for p in range(1, 4):
            if t in ends_of(p, 3, lambda t: 4):
                i = cut[p - 1]
                Δ = θ[:, i] - reference[:, i]
                θ[:, i] -= Δ + late.get(p, 0)
                late[p], reference[:, i] = w @ Δ - Δ, θ[:, i]
        path.append(reference.copy())
        v = 0.9 * v + gradients(reference, *problems(2)) + 0.01 * reference
        reference = reference - LR * v
    assert distance(x, np.stack(path)) < TOL
    assert distance(x, np.stack([path.x for path in odd()["own terms, one fragment"]], axis=1)) > 1e-3


# What is left out, what comes later, what is lost


def not_finite(rank, n, delay, on_nonfinite="skip", thaws=False, resume_at=None):
    """Rank 0's gradient is not finite for once. Whether it is, step by step, the end, and what the optimizer keeps."""

    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model[2].requires_grad_(not thaws)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        options = {"period": 4, "fragments": 3, "delay": delay, "on_nonfinite": on_nonfinite}
        return model, optimizer, StreamingDiLoCo(model, optimizer, **options)

    def run(start, stop):
        for t in range(start, stop):
            model[2].requires_grad_(not thaws or t >= 5)
            draw = torch.Generator().manual_seed(100 * rank + t)
            optimizer.zero_grad()
            model(torch.randn(5, 3, generator=draw)).sub(1).square().mean().backward()
            if t == 4 and rank == 0:
                model[0].weight.grad[0, 0] = torch.nan
            algo.step()
            path.append(all(v.isfinite().all() for v in model.state_dict().values()))

    (model, optimizer, algo), path = fresh(), []
    if resume_at is not None:
        with algo:
            run(0, resume_at)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict()))
            run(resume_at, 14)
        model, optimizer, algo = fresh()
        del path[resume_at:]
    with algo:
        if resume_at is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        run(resume_at or 0, 14)
    return path, [v.detach().clone() for v in model.state_dict().values()], optimizer.state_dict()["state"]


@pytest.mark.parametrize("thaws", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_rank_that_is_left_out_takes_in_all_outer_parameters_at_the_merge(delay, thaws):
    """What has been thawed since, and is in no fragment yet, comes from the other rank."""
    (first, end, kept), (second, other, _) = run_ranks(not_finite, 2, delay, "skip", thaws, timeout=LIMIT)
    assert all(second)
    broken = [t for t, finite in enumerate(first) if not finite]
    # Step 4 breaks it. The rounds of the fragments end at 6, 7 and 8, of two fragments at 6 and 8: it is seen at 6.
    assert broken == list(range(4, 5 + delay))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(end, other, strict=True))
    assert all(v.isfinite().all() for state in kept.values() for v in state.values())


def test_who_is_left_out_of_a_message_in_flight_survives_a_resume():
    whole, resumed = (run_ranks(not_finite, 2, 3, "skip", False, at, timeout=LIMIT) for at in (None, 7))
    for (finite, end, _), (again, other, _) in zip(whole, resumed, strict=True):
        assert finite == again
        assert all(torch.equal(a, b) for a, b in zip(end, other, strict=True))
    assert whole[0][0][6:9] == [False, False, True]  # it was in flight


def refused(rank, n):
    with pytest.raises(NonFiniteMessage, match=r"streaming_diloco/round at step 6: NaN .* message of rank 0"):
        not_finite(rank, n, 1, "raise")
    return True


def test_a_rank_that_is_not_finite_ends_the_run_unless_told():
    assert run_ranks(refused, 2, timeout=LIMIT) == [True, True]


def late_parameters(rank, n, resume_at=None):
    """One parameter is freed in mid-round, one is added that the model does not have. Both fragments have messages then."""

    def event(t):
        if t == 3:
            model[1].requires_grad_()
        if t == 5:
            optimizer.add_param_group({"params": [stray]})

    def run(start, stop):
        for t in range(start, stop):
            event(t)
            for p in [*model, stray]:
                p.grad = torch.full((3,), rank + 1.0 + t, dtype=torch.float64) if p.requires_grad else None
            algo.step()
            path.append(torch.stack([p.detach()[0] for p in [*model, stray]]))

    def fresh():
        model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3)])
        model[1].requires_grad_(False)
        optimizer = torch.optim.SGD(list(model), 0.1)
        options = {"outer_lr": 0.8, "outer_momentum": 0.5, "fragments": 2, "delay": 1, "keep": 0.25}
        stray = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        return model, optimizer, stray, StreamingDiLoCo(model, optimizer, period=2, **options)

    (model, optimizer, stray, algo), path = fresh(), []
    if resume_at is not None:
        with algo:
            run(0, resume_at)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict(), stray))
        (model, optimizer, stray, algo), path = fresh(), []
        for t in range(resume_at):
            event(t)
        stray.data.copy_(saved[3].data)
    with algo:
        if resume_at is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=False):
                part.load_state_dict(state)
        run(resume_at or 0, 12)
        groups = [len(group["params"]) for group in algo.outer.param_groups]
        return torch.stack(path).numpy(), groups, [len(f.θ) for f in algo.fragments]


def joined():
    """The same in one process. Fragment 1 has parameters 0 and 1 and ends its rounds at 1, 3, …; 2 has the others."""
    of, joins = [1, 1, 2, 2], [0, 5, 0, 6]  # 1 is freed before step 3, so moves in it; the next end of 1 is at 5
    x, θ, m, sent, path = np.zeros((2, 4)), np.zeros(4), np.zeros(4), {}, []
    for t in range(13):
        for p in (1, 2):
            if p in sent and sent[p][0] == t:
                _, Δ, i = sent.pop(p)
                m[i] = 0.5 * m[i] + Δ
                θ[i] -= 0.8 * (Δ + 0.5 * m[i])
                x[:, i] = 0.25 * x[:, i] + 0.75 * θ[i]
        for p in (1, 2):
            if t > 0 and t % 2 == p % 2:
                i = [j for j in range(4) if of[j] == p and joins[j] < t]
                sent[p] = t + 1, (θ[i] - x[:, i]).mean(0), i
                for j in (j for j in range(4) if of[j] == p and joins[j] == t):
                    x[:, j] = θ[j] = x[:, j].mean()
        if t > 0:
            path.append(x.copy())
        x = x - 0.1 * np.array([1, t >= 3, 1, t >= 5]) * (np.arange(2.0)[:, None] + 1 + t)
    return np.stack(path)


def test_parameters_that_come_later_join_their_fragment_when_its_round_ends():
    expected = joined()
    for rank, (path, groups, sizes) in enumerate(run_ranks(late_parameters, 2, timeout=LIMIT)):
        assert groups == [3, 1]
        assert sizes == [2, 2]
        assert distance(path, expected[:, rank]) < TOL


@pytest.mark.parametrize("stop", [3, 5, 6, 7])
def test_a_run_whose_parameters_came_later_is_resumed_bit_for_bit(stop):
    whole, resumed = (run_ranks(late_parameters, 2, at, timeout=LIMIT) for at in (None, stop))
    for (one, *_), (other, *_) in zip(whole, resumed, strict=True):
        assert bitwise(one[stop:], other)


def test_the_lost_steps_of_the_fragments_are_told(caplog):
    trained(0, 1, **MANY)
    # The rounds of the fragments end at 14, 15 and 16. At 17 the last of them is still in flight, and is waited for.
    told = "the last 1 to 3 steps are not in the model of streaming_diloco: how many depends on the fragment; the "
    told += "fewest are missing after a multiple of the period's steps"
    assert [r.getMessage() for r in caplog.records] == [told]


def test_new_weights_for_all_begin_anew():
    """One worker: replaced at 7, when the fragments, whose rounds end at 6, 7 and 8, have two messages in flight."""
    model = Pieces(0)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    with StreamingDiLoCo(model, optimizer, **{k: v for k, v in MANY.items() if k not in BOTH}) as algo:
        for _ in range(7):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        assert [f.launched for f in algo.fragments] == [6, 7, None]
        with algo.rewriting(), torch.no_grad():
            for p in model.parameters():
                p.fill_(5.0)
        assert [(f.launched, f.D, f.ends) for f in algo.fragments] == [(None, None, 7 + k) for k in (2, 3, 4)]
        assert all((θ == 5).all() for θ in algo.θ.values())
        assert not algo.outer.state


def test_options_out_of_range_are_refused_by_name():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for options, text in [
        ({"delay": -1}, "delay must be a whole number of at least 0, got -1"),
        ({"delay": None}, "delay must be a whole number of at least 0, got None"),
        ({"delay": 4, "period": 4}, "delay must be less than the period, 4, got 4"),
        ({"delay": 2, "period": {0: 5, 100: 2}}, "delay must be less than the period, 2, got 2"),
        ({"delay": 2, "period": Schedule({0: 5, 100: 2})}, "delay must be less than the period, 2, got 2"),
        ({"delay": 2, "period": WarmUp(3, Every(2))}, "delay must be less than the period, 2, got 2"),
        ({"keep": -0.1}, "keep must be a number of at least 0"),
        ({"fragments": 0}, "fragments must be a whole number of at least 1, got 0"),
        ({"fragments": "weight"}, "fragments must be a whole number"),
        ({"fragments": ["weight", "bias"]}, "fragments must be a number, or for each a list of names of modules"),
        ({"fragments": []}, "fragments must be a number, or for each a list"),
        ({"fragments": [["weight"], []]}, "fragments must be a number, or for each a list"),
        ({"outer_lr": -1}, "outer_lr must be a number of at least 0, got -1"),
        ({"outer_momentum": 1}, "outer_momentum must be less than 1, got 1"),
        ({"overlap": 1}, "overlap must be True or False"),
    ]:
        with pytest.raises(ValueError, match=text):
            StreamingDiLoCo(model, optimizer, **options)
