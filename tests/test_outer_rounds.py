"""DiLoCo, SlowMo, Eager DiLoCo and the parts they are made of. The quadratics are those of test_cocod."""

import copy
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
from lightning_cocod.algorithms.outer import Delay, OuterRounds

SIZES = [1, 2, 4]


class Delayed(OuterRounds):
    """The member with an outer gradient descent, the delay and the own term that is asked for."""

    name = "delayed"

    def __init__(self, *args, own=None, **options):
        super().__init__(*args, outer=functools.partial(torch.optim.SGD, lr=1.0), delay=Delay(own), **options)


def inner(x, v, n, momentum, weight_decay, lr=LR):
    v = momentum * v + gradients(x, *problems(n)) + weight_decay * x
    return x - lr * v, v


def diloco(
    n, k, w, *, lr=0.7, beta=0.9, nesterov=True, momentum=0.0, weight_decay=0.0, lag=0, own=None, adamw=None, resets=False
):
    """x_i(t), t = 0 … STEPS, before the forward of step t, and θ_i(t). `own` is None for the blocking DiLoCo, else a.

    The inner optimizer is SGD, or with options for it `adamw`. What must not match: `resets` its state at every merge.
    """
    adam = None if adamw is None else AdamW(**adamw)
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
            adam = AdamW(**adamw) if resets else adam
        path.append(x)
        outer.append(θ)
        if adam is None:
            x, v = inner(x, v, n, momentum, weight_decay)
        else:
            x = adam.step(x, gradients(x, *problems(n)))
    return np.stack(path), np.stack(outer)


RATES = [LR, LR / 2, 0.0, 0.0, 0.0, 0.0, LR / 4]  # of the steps, in turn: falling to zero in mid-round, zero for a round


def slowmo(n, k, w, alpha, beta, *, momentum=0.0, weight_decay=0.0, rates=None, gamma=np.mean):
    """x_i(t) and x_0(t). `gamma` makes the γ of a round out of the rates of its steps."""
    x, v = np.tile(X0, (n, 1)), np.zeros((n, DIM))
    x_0, u, path, outer, seen = x, np.zeros((n, DIM)), [], [], []
    for t in range(STEPS + 1):
        if t > 0 and t % k == 0:
            Δ, γ = x_0 - np.tile(w @ x, (n, 1)), gamma(seen)
            u = beta * u + (0 if γ == 0 else Δ / γ)
            x_0 = x_0 - alpha * γ * u
            x, seen = x_0, []
        path.append(x)
        outer.append(x_0)
        seen.append(LR if rates is None else rates[t % len(rates)])
        x, v = inner(x, v, n, momentum, weight_decay, seen[-1])
    return np.stack(path), np.stack(outer)


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
    "diloco warm-up": {"algorithm": DiLoCo, "period": 3, "warmup_steps": 4, **BOTH},
    "diloco adamw": {"algorithm": DiLoCo, "period": 3, "unequal": True, "adamw": {"weight_decay": 0.1}},
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
    scheduled = functools.partial(Scheduled, slow_lr=0.8, slow_momentum=0.5)
    return {
        "with rates": quadratic(rank, n, scheduled, period=3, unequal=True),
        "with rates, resumed": quadratic(rank, n, scheduled, period=3, unequal=True, resume_at=8),
    }


class Scheduled(SlowMo):
    """Sets the rate of the step that comes, before the merge that belongs to it, as a scheduler does."""

    def after_step(self):
        self.optimizers[0].param_groups[0]["lr"] = RATES[(self.t + 1) % len(RATES)]
        super().after_step()


def everything(rank, n):
    return {**paths_of(rank, n, CONFIGURATIONS), **with_rates(rank, n)}


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
def test_with_adamw_inside_as_in_the_paper_it_does_too_and_adamw_keeps_its_state(n):
    x, inside = positions(paths(n)["diloco adamw"]), {"adamw": {"weight_decay": 0.1}}
    assert distance(x, diloco(n, 3, unequal(n), **inside)[0]) < TOL
    for wrong in ({"resets": True}, {"adamw": {"weight_decay": 0.0}}, {"adamw": None}, {"nesterov": False}):
        assert distance(x, diloco(n, 3, unequal(n), **{**inside, **wrong})[0]) > 1e-3


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


