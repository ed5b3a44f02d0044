"""CoCoD-SGD: its identities on 1, 2 and 4 workers, against references written from the paper's equations.

The workers' problems are quadratics in float64, f_i(x) = ½ (x - b_i)ᵀ H_i (x - b_i), so that everything is known. `TOL`
is what rounding in float64 explains; where the specification says exact, the comparison is `torch.equal`.
"""

import copy
import functools
import random
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn

from lightning_cocod import CoCoD
from lightning_cocod.comm import buckets, carrying
from lightning_cocod.comm.collectives import Collective
from lightning_cocod.comm.correction import Correction

SIZES = [1, 2, 4]
TOL = 1e-12
LIMIT = 60.0
LR, DIM, STEPS = 0.1, 5, 14


# The workers' problems and the paper's equations


def problem(rank, same_hessian=False):
    """H_i and b_i of a worker."""
    M = np.random.default_rng(100 if same_hessian else 100 + rank).normal(size=(DIM, DIM))
    return M @ M.T / DIM + 0.1 * np.eye(DIM), np.random.default_rng(200 + rank).normal(size=DIM)


def problems(n, same_hessian=False):
    H, b = zip(*(problem(rank, same_hessian) for rank in range(n)), strict=True)
    return np.stack(H), np.stack(b)


def gradients(x, H, b):
    """G_i(x_i), a row for each worker; one x for all of them broadcasts."""
    return np.einsum("nij,nj->ni", H, x - b)


def normalised(weights):
    return np.asarray(weights, dtype=np.float64) / np.sum(weights)


X0 = np.linspace(-1, 1, DIM)


def paper(n, k, w=None, *, steps=STEPS, same_hessian=False, momentum=0.0, weight_decay=0.0, lag=0, late=False, buffers=""):
    """x_i(t), t = 0 … steps, before the forward of step t: array [t, i, :].

    What must not match: `lag` shifts every merge (an off-by-one counter), `late` merges between forward and update,
    `buffers` averages or resets the momentum at merges.
    """
    w = normalised(np.ones(n) if w is None else w)
    H, b = problems(n, same_hessian)
    x, v = np.tile(X0, (n, 1)), np.zeros((n, DIM))
    S, A, path = x, w @ x, []
    for t in range(steps + 1):
        early = gradients(x, H, b)
        if t > 0 and t % (k + lag) == 0:
            x = x + (A - S)
            S, A = x, w @ x
            v = {"averaged": np.tile(w @ v, (n, 1)), "reset": 0 * v}.get(buffers, v)
        path.append(x)
        g = early if late else gradients(x, H, b)
        v = momentum * v + g + weight_decay * x
        x = x - LR * v
    return np.stack(path)


def synchronous(n, w=None, *, steps=STEPS, same_hessian=False, momentum=0.0, weight_decay=0.0):
    """S-SGD: x(t), t = 0 … steps."""
    w = normalised(np.ones(n) if w is None else w)
    x, v, path = X0, 0 * X0, []
    for _ in range(steps + 1):
        path.append(x)
        v = momentum * v + w @ gradients(x, *problems(n, same_hessian)) + weight_decay * x
        x = x - LR * v
    return np.stack(path)


class AdamW:
    """x ← x − γ (λ x + m̂ / (√v̂ + ε)), a row for each worker: after the paper, as torch's is of the workers."""

    def __init__(self, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8):
        self.decay, self.betas, self.eps, self.t, self.m, self.v = weight_decay, betas, eps, 0, 0.0, 0.0

    def step(self, x, g):
        (β1, β2), self.t = self.betas, self.t + 1
        self.m = β1 * self.m + (1 - β1) * g
        self.v = β2 * self.v + (1 - β2) * g**2
        m, v = self.m / (1 - β1**self.t), self.v / (1 - β2**self.t)
        return x - LR * (self.decay * x + m / (np.sqrt(v) + self.eps))


# The same on workers


class Quadratic(nn.Module):
    def __init__(self, rank, same_hessian=False):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(X0))
        self.H, self.b = map(torch.tensor, problem(rank, same_hessian))

    def forward(self):
        r = self.x - self.b
        return 0.5 * r @ self.H @ r


@dataclass
class Path:
    """What one worker saw: x(t) before the forward of step t, x before the merge that belongs to t, and the end."""

    x: list[np.ndarray] = field(default_factory=list)
    unmerged: dict[int, np.ndarray] = field(default_factory=dict)
    consensus: dict[int, np.ndarray] = field(default_factory=dict)
    end: np.ndarray | None = None


