"""What each codec does to values: error bounds, where they are equalities, and means of those that draw random numbers."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_cocod.compression import (
    BF16,
    E3M0,
    FP16,
    QSGD,
    Identity,
    Int4,
    Int8,
    Natural,
    RandomK,
    ScaledSign,
    TernGrad,
    Threshold,
    TopK,
    pack,
    selection,
    unpack,
)
from lightning_cocod.compression.randomk import places
from lightning_cocod.compression.selection import largest, stride

ROWS = 4000


def coded(codec, x, seed=0):
    """C(x)."""
    generator = torch.Generator().manual_seed(seed)
    return unpack(codec, pack(codec, x, generator), x)


def square(x):
    """‖x‖², in float64."""
    return float(x.double().square().sum())


@st.composite
def vectors(draw, most=300, exponents=(-30, 30)):
    """Values of any size, some of them 0, some much larger than the others."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(draw(st.integers(1, most)), generator=generator)
    x[torch.rand(x.shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = 0
    x[torch.rand(x.shape, generator=generator) < 0.02] *= draw(st.sampled_from([1, 100]))
    return x * 2.0 ** draw(st.integers(*exponents))


# Casts


@given(vectors())
def test_none_is_exact(x):
    assert torch.equal(coded(Identity(), x).view(torch.int32), x.view(torch.int32))


@given(vectors(exponents=(-40, 40)))
def test_casts_keep_relative_error(x):
    for codec, bits, least, most in ((FP16(), 11, 2.0**-14, 65504.0), (BF16(), 8, 2.0**-126, 3.38e38)):
        inside = (x.abs() >= least) & (x.abs() <= most)
        error = (coded(codec, x) - x).abs()
        assert (error[inside] <= 2.0**-bits * x.abs()[inside]).all()
        assert (error[x.abs() < least] <= least * 2.0**-bits).all()


def test_casts_reach_their_bounds_and_saturate():
    x = torch.tensor([1 + 2.0**-11, 1 + 2.0**-8, 1e6, -3e38, torch.finfo().max])
    assert coded(FP16(), x).tolist() == [1, 1 + 2.0**-8, 65504, -65504, 65504]
    most = float(torch.finfo(torch.bfloat16).max)
    assert coded(BF16(), x)[1] == 1
    assert coded(BF16(), x)[4] == most


# Sparse codecs


@given(vectors(), st.floats(0.001, 1))
def test_topk_contracts_is_idempotent_and_keeps_the_largest(x, ratio):
    codec, n = TopK(ratio), x.numel()
    k = codec.nbytes(n) // 8
    c = coded(codec, x)
    assert square(c - x) <= (1 - k / n) * square(x) * (1 + 1e-6)
    order = sorted(range(n), key=lambda i: (-abs(float(x[i])), i))[:k]
    expected = torch.zeros(n)
    expected[order] = x[order]
    assert torch.equal(c, expected)
    assert torch.equal(coded(codec, c), c)


@pytest.mark.parametrize("n", [64, 1000, 30_000])
def test_topk_reaches_its_bound_where_all_magnitudes_are_equal(n):
    x = torch.randn(n).sign() * 3
    c = coded(TopK(0.25), x)
    assert square(c - x) == 0.75 * square(x)
    assert c[: n // 4].count_nonzero() == n // 4, "of equal ones those that come first"


@pytest.mark.parametrize("n", [20_000, 300_001])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "few", "misleading"])
def test_the_largest_are_found_whatever_the_sample_says(n, kind):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator)
    if kind == "ties":
        x = (x * 2).round()
    elif kind == "zeros":
        x.zero_()
    elif kind == "few":
        x[torch.rand(n, generator=generator) > 0.001] = 0
    elif kind == "misleading":  # what a strided sample sees is large
        x[:: stride(n)] += 10
        x[1] = 99
    for k in (1, 7, n // 100, n // 2, n - 1, n):
        expected = torch.sort(x.abs(), descending=True, stable=True).indices[:k].sort().values
        assert torch.equal(largest(x, k), expected)


def test_of_many_values_few_are_compared(monkeypatch):
    """But all of them where the sample misleads."""
    compared = []
    kth_largest = selection.kth_largest
    monkeypatch.setattr(selection, "kth_largest", lambda sizes, k: compared.append(len(sizes)) or kth_largest(sizes, k))
    n, k = 300_001, 3000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    largest(x, k)
    assert k <= compared[-1] <= 2 * k
    x[:: stride(n)] += 10
    largest(x, 2 * n // stride(n))
    assert compared[-1] == n


@given(vectors(most=14), st.floats(0.05, 1))
def test_randomk_over_all_its_seeds(x, ratio):
    """All a and b, each as often as the other: exact means."""
    n = x.numel()
    codec, unbiased = RandomK(ratio), RandomK(ratio, unbiased=True)
    k = (codec.nbytes(n) - 8) // 4
    seeds = [(a, b) for a in range(n) for b in range(n) if math.gcd(b, n) == 1]
    mean, bare, scaled = torch.zeros(n).double(), 0.0, 0.0
    for seed in seeds:
        index = places(torch.tensor(seed), n, k)
        assert index.unique().numel() == k
        code = torch.cat([torch.tensor(seed, dtype=torch.int32).view(torch.uint8), x[index].view(torch.uint8)])
        c = unpack(codec, code, x).double()
        mean += c * n / k / len(seeds)
        bare += square(c - x) / len(seeds)
        scaled += square(c * n / k - x) / len(seeds)
    assert torch.allclose(mean, x.double(), atol=1e-12 * float(x.abs().max()))
    assert math.isclose(bare, (1 - k / n) * square(x), rel_tol=1e-9, abs_tol=1e-9 * square(x))
    assert math.isclose(scaled, (n / k - 1) * square(x), rel_tol=1e-9, abs_tol=1e-9 * square(x))
    torch.testing.assert_close(coded(unbiased, x), coded(codec, x) * (n / k))


def test_randomk_draws_every_place_equally_often():
    codec, n, draws = RandomK(0.25), 24, 3000
    generator = torch.Generator().manual_seed(0)
    counts = sum((unpack(codec, pack(codec, torch.ones(n), generator), torch.ones(n)) for _ in range(draws)), torch.zeros(n))
    sigma = math.sqrt(draws * 0.25 * 0.75)
    assert ((counts - draws / 4).abs() <= 5 * sigma).all()
    assert counts.std() > 0


# Blocks


@given(vectors())
def test_sign_contracts_with_equality(x):
    c = coded(ScaledSign(block=64), x)
    for v, w in zip(x.split(64), c.split(64), strict=True):
        loss = square(v) - float(v.double().abs().sum()) ** 2 / v.numel()
        assert math.isclose(square(w - v), loss, rel_tol=1e-4, abs_tol=1e-6 * square(v))
        assert (w.abs() == w.abs()[0]).all()


@pytest.mark.parametrize("codec", [Int8(block=64), Int4(block=64)])
@given(x=vectors(exponents=(-60, 60)))
def test_nearest_levels(codec, x):
    c = coded(codec, x)
    for v, w in zip(x.split(64), c.split(64), strict=True):
        largest_of_block = float(v.abs().max())
        unit = largest_of_block / codec.Q
        assert ((w - v).abs() <= unit / 2 * (1 + 1e-4)).all()
        assert (w[v == 0] == 0).all()
        assert square(w - v) <= (1 - 1 / 64) * square(v)
        assert math.isclose(float(w.abs().max()), largest_of_block, rel_tol=1e-6)


@pytest.mark.parametrize("codec", [Int8(), Int4(), ScaledSign(), E3M0(), QSGD(), TernGrad()])
@pytest.mark.parametrize("size", [torch.finfo().max, 2.0**-126, 1e-44, 0.0])
def test_scales_that_are_hardly_numbers(codec, size):
    x = torch.tensor([1.0, -1.0, 0.0, 0.5, 0.3] * 3) * size
    x = x[:1] if codec == ScaledSign() else x  # a block's sum has to be a number
    c = coded(codec, x)
    assert c.isfinite().all()
    assert square(c - x) <= square(x)


@given(vectors(exponents=(-60, 60)))
def test_e3m0_in_its_range_and_out_of_it(x):
    c = coded(E3M0(block=64), x)
    for v, w in zip(x.split(64), c.split(64), strict=True):
        if not v.any():
            assert not w.any()
            continue
        top = 2.0 ** math.floor(math.log2(float(v.abs().max()) * 4 / 3))
        inside = v.abs() >= 0.75 * top / 64
        assert ((w - v).abs()[inside] <= v.abs()[inside] / 3 * (1 + 1e-6)).all()
        assert (w[~inside] == 0).all()
        assert (torch.frexp(w[inside]).mantissa.abs() == 0.5).all(), "powers of two"
        assert w.abs().max() == top


def test_e3m0_reaches_a_third_and_saturates():
    assert coded(E3M0(), torch.tensor([64.0, -1.5, 0.76, 0.74, 48, -47])).tolist() == [64, -2, 1, 0, 64, -32]
    assert coded(E3M0(), torch.tensor([torch.finfo().max, 1.0])).tolist() == [2.0**127, 0]


@given(vectors(exponents=(-3, 3)), st.floats(0.01, 10))
def test_threshold_is_its_definition(x, threshold):
    up, down = x >= threshold, x <= -threshold
    assert torch.equal(coded(Threshold(threshold), x), (up.float() - down.float()) * threshold)


# Random rounding: a block is encoded many times at once, for every row of a matrix is a block


def rounding_error(v, unit):
    """E(C(v) − v)² of each value, rounded at random to multiples of unit."""
    part = v.double() / unit - (v.double() / unit).floor()
    return part * (1 - part) * unit**2


def check_mean(codec, v, variance, factor=1.0):
    """The mean of C(v) is factor · v, and that of ‖C(v) − v‖² follows from the variance: within five deviations.

    Returns the latter.
    """
    c = coded(codec, v.repeat(ROWS, 1)).double()
    deviation = (variance / ROWS).sqrt() * factor
    assert ((c.mean(0) - v.double() * factor).abs() <= 5 * deviation + 1e-6 * v.abs().max()).all()
    errors = (c - v).square().sum(1)
    expected = float(variance.sum()) * factor**2 + (1 - factor) ** 2 * square(v)
    assert abs(float(errors.mean()) - expected) <= 5 * float(errors.std()) / math.sqrt(ROWS) + 1e-6 * square(v)
    return expected


def worst(codec):
    """The block whose error is ω‖x‖² where levels are equidistant up to the largest magnitude."""
    x = torch.full((codec.block,), 1 / codec.Q / (2 + 2 * codec.omega))
    x[3] = -1
    return x


BLOCK = 64
NORMAL = torch.randn(BLOCK, generator=torch.Generator().manual_seed(5))
SPARSE = torch.where(NORMAL.abs() > 1, NORMAL, torch.zeros(()))


@pytest.mark.parametrize("v", [NORMAL, SPARSE], ids=["normal", "sparse"])
@pytest.mark.parametrize("levels", [1, 2, 7, 127])
def test_qsgd(v, levels):
    bare, codec = QSGD(levels, block=BLOCK, unbiased=True), QSGD(levels, block=BLOCK)
    variance = rounding_error(v, float(v.norm()) / levels)
    omega = min(BLOCK / levels**2, math.sqrt(BLOCK) / levels)
    assert bare.omega == omega
    assert check_mean(bare, v, variance) <= omega * square(v)
    assert check_mean(codec, v, variance, 1 / (1 + omega)) <= omega / (1 + omega) * square(v)


@pytest.mark.parametrize("v", [NORMAL, SPARSE], ids=["normal", "sparse"])
def test_terngrad(v):
    omega = (math.sqrt(BLOCK) - 1) / 2
    expected = float(v.abs().max() * v.abs().sum()) - square(v)
    variance = rounding_error(v, float(v.abs().max()))
    assert math.isclose(float(variance.sum()), expected, rel_tol=1e-5)
    assert check_mean(TernGrad(block=BLOCK, unbiased=True), v, variance) <= omega * square(v)
    assert check_mean(TernGrad(block=BLOCK), v, variance, 1 / (1 + omega)) <= omega / (1 + omega) * square(v)


@pytest.mark.parametrize(
    "codec", [Int8(BLOCK, stochastic=True), Int4(BLOCK, stochastic=True), TernGrad(BLOCK, unbiased=True)], ids=repr
)
def test_levels_at_random_reach_their_omega(codec):
    assert codec.contraction == (codec.omega < 1)
    variance = rounding_error(NORMAL, float(NORMAL.abs().max()) / codec.Q)
    assert check_mean(codec, NORMAL, variance) <= codec.omega * square(NORMAL)
    v = worst(codec)
    error = check_mean(codec, v, rounding_error(v, 1 / codec.Q))
    assert math.isclose(error, codec.omega * square(v), rel_tol=1e-5)


def test_natural():
    v = torch.tensor([1.0, 4 / 3, -4 / 3 * 2**20, 1.01, -1.99, 0.0, 3.0, 2.0**-126, 1.5 * 2.0**-127])
    low = 2.0 ** v.double().abs().clamp(2.0**-200).log2().floor()
    low[-1] = low[5] = 0
    high = torch.where(low > 0, 2 * low, torch.tensor(2.0**-126).double())
    variance = (v.double().abs() - low) * (high - v.double().abs())
    c = coded(Natural(), v.repeat(ROWS, 1)).double()
    allowed = 5 * (variance / ROWS).sqrt() + 1e-9 * v.abs()
    assert ((c.mean(0) - v).abs() <= allowed).all()
    assert (((c.abs() == low) | (c.abs() == high)) & (c * v >= 0)).all()
    assert (variance[:8] <= v.double()[:8] ** 2 / 8 * (1 + 1e-6)).all()
    assert math.isclose(float(variance[1]), float(v[1].double() ** 2 / 8), rel_tol=1e-6)
    assert coded(Natural(), torch.tensor([torch.finfo().max])).item() == 2.0**127


at_random = pytest.mark.parametrize(
    ("codec", "unit"),
    [
        (QSGD(7, block=BLOCK, unbiased=True), lambda v: v.norm() / 7),
        (QSGD(127, block=BLOCK, unbiased=True), lambda v: v.norm() / 127),
        (TernGrad(block=BLOCK, unbiased=True), lambda v: v.abs().max()),
        (Int8(BLOCK, stochastic=True), lambda v: v.abs().max() / 127),
        (Int4(BLOCK, stochastic=True), lambda v: v.abs().max() / 7),
        (Natural(), lambda v: 2.0 ** v.abs().log2().floor()),
    ],
    ids=lambda value: repr(value) if not callable(value) else "",
)


@at_random
@given(x=vectors(), seed=st.integers(0, 2**32))
def test_rounding_at_random_goes_to_a_neighbouring_level(codec, unit, x, seed):
    """Whatever is drawn: to a multiple of the unit less than one from the value, which stays where it is one already."""
    for v, c in zip(x.double().split(BLOCK), coded(codec, x, seed).double().split(BLOCK), strict=True):
        if not v.any():
            assert not c.any()
            continue
        u = unit(v)
        levels, exact = torch.where(v == 0, c, c / u), torch.where(v == 0, v, v / u)
        assert ((levels - levels.round()).abs() <= 1e-4).all()
        assert ((levels - exact).abs() < 1 + 1e-4).all()
        assert (levels[v == 0] == 0).all()


@at_random
@settings(derandomize=True, max_examples=30)
@given(x=vectors(most=BLOCK))
@example(x=NORMAL)
def test_rounding_at_random_has_the_value_as_its_mean_and_an_error_below_omega(codec, unit, x):
    v = torch.nn.functional.pad(x, (0, BLOCK - x.numel())).double()
    u = torch.where(v == 0, 0, unit(v))
    variance = torch.where(v == 0, 0, rounding_error(v, torch.where(v == 0, 1, u)))
    mean = coded(codec, v.float().repeat(ROWS, 1)).double().mean(0)
    assert ((mean - v).abs() <= 6 * (variance / ROWS).sqrt() + 20 * u / ROWS + 1e-6 * v.abs()).all()  # Bernstein's
    omega = 1 / 8 if isinstance(codec, Natural) else codec.omega
    assert variance.sum() <= omega * square(v) * (1 + 1e-6)


def test_rounding_to_the_nearest_has_another_mean():
    """The check can fail."""
    with pytest.raises(AssertionError):
        check_mean(Int4(BLOCK), NORMAL, rounding_error(NORMAL, float(NORMAL.abs().max()) / 7))


# Contractions


@pytest.mark.parametrize(
    "codec",
    [Identity(), FP16(), BF16(), Int8(64), Int4(64), E3M0(64), ScaledSign(64), TopK(0.1), RandomK(1.0, unbiased=True)],
    ids=repr,
)
@given(x=vectors(exponents=(-10, 10)))
@example(x=torch.ones(64))
@example(x=torch.eye(64)[0])
def test_codecs_that_do_not_round_at_random_contract(codec, x):
    assert codec.contraction
    assert square(coded(codec, x) - x) < square(x) or not x.any()


@pytest.mark.parametrize(
    ("codec", "x"),
    [
        (RandomK(0.01, unbiased=True), torch.ones(1000)),
        (TernGrad(1024, unbiased=True), worst(TernGrad(1024))),
        (QSGD(1, unbiased=True), torch.ones(512)),
        (QSGD(7, block=1024, unbiased=True), torch.ones(1024)),
        (Int4(4096, stochastic=True), worst(Int4(4096))),
        (Threshold(0.5), torch.full((100,), 0.4)),
    ],
    ids=lambda value: "" if isinstance(value, torch.Tensor) else repr(value),
)
def test_what_is_no_contraction_says_so(codec, x):
    assert not codec.contraction
    assert sum(square(coded(codec, x, seed) - x) for seed in range(100)) / 100 >= square(x) * (1 - 1e-6)
