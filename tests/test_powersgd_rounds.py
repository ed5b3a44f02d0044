"""Rounds and gradients through PowerSGD, against the equations in NumPy; what is resumed, what is sent, what is refused.

A worker's problem has two matrices of the same shape and two vectors, all in float64: the sum over both of
½ tr (X - B)ᵀ H (X - B) + ½ ‖b - a‖².
"""

import copy
import functools

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from test_cocod import HEAVY, LIMIT, LR, bitwise, distance, normalised
from test_compressed_rounds import FAMILY, traffic
from torch import nn

from lightning_cocod import CoCoD, LocalSGD, NonFiniteMessage, OverlapLocalSGD, PipeSGD
from lightning_cocod.compression import PowerSGD
from lightning_cocod.compression.powersgd import start_

ROWS, COLUMNS, MORE, HALVES, STEPS = 6, 5, 4, 2, 14
MATRIX = ROWS * COLUMNS


def problem(rank, half):
    """H, B and a."""
    random = np.random.default_rng([rank, half])
    M = random.normal(size=(ROWS, ROWS))
    return M @ M.T / ROWS + 0.1 * np.eye(ROWS), random.normal(size=(ROWS, COLUMNS)), random.normal(size=MORE)


class Half(nn.Module):
    def __init__(self, rank, half):
        super().__init__()
        self.H, self.B, self.a = map(torch.tensor, problem(rank, half))
        self.X, self.b = nn.Parameter(torch.zeros_like(self.B)), nn.Parameter(torch.zeros_like(self.a))

    def forward(self):
        R = self.X - self.B
        return 0.5 * ((R * (self.H @ R)).sum() + (self.b - self.a).square().sum())


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def path_of(rank, n, algorithm, *, resume_at=None, without=(), evaluate=(), **options):
    """x before each step, and in the end. A resumed run is without some parts of its state."""

    def fresh():
        model = nn.Sequential(*(Half(rank, half) for half in range(HALVES)))
        optimizer = torch.optim.SGD(model.parameters(), LR, **HEAVY)
        return model, optimizer, algorithm(model, optimizer, weights=list(range(1, n + 1)), **options)

    def run(start, stop):
        for t in range(start, stop):
            path.append(flat(model))
            if t in evaluate:
                with algo.consensus():
                    pass
            optimizer.zero_grad()
            sum(half() for half in model).backward()
            algo.step()

    path = []
    model, optimizer, algo = fresh()
    if resume_at is not None:
        with algo:
            run(0, resume_at)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict()))
        saved[2].update({part: {} for part in without})
        model, optimizer, algo = fresh()
    with algo:
        if resume_at is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        run(resume_at or 0, STEPS)
    return np.stack([*path, flat(model)])


LOW = {"compression": PowerSGD(rank=1)}
EACH = {
    "cocod": {"algorithm": CoCoD, "period": 3},
    "local": {"algorithm": LocalSGD, "period": 3},
    "anchored": {"algorithm": OverlapLocalSGD, "period": 3},
    "piped": {"algorithm": PipeSGD},
    **FAMILY,
}
EACH["streaming"] = {**EACH["streaming"], "fragments": 2}  # one for each half
CONFIGURATIONS = {
    **{name: {**options, **LOW} for name, options in EACH.items()},
    **{f"{name} resumed": {**options, **LOW, "resume_at": 8} for name, options in EACH.items()},
    **{f"{name} cold": {**options, **LOW, "resume_at": 8, "without": ("compression",)} for name, options in EACH.items()},
    "cocod waiting": {**EACH["cocod"], **LOW, "overlap": False},
    "piped waiting": {**EACH["piped"], **LOW, "overlap": False},
    "streaming waiting": {**EACH["streaming"], **LOW, "overlap": False},
    "cocod evaluated": {**EACH["cocod"], **LOW, "evaluate": (0, 2, 3, 7)},
    "cocod without": EACH["cocod"],
    "cocod by name": {**EACH["cocod"], "compression": "powersgd"},
    "cocod of rank 2": {**EACH["cocod"], "compression": PowerSGD(rank=2)},
}


