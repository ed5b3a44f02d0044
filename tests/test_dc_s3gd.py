"""DC-S3GD: its exact tests on 1, 2 and 4 workers, and the correction by itself. The quadratics are those of test_cocod."""

import functools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from test_cocod import (
    DIM,
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
    paper,
    paths_of,
    positions,
    problems,
    quadratic,
    synchronous,
    unequal,
)
from test_compressed_rounds import Coarse, encoded
from torch import nn

from lightning_cocod import DCS3GD, CoCoD
from lightning_cocod.algorithms import compensation
from lightning_cocod.algorithms.compensation import Compensation, Part
from lightning_cocod.comm.collectives import Collective
from lightning_cocod.comm.correction import Correction

SIZES = [1, 2, 4]
EPS = np.finfo(np.float64).eps


def corrected(g, D, x, lambda_0, decay=0.0, lambda_max=np.inf, floor=16):
    """g̃_i of every worker (rows), from the equation."""
    found = []
    for g_i, D_i, x_i in zip(g, D, x, strict=True):
        seen = g_i + decay * x_i
        u, size = seen * seen * D_i, np.linalg.norm
        small = size(D_i) <= floor * EPS * size(x_i) or size(u) == 0
        found.append(g_i + (0.0 if small else min(lambda_max, lambda_0 * size(seen) / size(u))) * u)
    return np.stack(found)


def dc_s3gd(
    n, k, w, lambda_0=0.2, *, momentum=0.0, weight_decay=0.0, before=False, lambda_max=np.inf, coarse=False, wrong=""
):
    """x_i(t), t = 0 … STEPS, before the forward of step t: array [t, i, :].

    Where it is `coarse` codes of x_i − θ travel. What must not match: `wrong`: "every" step corrected, D added "early", the
    correction "turned" round, or what the mean's code drops "forgotten".
    """
    H, b = problems(n)
    x, v = np.tile(X0, (n, 1)), np.zeros((n, DIM))
    D, θ, A, path = 0 * x, X0, 0 * X0, []
    for t in range(STEPS + 1):
        path.append(x)
        g, merges = gradients(x, H, b), (t + 1) % k == 0
        if merges or wrong == "every":
            turned = -D if wrong == "turned" else D
            g = corrected(g, turned, x, lambda_0, weight_decay if before else 0.0, lambda_max)
        if merges and wrong == "early":
            x = x + D
        v = momentum * v + g + weight_decay * x
        x = x - LR * v
        if merges:
            x = x if wrong == "early" else x + D
            θ = θ + A
            c, A = encoded(x - θ, w, wrong != "forgotten") if coarse else (x - θ, w @ (x - θ))
            D = A - c
    return np.stack(path)


CONFIGURATIONS = {
    "k1": {},
    "k1 unequal": {"unequal": True, "sgd": HEAVY},
    "k1 before": {"unequal": True, "sgd": HEAVY, "weight_decay": "before"},
    "k1 capped": {"lambda_max": 0.5},
    "k1 evaluated": {"unequal": True, "sgd": HEAVY, "evaluate": (0, 1, 4, 8)},
    "k1 resumed": {"unequal": True, "sgd": HEAVY, "resume_at": 5},
    "k1 blocking": {"unequal": True, "sgd": HEAVY, "overlap": False},
    "k3": {"period": 3, "unequal": True, "sgd": HEAVY},
    "k3 resumed": {"period": 3, "unequal": True, "sgd": HEAVY, "resume_at": 5},
    "k1 coarse": {"unequal": True, "sgd": HEAVY, "compression": Coarse()},
    "k3 coarse": {"period": 3, "unequal": True, "sgd": HEAVY, "compression": Coarse()},
    "nothing": {"lambda_0": 0.0, "unequal": True, "sgd": HEAVY},
    "warm-up": {"warmup_steps": 4, "unequal": True, "sgd": HEAVY},
}


def all_paths(rank, n):
    found = paths_of(rank, n, {name: {**options, "algorithm": DCS3GD} for name, options in CONFIGURATIONS.items()})
    found["cocod"] = quadratic(rank, n, CoCoD, period=1, unequal=True, sgd=HEAVY)
    return found


