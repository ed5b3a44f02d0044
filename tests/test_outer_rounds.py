"""DiLoCo, SlowMo, Eager DiLoCo and the parts they are made of. The quadratics are those of test_cocod."""

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
    bitwise,
    distance,
    gradients,
    normalised,
    paths_of,
    positions,
    problems,
    quadratic,
    synchronous,
    unequal,
)
from torch import nn

from lightning_cocod import CoCoD, DiLoCo, EagerDiLoCo, LocalSGD, SlowMo
from lightning_cocod.algorithms.outer import OuterRounds

SIZES = [1, 2, 4]


class Delayed(OuterRounds):
    """The member with an outer gradient descent, the delay and the own term that is asked for."""

    name = "delayed"

    def __init__(self, *args, outer_lr=1.0, **options):
        super().__init__(*args, outer=functools.partial(torch.optim.SGD, lr=outer_lr), delayed=True, **options)


class Descent(OuterRounds):
    """The blocking member with an outer gradient descent."""

    name = "descent"

    def __init__(self, *args, outer_lr=1.0, **options):
        super().__init__(*args, outer=functools.partial(torch.optim.SGD, lr=outer_lr), **options)


def inner(x, v, n, momentum, weight_decay, lr=LR):
    v = momentum * v + gradients(x, *problems(n)) + weight_decay * x
    return x - lr * v, v


def diloco(n, k, w, *, lr=0.7, beta=0.9, nesterov=True, momentum=0.0, weight_decay=0.0, lag=0, own=None):
    """x_i(t), t = 0 … STEPS, before the forward of step t, and θ_i(t). `own` is None for the blocking DiLoCo, else a."""
    x, v = np.tile(X0, (n, 1)), np.zeros((n, DIM))
    θ, m, before, path, outer = x, np.zeros((n, DIM)), None, [], []
    for t in range(STEPS + 1):
        if t > 0 and t % (k + lag) == 0:
            Δ = θ - x
            mean = np.tile(w @ Δ, (n, 1))
            if own is None:
                G = mean
            else:
                a = own if np.ndim(own) == 0 else np.asarray(own)[:, None]
                G = a * Δ + (0 if before is None else before[1] - a * before[0])
                before = Δ, mean
            m = beta * m + G
            θ = θ - lr * (G + beta * m if nesterov else m)
            x = θ
        path.append(x)
        outer.append(θ)
        x, v = inner(x, v, n, momentum, weight_decay)
    return np.stack(path), np.stack(outer)


RATES = [LR, LR / 2, 0.0, LR / 4]  # of the rounds, in turn


