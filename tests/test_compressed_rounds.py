"""Compressed rounds of CoCoD, Local SGD and DC-S3GD. The quadratics, and what is exact without a codec, are test_cocod's."""

import copy
import functools
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
    problems,
)
from torch import nn

from lightning_cocod import (
    CO2,
    DCS3GD,
    CoCoD,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    MessageMismatch,
    OverlapLocalSGD,
    PipeSGD,
    PostLocalSGD,
    SlowMo,
    StreamingDiLoCo,
)
from lightning_cocod.comm import compressed
from lightning_cocod.compression import CODECS, Codec, PowerSGD, RandomK

SIZES = [1, 2, 4]


class Coarse(Codec):
    """Multiples of a quarter of the largest: drops much, and is easily written down."""

    name = "coarse"
    contraction = True

    def nbytes(self, n):
        return 4 * (n > 0) + n

    def _encode(self, x, code, generator):
        if x.numel():
            quarter = (x.abs().max() / 4).clamp_min(1e-30)
            code[:4] = quarter.view(1).view(torch.uint8)
            code[4:] = (x / quarter).round().to(torch.int8).view(torch.uint8)

    def _decode(self, code, out):
        if out.numel():
            out.copy_(code[4:].view(torch.int8) * code[:4].clone().view(torch.float32))


class Noisy(Coarse):
    """Rounds at random."""

    name = "noisy"
    stochastic = True

    def _encode(self, x, code, generator):
        super()._encode(x + x.abs().mean() / 8 * torch.rand(x.shape, generator=generator), code, generator)


class Whole(Codec):
    """Drops nothing but what float32 drops."""

    name = "whole"
    contraction = True

    def nbytes(self, n):
        return 4 * n

    def _encode(self, x, code, generator):
        code.copy_(x.contiguous().view(torch.uint8))

    def _decode(self, code, out):
        out.copy_(code.clone().view(torch.float32))


class Growing(Whole):
    """Has no right to error feedback."""

    name = "growing"
    contraction = False


def coarse(p):
    """C(p) as `Coarse` has it."""
    p = p.astype(np.float32)
    if not p.size:
        return p.astype(np.float64)
    quarter = np.maximum(np.abs(p).max() / np.float32(4), np.float32(1e-30))
    return (np.round(p / quarter) * quarter).astype(np.float64)