def all_paths(rank, n):
    return {name: path_of(rank, n, **options) for name, options in CONFIGURATIONS.items()}


@functools.cache
def paths(n):
    """Array [t, i, :] of every configuration."""
    ranks = run_ranks(all_paths, n, timeout=LIMIT)
    return {name: np.stack([rank[name] for rank in ranks], axis=1) for name in CONFIGURATIONS}


# Against the equations


class Reference:
    """Of the mean of matrices and vectors that lie flat, message after message."""

    def __init__(self, n, r, cold=False):
        self.w, self.r, self.cold, self.Q = normalised(np.arange(1, n + 1)), r, cold, {}

    def __call__(self, p, step):
        """c of all workers, whose parts are p, and the mean."""
        c, size = p.copy(), MATRIX + MORE
        for half in range(HALVES):
            here = slice(half * size, half * size + MATRIX)
            M, number = p[:, here].reshape(-1, ROWS, COLUMNS), 2 * half
            if self.cold or half not in self.Q:
                self.Q[half] = self.start(step, number)
            P, _ = np.linalg.qr(np.einsum("n,nij->ij", self.w, M) @ self.Q[half])
            Q = np.einsum("nij,ir->njr", M, P)
            c[:, here] = np.einsum("ir,njr->nij", P, Q).reshape(len(p), -1)
            norms = np.linalg.norm(self.w @ Q.transpose(1, 0, 2), axis=0)
            self.Q[half] = np.einsum("n,njr->jr", self.w, Q) / norms if norms.all() else self.start(step, number)
        return c, self.w @ c

    def start(self, step, number):
        Q = torch.empty(COLUMNS, self.r, dtype=torch.float64)
        start_(Q, (step, number))
        return Q.numpy()


def gradients(x):
    halves = []
    for half in range(HALVES):
        for i, row in enumerate(x):
            H, B, a = problem(i, half)
            X, b = (
                row[half * (MATRIX + MORE) :][:MATRIX].reshape(ROWS, COLUMNS),
                row[half * (MATRIX + MORE) + MATRIX :][:MORE],
            )
            halves.append(np.concatenate([(H @ (X - B)).ravel(), b - a]))
    return np.concatenate(np.split(np.stack(halves), HALVES), axis=1)


def moved(x, v, g):
    v = HEAVY["momentum"] * v + g + HEAVY["weight_decay"] * x
    return x - LR * v, v


def rounds(n, k, mean, *, all_sent=False):
    """x_i(t) of CoCoD. What a worker counts as sent is all that it has, if ``all_sent``."""
    x = np.zeros((n, HALVES * (MATRIX + MORE)))
    θ, v, flight, path = x[0], 0 * x, None, []
    for t in range(STEPS + 1):
        if t % k == 0:
            if flight is not None:
                x, θ = x + flight[1] - flight[0], θ + flight[1]
            p = x - θ
            c, m = mean(p, t)
            flight = (p if all_sent else c), m
        path.append(x)
        x, v = moved(x, v, gradients(x))
    return np.stack(path)


def piped(n, mean, *, feeds=True):
    """x(t) of Pipe-SGD."""
    x, e, G, path = np.zeros(HALVES * (MATRIX + MORE)), 0.0, None, []
    v = 0 * x
    for t in range(STEPS + 1):
        path.append(x)
        p = gradients(np.tile(x, (n, 1))) + e
        c, m = mean(p, t)
        e = p - c if feeds else 0.0
        if G is not None:
            x, v = moved(x, v, G)
        G = m
    return np.stack(path)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("name", "r"), [("cocod", 1), ("cocod of rank 2", 2), ("cocod by name", 2)])
def test_the_path_of_rounds_is_that_of_the_equations(n, name, r):
    x = rounds(n, 3, Reference(n, r))
    assert distance(paths(n)[name][:-1], x[:-1]) < 1e-11
    assert distance(rounds(n, 3, Reference(n, r, cold=True)), x) > 1e-3
    assert distance(rounds(n, 3, Reference(n, r), all_sent=True), x) > 1e-2
    assert distance(paths(n)["cocod without"], paths(n)[name]) > 1e-2