def unstable_from(n, beta, lr=0.7):
    """The least part h of the way to the optimum of a quadratic in a round, in hundredths, with which n workers diverge."""

    def grows(h):
        G = np.array([h / n, h - h / n, 0])  # of θ(t), θ(t − 1), m(t − 1)
        m = G + np.array([0, 0, beta])
        step = lr * (G + beta * m)
        return max(abs(np.linalg.eigvals([np.array([1, 0, 0]) - step, [1, 0, 0], m]))) > 1 + 1e-9

    return next((h for h in np.arange(1, 101) / 100 if grows(h)), None)


def test_from_where_on_eager_diloco_is_unstable():
    assert [unstable_from(n, 0.9) for n in (1, 2, 4, 8, 1e9)] == [None, None, 0.6, 0.46, 0.37]
    assert [unstable_from(n, 0.5) for n in (1, 2, 4, 8, 1e9)] == [None, None, None, 0.93, 0.81]


def farthest(rank, n, h, options):
    """How far from the optimum of x²/2, after 20 rounds and after 40, of one step that goes the part h of the way each."""
    x = nn.Parameter(torch.ones(1, dtype=torch.float64))
    model, sgd = nn.ParameterList([x]), torch.optim.SGD([x], lr=h)
    far = []
    with EagerDiLoCo(model, sgd, period=1, timeout=20, **options):
        for _ in range(2):
            steps = []
            for _ in range(20):
                x.grad = x.detach().clone()
                sgd.step()
                steps.append(abs(x.item()))
            far.append(max(steps))
    return far


@pytest.mark.parametrize(
    ("n", "h", "options", "stable"),
    [
        (2, 0.95, {}, True),
        (4, 0.55, {}, True),
        (4, 0.65, {}, False),
        (4, 0.95, {"outer_momentum": 0.5}, True),
    ],
)
def test_late_parts_with_momentum_are_unstable_for_four_workers_whose_rounds_go_far(n, h, options, stable):
    for first, second in run_ranks(farthest, n, h, options, timeout=LIMIT):
        assert (second < first) == stable


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
        assert distance(positions(paths(n)[name]), expected) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_slowmo_follows_its_equations(n):
    x, (expected, x_0) = positions(paths(n)["slowmo"]), slowmo(n, 3, unequal(n), 1.0, 0.7, **HEAVY)
    assert distance(x, expected) < TOL
    assert distance(x, slowmo(n, 3, unequal(n), 1.0, 0.6, **HEAVY)[0]) > 1e-3
    assert distance(x, slowmo(n, 3, unequal(n), 0.9, 0.7, **HEAVY)[0]) > 1e-3
    assert distance(paths(n)["slowmo"][0].end, x_0[-1, 0]) < TOL
    assert distance(positions(paths(n)["slowmo of nothing"]), positions(paths(n)["local sgd"])) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_slow_momentum_is_in_units_of_the_learning_rate_of_the_round(n):
    x = positions(paths(n)["with rates"])
    assert np.isfinite(x).all()
    assert distance(x, slowmo(n, 3, unequal(n), 0.8, 0.5, rates=RATES)[0]) < TOL
    for wrong in (lambda rates: LR, lambda rates: rates[-1], max):
        assert distance(x, slowmo(n, 3, unequal(n), 0.8, 0.5, rates=RATES, gamma=wrong)[0]) > 1e-3
    assert bitwise(x, positions(paths(n)["with rates, resumed"]))


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


def late_parameters(rank, n, algorithm, resume_at=None):
    """A parameter that is freed in mid-round and one that is added later: both are averaged from the next round on."""

    def fresh():
        model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3)])
        model[1].requires_grad_(False)
        optimizer = torch.optim.SGD(list(model)[:2], 0.1)
        return model, optimizer, algorithm(model, optimizer, period=2, outer_lr=0.8, outer_momentum=0.5)

    def event(t, model, optimizer):
        if t == 3:
            model[1].requires_grad_()
        if t == 5:
            optimizer.add_param_group({"params": [model[2]]})

    def run(start, stop):
        for t in range(start, stop):
            event(t, model, optimizer)
            for p in model:
                p.grad = torch.full((3,), rank + 1.0 + t, dtype=torch.float64) if p.requires_grad else None
            algo.step()

    model, optimizer, algo = fresh()
    if resume_at is not None:
        with algo:
            run(0, resume_at)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict()))
        model, optimizer, algo = fresh()
        for t in range(resume_at):
            event(t, model, optimizer)
    with algo:
        if resume_at is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        run(resume_at or 0, 12)
        return [p.detach().clone() for p in model], [len(group["params"]) for group in algo.outer.param_groups]