def shared(values, n, code=coarse):
    """What a code of every shard decodes to."""
    size = -(-len(values) // n)
    return np.concatenate([code(values[j * size : (j + 1) * size]) for j in range(n)])


def reference(n, k, w, *, blocking=False, momentum=0.0, weight_decay=0.0, keeps=True):
    """x_i(t) and θ(t), t = 0 … STEPS. Without `keeps` the owner of a shard forgets what its second code has dropped."""
    x, v, θ = np.tile(X0, (n, 1)), np.zeros((n, len(X0))), X0
    flight, path, base = None, [], []
    for t in range(STEPS + 1):
        if t > 0 and t % k == 0 and flight is not None:
            x, θ = x + flight[0] - flight[1], θ + flight[0]
            flight = None
        if t % k == 0:
            c, A = encoded(x - θ, w, keeps)
            if blocking:
                x, θ = x + A - c, θ + A
            else:
                flight = A, c
        path.append(x)
        base.append(θ)
        v = momentum * v + gradients(x, *problems(n)) + weight_decay * x
        x = x - LR * v
    return np.stack(path), np.stack(base)


def encoded(p, w, keeps=True, code=coarse):
    """c of all workers, whose parts are p, and the mean that they decode."""
    n, size = len(w), -(-p.shape[1] // len(w))
    c = np.stack([shared(p_i, n, code) for p_i in p])
    mean = w @ c
    A = shared(mean, n, code)
    for j in range(n) if keeps else ():
        own = slice(j * size, (j + 1) * size)
        c[j, own] -= (mean[own] - A[own]) / w[j]
    return c, A


def anchored(n, k, w, *, momentum=0.0, weight_decay=0.0, feeds=True, twice=False, α=0.6, β=0.7):
    """x_i(t) of Overlap-Local-SGD. Without `feeds` there is no error feedback; `twice` says what was dropped once more."""
    x, m = np.tile(X0, (n, 1)), np.zeros((n, len(X0)))
    z, v, e, A, path = X0, 0 * X0, 0 * x, 0 * X0, []
    for t in range(STEPS + 1):
        if t > 0 and t % k == 0:
            v = β * v + A
            z = z - v
            x = (1 - α) * x + α * (z - e if feeds else z)
            p = z - x + (e if twice else 0)
            c, A = encoded(p, w)
            e = p - c
        path.append(x)
        m = momentum * m + gradients(x, *problems(n)) + weight_decay * x
        x = x - LR * m
    return np.stack(path)


def piped(n, w, *, momentum=0.0, weight_decay=0.0, feeds=True):
    """x(t) of Pipe-SGD."""
    x, v, e, G, path = X0, 0 * X0, np.zeros((n, len(X0))), None, []
    for _ in range(STEPS + 1):
        path.append(x)
        p = gradients(x, *problems(n)) + e
        c, A = encoded(p, w)
        e = p - c if feeds else e
        if G is not None:
            v = momentum * v + G + weight_decay * x
            x = x - LR * v
        G = A
    return np.stack(path)


def nesterov(m, G, η=0.5, β=0.6):
    """m, and V(G) of DiLoCo's outer optimizer."""
    m = β * m + G
    return m, -η * (G + β * m)


def slow(u, G, α=1.0, β=0.7):
    """The same of SlowMo's."""
    u = β * u + G / LR
    return u, -α * LR * u


def penalised(v, G, η=0.8, β=0.6, Λ=1.5, φ=0.9):
    """The same of CO2's."""
    v = np.clip(β * v + G / Λ, -φ, φ)
    return v, -η * v


MEMBERS = {"diloco": nesterov, "eager": nesterov, "slowmo": slow, "co2": penalised}
"""Rounds with an outer optimizer that end for all parameters at a time."""


def outer(name, n, k, w, *, momentum=0.0, weight_decay=0.0, feeds=True):
    """x_i(t) of one of them. Without `feeds` nobody says later what a codec has dropped."""
    late, own = name in ("eager", "co2"), w[:, None] if name == "eager" else 0.0
    x, v = np.tile(X0, (n, 1)), np.zeros((n, len(X0)))
    θ, m, e, before, path = x, 0 * x, 0 * x, 0 * x, []
    for t in range(STEPS + 1):
        if t > 0 and t % k == 0:
            Δ = θ - x
            p = Δ + e if late else Δ
            c, A = encoded(p, w)
            e = p - c if feeds else e
            m, V = MEMBERS[name](m, own * Δ + before if late else np.tile(A, (n, 1)))
            before = A - own * c
            θ = θ + V
            x = θ if late else θ - e
        path.append(x)
        v = momentum * v + gradients(x, *problems(n)) + weight_decay * x
        x = x - LR * v
    return np.stack(path)


OUTER = {"outer_lr": 0.5, "outer_momentum": 0.6}
FAMILY = {
    "diloco": {"algorithm": DiLoCo, "period": 3, **OUTER},
    "eager": {"algorithm": EagerDiLoCo, "period": 3, **OUTER},
    "co2": {"algorithm": CO2, "period": 3, "outer_lr": 0.8, "outer_momentum": 0.6, "gap_penalty": 1.5, "clip": 0.9},
    "slowmo": {"algorithm": SlowMo, "period": 3},
    "streaming": {"algorithm": StreamingDiLoCo, "period": 4, "delay": 2, "keep": 0.5},
}
"""Rounds with an outer optimizer."""
BOTH = {"unequal": True, "sgd": HEAVY}
CONFIGURATIONS = {
    "coarse": {"algorithm": CoCoD, "period": 3, "compression": Coarse()},
    "coarse heavy": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Coarse()},
    "coarse waiting": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Coarse(), "overlap": False},
    "coarse resumed": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Coarse(), "resume_at": 8},
    "coarse evaluated": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Coarse(), "evaluate": (0, 2, 3, 7)},
    "noisy": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Noisy()},
    "noisy again": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Noisy()},
    "noisy resumed": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Noisy(), "resume_at": 8},
    "whole": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Whole()},
    "warm-up": {"algorithm": CoCoD, "period": 3, **BOTH, "compression": Whole(), "warmup_steps": 4},
    "without": {"algorithm": CoCoD, "period": 3, **BOTH},
    "warm-up without": {"algorithm": CoCoD, "period": 3, **BOTH, "warmup_steps": 4},
    "local": {"algorithm": LocalSGD, "period": 3, **BOTH, "compression": Coarse()},
    "local resumed": {"algorithm": LocalSGD, "period": 3, **BOTH, "compression": Coarse(), "resume_at": 8},
    "local whole": {"algorithm": LocalSGD, "period": 3, **BOTH, "compression": Whole()},
    "local without": {"algorithm": LocalSGD, "period": 3, **BOTH},
    "anchored": {"algorithm": OverlapLocalSGD, "period": 3, **BOTH, "compression": Coarse()},
    "anchored waiting": {"algorithm": OverlapLocalSGD, "period": 3, **BOTH, "compression": Coarse(), "overlap": False},
    "anchored resumed": {"algorithm": OverlapLocalSGD, "period": 3, **BOTH, "compression": Coarse(), "resume_at": 8},
    "anchored evaluated": {"algorithm": OverlapLocalSGD, "period": 3, **BOTH, "compression": Coarse(), "evaluate": (3, 7)},
    "anchored whole": {"algorithm": OverlapLocalSGD, "period": 3, **BOTH, "compression": Whole()},
    "anchored without": {"algorithm": OverlapLocalSGD, "period": 3, **BOTH},
    "piped": {"algorithm": PipeSGD, **BOTH, "compression": Coarse()},
    "piped waiting": {"algorithm": PipeSGD, **BOTH, "compression": Coarse(), "overlap": False},
    "piped resumed": {"algorithm": PipeSGD, **BOTH, "compression": Coarse(), "resume_at": 8},
    "piped whole": {"algorithm": PipeSGD, **BOTH, "compression": Whole()},
    "piped without": {"algorithm": PipeSGD, **BOTH},
    **{f"{name} without": {**options, **BOTH} for name, options in FAMILY.items()},
    **{f"{name} whole": {**options, **BOTH, "compression": Whole()} for name, options in FAMILY.items()},
    **{name: {**options, **BOTH, "compression": Coarse()} for name, options in FAMILY.items()},
    **{f"{name} resumed": {**options, **BOTH, "compression": Coarse(), "resume_at": 9} for name, options in FAMILY.items()},
    **{
        f"{name} evaluated": {**options, **BOTH, "compression": Coarse(), "evaluate": (3, 6)}
        for name, options in FAMILY.items()
    },
    "eager waiting": {**FAMILY["eager"], **BOTH, "compression": Coarse(), "overlap": False},
    "compensated": {"algorithm": DCS3GD, "period": 1, **BOTH, "compression": Whole()},
    "compensated without": {"algorithm": DCS3GD, "period": 1, **BOTH},
}


