"""PowerSGD: the identities of its mean on 1, 2 and 4 workers. What rounds make of it is test_powersgd_rounds."""

import functools
import threading
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from test_cocod import LIMIT, normalised
from torch import nn

from lightning_cocod.comm import carrying, powersgd
from lightning_cocod.comm.buckets import Layout
from lightning_cocod.comm.parts import FromZero
from lightning_cocod.comm.powersgd import LowRank
from lightning_cocod.comm.tracer import Tracer
from lightning_cocod.compression import PowerSGD
from lightning_cocod.compression.powersgd import orthonormalise_, start_, warm_

SIZES = [1, 2, 4]


# One mean


SHAPES = [(40, 30), (7,), (6, 5, 3, 3), (25, 50), (3, 3), ()]
LOW = (0, 2, 3)
"""Of rank 2: those that are worth it."""


def parameters(dtype=torch.float64):
    """Of all forms: a matrix, a transposed one, one of channels_last; a bias, a small one, a number."""
    made = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    made[2] = made[2].to(memory_format=torch.channels_last)
    made[3] = torch.zeros(50, 25, dtype=dtype).t()
    return [nn.Parameter(t) for t in made]


def part(rank, x, step=0):
    """A worker's own."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64)).detach() for p in x]


def matrix(t):
    """As it lies in memory."""
    if t.dim() < 2:
        return t.reshape(1, -1)
    return t.t() if t.stride(0) == 1 and t.dim() == 2 else t.permute(0, *range(2, t.dim()), 1).reshape(t.shape[0], -1)


class Mean:
    """Messages about x, one after the other, in buckets that cut tensors anywhere. m, and the residual c leaves."""

    def __init__(self, rank, weights, x, chosen, cap=1001):
        self.rank, self.weights, self.x = rank, weights, x
        self.how, self.layout = LowRank(chosen), Layout(x, cap)
        self.step = 0

    def __call__(self, M):
        D, R = self.layout.buffer(), [torch.empty_like(t) for t in M]
        D.copy_(M)
        operation = self.how.mean(FromZero(D, R, 0.0), self.x, self.weights, self.rank, self.step)
        carrying.run(operation, dist.group.WORLD, None, carrying.new_scratch(), threading.Event(), Tracer())
        m = [torch.empty_like(t) for t in M]
        D.copy_to(m)
        self.step += 1
        return m, R


def weights_of(n):
    return list(normalised(np.arange(1, n + 1)))


def norm2(tensors):
    return sum(float(t.double().square().sum()) for t in tensors)


def weighted(w, lists):
    return [sum(w_j * t for w_j, t in zip(w, same, strict=True)) for same in zip(*lists, strict=True)]


def plus(a, b):
    return [p + q for p, q in zip(a, b, strict=True)]


def minus(a, b):
    return [p - q for p, q in zip(a, b, strict=True)]


def one_mean(rank, n, dtype=torch.float64, rank_of=2):
    x, w = parameters(dtype), weights_of(n)
    return Mean(rank, w, x, PowerSGD(rank_of))(part(rank, x))


@functools.cache
def one(n, dtype=torch.float64):
    return run_ranks(one_mean, n, dtype, timeout=LIMIT)


def of_all(n, dtype=torch.float64):
    """What the workers have put in, and its mean."""
    M = [part(j, parameters(dtype)) for j in range(n)]
    return M, weighted(weights_of(n), M)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_mean_is_a_projection_of_the_mean_of_matrices(n, dtype, tolerance):
    _, M = of_all(n, dtype)
    for m, _ in one(n, dtype):
        for i in LOW:
            dropped, kept, whole = (norm2([t]) for t in (M[i] - m[i], m[i], M[i]))
            assert dropped == pytest.approx(whole - kept, rel=tolerance)
            assert 0.02 * whole < dropped < 0.98 * whole
            assert torch.linalg.matrix_rank(matrix(m[i]).double(), rtol=1e-5) == 2
        for i in {*range(len(SHAPES))} - {*LOW}:
            torch.testing.assert_close(m[i], M[i], rtol=1e-6, atol=1e-7)


def not_orthonormal(rank, n):
    with mock.patch.object(powersgd, "orthonormalise_", lambda P: P.div_(torch.linalg.vector_norm(P, dim=0))):
        return one_mean(rank, n)


def test_without_orthogonal_columns_it_would_not_be():
    M, (m, _) = part(0, parameters()), run_ranks(not_orthonormal, 1, timeout=LIMIT)[0]
    assert any(abs(norm2([M[i] - m[i]]) - norm2([M[i]]) + norm2([m[i]])) > 1e-3 * norm2([M[i]]) for i in LOW)


@pytest.mark.parametrize("n", SIZES)
def test_all_workers_have_the_same_bits(n):
    (first, _), *others = one(n)
    for m, _ in others:
        assert all(torch.equal(a, b) for a, b in zip(first, m, strict=True))


def of_the_mean(rank, n, parts):
    x = parameters()
    return Mean(rank, [1.0], x, PowerSGD(2))([torch.empty_like(p).copy_(t).detach() for p, t in zip(x, parts, strict=True)])


@pytest.mark.parametrize("n", [2, 4])
def test_it_is_linear_the_mean_of_many_is_that_of_one_with_the_mean(n):
    M, mean = of_all(n)
    alone, _ = run_ranks(of_the_mean, 1, mean, timeout=LIMIT)[0]
    for m, _ in one(n):
        assert norm2(minus(m, alone)) < 1e-20 * norm2(alone)
    unweighted, _ = run_ranks(of_the_mean, 1, weighted([1 / n] * n, M), timeout=LIMIT)[0]
    assert norm2(minus(alone, unweighted)) > 1e-3 * norm2(alone)


@pytest.mark.parametrize("n", SIZES)
def test_what_the_workers_count_as_sent_is_the_mean(n):
    M, _ = of_all(n)
    c = [minus(M[j], R) for j, (_, R) in enumerate(one(n))]
    m = one(n)[0][0]
    assert norm2(minus(weighted(weights_of(n), c), m)) < 1e-22 * norm2(m)
    if n > 1:
        assert norm2(minus(weighted([1 / n] * n, c), m)) > 1e-3 * norm2(m)


@pytest.mark.parametrize("shape", [(8, 8), (3, 5, 7), (12, 40)])
def test_blocks_hold_every_element_of_a_matrix_once_wherever_buckets_cut_it(shape):
    for cap in (4, 20, 36, 100, 1000, 10_000):
        layout = Layout([torch.zeros(2), torch.zeros(shape)], cap)
        m, n = layout.matrix(1)
        seen = torch.zeros(m, n)
        factors = powersgd.Factors(layout, PowerSGD(1))
        for bucket, blocks in enumerate(factors.blocks):
            flat = torch.arange(10_000.0)[: layout.sizes()[bucket]]
            for block in blocks:
                assert block.of(flat).shape == seen[block.rows, block.columns].shape
                seen[block.rows, block.columns] += 1
        assert torch.equal(seen, torch.ones(m, n))
        assert sum(o.part.stop - o.part.start for others in factors.others for o in others) == 2


# Of low rank, or of none


def product(rank, of, m=40, n=30):
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(size, of, generator=generator, dtype=torch.float64) for size in (m, n))
    return left @ right.t()


def errors_of_rank(rank, n, dtype):
    """Relative errors of matrices whose mean has so many independent columns, message after message."""
    found = {}
    for of in (0, 1, 2, 3, 4, 5):
        x = [nn.Parameter(torch.zeros(40, 30, dtype=dtype))]
        mean = Mean(rank, [1 / n] * n, x, PowerSGD(4))
        M = [product(0, of).to(dtype) * 2 * (j + 1) / (n + 1) for j in range(n)]  # their mean is the product
        found[of] = []
        for _ in range(3):
            m, _ = mean([M[rank]])
            found[of].append((norm2([m[0] - product(0, of)]) / max(norm2([product(0, of)]), 1e-300)) ** 0.5)
    return found


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_a_matrix_of_no_higher_rank_is_exact_and_one_of_higher_rank_is_not(n, dtype, tolerance):
    for found in run_ranks(errors_of_rank, n, dtype, timeout=LIMIT):
        assert found[0] == [0.0] * 3
        for of in (1, 2, 3, 4):
            assert max(found[of]) < tolerance, of
        assert min(found[5]) > 1e-3


def growing_rank(rank, n):
    """Errors of rank 4 for matrices of rank 0, 1 and 4: nothing of Q is lost on the way."""
    mean = Mean(rank, [1.0], [nn.Parameter(torch.zeros(40, 30))], PowerSGD(4))
    return [norm2([mean([M])[0][0] - M]) / norm2([product(0, 4)]) for M in (product(0, of).float() for of in (0, 1, 1, 4))]


def growing_rank_without(rank, n):
    with mock.patch.object(powersgd, "warm_"):
        return growing_rank(rank, n)


def test_a_column_that_had_nothing_to_do_comes_back():
    assert max(run_ranks(growing_rank, 1, timeout=LIMIT)[0]) < 1e-12
    assert run_ranks(growing_rank_without, 1, timeout=LIMIT)[0][1] > 1e-2


def test_orthonormal_columns_whatever_they_were():
    for P in (torch.zeros(9, 3), torch.ones(9, 3), torch.randn(9, 3), 1e-30 * torch.randn(9, 3), 1e30 * torch.randn(9, 3)):
        basis = P.clone()
        orthonormalise_(basis)
        torch.testing.assert_close(basis.t() @ basis, torch.eye(3), rtol=0, atol=1e-6)
        torch.testing.assert_close(basis @ (basis.t() @ P), P, rtol=1e-5, atol=1e-6 * float(P.abs().max()))


@settings(derandomize=True)  # a matrix may be of lower rank but for rounding
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    rank=st.integers(1, 4),
    of=st.integers(0, 4),
    exponent=st.integers(-40, 40),
    seed=st.integers(0, 2**32),
)
def test_a_projection_drops_what_it_does_not_keep_whatever_the_matrix(shape, rank, of, exponent, seed):
    """‖M − PPᵀM‖² = ‖M‖² − ‖PPᵀM‖², of matrices of any rank, and 0 once P has as many columns as that."""
    (m, n), rank = shape, min(rank, *shape)
    draw = torch.Generator().manual_seed(seed)
    M = torch.randn(m, of, generator=draw).double() @ torch.randn(of, n, generator=draw).double() * 2.0**exponent
    P = M @ torch.randn(n, rank, generator=draw).double()
    orthonormalise_(P)
    kept = P @ (P.t() @ M)
    dropped, whole = norm2([M - kept]), norm2([M])
    assert dropped == pytest.approx(whole - norm2([kept]), abs=1e-9 * whole)
    if rank >= min(of, m, n):
        assert dropped <= 1e-12 * whole


def test_a_start_depends_on_its_seed_alone_and_columns_are_kept_or_begin_anew():
    a, b, c = (torch.empty(30, 3) for _ in range(3))
    start_(a, (4, 1))
    torch.rand(7)
    start_(b, (4, 1))
    start_(c, (4, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    Q = torch.stack([1e-25 * a[:, 0], 1e-25 * a[:, 1] + 1e-25 * c[:, 1], torch.zeros(30)], 1)
    warm_(Q, (4, 2))
    torch.testing.assert_close(torch.linalg.vector_norm(Q, dim=0), torch.ones(3))
    torch.testing.assert_close(Q[:, 0], a[:, 0])
    assert torch.equal(Q[:, 2], c[:, 2])


# Message after message


def best(M, r):
    """The least error that rank r allows."""
    return float(torch.linalg.svdvals(M)[r:].square().sum().sqrt())


def same_matrix(rank, n, messages, warm):
    """Errors of the same matrix, again and again."""
    torch.manual_seed(0)
    U, V = torch.linalg.qr(torch.randn(40, 30))[0], torch.linalg.qr(torch.randn(30, 30))[0]
    M = U * 0.8 ** torch.arange(30) @ V
    mean = Mean(rank, [1 / n] * n, [nn.Parameter(torch.zeros(40, 30))], PowerSGD(3))
    errors = []
    for _ in range(messages):
        errors.append(norm2([mean([M])[0][0] - M]) ** 0.5 / best(M, 3))
        if not warm:
            mean.how.forget()
    return errors


@pytest.mark.parametrize("n", [1, 2])
def test_with_a_warm_start_the_error_becomes_the_least_possible_and_without_it_does_not(n):
    warm, cold = (run_ranks(same_matrix, n, 40, warm, timeout=LIMIT)[0] for warm in (True, False))
    assert warm[0] == cold[0] > 1.02
    assert warm[-1] < 1.0001
    assert min(cold) > 1.01
    assert np.mean(cold) > 1.02


def fed_back(rank, n, steps):
    """Σ c + e − Σ g, ‖Σ g‖ and ‖e‖ every hundred steps. Gradients are noise around what each worker has of its own."""
    x = [nn.Parameter(torch.zeros(12, 10, dtype=torch.float64)), nn.Parameter(torch.zeros(5, dtype=torch.float64))]
    mean, own = Mean(rank, weights_of(n), x, PowerSGD(1)), part(rank, x, step=-1)
    e, total, sent = ([torch.zeros_like(p).detach() for p in x] for _ in range(3))
    sizes = []
    for step in range(steps):
        g = plus(own, part(rank, x, step))
        p = plus(g, e)
        _, e = mean(p)
        total, sent = plus(total, g), plus(sent, minus(p, e))
        if step % 100 == 99:
            sizes.append(norm2(e) ** 0.5)
    return norm2(minus(plus(sent, e), total)) ** 0.5, norm2(total) ** 0.5, sizes


def fed_back_along_one_column(rank, n, steps):
    basis = torch.eye(12, 1, dtype=torch.float64)
    with mock.patch.object(powersgd, "orthonormalise_", lambda P: P.copy_(basis)):
        return fed_back(rank, n, steps)


@pytest.mark.parametrize(("n", "steps"), [(1, 3000), (2, 1000), (4, 200)])
def test_with_error_feedback_everything_is_sent_in_the_end_and_what_waits_stays_bounded(n, steps):
    for difference, total, sizes in run_ranks(fed_back, n, steps, timeout=LIMIT):
        assert difference < 1e-10 * total
        assert min(sizes) > 1.0  # or nothing would be telescoped
        assert max(sizes) < 2 * max(sizes[:2])
        assert total > 0.9 * 8 * steps


def test_what_waits_would_grow_if_the_columns_were_always_the_same():
    _, total, sizes = run_ranks(fed_back_along_one_column, 1, 1000, timeout=LIMIT)[0]
    assert sizes[-1] > 9 * sizes[0]
    assert sizes[-1] > 0.5 * total


# Of other kinds


def with_others(rank, n):
    """A complex matrix beside one of bfloat16, with unequal weights."""
    x = [nn.Parameter(torch.zeros(9, 8, dtype=dtype)) for dtype in (torch.complex64, torch.bfloat16)]
    generator = torch.Generator().manual_seed(0)
    M = [
        [torch.randn(9, 8, generator=generator, dtype=torch.complex64), torch.randn(9, 8, generator=generator).bfloat16()]
        for _ in range(n)
    ]
    mean = Mean(rank, weights_of(n), x, PowerSGD(2))
    m, _ = mean(M[rank])
    exact = weighted(weights_of(n), [[z, t.float()] for z, t in M])
    return m, exact, {p.dtype: Q.dtype for p, Q in mean.how.remembered.items()}


@pytest.mark.parametrize("n", [2, 4])
def test_complex_numbers_travel_whole_and_halves_have_factors_in_float32(n):
    for m, M, kinds in run_ranks(with_others, n, timeout=LIMIT):
        torch.testing.assert_close(m[0], M[0], rtol=1e-5, atol=1e-6)
        assert m[0].imag.abs().max() > 0.5
        assert kinds == {torch.bfloat16: torch.float32}
        dropped, kept, whole = norm2([M[1] - m[1].float()]), norm2([m[1]]), norm2([M[1]])
        assert dropped == pytest.approx(whole - kept, rel=0.05)  # m is rounded to 8 bits


def nothing_but_vectors(rank, n):
    x = [nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(3, 3))]
    mean, M = Mean(rank, weights_of(n), x, PowerSGD(2)), [part(j, x) for j in range(n)]
    m, _ = mean(M[rank])
    return m, weighted(weights_of(n), M), mean.how.remembered


@pytest.mark.parametrize("n", [2, 4])
def test_where_there_is_no_matrix_the_mean_is_whole(n):
    for m, M, remembered in run_ranks(nothing_but_vectors, n, timeout=LIMIT):
        for got, expected in zip(m, M, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        assert not remembered