def quadratic(
    rank,
    n,
    algorithm=CoCoD,
    *,
    steps=STEPS,
    same_hessian=False,
    sgd=None,
    adamw=None,
    clip_norm=None,
    unequal=False,
    evaluate=(),
    reweigh=None,
    resume_at=None,
    **options,
):
    """Train a worker's quadratic and return its Path. `reweigh` is {step: weights}; `resume_at` restarts from a state.

    With options for `adamw` that is the optimizer; `clip_norm` is the most that a worker's gradient may be long.
    """
    weights = list(range(1, n + 1)) if unequal else None
    path = Path()

    def fresh():
        model = Quadratic(rank, same_hessian)
        make, its = (torch.optim.SGD, sgd) if adamw is None else (torch.optim.AdamW, adamw)
        optimizer = make(model.parameters(), LR, **(its or {}))
        optimizer.register_step_post_hook(lambda *_: path.unmerged.__setitem__(algo.t + 1, model.x.detach().numpy().copy()))
        return model, optimizer, algorithm(model, optimizer, weights=weights, **options)

    def run(start, stop):
        for t in range(start, stop):
            path.x.append(model.x.detach().numpy().copy())
            if t in evaluate:
                with algo.consensus():
                    path.consensus[t] = model.x.detach().numpy().copy()
            if reweigh and t in reweigh:
                algo.set_weights(reweigh[t])
            optimizer.zero_grad()
            model().backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            algo.step()

    model, optimizer, algo = fresh()
    if resume_at is not None:
        with algo:
            run(0, resume_at)
            saved = copy.deepcopy((model.state_dict(), algo.optimizer_state(optimizer), algo.state_dict()))
        model, optimizer, algo = fresh()
    with algo:
        if resume_at is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        run(resume_at or 0, steps)
        path.x.append(model.x.detach().numpy().copy())
    path.end = model.x.detach().numpy().copy()
    return path


def paths_of(rank, n, configurations):
    return {name: quadratic(rank, n, **options) for name, options in configurations.items()}


HEAVY = {"momentum": 0.9, "weight_decay": 0.01}
CONFIGURATIONS = {
    "k1": {"period": 1},
    "k3": {"period": 3},
    "k3 unequal": {"period": 3, "unequal": True},
    "k3 same Hessian": {"period": 3, "unequal": True, "same_hessian": True},
    "k3 heavy": {"period": 3, "unequal": True, "sgd": HEAVY},
    "k3 blocking launch": {"period": 3, "overlap": False, "unequal": True, "sgd": HEAVY},
    "k3 evaluated": {"period": 3, "unequal": True, "sgd": HEAVY, "evaluate": (0, 1, 3, 4, 8, 11, 12)},
    "schedule": {"period": {0: 1, 4: 3}},
    "warm-up": {"period": 3, "warmup_steps": 4, "unequal": True, "sgd": HEAVY},
    "all warm-up": {"period": 3, "warmup_steps": STEPS + 1, "unequal": True, "sgd": HEAVY},
}


@functools.cache
def paths(n):
    """All configurations on n workers, in one start of the workers: {name: the Paths of all ranks}."""
    ranks = run_ranks(paths_of, n, CONFIGURATIONS, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in CONFIGURATIONS}


def positions(ranks):
    """Array [t, i, :], as `paper` returns it."""
    return np.stack([path.x for path in ranks], axis=1)


def unequal(n):
    return normalised(np.arange(1, n + 1))


def distance(a, b):
    return np.abs(a - b).max()


def bitwise(a, b):
    return np.array_equal(np.asarray(a), np.asarray(b))


# Exact test 1: identical batches, or one worker, are plain SGD