@functools.cache
def paths(n):
    ranks = run_ranks(all_paths, n, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def weights(name, n):
    return unequal(n) if CONFIGURATIONS[name].get("unequal") else normalised(np.ones(n))


# The trajectory is the paper's


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("name", "k", "options"),
    [
        ("k1", 1, {}),
        ("k1 unequal", 1, HEAVY),
        ("k1 before", 1, {**HEAVY, "before": True}),
        ("k1 capped", 1, {"lambda_max": 0.5}),
        ("k3", 3, HEAVY),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_trajectory_is_that_of_the_equations(n, name, k, options):
    w, x = weights(name, n), positions(paths(n)[name])
    assert distance(x, dc_s3gd(n, k, w, **options)) < TOL
    if n > 1:
        for other in ({"lambda_0": 0.1}, {"wrong": "turned"}, {"before": not options.get("before")}, {"lambda_max": 0.3}):
            if "before" not in other or "weight_decay" in options:
                assert distance(x, dc_s3gd(n, k, w, **{**options, **other})) > 1e-6, other
        if "weight_decay" in options:
            assert distance(x, dc_s3gd(n, k, w, **options, wrong="early")) > 1e-6
        if k > 1:
            assert distance(x, dc_s3gd(n, k, w, **options, wrong="every")) > 1e-6


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("k", [1, 3])
def test_under_a_codec_the_correction_is_towards_the_mean_of_codes(n, k):
    w, x = unequal(n), positions(paths(n)[f"k{k} coarse"])
    assert distance(x, dc_s3gd(n, k, w, **HEAVY, coarse=True)) < 1e-6  # codes are float32
    for other in ({"lambda_0": 0.1}, {"coarse": False}, {"wrong": "turned"}, {"wrong": "forgotten"}):
        assert distance(x, dc_s3gd(n, k, w, **{**HEAVY, "coarse": True, **other})) > 1e-3, other


# Exact test 1


def without_own_update(ranks):
    """x_i(t+1) − Δ_i, for all t: array [t, i, :]."""
    x = positions(ranks)
    unmerged = np.stack([[p.unmerged[t] for p in ranks] for t in range(1, STEPS + 1)])
    return x[1:] - (unmerged - x[:-1])


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", ["k1", "k1 unequal", "k1 before"])
def test_without_their_own_updates_all_workers_are_equal_after_every_step(n, name):
    rest = without_own_update(paths(n)[name])
    assert distance(rest, rest[:, :1]) < TOL
    assert distance(rest, np.einsum("n,tnd->td", weights(name, n), positions(paths(n)[name])[:-1])[:, None]) < TOL
    longer = without_own_update(paths(n)["k3"])  # the negative control
    assert distance(longer, longer[:, :1]) > 1e-3


# Exact test 2


@pytest.mark.parametrize("n", SIZES)
def test_without_the_correction_it_is_cocod_with_rounds_of_one_step(n):
    for nothing, cocod in zip(paths(n)["nothing"], paths(n)["cocod"], strict=True):
        assert bitwise(nothing.x, cocod.x)
        assert bitwise(nothing.end, cocod.end)
    x = positions(paths(n)["nothing"])
    assert distance(x, paper(n, 1, unequal(n), **HEAVY)) < TOL
    if n > 1:
        assert distance(x, positions(paths(n)["k1 unequal"])) > 1e-3


# Exact tests 3 and 4


def network(rank, own_data, algorithm, floor=compensation.FLOOR):
    """A float32 network with momentum; without an algorithm it is plain SGD. Returns the flat parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    data = torch.Generator().manual_seed(rank if own_data else 0)

    def train(step):
        for _ in range(11):
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=data)).square().mean().backward()
            step()

    with mock.patch.object(compensation, "FLOOR", floor):
        if algorithm is None:
            train(optimizer.step)
        else:
            with algorithm(model, optimizer) as algo:
                train(algo.step)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


ALGORITHMS = {
    "strong": functools.partial(DCS3GD, lambda_0=5.0),
    "per tensor": functools.partial(DCS3GD, lambda_0=5.0, norm="tensor"),
    "before": functools.partial(DCS3GD, lambda_0=5.0, weight_decay="before", period=3),
}


def networks(rank, n, own_data):
    plain = network(rank, own_data, None)
    return plain, {name: network(rank, own_data, algorithm) for name, algorithm in ALGORITHMS.items()}


@pytest.mark.parametrize("n", SIZES)
def test_one_worker_and_workers_with_identical_batches_are_the_sequential_optimizer_exactly(n):
    for plain, ends in run_ranks(networks, n, False, timeout=LIMIT):
        for name, x in ends.items():
            assert torch.equal(plain, x), name


def test_workers_with_different_batches_are_not():
    for plain, ends in run_ranks(networks, 2, True, timeout=LIMIT):
        assert all((x - plain).abs().max() > 1e-3 for x in ends.values())


def with_and_without_floor(rank, n):
    with mock.patch.object(Correction, "cargo", Collective.cargo):  # sums of thirds, as over Gloo and for halves
        return [network(rank, False, alg) for alg in (None, DCS3GD)] + [network(rank, False, DCS3GD, floor=0)]


def test_the_floor_keeps_rounding_errors_from_becoming_a_fifth_of_the_gradient():
    """Thirds are not exact: the means of three equal models differ from them by rounding, and nothing else does."""
    for plain, with_floor, without in run_ranks(with_and_without_floor, 3, timeout=LIMIT):
        torch.testing.assert_close(with_floor, plain, rtol=1e-5, atol=1e-6)
        assert (without - plain).norm() > 1e-3 * plain.norm()


# Exact test 5, and the correction by itself


def parts_of(tensors, seed, size_of_D, dtype=torch.float32):
    """Parts of tensors of these sizes, each cut into two; D is relative to x."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, size in enumerate(tensors):
        x, D, g = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
        cut = size // 2
        for part in (slice(0, cut), slice(cut, size)):
            made.append(
                Part(number, *((t[part] * s).to(dtype) for t, s in ((x, 1), (D, size_of_D), (g, 0.1 * (number + 1)))))
            )
    return made


def flat(parts, field, tensor=None):
    return torch.cat([getattr(p, field).double() for p in parts if tensor in (None, p.tensor)])


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.lists(st.integers(2, 200), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    size_of_D=st.floats(1e-4, 10),
    lambda_0=st.floats(0.01, 3),
    norm=st.sampled_from(["model", "tensor"]),
)
def test_the_correction_has_lambda_0_times_the_size_of_the_gradient(tensors, seed, size_of_D, lambda_0, norm):
    parts = parts_of(tensors, seed, size_of_D)
    before = [p._replace(g=p.g.clone()) for p in parts]
    Compensation(lambda_0, norm=norm)(parts)
    for tensor in range(len(tensors)) if norm == "tensor" else [None]:
        g, moved = flat(before, "g", tensor), flat(parts, "g", tensor)
        assert (moved - g).norm().item() == pytest.approx(lambda_0 * g.norm().item(), rel=1e-3 / min(1, lambda_0))
        u = g * g * flat(parts, "D", tensor)
        along = torch.dot(moved - g, u) / ((moved - g).norm() * u.norm())
        assert along.item() == pytest.approx(1, abs=1e-3)  # towards g(x + D): the same side


def test_norms_over_the_model_and_over_each_tensor_differ():
    one, other = parts_of([50, 80], 0, 0.1), parts_of([50, 80], 0, 0.1)
    Compensation(norm="model")(one)
    Compensation(norm="tensor")(other)
    assert not torch.allclose(flat(one, "g"), flat(other, "g"), rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_move_that_is_no_more_than_rounding_error_corrects_nothing(dtype):
    eps = torch.finfo(dtype).eps
    for size, corrects in ((0.0, False), (8 * eps, False), (40 * eps, True)):
        parts = parts_of([400], 1, size, dtype)
        before = flat(parts, "g")
        Compensation(0.2)(parts)
        assert torch.equal(flat(parts, "g"), before) is not corrects
    parts = parts_of([400], 1, 8 * eps, dtype)
    with mock.patch.object(compensation, "FLOOR", 0):  # the hazard
        Compensation(0.2)(parts)
    assert (flat(parts, "g") - before).norm() > 0.1 * before.norm()


@pytest.mark.parametrize(
    ("g", "D", "x"), [(1e-8, 1e-7, 1), (1e-9, 1e-6, 1), (1e-9, 3e-7, 1), (1e-7, 1e-10, 1e-5), (1e-15, 1e-6, 1)]
)
def test_squares_that_float32_cannot_hold_change_nothing_of_that(g, D, x):
    draw = torch.Generator().manual_seed(0)
    parts = [Part(0, *(torch.randn(20_000, generator=draw) * size for size in (x, 30 * D, g))) for _ in range(3)]
    before = flat(parts, "g")
    Compensation(0.2)(parts)
    assert ((flat(parts, "g") - before).norm() / before.norm()).item() == pytest.approx(0.2, rel=1e-3)


def test_a_gradient_of_zero_stays_zero_and_a_tiny_one_stays_finite():
    for g in (0.0, 1e-30, 1e-20):
        parts = [Part(0, torch.ones(4), torch.full((4,), 1e-3), torch.full((4,), g))]
        Compensation(0.2)(parts)
        assert parts[0].g.isfinite().all()
        assert (parts[0].g - g).abs().max() <= 0.21 * g


def test_lambda_max_limits_lambda():
    x, D, g = torch.ones(3), torch.full((3,), 0.1), torch.full((3,), 0.5)
    parts = [Part(0, x, D, g.clone())]  # λ = 0.2 / (0.5 · 0.1) = 4
    Compensation(0.2, lambda_max=3.0)(parts)
    torch.testing.assert_close(parts[0].g, g + 3 * g * g * D)
    parts = [Part(0, x, D, g.clone())]
    Compensation(0.2, lambda_max=5.0)(parts)
    torch.testing.assert_close(parts[0].g, g + 4 * g * g * D)


def test_it_is_the_first_order_of_a_gradient_whose_hessian_is_g_squared():
    """For ℓ(x) = −ln x, g = −1/x and the Hessian is g², so that λ = 1 corrects to the first order."""
    x = torch.linspace(1, 2, 50, dtype=torch.float64)
    errors = []
    for size in (1e-2, 1e-3):
        D = size * torch.cos(7 * x)
        part = Part(0, x, D, -1 / x)
        Compensation(1e9, lambda_max=1.0)([part])
        there = -1 / (x + D)
        assert (part.g - there).norm() < 0.05 * (-1 / x - there).norm()
        errors.append((part.g - there).norm() / D.norm())
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.2)  # what is left is of the second order


# The same as other strategies


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "same_as"), [("k1 evaluated", "k1 unequal"), ("k1 resumed", "k1 unequal")])
def test_evaluating_and_resuming_change_nothing(n, name, same_as):
    for changed, plain in zip(paths(n)[name], paths(n)[same_as], strict=True):
        assert bitwise(changed.x, plain.x)
        assert bitwise(changed.end, plain.end)
    for resumed, plain in zip(paths(n)["k3 resumed"], paths(n)["k3"], strict=True):
        assert bitwise(resumed.x, plain.x)