def slowmo(n, k, w, alpha, beta, *, momentum=0.0, weight_decay=0.0, constant=False, rates=None):
    x, v = np.tile(X0, (n, 1)), np.zeros((n, DIM))
    x_0, u, path, lr = x, np.zeros((n, DIM)), [], LR
    for t in range(STEPS + 1):
        if t > 0 and t % k == 0:
            Δ = x_0 - np.tile(w @ x, (n, 1))
            u = beta * u + (0 if lr == 0 else Δ / (LR if constant else lr))
            x_0 = x_0 - alpha * (LR if constant else lr) * u
            x = x_0
        lr = LR if rates is None else rates[t // k % len(rates)]
        path.append(x)
        x, v = inner(x, v, n, momentum, weight_decay, lr)
    return np.stack(path)


BOTH = {"unequal": True, "sgd": HEAVY}
OUTER = {"outer_lr": 0.5, "outer_momentum": 0.6}
CONFIGURATIONS = {
    "diloco": {"algorithm": DiLoCo, "period": 3},
    "diloco heavy": {"algorithm": DiLoCo, "period": 3, **BOTH, **OUTER},
    "diloco evaluated": {
        "algorithm": DiLoCo,
        "period": 3,
        **BOTH,
        **OUTER,
        "evaluate": (0, 2, 3, 7),
    },
    "diloco resumed": {"algorithm": DiLoCo, "period": 3, **BOTH, **OUTER, "resume_at": 8},
    "diloco schedule": {"algorithm": DiLoCo, "period": {0: 1, 4: 3}},
    "diloco warm-up": {"algorithm": DiLoCo, "period": 3, "warmup_steps": 4, **BOTH},
    "diloco of one": {"algorithm": DiLoCo, "period": 3, **BOTH, "outer_lr": 1.0, "outer_momentum": 0.0},
    "local sgd": {"algorithm": LocalSGD, "period": 3, **BOTH},
    "eager": {"algorithm": EagerDiLoCo, "period": 3},
    "eager heavy": {"algorithm": EagerDiLoCo, "period": 3, **BOTH, **OUTER},
    "eager evaluated": {
        "algorithm": EagerDiLoCo,
        "period": 3,
        **BOTH,
        **OUTER,
        "evaluate": (1, 3, 8),
    },
    "eager resumed": {"algorithm": EagerDiLoCo, "period": 3, **BOTH, **OUTER, "resume_at": 8},
    "eager waiting": {
        "algorithm": EagerDiLoCo,
        "period": 3,
        **BOTH,
        **OUTER,
        "overlap": False,
    },
    "full own term": {"algorithm": Delayed, "period": 3, **BOTH, "own": 1.0},
    "full own term, one step": {"algorithm": Delayed, "period": 1, "own": 1.0},
    "half own term": {"algorithm": Delayed, "period": 3, **BOTH, "own": 0.5},
    "no own term": {"algorithm": Delayed, "period": 3, **BOTH, "own": 0.0},
    "cocod": {"algorithm": CoCoD, "period": 3, **BOTH},
    "cocod, one step": {"algorithm": CoCoD, "period": 1},
    "slowmo": {"algorithm": SlowMo, "period": 3, **BOTH},
    "slowmo of nothing": {"algorithm": SlowMo, "period": 3, **BOTH, "slow_lr": 1.0, "slow_momentum": 0.0},
    "slowmo resumed": {"algorithm": SlowMo, "period": 3, **BOTH, "resume_at": 8},
}


def with_rates(rank, n):
    """SlowMo under a schedule of the learning rate that reaches zero."""
    torch.manual_seed(0)
    return quadratic(rank, n, functools.partial(Scheduled, slow_lr=0.8, slow_momentum=0.5), period=3, unequal=True)


class Scheduled(SlowMo):
    """Sets the rate of the round that begins."""

    def after_step(self):
        super().after_step()
        self.optimizers[0].param_groups[0]["lr"] = RATES[self.t // 3 % len(RATES)]


def everything(rank, n):
    return {**paths_of(rank, n, CONFIGURATIONS), "with rates": with_rates(rank, n)}


@functools.cache
def paths(n):
    ranks = run_ranks(everything, n, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def weights(name, n):
    return unequal(n) if CONFIGURATIONS[name].get("unequal") else normalised(np.ones(n))


SMALL = {"lr": 0.5, "beta": 0.6, **HEAVY}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "options"), [("diloco", {}), ("diloco heavy", SMALL)])
def test_diloco_follows_its_equations(n, name, options):
    w, x = weights(name, n), positions(paths(n)[name])
    assert distance(x, diloco(n, 3, w, **options)[0]) < TOL
    for wrong in ({"nesterov": False}, {"beta": 0.8}, {"lr": 0.6}, {"lag": 1}):
        assert distance(x, diloco(n, 3, w, **{**options, **wrong})[0]) > 1e-3
    if n > 1:
        assert distance(x, diloco(n, 3, w[::-1] if "unequal" in CONFIGURATIONS[name] else unequal(n), **options)[0]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_with_an_outer_step_of_one_diloco_is_local_sgd(n):
    assert distance(positions(paths(n)["diloco of one"]), positions(paths(n)["local sgd"])) < TOL
    assert distance(positions(paths(n)["diloco heavy"]), positions(paths(n)["local sgd"])) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_eager_diloco_follows_its_equations(n):
    for name, options in (("eager", {}), ("eager heavy", SMALL)):
        w, x = weights(name, n), positions(paths(n)[name])
        assert distance(x, diloco(n, 3, w, own=w, **options)[0]) < TOL
        if n > 1:
            for wrong in (1.0, 0.0, None):
                assert distance(x, diloco(n, 3, w, own=wrong, **options)[0]) > 1e-3


def test_eager_diloco_of_one_worker_is_diloco():
    for eager, blocking in (("eager", "diloco"), ("eager heavy", "diloco heavy")):
        assert bitwise(positions(paths(1)[eager]), positions(paths(1)[blocking]))
    assert distance(positions(paths(2)["eager"]), positions(paths(2)["diloco"])) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("suffix", ["", ", one step"])
def test_cocod_is_the_member_with_an_outer_step_of_one_the_delay_and_the_full_own_term(n, suffix):
    member, cocod = positions(paths(n)[f"full own term{suffix}"]), positions(paths(n)[f"cocod{suffix}"])
    assert distance(member, cocod) < TOL
    if n > 1:  # each part is needed
        for other in ("half own term", "no own term", "local sgd"):
            assert distance(positions(paths(n)[other]), positions(paths(n)["cocod"])) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_any_own_term_follows_the_equations(n):
    for name, own in (("half own term", 0.5), ("no own term", 0.0)):
        expected = diloco(n, 3, unequal(n), lr=1.0, beta=0.0, nesterov=False, own=own, **HEAVY)[0]
        if n > 1:
            assert distance(positions(paths(n)[name]), expected) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_slowmo_follows_its_equations(n):
    x = positions(paths(n)["slowmo"])
    assert distance(x, slowmo(n, 3, unequal(n), 1.0, 0.7, **HEAVY)) < TOL
    assert distance(x, slowmo(n, 3, unequal(n), 1.0, 0.6, **HEAVY)) > 1e-3
    assert distance(x, slowmo(n, 3, unequal(n), 0.9, 0.7, **HEAVY)) > 1e-3
    assert distance(positions(paths(n)["slowmo of nothing"]), positions(paths(n)["local sgd"])) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_slow_momentum_is_in_units_of_the_learning_rate_of_the_round(n):
    x = positions(paths(n)["with rates"])
    assert np.isfinite(x).all()
    assert distance(x, slowmo(n, 3, unequal(n), 0.8, 0.5, rates=RATES)) < TOL
    assert distance(x, slowmo(n, 3, unequal(n), 0.8, 0.5, rates=RATES, constant=True)) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "own"), [("diloco", None), ("eager", "w")])