@functools.cache
def paths(n):
    ranks = run_ranks(paths_of, n, CONFIGURATIONS, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in CONFIGURATIONS}


def weights(n, name):
    return normalised(np.arange(1, n + 1) if CONFIGURATIONS[name].get("unequal") else np.ones(n))


# Against the equations


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", ["coarse", "coarse heavy", "local"])
def test_the_path_is_that_of_the_equations(n, name):
    options = {"blocking": name == "local", **CONFIGURATIONS[name].get("sgd", {})}
    x, _ = reference(n, 3, weights(n, name), **options)
    assert distance(positions(paths(n)[name]), x) < 1e-6  # codes are float32
    forgetful, _ = reference(n, 3, weights(n, name), **options, keeps=False)
    assert distance(forgetful, x) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
def test_the_path_of_an_anchor_is_that_of_the_equations_with_error_feedback(n):
    x = anchored(n, 3, weights(n, "anchored"), **HEAVY)
    assert distance(positions(paths(n)["anchored"]), x) < 1e-6
    assert distance(anchored(n, 3, weights(n, "anchored"), **HEAVY, feeds=False), x) > 1e-3
    assert distance(anchored(n, 3, weights(n, "anchored"), **HEAVY, twice=True), x) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
def test_the_path_of_late_gradients_is_that_of_the_equations_with_error_feedback(n):
    x = piped(n, weights(n, "piped"), **HEAVY)
    assert distance(positions(paths(n)["piped"]), x[:, None]) < 1e-6
    assert distance(piped(n, weights(n, "piped"), **HEAVY, feeds=False), x) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", MEMBERS)