@pytest.mark.parametrize("n", SIZES)
def test_the_consensus_is_the_weighted_mean(n):
    ranks = paths(n)["k1 evaluated"]
    x = positions(ranks)
    for t, seen in ranks[0].consensus.items():
        assert all(bitwise(seen, path.consensus[t]) for path in ranks)
        assert distance(seen, unequal(n) @ x[t]) < TOL
    assert distance(ranks[0].end, unequal(n) @ x[-1]) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_waiting_at_the_launch_gives_the_same_trajectory_bit_for_bit(n):
    for waiting, plain in zip(paths(n)["k1 blocking"], paths(n)["k1 unequal"], strict=True):
        assert bitwise(waiting.x, plain.x)


@pytest.mark.parametrize("n", SIZES)
def test_the_warm_up_is_synchronous_and_corrects_nothing(n):
    x = positions(paths(n)["warm-up"])
    assert distance(x[:5], synchronous(n, unequal(n), **HEAVY)[:5, None]) < TOL
    if n > 1:
        assert distance(x[5:], synchronous(n, unequal(n), **HEAVY)[5:, None]) > 1e-6


# Wrong input, and models of every kind


def test_options_out_of_range_are_refused_by_name():
    model = nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
    for options, text in [
        ({"lambda_0": -1}, "lambda_0 must be a number of at least 0, got -1"),
        ({"lambda_0": float("nan")}, "lambda_0 must be"),
        ({"lambda_max": -0.5}, "lambda_max must be"),
        ({"norm": "layer"}, "norm must be 'model' or 'tensor', got 'layer'"),
        ({"weight_decay": 0.1}, "weight_decay must be 'after' or 'before', got 0.1"),
    ]:
        with pytest.raises(ValueError, match=text):
            DCS3GD(model, sgd, **options)
    with pytest.raises(ValueError, match="before"):
        DCS3GD(model, adam, weight_decay="before")
    decoupled = type("Decoupled", (torch.optim.SGD,), {"step": lambda self, closure=None: None})
    with pytest.raises(ValueError, match="before"):  # what it does with weight decay nobody knows
        DCS3GD(model, decoupled(model.parameters(), 0.1), weight_decay="before")
    with pytest.raises(ValueError, match="maximize"):
        DCS3GD(model, torch.optim.SGD(model.parameters(), 0.1, maximize=True))
    DCS3GD(model, adam)