def test_the_consensus_is_the_mean_of_the_outer_parameters_and_looking_at_it_changes_nothing(n, name, own):
    plain, evaluated = paths(n)[f"{name} heavy"], paths(n)[f"{name} evaluated"]
    assert bitwise(positions(plain), positions(evaluated))
    θ = diloco(n, 3, unequal(n), own=unequal(n) if own else None, **SMALL)[1]
    for t, seen in evaluated[0].consensus.items():
        assert all(bitwise(seen, path.consensus[t]) for path in evaluated)
        assert distance(seen, unequal(n) @ θ[t]) < TOL
    x = positions(plain)
    assert distance(plain[0].end, unequal(n) @ θ[-1]) < TOL
    assert distance(plain[0].end, unequal(n) @ x[-1]) > 1e-3  # not the mean of the replicas


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "same_as"), [("diloco", "diloco heavy"), ("eager", "eager heavy"), ("slowmo", "slowmo")])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(n, name, same_as):
    for resumed, plain in zip(paths(n)[f"{name} resumed"], paths(n)[same_as], strict=True):
        assert bitwise(resumed.x, plain.x)
        assert bitwise(resumed.end, plain.end)


@pytest.mark.parametrize("n", SIZES)
def test_waiting_at_the_launch_gives_the_same_trajectory_bit_for_bit(n):
    for waiting, plain in zip(paths(n)["eager waiting"], paths(n)["eager heavy"], strict=True):
        assert bitwise(waiting.x, plain.x)


@pytest.mark.parametrize("n", SIZES)
def test_the_warm_up_is_synchronous(n):
    x = positions(paths(n)["diloco warm-up"])
    assert distance(x[:5], synchronous(n, unequal(n), **HEAVY)[:5, None]) < TOL
    assert distance(x[8:], synchronous(n, unequal(n), **HEAVY)[8:, None]) > 1e-3


