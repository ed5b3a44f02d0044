"""Compiled loops write the bytes and values of the operations that they replace; without numba nothing is missing."""

import sys
import warnings

import pytest
import torch

from lightning_cocod.compression import Int4, Int8, ScaledSign, compiled, pack, unpack

needs_numba = pytest.mark.skipif(not compiled.kernels(), reason="numba is missing: pip install 'lightning-cocod[fast]'")

CODECS = [
    *(Int8(), Int8(8), Int8(1000), Int4(), Int4(8), Int4(24), Int4(1000)),
    *(ScaledSign(), *map(ScaledSign, (8, 16, 24, 32, 64, 128, 256, 512, 1000, 2048, 4096, 1 << 15))),
]
each = pytest.mark.parametrize("codec", CODECS, ids=repr)
SIZES = [0, *range(1, 34), 255, 1000, 1023, 1024, 1025, (1 << 17) + 7, 1 << 18]


@pytest.fixture
def without(monkeypatch):
    """Runs something with torch's and NumPy's operations."""

    def run(job, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "kernels", dict)
            return job(*arguments)

    return run


def values(n, seed=0):
    """Of many magnitudes, with both zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 2.0 ** torch.randint(-8, 8, (n,), generator=generator)
    x[::5], x[1::7] = -0.0, 0.0
    return x


def same(a, b):
    """Bit for bit, but for the bits of NaN."""
    assert torch.equal(a.isnan(), b.isnan())
    return torch.equal(a.nan_to_num(0).view(torch.int32), b.nan_to_num(0).view(torch.int32))


def check(codec, x, without):
    code = pack(codec, x)
    assert torch.equal(code, without(pack, codec, x))
    assert same(unpack(codec, code, x), without(unpack, codec, code, x))


@needs_numba
@each
@pytest.mark.parametrize("n", SIZES)
def test_codes_and_values_are_those_without_kernels(codec, n, without):
    check(codec, values(n), without)


@needs_numba
@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=repr)
def test_values_near_a_tie_are_rounded_alike(codec, without):
    """Products that a rounding of their own would move onto a tie: about one value in 2¹⁷ of these."""
    check(codec, torch.rand(1 << 20, generator=torch.Generator().manual_seed(1)), without)


def test_a_rounding_of_the_product_would_show():
    """Negative control of the last test: for int8, it holds values whose level depends on it."""
    x = torch.rand(1 << 20, generator=torch.Generator().manual_seed(1)).view(-1, 1024)
    twice = (x * (127 / x.amax(1, keepdim=True))).round().to(torch.int8).view(-1)
    assert 0 < (twice != pack(Int8(), x)[: 1 << 20].view(torch.int8)).sum() < 1000


@needs_numba
@each
@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-126, 2.0**-119, 2.0**127, 2.0**128 * (1 - 2.0**-24)])
def test_at_the_ends_of_the_range(codec, scale, without):
    for x in (torch.full((3000,), scale), values(3000).clamp(-1, 1) * scale):
        check(codec, x, without)


@needs_numba
@each
@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(codec, odd, without):
    x = values(5003)
    x[[3, 2500, 5002]] = odd
    check(codec, x, without)
    x[2000:3000] *= 2.0**115
    check(codec, x, without)


@needs_numba
@pytest.mark.parametrize("codec", [Int8(stochastic=True), Int4(stochastic=True)], ids=repr)
def test_codes_that_are_drawn_are_decoded_alike(codec, without):
    x = values(3001)
    code = pack(codec, x, torch.Generator().manual_seed(2))
    assert torch.equal(code, without(pack, codec, x, torch.Generator().manual_seed(2)))
    assert same(unpack(codec, code, x), without(unpack, codec, code, x))


@needs_numba
@each
def test_codes_that_begin_anywhere(codec, without):
    """Scales need not lie at a multiple of four bytes."""
    x = values(1003)
    code = without(pack, codec, x)
    for offset in range(4):
        memory = torch.zeros(code.numel() + 8, dtype=torch.uint8)
        place, out = memory[offset : offset + code.numel()], torch.zeros(1003)
        codec.encode(x, place)
        codec.decode(place, out)
        assert torch.equal(place, code)
        assert same(out, without(unpack, codec, code, x))
        assert not memory[:offset].any()
        assert not memory[offset + code.numel() :].any()


@needs_numba
def test_a_kernel_is_used(monkeypatch):
    """Negative control: without this, all of the above would hold where no kernel ever runs."""
    used = []
    for name in ("encode", "decode"):
        monkeypatch.setattr(compiled, name, lambda *_, name=name: used.append(name))
    for codec in (Int8(), Int4(), ScaledSign()):
        unpack(codec, pack(codec, torch.ones(10)), torch.ones(10))
    pack(Int8(stochastic=True), torch.ones(10))
    assert used == ["encode", "decode"] * 3


@needs_numba
def test_kernels_are_compiled_to_leave_the_gil_alone():
    for loops in compiled.kernels().values():
        for kernel in (loops.encode, loops.decode):
            assert kernel.targetoptions["nogil"]
            assert kernel.targetoptions["fastmath"] == {"contract"}


def test_without_numba_nothing_is_said_and_codes_are_as_ever(monkeypatch, without):
    x = values(3001)
    expected = [without(pack, codec, x) for codec in CODECS]
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "lightning_cocod.compression.kernels", raising=False)
    compiled.kernels.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compiled.kernels() == {}
            assert all(torch.equal(pack(codec, x), code) for codec, code in zip(CODECS, expected, strict=True))
    finally:
        compiled.kernels.cache_clear()