def every_kind(rank, n):
    """Gradients in another memory order, missing ones, frozen, scalar, half, complex and strided parameters."""
    torch.manual_seed(0)
    x = {
        "last": nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        "large": nn.Parameter(torch.randn(700_000)),
        "scalar": nn.Parameter(torch.tensor(2.0)),
        "halves": nn.Parameter(torch.randn(30).bfloat16()),
        "complex": nn.Parameter(torch.randn(7, dtype=torch.complex64)),
        "gaps": nn.Parameter(torch.randn(6, 6)[::2, ::3]),
        "unused": nn.Parameter(torch.randn(3)),
        "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
    }
    model = nn.ParameterDict(x)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)  # moves that are more than rounding errors of bfloat16
    found = []

    def gradients(*_):
        found.append({k: p.grad.clone() for k, p in x.items() if p.grad is not None})

    optimizer.register_step_pre_hook(gradients)
    with DCS3GD(model, optimizer, norm="tensor") as algo:
        for t in range(3):
            for name, p in x.items():
                if name not in ("unused", "frozen"):
                    draw = torch.Generator().manual_seed(100 * rank + t)
                    p.grad = torch.randn(p.shape, generator=draw).contiguous().to(p.dtype)
            given = {k: p.grad.clone() for k, p in x.items() if p.grad is not None}
            algo.step()
            for k, g in given.items():
                moved = torch.linalg.vector_norm((found[-1][k] - g).to(torch.complex128).abs())
                size = torch.linalg.vector_norm(g.to(torch.complex128).abs())
                assert moved == 0 if t == 0 else moved / size == pytest.approx(0.2, rel=0.02), (k, t)
        x["unused"].grad = torch.sparse_coo_tensor([[0]], [1.0], (3,))
        with pytest.raises(TypeError, match="sparse"):
            algo.before_step()
        x["unused"].grad = None