def network_run(rank, n, own_data, k, algorithm=CoCoD):
    """A float32 network with momentum; k = 0 is plain SGD. Returns the flat parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    data = torch.Generator().manual_seed(rank if own_data else 0)

    def train():
        for _ in range(11):
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=data)).square().mean().backward()
            optimizer.step()

    with algorithm(model, optimizer, period=k) if k else nullcontext():
        train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def network_runs(rank, n, own_data):
    return [network_run(rank, n, own_data, k) for k in (0, 1, 3, 4)]


@pytest.mark.parametrize("n", SIZES)
def test_identical_batches_are_plain_sgd_exactly_for_any_period(n):
    for plain, *averaged in run_ranks(network_runs, n, False, timeout=LIMIT):
        assert all(torch.equal(plain, x) for x in averaged)


def test_identical_batches_on_three_workers_are_plain_sgd_to_rounding():
    for plain, *averaged in run_ranks(network_runs, 3, False, timeout=LIMIT):
        for x in averaged:  # 1/3 has no exact representation
            torch.testing.assert_close(x, plain, rtol=1e-6, atol=1e-7)


def test_different_batches_are_not_plain_sgd():
    for plain, *averaged in run_ranks(network_runs, 2, True, timeout=LIMIT):
        assert all((x - plain).abs().max() > 1e-3 for x in averaged)


def test_the_merge_must_be_written_as_a_difference_to_be_exact():
    S = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x, A = S + 0.01 * S.flip(0), S
    assert torch.equal(x + (A - S), x)
    assert not torch.equal((A + x) - S, x)


# Exact test 2: a merge conserves the weighted sum


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["k3", "k3 unequal", "k3 heavy"])
def test_a_merge_conserves_the_weighted_mean(n, name):
    w = normalised(np.ones(n)) if name == "k3" else unequal(n)
    before = np.stack([[p.unmerged[t] for p in paths(n)[name]] for t in range(1, STEPS + 1)])
    after = positions(paths(n)[name])[1:]
    assert distance(np.einsum("n,tnd->td", w, before), np.einsum("n,tnd->td", w, after)) < TOL
    moved = [t for t in range(1, STEPS + 1) if distance(before[t - 1], after[t - 1]) > 1e-6]
    assert moved == ([] if n == 1 else [6, 9, 12])  # the first merge, at 3, is a no-op


@pytest.mark.parametrize("n", [2, 4])
def test_wrong_weights_do_not_conserve_the_mean(n):
    before = np.stack([p.unmerged[9] for p in paths(n)["k3 unequal"]])
    after = np.stack([p.x[9] for p in paths(n)["k3 unequal"]])
    assert distance(before.mean(0), after.mean(0)) > 1e-3


REWEIGHED = {"period": 3, "steps": 17, "reweigh": {7: [5.0, 1.0]}, "evaluate": (8, 10, 13, 16)}


@functools.cache
def reweighed():
    configurations = {
        "whole": REWEIGHED,
        "resumed before the merge": {**REWEIGHED, "resume_at": 8},
        "resumed after the merge": {**REWEIGHED, "resume_at": 11},
        "warm-up": {"period": 3, "warmup_steps": 4, "reweigh": {2: [5.0, 1.0]}},
    }
    ranks = run_ranks(paths_of, 2, configurations, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in configurations}


def test_new_weights_are_those_of_the_rounds_that_begin_with_the_next_merge():
    ranks = reweighed()["whole"]
    x, old, new = positions(ranks), normalised([1, 1]), normalised([5, 1])
    merge = {t: np.stack([p.x[t] - p.unmerged[t] for p in ranks]) for t in (6, 9, 12, 15)}
    # The merge at 9 begins the first round with the new weights. It is reported at 12, and that report is merged at 15.
    for t, in_force, other in ((6, old, new), (9, old, new), (12, old, new), (15, new, old)):
        assert np.abs(in_force @ merge[t]).max() < TOL
        assert np.abs(other @ merge[t]).max() > 1e-4
    G = np.stack([gradients(row, *problems(2)) for row in x])
    for t0, in_force, other in ((3, old, new), (6, old, new), (9, old, new), (12, new, old)):
        for t in range(t0 + 3, min(t0 + 6, len(x))):
            assert distance(x[t], in_force @ x[t0] - LR * G[t0:t].sum(0)) < TOL
            assert distance(x[t], other @ x[t0] - LR * G[t0:t].sum(0)) > 1e-4


def test_the_consensus_has_the_weights_of_the_message_in_flight():
    ranks = reweighed()["whole"]
    x, old, new = positions(ranks), normalised([1, 1]), normalised([5, 1])
    for t, in_force, other in ((8, old, new), (10, old, new), (13, new, old), (16, new, old)):
        assert all(bitwise(ranks[0].consensus[t], path.consensus[t]) for path in ranks)
        assert distance(ranks[0].consensus[t], in_force @ x[t]) < TOL
        assert distance(ranks[0].consensus[t], other @ x[t]) > 1e-4
    assert bitwise(ranks[0].end, ranks[1].end)
    assert distance(ranks[0].end, new @ x[-1]) < TOL


@pytest.mark.parametrize("stop", ["before", "after"])
def test_weights_that_wait_for_a_merge_survive_a_resume(stop):
    for whole, resumed in zip(reweighed()["whole"], reweighed()[f"resumed {stop} the merge"], strict=True):
        assert bitwise(whole.x, resumed.x)
        assert bitwise(whole.end, resumed.end)


def test_new_weights_hold_at_once_for_synchronous_steps():
    for path in reweighed()["warm-up"]:
        x, old, new = np.stack(path.x), normalised([1, 1]), normalised([5, 1])
        for t, in_force, other in ((0, old, new), (1, old, new), (2, new, old), (3, new, old)):
            G = gradients(x[t], *problems(2))
            assert distance(x[t + 1], x[t] - LR * (in_force @ G)) < TOL
            assert distance(x[t + 1], x[t] - LR * (other @ G)) > 1e-4


def test_the_state_names_the_weights_of_three_rounds(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = Quadratic(0)
    algo = CoCoD(model, torch.optim.SGD(model.parameters(), LR))
    assert algo.state_dict()["weights"] == [[1.0]] * 3


# Exact test 3: with a common Hessian the mean is S-SGD


@pytest.mark.parametrize("n", SIZES)
def test_with_a_common_hessian_the_mean_model_is_synchronous_sgd(n):
    mean = np.einsum("n,tnd->td", unequal(n), positions(paths(n)["k3 same Hessian"]))
    assert distance(mean, synchronous(n, unequal(n), same_hessian=True)) < TOL


@pytest.mark.parametrize("n", [2, 4])
def test_with_different_hessians_the_mean_model_is_not_synchronous_sgd(n):
    mean = np.einsum("n,tnd->td", unequal(n), positions(paths(n)["k3 unequal"]))
    assert distance(mean, synchronous(n, unequal(n))) > 1e-3


# Exact test 4: k = 1 is D-PSGD


@pytest.mark.parametrize("n", SIZES)
def test_period_one_is_decentralised_sgd_on_the_complete_graph(n):
    x = positions(paths(n)["k1"])
    for t in range(STEPS):
        assert distance(x[t + 1], x[t].mean(0) - LR * gradients(x[t], *problems(n))) < TOL


@pytest.mark.parametrize("n", [2, 4])
def test_period_one_is_neither_synchronous_sgd_nor_a_merge_between_forward_and_update(n):
    x = positions(paths(n)["k1"])
    assert distance(x.mean(1), synchronous(n)) > 1e-3
    assert distance(x, paper(n, 1, late=True)) > 1e-3


# Exact test 6: the closed form


def closed_form_error(x, k, w, H, b, delay=1):
    """Largest difference from x_i(t) = x̂(t0) - γ Σ_{τ=t0}^{t-1} G_i(τ), t0 = (⌊t/k⌋ - delay) k, over t ≥ k."""
    G = np.stack([gradients(row, H, b) for row in x])
    starts = {t: (t // k - delay) * k for t in range(k, len(x))}
    return max(distance(x[t], w @ x[t0] - LR * G[t0:t].sum(0)) for t, t0 in starts.items())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "k"), [("k1", 1), ("k3", 3), ("k3 unequal", 3)])
def test_the_closed_form_holds_at_every_step(n, name, k):
    w = unequal(n) if "unequal" in name else normalised(np.ones(n))
    x = positions(paths(n)[name])
    assert closed_form_error(x, k, w, *problems(n)) < TOL
    if n > 1:
        assert closed_form_error(x, k, w, *problems(n), delay=0) > 1e-3  # a blocking average
        assert closed_form_error(x, k + 1, w, *problems(n)) > 1e-3  # an off-by-one counter


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("name", "options"), [("k3", {}), ("k3 heavy", HEAVY)])
def test_the_trajectory_is_the_papers_and_the_optimizer_stays_local(n, name, options):
    w = unequal(n) if name == "k3 heavy" else np.ones(n)
    x = positions(paths(n)[name])
    assert distance(x, paper(n, 3, w, **options)) < TOL
    if n > 1:
        assert distance(x, paper(n, 3, w, lag=1, **options)) > 1e-3
        assert distance(x, paper(n, 3, w, late=True, **options)) > 1e-3
        for wrong in ("averaged", "reset") if options else ():
            assert distance(x, paper(n, 3, w, buffers=wrong, **options)) > 1e-3


def one_parameter(rank, n):
    p = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model = nn.ParameterList([p])
    with CoCoD(model, torch.optim.SGD([p], 1.0), period=1) as algo:
        seen = []
        for _ in range(3):
            p.grad = torch.tensor(-1.0 - rank, dtype=torch.float64)  # rank 0 walks +1 a step, rank 1 +2
            algo.step()
            seen.append(p.item())
    return seen, p.item()


def test_the_sign_of_the_correction_in_one_parameter():  # field report 21
    assert run_ranks(one_parameter, 2, timeout=LIMIT) == [([1.0, 2.5, 4.0], 4.5), ([2.0, 3.5, 5.0], 4.5)]


# Overlap, consensus, end


@pytest.mark.parametrize("n", SIZES)
def test_without_overlap_the_trajectory_is_the_same_bit_for_bit(n):
    assert bitwise(positions(paths(n)["k3 heavy"]), positions(paths(n)["k3 blocking launch"]))


@pytest.mark.parametrize("n", SIZES)
def test_evaluating_changes_nothing_and_sees_the_weighted_mean(n):
    plain, evaluated = paths(n)["k3 heavy"], paths(n)["k3 evaluated"]
    x = positions(plain)
    assert bitwise(x, positions(evaluated))
    assert all(bitwise(p.end, q.end) for p, q in zip(plain, evaluated, strict=True))
    for t, seen in evaluated[0].consensus.items():
        assert all(bitwise(seen, path.consensus[t]) for path in evaluated)
        assert distance(seen, unequal(n) @ x[t]) < TOL


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", ["k1", "k3 heavy"])
def test_all_replicas_end_on_the_consensus_bit_for_bit(n, name):
    ranks, w = paths(n)[name], unequal(n) if name == "k3 heavy" else normalised(np.ones(n))
    assert all(bitwise(path.end, ranks[0].end) for path in ranks)
    x, k = positions(ranks), int(name[1])
    launched = STEPS // k * k
    correction = w @ x[launched] - x[launched]
    assert distance(ranks[0].end, w @ (x[-1] + correction)) < TOL
    if n > 1:
        assert distance(ranks[0].end, x[-1][0]) > 1e-3


# When


@pytest.mark.parametrize("n", SIZES)
def test_a_schedule_changes_the_length_of_rounds(n):
    x = positions(paths(n)["schedule"])
    w = normalised(np.ones(n))
    assert distance(x[:5], paper(n, 1)[:5]) < TOL
    G = np.stack([gradients(row, *problems(n)) for row in x])
    for t0, until in ((4, 10), (7, 13)):  # rounds begin at 4, 7, 10, 13
        for t in range(t0 + 3, until):
            assert distance(x[t], w @ x[t0] - LR * G[t0:t].sum(0)) < TOL


@pytest.mark.parametrize("n", SIZES)
def test_warm_up_is_synchronous_sgd_and_then_rounds_begin(n):
    ssgd = synchronous(n, unequal(n), **HEAVY)
    for path in paths(n)["all warm-up"]:
        assert distance(np.stack(path.x), ssgd) < TOL
        assert bitwise(path.x, paths(n)["all warm-up"][0].x)
    warm = positions(paths(n)["warm-up"])
    assert bitwise(warm[:5], positions(paths(n)["all warm-up"])[:5])
    if n > 1:
        assert distance(warm[5, 0], warm[5, 1]) > 1e-3  # step 4 is local
        merged = [t for t in range(1, STEPS + 1) if distance(warm[t][0], paths(n)["warm-up"][0].unmerged[t]) > 1e-6]
        assert merged == [10, 13]  # launched at 4, 7 and 10; the merge at 7 is a no-op


def branches(rank, n, concatenated=False, algorithm=CoCoD, branching=True, **options):
    """Inputs of unequal number; `only_0` is used by rank 0 alone, `unused` by nobody. Returns the parameters."""
    names = ("shared", "only_0", "unused")
    model = nn.ParameterDict({name: nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9, weight_decay=0.1)
    batches = [torch.randn(3 + 2 * r, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    def losses(r):
        used = model["shared"] + model["only_0"] if branching and r == 0 else model["shared"]
        return (batches[r] @ used - 1).square()

    with nullcontext(optimizer) if concatenated else algorithm(model, optimizer, weights=[3, 5], **options) as stepper:
        for _ in range(6):
            optimizer.zero_grad()
            (torch.cat([losses(0), losses(1)]) if concatenated else losses(rank)).mean().backward()
            stepper.step()
    return {name: p.detach() for name, p in model.items()}


def warm_branches(rank, n):
    return branches(rank, n, warmup_steps=10)


def test_warm_up_is_one_process_on_the_concatenated_batch_even_where_gradients_are_missing():
    single = branches(0, 1, concatenated=True)
    for worker in run_ranks(warm_branches, 2, timeout=LIMIT):
        torch.testing.assert_close(worker, single, rtol=TOL, atol=TOL)
        assert torch.equal(worker["unused"], torch.tensor([1.0, -2.0], dtype=torch.float64))  # not even weight decay


# State


RESUMED = {
    "mid-round": (5, {"period": 4}),
    "at a boundary": (8, {"period": 4}),
    "in the warm-up": (2, {"period": 3, "warmup_steps": 5}),  # field report 6
    "without overlap": (6, {"period": 4, "overlap": False}),
}


def test_a_run_resumed_from_its_state_is_the_uninterrupted_run_bit_for_bit():
    shared = {"sgd": HEAVY, "unequal": True}
    configurations = {}
    for name, (stop, options) in RESUMED.items():
        configurations[name] = {**shared, **options}
        configurations[f"{name}, resumed"] = {**shared, **options, "resume_at": stop}
    for rank in run_ranks(paths_of, 2, configurations, timeout=LIMIT):
        for name in RESUMED:
            assert bitwise(rank[name].x, rank[f"{name}, resumed"].x), name
            assert bitwise(rank[name].end, rank[f"{name}, resumed"].end), name


def load_state_of_three(rank, n):
    model = Quadratic(rank)
    with CoCoD(model, torch.optim.SGD(model.parameters(), LR)) as algo:
        state = {**algo.state_dict(), "weights": [[1 / 3] * 3] * 3}
        with pytest.raises(ValueError, match="3 workers, there are 2"):
            algo.load_state_dict(state)


def test_the_state_of_another_number_of_workers_is_refused():
    run_ranks(load_state_of_three, 2, timeout=LIMIT)


def load_with_weights(rank, n):
    model = Quadratic(rank)
    made = {}
    for then, now in ((None, [3, 1]), ([3, 1], [3, 1])):
        with CoCoD(model, torch.optim.SGD(model.parameters(), LR), weights=then) as algo:
            algo.set_weights([4, 1])
            state = algo.state_dict()
        with CoCoD(model, torch.optim.SGD(model.parameters(), LR), weights=now) as algo:
            algo.load_state_dict(state)
            made[then is None] = algo.state_dict()["weights"]
    assert made[True] == [[0.5, 0.5], [0.5, 0.5], [0.75, 0.25]]
    assert made[False] == [[0.75, 0.25], [0.75, 0.25], [0.8, 0.2]]


def test_weights_that_are_changed_on_resuming_follow_those_in_flight_and_others_are_resumed():
    run_ranks(load_with_weights, 2, timeout=LIMIT)


# Buckets, buffers, races


@contextmanager
def buckets_of(nbytes):
    with mock.patch.object(buckets, "BUCKET_BYTES", nbytes):
        yield


@contextmanager
def held_back():
    """Yields an event: messages in the communication thread wait until it is set."""
    gate, run = threading.Event(), carrying.run

    def later(*args):
        assert gate.wait(30)
        return run(*args)

    with mock.patch.object(carrying, "run", later):
        yield gate


@contextmanager
def jitter(rank):
    """Sleeps of random length between the buckets, different on every rank."""
    draw = random.Random(rank)

    def late(of):
        def later(*args):
            time.sleep(draw.random() * 2e-3)
            return of(*args)

        return later

    in_place, scratch = late(Correction.cargo), late(Collective.put_in)
    with mock.patch.object(Correction, "cargo", in_place), mock.patch.object(Collective, "put_in", scratch):
        yield


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def convnet(rank, n, *, overlap=True, race="", evaluate=(), steps=11):
    """BatchNorm, many buckets, an own data set. Returns the states at the end, at evaluations, and after finish."""
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4), nn.BatchNorm1d(4)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    seen, sums = {}, []
    with buckets_of(256), jitter(rank) if race == "jitter" else nullcontext(), held_back() as gate:
        gate.set()
        with CoCoD(model, optimizer, period=3, overlap=overlap) as algo:
            assert len(algo.comm.layout(algo.x)) > 8
            for t in range(steps):
                if race == "held back":
                    gate.clear()
                if t == 2:
                    for _ in range(rank):
                        model(torch.randn(6, 3, 6, 6, generator=data))  # running statistics and their counter differ
                if t in evaluate:
                    own = snapshot(model)
                    with algo.consensus():
                        seen[t] = own, snapshot(model)
                optimizer.zero_grad()
                model(torch.randn(6, 3, 6, 6, generator=data)).square().sub(1).square().mean().backward()
                if race == "jitter":  # field report 4: a collective of the user's while ours is in flight
                    mine = torch.full((1000,), float(t + rank))
                    dist.all_reduce(mine)
                    sums.append((mine - n * t).unique().tolist())
                if (t + 1) % 3 == 0:
                    gate.set()
                algo.step()
            gate.set()
            last = snapshot(model)
    return {"last": last, "end": snapshot(model), "seen": seen, "sums": sums}


def convnets(rank, n):
    return {
        "plain": convnet(rank, n),
        "no overlap": convnet(rank, n, overlap=False),
        "held back": convnet(rank, n, race="held back"),
        "jitter": convnet(rank, n, race="jitter"),
        "evaluated": convnet(rank, n, evaluate=(0, 2, 5, 6, 7)),
    }


@functools.cache
def convnet_runs():
    return run_ranks(convnets, 2, timeout=LIMIT)


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("other", ["no overlap", "held back", "jitter", "evaluated"])
def test_neither_overlap_nor_timing_nor_evaluation_changes_a_bit(other):
    for runs in convnet_runs():
        assert same_bits(runs["plain"]["last"], runs[other]["last"])
        assert same_bits(runs["plain"]["end"], runs[other]["end"])
    first, second = (runs["plain"]["last"] for runs in convnet_runs())
    assert not same_bits(first, second)  # replicas do differ while training


def test_a_users_own_all_reduce_meets_ours_and_both_are_right():  # field report 4
    for runs in convnet_runs():
        assert runs["jitter"]["sums"] == [[1.0]] * 11  # ranks 0 and 1 add t and t + 1


def test_consensus_averages_floats_and_takes_counters_from_rank_zero():  # field report 15
    first, second = (runs["evaluated"]["seen"] for runs in convnet_runs())
    for t in first:
        (own_0, consensus_0), (own_1, consensus_1) = first[t], second[t]
        assert same_bits(consensus_0, consensus_1)
        for name, value in consensus_0.items():
            mean = (own_0[name] + own_1[name]) / 2
            if value.is_floating_point():  # float32: the drained correction rounds once more
                torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(value, own_0[name])
        counted = own_1["1.num_batches_tracked"] - own_0["1.num_batches_tracked"]
        assert counted == (0 if t < 2 else 1)


def test_buffers_end_equal_as_well():
    first, second = (runs["plain"]["end"] for runs in convnet_runs())
    assert same_bits(first, second)


# Parameters of every kind


def zoo(seed):
    """Parameters that packing could get wrong; `late` is frozen at first."""
    draw = torch.Generator().manual_seed(seed)

    def make(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=draw).to(dtype)

    return {
        "scalar": make(),
        "bf16": make(7, 3, dtype=torch.bfloat16),
        "empty": make(0, 4),
        "fp64": make(33, dtype=torch.float64),
        "large": make(100, 50),
        "channels_last": make(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "transposed": make(6, 9).t(),
        "with gaps": make(8, 10)[:, ::2],
        "more bf16": make(300, dtype=torch.bfloat16),
        "late": make(5),
        "added": make(4, 4),
        "frozen": make(3),
    }


def zoo_gradients(params, rank, t):
    """Gradients that depend on rank and step alone; every fifth is missing, on one rank only."""
    draw = torch.Generator().manual_seed(1000 * rank + t)
    for number, p in enumerate(params.values()):
        g = torch.randn(p.shape, generator=draw).to(p.dtype)
        p.grad = g if p.requires_grad and (number + t + rank) % 5 else None


def zoo_optimizer(params):
    first = [p for name, p in params.items() if name != "added"]
    return torch.optim.SGD(first, 0.1, momentum=0.9)


def zoo_events(params, optimizer, t):
    if t == 4:
        params["late"].requires_grad_()
    if t == 5:
        optimizer.add_param_group({"params": [params["added"]]})


def zoo_params(seed):
    params = {name: nn.Parameter(value) for name, value in zoo(seed).items()}
    params["late"].requires_grad_(False)
    params["frozen"].requires_grad_(False)
    return params


class Zoo(nn.Module):
    def __init__(self, params):
        super().__init__()
        for name, p in params.items():
            self.register_parameter(name, p)
        self.tied = params["large"]


def zoo_run(rank, n, cap, steps=13):
    params = zoo_params(rank)  # rank 0's are broadcast
    model, optimizer = Zoo(params), zoo_optimizer(params)
    with buckets_of(cap), CoCoD(model, optimizer, period=3) as algo:
        for t in range(steps):
            zoo_events(params, optimizer, t)
            zoo_gradients(params, rank, t)
            algo.step()
        sizes = [bucket.nbytes for bucket in algo.S.buckets]
        last = {name: p.detach().clone() for name, p in params.items()}
    assert all(p.stride() == params[name].stride() for name, p in model.named_parameters())
    return last, {name: p.detach() for name, p in params.items()}, sizes


def zoo_reference(steps=13):
    """Two workers, one process. The sum of two is the same in any order, so that this is exact in every dtype.

    Halves are averaged in float32; the correction A - S is what is rounded.
    """

    def summed(t):
        return t.float() if t.dtype == torch.bfloat16 else t

    workers = [zoo_params(0) for _ in range(2)]
    optimizers = [zoo_optimizer(params) for params in workers]
    S, A = None, None
    for t in range(steps + 1):
        if t % 3 == 0:
            moving = [k for k in workers[0] if not ((k == "late" and t <= 4) or (k == "added" and t <= 5) or k == "frozen")]
            with torch.no_grad():
                for k, mean in (A or {}).items():
                    for params, s in zip(workers, S, strict=True):
                        params[k] += (mean - summed(s[k])).to(s[k].dtype)
                S = [{k: params[k].detach().clone() for k in moving} for params in workers]
                A = {k: summed(S[0][k]) * 0.5 + summed(S[1][k]) * 0.5 for k in moving}
        if t == steps:
            return [{k: p.detach() for k, p in params.items()} for params in workers]
        for rank, (params, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            zoo_events(params, optimizer, t)
            zoo_gradients(params, rank, t)
            optimizer.step()


@pytest.mark.parametrize("cap", [256, 1 << 20])
def test_parameters_of_every_kind_follow_the_paper_bit_for_bit(cap):
    # field report 2: the cap lies below the largest tensor
    ranks = run_ranks(zoo_run, 2, cap, timeout=LIMIT)
    for (last, _, sizes), reference in zip(ranks, zoo_reference(), strict=True):
        assert {name for name in last if not torch.equal(last[name], reference[name])} == set()
        assert (len(sizes) > 80) == (cap == 256)
        assert max(sizes) < cap + 8 * 5 * 4  # a tensor with gaps stays in one piece
    (last_0, end_0, _), (last_1, end_1, _) = ranks
    assert same_bits(end_0, end_1)
    assert not torch.equal(last_0["large"], last_1["large"])
    assert torch.equal(end_0["frozen"], zoo(0)["frozen"])


@pytest.mark.parametrize("n", [3, 4])
def test_parameters_of_every_kind_end_equal_on_more_workers(n):
    ends = [end for _, end, _ in run_ranks(zoo_run, n, 256, timeout=LIMIT)]
    assert all(same_bits(ends[0], end) for end in ends)


def empty_of_its_own_kind(rank, n):
    params = nn.ParameterList([torch.ones(3), torch.empty(0, dtype=torch.float64)])
    with CoCoD(params, torch.optim.SGD(params, 1.0), period=2) as algo:
        for _ in range(5):
            params[0].grad = torch.full((3,), float(rank))
            algo.step()
        with algo.consensus():
            pass
    return params[0].detach()


def test_a_dtype_of_which_there_are_only_empty_parameters():
    for x in run_ranks(empty_of_its_own_kind, 2, timeout=LIMIT):
        assert torch.equal(x, torch.full((3,), -1.5))


def complex_parameter(rank, n):
    params = nn.ParameterList([torch.ones(3, dtype=torch.complex64)])
    with CoCoD(params, torch.optim.SGD(params, 1.0), period=2) as algo:
        for _ in range(5):
            params[0].grad = torch.full((3,), complex(0, rank))
            algo.step()
    return params[0].detach()


def test_complex_parameters():
    for x in run_ranks(complex_parameter, 2, timeout=LIMIT):
        assert torch.equal(x, torch.full((3,), 1 - 2.5j))


# Field reports 14 and 26: every world size


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_world_size_follows_the_paper(n):
    name = "k3 heavy"
    ranks = run_ranks(paths_of, n, {name: CONFIGURATIONS[name]}, timeout=LIMIT)
    x = positions([rank[name] for rank in ranks])
    assert distance(x, paper(n, 3, unequal(n), **HEAVY)) < TOL


def test_without_a_process_group_it_is_plain_training(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = quadratic(0, 1, period=3)
    assert bitwise(np.stack(path.x), np.stack(paths(1)["k3"][0].x))
    assert distance(np.stack(path.x), synchronous(1)) < TOL