@pytest.mark.parametrize("n", [2, 4])
def test_the_path_of_gradients_is_that_of_the_equations_with_error_feedback(n):
    x = piped(n, Reference(n, 1))
    assert distance(paths(n)["piped"], x[:, None]) < 1e-11
    assert distance(piped(n, Reference(n, 1, cold=True)), x) > 1e-3
    assert distance(piped(n, Reference(n, 1), feeds=False), x) > 1e-2


def test_one_worker_loses_nothing():
    assert bitwise(paths(1)["cocod"], paths(1)["cocod without"])


# What any round promises


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", EACH)
def test_a_resumed_run_goes_on_with_the_same_columns(n, name):
    assert bitwise(paths(n)[f"{name} resumed"], paths(n)[name])
    assert distance(paths(n)[f"{name} cold"], paths(n)[name]) > 1e-6


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    ("name", "other"),
    [(f"{name} waiting", name) for name in ("cocod", "piped", "streaming")] + [("cocod evaluated", "cocod")],
)
def test_waiting_and_evaluating_change_no_bit(n, name, other):
    assert bitwise(paths(n)[name], paths(n)[other])


def columns(rank, n):
    model = nn.Sequential(*(Half(rank, half) for half in range(HALVES)))
    optimizer = torch.optim.SGD(model.parameters(), LR)
    with CoCoD(model, optimizer, period=1, **LOW) as algo:
        for _ in range(4):
            optimizer.zero_grad()
            sum(half() for half in model).backward()
            optimizer.step()
        return algo.state_dict()["compression"]


def test_every_matrix_has_columns_of_its_own_the_same_on_all_workers():
    first, *others = run_ranks(columns, 3, timeout=LIMIT)
    assert list(first) == [0, 2]
    assert not torch.allclose(first[0].abs(), first[2].abs(), rtol=1e-2)
    for other in others:
        assert all(torch.equal(Q, other[number]) for number, Q in first.items())


# Bytes, and what is not sent


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("r", [1, 4])
def test_the_bytes_are_those_of_the_factors_and_of_what_travels_whole(n, r):
    m, rows, rounds_ = 200, 300, 5
    for sent, received, raw in run_ranks(traffic, n, PowerSGD(rank=r), timeout=LIMIT):
        headers = rounds_ * 112 * (n - 1)
        expected = rounds_ * 2 * (n - 1) / n * 4 * (r * (m + rows) + m)  # m numbers are the bias
        assert sent == received == pytest.approx(expected + headers, rel=0.01)
        assert raw == pytest.approx(rounds_ * 2 * (n - 1) / n * 4 * (m * rows + m), rel=0.01)


def broken_once(rank, n):
    """Rank 1 has NaN in the fourth step. x in the end, and the columns."""
    model = nn.Sequential(*(Half(rank, half) for half in range(HALVES)))
    with PipeSGD(model, torch.optim.SGD(model.parameters(), LR), on_nonfinite="skip", **LOW) as algo:
        for t in range(10):
            model.zero_grad()
            sum(half() for half in model).backward()
            if t == 3 and rank == 1:
                model[1].X.grad[2, 2] = float("nan")
            algo.step()
        return flat(model), algo.state_dict()["compression"]


def test_a_rank_that_is_not_finite_is_left_out_of_both_factors():
    (x, Q), *others = run_ranks(broken_once, 3, timeout=LIMIT)
    assert np.isfinite(x).all()
    assert np.abs(x).max() > 0.1
    for y, R in others:
        assert bitwise(x, y)
        assert all(torch.equal(Q[number], R[number]) for number in (0, 2))


def too_large(rank, n, compression):
    model = nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), 1e-30)
    before = copy.deepcopy(model.state_dict())
    with PipeSGD(model, optimizer, compression=compression) as algo:
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1e37 if rank == 1 else 1.0)
            algo.step()
    return all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def refused(rank, n):
    with pytest.raises(NonFiniteMessage, match="rank 1"):
        too_large(rank, n, PowerSGD())


def test_numbers_whose_products_may_overflow_are_not_sent():
    run_ranks(refused, 2, timeout=LIMIT)
    assert run_ranks(too_large, 2, None, timeout=LIMIT) == [False, False]  # finite as they are, they are sent whole