def test_parameters_of_every_kind_are_corrected():
    run_ranks(every_kind, 2, timeout=LIMIT)


def in_a_plain_loop(rank, n):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with DCS3GD(model, optimizer):
        model(torch.ones(2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"call step\(\) of the algorithm"):
            optimizer.step()


def test_a_plain_loop_is_told_to_call_step():
    run_ranks(in_a_plain_loop, 2, timeout=LIMIT)


def not_finite(rank, n):
    """Rank 0's weights are not finite for once."""
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with DCS3GD(model, optimizer, on_nonfinite="skip") as algo:
        for t in range(6):
            optimizer.zero_grad()
            (model(torch.full((3,), 1.0 + rank)) - 1).square().sum().backward()
            if t == 2 and rank == 0:
                model.weight.grad[0, 0] = torch.nan
            algo.step()
        assert all(p.isfinite().all() for p in model.parameters())
    return [p.detach().clone() for p in model.parameters()]


def test_a_rank_that_is_left_out_goes_on_with_the_others_model():
    first, second = run_ranks(not_finite, 2, timeout=LIMIT)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_a_gradient_that_is_not_finite_or_overflows_spoils_no_other():
    for bad in (1e20, float("inf"), float("nan")):
        for D in (0.1, 0.0):
            g = torch.tensor([0.5, 0.5, bad])
            part = Part(0, torch.ones(3), torch.tensor([0.1, 0.1, D]), g.clone())
            Compensation(0.2)([part])
            assert part.g[:2].isfinite().all()
            assert torch.equal(part.g[2], g[2]) or bad != bad