def test_the_path_of_an_outer_optimizer_is_that_of_the_equations_with_what_was_dropped(n, name):
    x = outer(name, n, 3, weights(n, name), **HEAVY)
    assert distance(positions(paths(n)[name]), x) < 1e-6
    assert distance(outer(name, n, 3, weights(n, name), **HEAVY, feeds=False), x) > 1e-3
    assert distance(positions(paths(n)[f"{name} without"]), x) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "name",
    ["whole", "warm-up", "local whole", "anchored whole", "piped whole", "compensated", *(f"{m} whole" for m in FAMILY)],
)
def test_a_codec_that_drops_nothing_changes_nothing(n, name):
    without = {"whole": "without", "warm-up": "warm-up without"}.get(name, name.replace("whole", "without"))
    without = "compensated without" if name == "compensated" else without
    assert distance(positions(paths(n)[name]), positions(paths(n)[without])) < 1e-5


@pytest.mark.parametrize("n", [2, 4])
def test_one_that_drops_something_does(n):
    assert distance(positions(paths(n)["coarse heavy"]), positions(paths(n)["without"])) > 1e-3


def test_one_worker_loses_nothing():
    for name, without in (("coarse heavy", "without"), ("local", "local without"), ("noisy", "without")):
        assert bitwise(paths(1)[name][0].x, paths(1)[without][0].x)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", ["coarse", "coarse heavy", "noisy", "local"])
def test_a_merge_conserves_the_weighted_mean_whatever_the_codec_drops(n, name):
    w = weights(n, name)
    before = np.stack([[p.unmerged[t] for p in paths(n)[name]] for t in range(1, STEPS + 1)])
    after = positions(paths(n)[name])[1:]
    assert distance(np.einsum("n,tnd->td", w, before), np.einsum("n,tnd->td", w, after)) < TOL
    assert distance(before, after) > 1e-3


@pytest.mark.parametrize("n", [2, 4])
def test_it_would_not_if_the_owner_of_a_shard_forgot_what_it_dropped(n):
    w = weights(n, "coarse")
    x, _ = reference(n, 3, w, keeps=False)
    kept, _ = reference(n, 3, w)
    G = np.stack([gradients(row, *problems(n)) for row in x])
    moved = x[6:7] - (x[5:6] - LR * G[5:6])  # what the merge at 6 did
    assert np.abs(np.einsum("n,tnd->td", w, moved)).max() > 1e-4
    G = np.stack([gradients(row, *problems(n)) for row in kept])
    moved = kept[6:7] - (kept[5:6] - LR * G[5:6])
    assert np.abs(np.einsum("n,tnd->td", w, moved)).max() < TOL


# What any round promises


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("coarse waiting", "coarse heavy"),
        ("coarse resumed", "coarse heavy"),
        ("coarse evaluated", "coarse heavy"),
        ("noisy again", "noisy"),
        ("noisy resumed", "noisy"),
        ("local resumed", "local"),
        ("piped waiting", "piped"),
        ("piped resumed", "piped"),
        ("anchored waiting", "anchored"),
        ("eager waiting", "eager"),
        *((f"{name} {what}", name) for name in FAMILY for what in ("resumed", "evaluated")),
        ("anchored resumed", "anchored"),
        ("anchored evaluated", "anchored"),
    ],
)
def test_waiting_resuming_and_evaluating_change_no_bit(n, name, other):
    for one, another in zip(paths(n)[name], paths(n)[other], strict=True):
        assert bitwise(one.x, another.x)
        assert bitwise(one.end, another.end)