def joined(algorithm):
    """The same in one process: the parameters of two workers, each with the mean of what both have found."""
    x, θ, m = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)  # worker, parameter
    before = None
    for t in range(13):
        if t % 2 == 0 and t > 0:
            Δ = θ - x
            for j, joins in ((1, 4), (2, 6)):
                if t < joins:
                    Δ[:, j] = 0
                if t == joins:
                    x[:, j] = θ[:, j] = x[:, j].mean()
                    Δ[:, j] = 0
            G = Δ.mean(0).expand(2, 3) if algorithm is DiLoCo else 0.5 * Δ + (0 if before is None else before)
            before = Δ.mean(0) - 0.5 * Δ
            m = 0.5 * m + G
            θ = θ - 0.8 * (G + 0.5 * m)
            x = torch.where(torch.tensor([True, t >= 4, t >= 6]), θ, x)
        if t < 12:
            moves = torch.tensor([True, t >= 3, t >= 5])
            x = x - 0.1 * moves * (torch.arange(2.0)[:, None] + 1 + t)
    return x


@pytest.mark.parametrize("algorithm", [DiLoCo, EagerDiLoCo])
def test_parameters_that_come_later_join_the_next_round(algorithm):
    expected = joined(algorithm)
    for rank, (values, groups) in enumerate(run_ranks(late_parameters, 2, algorithm, timeout=LIMIT)):
        assert groups == [2, 1]
        torch.testing.assert_close(torch.stack([v[0] for v in values]).float(), expected[rank])


@pytest.mark.parametrize("stop", [3, 7])
@pytest.mark.parametrize("algorithm", [DiLoCo, EagerDiLoCo])
def test_a_run_whose_parameters_came_later_is_resumed_bit_for_bit(algorithm, stop):
    whole, resumed = (run_ranks(late_parameters, 2, algorithm, at, timeout=LIMIT) for at in (None, stop))
    for (one, _), (other, _) in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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
        (SlowMo, {"slow_momentum": 1.0}, "slow_momentum must be less than 1, got 1.0"),
        (DiLoCo, {"outer_momentum": 1}, "outer_momentum must be less than 1, got 1"),
        (EagerDiLoCo, {"overlap": 1}, "overlap must be True or False"),
        (SlowMo, {"period": 0}, "period must be"),
    ]:
        with pytest.raises(ValueError, match=text):
            algorithm(model, optimizer, **options)
    with pytest.raises(ValueError, match="own must be a number of at least 0, got -5"):
        Delay(-5)
    for algorithm in (DiLoCo, SlowMo):  # nothing is in flight that could overlap
        with pytest.raises(TypeError, match="overlap"):
            algorithm(model, optimizer, overlap=False)


def not_finite(rank, n):
    """Rank 0's gradient is not finite for once. What each rank is at the next evaluation, and what its optimizer keeps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with DiLoCo(model, optimizer, period=2, on_nonfinite="skip") as algo:
        for t in range(6):
            optimizer.zero_grad()
            (model(torch.full((3,), 1.0 + rank)) - 1).square().sum().backward()
            if t == 2 and rank == 0:
                model.weight.grad[0, 0] = torch.nan
            algo.step()
        assert algo.left_out == ()  # at the merge at 4, and no longer
        with algo.consensus():
            seen = [p.detach().clone() for p in model.parameters()]
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [*seen, *(p.detach().clone() for p in model.parameters())], momentum


def test_a_rank_that_is_left_out_goes_on_with_the_others_outer_parameters():
    (first, momentum), (second, _) = run_ranks(not_finite, 2, timeout=LIMIT)
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(first, second, strict=True))
    assert all(buffer.isfinite().all() and buffer.any() for buffer in momentum)  # begun anew at 4, kept at the end


def test_a_model_without_the_last_steps_says_so(caplog):
    """One worker: three steps in rounds of two."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for steps, lost in ((3, 1), (4, 0), (1, 1)):
        caplog.clear()
        before = model.weight.detach().clone()
        with DiLoCo(model, optimizer, period=2):
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(2)).sum().backward()
                optimizer.step()
        assert [f"the last {lost} steps are not in the model of diloco" in r.getMessage() for r in caplog.records] == [
            True
        ] * lost
        assert torch.equal(before, model.weight) == (steps == 1)


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
            found.append(algo.metrics().get("algo/replica_distance", 0.0))
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