def late_parameters(rank, n, algorithm):
    """A parameter that is freed in mid-round and one that is added later: both are averaged from the next round on."""
    torch.manual_seed(0)
    first, late, added = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    late.requires_grad_(False)
    model = nn.ParameterList([first, late, added])
    optimizer = torch.optim.SGD([first, late], 0.1)
    with algorithm(model, optimizer, period=2, outer_lr=1.0, outer_momentum=0.5) as algo:
        for t in range(12):
            if t == 3:
                late.requires_grad_()
            if t == 5:
                optimizer.add_param_group({"params": [added]})
            for p in model:
                p.grad = torch.full((3,), float(rank + 1)) if p.requires_grad else None
            algo.step()
        return [p.detach().clone() for p in model], [len(group["params"]) for group in algo.outer.param_groups]


@pytest.mark.parametrize("algorithm", [DiLoCo, EagerDiLoCo])
def test_parameters_that_come_later_join_the_next_round(algorithm):
    ranks = run_ranks(late_parameters, 2, algorithm, timeout=LIMIT)
    for values, groups in ranks:
        assert groups == [1, 1, 1]
        assert all((v < 0).all() for v in values)
    if algorithm is DiLoCo:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True))


def test_options_out_of_range_are_refused_by_name():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for algorithm, options, text in [
        (DiLoCo, {"outer_lr": -1}, "outer_lr must be a number of at least 0, got -1"),
        (DiLoCo, {"outer_momentum": float("inf")}, "outer_momentum must be"),
        (EagerDiLoCo, {"outer_lr": "a"}, "outer_lr must be"),
        (EagerDiLoCo, {"on_nonfinite": "skip"}, "does not go together"),
        (SlowMo, {"slow_lr": -1}, "slow_lr must be"),
        (SlowMo, {"slow_momentum": True}, "slow_momentum must be"),
        (SlowMo, {"period": 0}, "period must be"),
    ]:
        with pytest.raises(ValueError, match=text):
            algorithm(model, optimizer, **options)


def not_finite(rank, n):
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with DiLoCo(model, optimizer, period=2, on_nonfinite="skip") as algo:
        for t in range(6):
            optimizer.zero_grad()
            (model(torch.full((3,), 1.0 + rank)) - 1).square().sum().backward()
            if t == 2 and rank == 0:
                model.weight.grad[0, 0] = torch.nan
            algo.step()
        return [p.detach().clone() for p in model.parameters()]


def test_a_rank_that_is_left_out_goes_on_with_the_others_outer_parameters():
    first, second = run_ranks(not_finite, 2, timeout=LIMIT)
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(first, second, strict=True))


def distances(rank, n, algorithm):
    """After a merge: the metric, and x as it was before."""
    model = nn.ParameterList([torch.ones(50, dtype=torch.float64)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, found = [], []
    optimizer.register_step_post_hook(lambda *_: before.append(model[0].detach().clone()))
    with algorithm(model, optimizer, period=2) as algo:
        for t in range(6):
            draw = torch.Generator().manual_seed(100 * rank + t)
            model[0].grad = torch.randn(50, generator=draw, dtype=torch.float64)
            algo.step()
            if algo.A is not None:
                algo.A.wait()
            found.append(algo.metrics()["algo/replica_distance"])
    return before, found


@pytest.mark.parametrize(("algorithm", "late"), [(DiLoCo, 0), (EagerDiLoCo, 2)])
def test_the_distance_is_that_of_the_replicas_relative_to_the_parameters(algorithm, late):
    ranks = run_ranks(distances, 3, algorithm, timeout=LIMIT)
    for before, found in ranks:
        t = 3  # the second merge; a delayed mean is known a round later
        if not late:  # there all start from one θ
            mean = sum(b[t] for b, _ in ranks) / 3
            assert found[t] == pytest.approx(float((before[t] - mean).norm() / before[t].norm()), rel=1e-6)
        assert found[t + late] > 0
    assert ranks[0][1][0] == 0.0