@pytest.mark.parametrize("n", [2, 4])
def test_the_consensus_is_the_weighted_mean(n):
    ranks = paths(n)["coarse evaluated"]
    x = positions(ranks)
    for t, consensus in ranks[0].consensus.items():
        assert all(bitwise(path.consensus[t], consensus) for path in ranks)
        assert distance(consensus, weights(n, "coarse heavy") @ x[t]) < TOL


# The base


def small(dtype=torch.float32, transposed=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)
    if transposed:
        model[0].weight = nn.Parameter(torch.randn(7, 12).t())
    return model


def base_after(rank, n, rounds, algorithm, codec, dtype=torch.float32):
    """θ and the distance of x from it, after so many rounds of one step on noise that each worker has for itself."""
    model = small(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    noise = torch.Generator().manual_seed(rank)
    farthest = 0.0
    with algorithm(model, optimizer, period=1, compression=codec) as algo:
        for t in range(rounds):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=noise).to(dtype) + 0.1 * p.detach()
            optimizer.step()
            if t % 50 == 49:
                if isinstance(algo, CoCoD):
                    algo.A.wait()
                x = torch.cat([p.detach().flatten() for p in algo.x]).float()
                farthest = max(farthest, float((x - torch.cat([b.float() for b in algo.base.θ.buckets])).norm()))
        if isinstance(algo, CoCoD):
            algo.A.wait()
        θ = [bucket.clone() for bucket in algo.base.θ.buckets]
    return θ, farthest


@pytest.mark.parametrize(
    ("algorithm", "codec", "rounds"),
    [
        (CoCoD, Noisy(), 10_000),
        (LocalSGD, Coarse(), 500),
        (CoCoD, PowerSGD(rank=1), 2000),
        (LocalSGD, PowerSGD(rank=1), 500),
    ],
    ids=["cocod", "local_sgd", "cocod powersgd", "local_sgd powersgd"],
)
@pytest.mark.timeout(1000)
def test_the_base_stays_bitwise_the_same_on_all_workers_and_what_is_dropped_stays_small(algorithm, codec, rounds):
    ranks = run_ranks(base_after, 2, rounds, algorithm, codec, timeout=900)
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True))
    assert not any(torch.equal(a, torch.zeros_like(a)) for a in ranks[0][0])
    assert all(farthest < 2.0 for _, farthest in ranks)  # a step is 0.1 long


def with_every_codec(rank, n):
    codecs = [codec() for codec in CODECS.values() if codec().contraction] + [PowerSGD(rank=1)]
    return {codec.name: base_after(rank, n, 50, CoCoD, codec) for codec in codecs}


@pytest.mark.parametrize("n", [3])
def test_every_codec_keeps_the_base_the_same_and_the_workers_near(n):
    first, *others = run_ranks(with_every_codec, n, timeout=LIMIT)
    assert {"int8", "int4", "sign", "topk", "qsgd", "terngrad", "randomk", "powersgd"} <= set(first)
    for name, (θ, farthest) in first.items():
        assert farthest < 3.0, name
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(θ, other[name][0], strict=True)), name


def places_moved(rank, n, alike):
    """Where the mean of both workers' codes is not zero."""
    with mock.patch.object(RandomK, "draws_alike", alike):
        torch.manual_seed(rank)
        model = nn.Linear(1, 500, bias=False)
        algorithm = LocalSGD(model, torch.optim.SGD(model.parameters(), 0.0), period=1, compression=RandomK(0.2))
        with algorithm:
            θ = torch.cat([bucket.clone() for bucket in algorithm.base.θ.buckets])
            with torch.no_grad():
                model.weight.add_(torch.randn(500, 1) + 3)
            algorithm.optimizers[0].step()
            return torch.cat(algorithm.base.θ.buckets) != θ


def test_workers_draw_the_same_places_of_random_k():
    """So the owner of a shard drops nothing of a mean of codes; places of its own would leave a third of them, or so."""
    alike, other = run_ranks(places_moved, 2, True)
    assert torch.equal(alike, other)
    assert int(alike.sum()) == 100
    control, _ = run_ranks(places_moved, 2, False)
    assert int(control.sum()) < 60


MEMBERS_OF_ALL = [
    CoCoD,
    LocalSGD,
    PostLocalSGD,
    DCS3GD,
    OverlapLocalSGD,
    PipeSGD,
    SlowMo,
    DiLoCo,
    EagerDiLoCo,
    CO2,
    StreamingDiLoCo,
]


def with_every_compression(rank, n, algorithm):
    """The model at the end of a few rounds on noise that each worker has for itself."""
    ends = {}
    for name in (None, *CODECS, PowerSGD.name):
        model, noise = small(), torch.Generator().manual_seed(rank)
        options = {"period": 2} if algorithm.has_rounds else {}
        options |= {"warmup_steps": 2} if algorithm is PostLocalSGD else {}
        with algorithm(model, torch.optim.SGD(model.parameters(), 1.0), compression=name, **options) as algo:
            for _ in range(6):
                for p in model.parameters():  # not linear: merges leave the mean of the workers as it is, whatever the codec
                    p.grad = torch.randn(p.shape, generator=noise) + p.detach().sin()
                algo.step()
        ends[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
    return ends


@pytest.mark.parametrize("algorithm", MEMBERS_OF_ALL)
def test_every_member_has_every_codec(algorithm):
    first, *others = run_ranks(with_every_compression, 2, algorithm, timeout=LIMIT)
    for name, end in first.items():
        assert end.isfinite().all(), name
        assert all(torch.equal(end, other[name]) for other in others), name
        same = torch.allclose(end, first[None], rtol=0, atol=2e-5)  # but for the order of sums
        assert same == (name in (None, "none")), name  # the control: a codec does something


@pytest.mark.parametrize("codec", [Coarse(), PowerSGD(rank=1)], ids=lambda codec: codec.name)
def test_in_half_precision_the_base_is_float32(codec):
    ranks = run_ranks(base_after, 3, 50, CoCoD, codec, torch.bfloat16, timeout=LIMIT)
    for θ, farthest in ranks:
        assert all(bucket.dtype == torch.float32 for bucket in θ)
        assert all(torch.equal(a, b) for a, b in zip(θ, ranks[0][0], strict=True))
        assert farthest < 2.0


def thawing(rank, n, codec):
    """A layer that is free from step 4 on. Returns the weighted mean's path and θ at the end."""
    model = small(transposed=True)
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = torch.Generator().manual_seed(rank)
    with CoCoD(model, optimizer, period=2, compression=codec) as algo:
        for t in range(11):
            if t == 3:
                model[2].requires_grad_(True)
            optimizer.zero_grad()
            model(torch.randn(8, 7, generator=data)).square().mean().backward()
            optimizer.step()
        algo.A.wait()
        θ = [bucket.clone() for bucket in algo.base.θ.buckets]
        known = len(algo.x)
    return θ, known, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("codec", [Coarse(), PowerSGD(rank=1)], ids=lambda codec: codec.name)
def test_a_layer_that_thaws_joins_the_base(codec):
    (θ, known, end), (other, _, other_end) = run_ranks(thawing, 2, codec, timeout=LIMIT)
    assert known == 4
    assert all(torch.equal(a, b) for a, b in zip(θ, other, strict=True))
    assert torch.equal(end, other_end)
    assert sum(bucket.numel() for bucket in θ) == end.numel()


# Bytes, and what is refused


def traffic(rank, n, codec, rounds=5):
    model = nn.Linear(300, 200)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with CoCoD(model, optimizer, period=1, compression=codec) as algo:
        algo.A.wait()
        before = algo.comm.ledger.totals()
        for _ in range(rounds):
            model(torch.randn(2, 300)).square().mean().backward()
            optimizer.step()
        algo.A.wait()
        spent = algo.comm.ledger.totals() - before
    return spent.sent, spent.received, spent.raw


@pytest.mark.parametrize("n", [2, 4])
def test_the_bytes_are_those_of_the_codec(n):
    elements, rounds = 300 * 200 + 200, 5
    for sent, received, raw in run_ranks(traffic, n, Coarse(), timeout=LIMIT):
        expected = rounds * 2 * (n - 1) / n * Coarse().nbytes(elements)
        assert sent == received == pytest.approx(expected, rel=0.01)
        assert raw == pytest.approx(4 * expected, rel=0.01)


def mismatched(rank, n, codecs):
    model = small()
    algo = CoCoD(model, torch.optim.SGD(model.parameters(), 0.1), compression=codecs[rank])
    with pytest.raises(MessageMismatch, match="same options"), algo:
        algo.A.wait()


@pytest.mark.parametrize(
    "codecs",
    [(Coarse(), Whole()), (PowerSGD(rank=1), PowerSGD(rank=2)), (PowerSGD(), Whole())],
    ids=["codecs", "ranks", "kinds"],
)
def test_workers_with_different_codecs_are_told(codecs):
    run_ranks(mismatched, 2, codecs, timeout=LIMIT)


def test_a_codec_that_error_feedback_cannot_hold_is_refused():
    model = small()
    with pytest.raises(ValueError, match=r"would grow without bound") as error:
        CoCoD(model, torch.optim.SGD(model.parameters(), 0.1), compression=Growing())
    assert "\n" not in str(error.value)


def broken_once(rank, n, algorithm, codec):
    """Rank 1's model is NaN in the third round. Returns every rank's end, and θ's agreement by its bytes."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    with algorithm(model, optimizer, period=2, compression=codec, on_nonfinite="skip") as algo:
        for t in range(14):
            optimizer.zero_grad()
            model(torch.randn(8, 7, generator=data)).square().mean().backward()
            if t == 5 and rank == 1:
                model[0].weight.grad.fill_(float("nan"))
            optimizer.step()
        if isinstance(algo, CoCoD):
            algo.A.wait()
        θ = [bucket.clone() for bucket in algo.base.θ.buckets]
        x = [p.detach().clone() for p in model.parameters()]
    return θ, x


@pytest.mark.parametrize("codec", [Coarse(), PowerSGD(rank=1)], ids=lambda codec: codec.name)
@pytest.mark.parametrize("algorithm", [CoCoD, LocalSGD])
def test_a_rank_that_is_not_finite_is_left_out_and_gets_the_base(algorithm, codec):
    ranks = run_ranks(broken_once, 3, algorithm, codec, timeout=LIMIT)
    for θ, x in ranks:
        assert all(torch.equal(a, b) for a, b in zip(θ, ranks[0][0], strict=True))
        assert all(p.isfinite().all() for p in [*θ, *x])


def test_a_shard_is_never_longer_than_the_ones_before():
    for n in range(1, 40):
        for world_size in range(1, 9):
            size = compressed.shard_size(n, world_size)
            assert size * world_size >= n > size * world_size - world_size


def without_a_codec_then_with(rank, n, wanted):
    """A state of a run without compression goes on with it."""

    def fresh(codec):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        return model, optimizer, CoCoD(model, optimizer, period=2, compression=codec)

    data = torch.Generator().manual_seed(rank)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 7, generator=data)).square().mean().backward()
            optimizer.step()

    model, optimizer, algo = fresh(None)
    with algo:
        train(model, optimizer, 5)
        saved = copy.deepcopy((model.state_dict(), algo.state_dict()))
    model, optimizer, algo = fresh(wanted)
    with algo:
        model.load_state_dict(saved[0])
        algo.load_state_dict(saved[1])
        train(model, optimizer, 5)
        algo.A.wait()
        return [bucket.clone() for bucket in algo.base.θ.buckets]


@pytest.mark.parametrize("codec", [Coarse(), PowerSGD(rank=1)], ids=lambda codec: codec.name)
def test_a_run_may_go_on_with_a_codec(codec):
    a, b = run_ranks(without_a_codec_then_with, 2, codec, timeout=LIMIT)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
