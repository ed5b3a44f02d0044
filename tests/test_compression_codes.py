"""The bytes of codes, and the memory that they are written to; names and options of codecs."""

import math
import struct
from dataclasses import fields

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_cocod import compression
from lightning_cocod.cli.conf_dir import conf_dir
from lightning_cocod.compression import (
    CODECS,
    E3M0,
    FP16,
    QSGD,
    Identity,
    Int4,
    Int8,
    Natural,
    PowerSGD,
    RandomK,
    ScaledSign,
    TernGrad,
    Threshold,
    TopK,
    absmax,
    as_compression,
    memory,
    numpy_ops,
    pack,
    sign,
    unpack,
)
from lightning_cocod.compression import bits as bits_
from lightning_cocod.compression.memory import SPAN

VARIANTS = [
    *(codec() for codec in CODECS.values()),
    *(Int8(8, stochastic=True), Int4(8), QSGD(3, 16), QSGD(10, 24), QSGD(127), TopK(0.3), RandomK(0.3, unbiased=True)),
]
each = pytest.mark.parametrize("codec", VARIANTS, ids=repr)


def code_of(codec, *values):
    return bytes(pack(codec, torch.tensor(values, dtype=torch.float32)).tolist())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# Sizes


BITS = {"int8": 8, "int4": 4, "e3m0": 4, "sign": 1, "terngrad": 2}


@each
@given(n=st.one_of(st.integers(0, 100), st.integers(0, 2**31 - 1)))
def test_sizes_are_those_of_the_table(codec, n):
    name = codec.name
    if name in BITS or name == "qsgd":
        width = math.ceil(math.log2(2 * codec.levels + 1)) if name == "qsgd" else BITS[name]
        expected = math.ceil(n * width / 8) + 4 * math.ceil(n / codec.block)
    elif name in ("topk", "randomk"):
        k = min(n, max(1, round(codec.ratio * n)))
        expected = 8 * k if name == "topk" else 4 * k + 8 * (n > 0)
    else:
        expected = {
            "none": 4 * n,
            "fp16": 2 * n,
            "bf16": 2 * n,
            "natural": n + math.ceil(n / 8),
            "threshold": math.ceil(n / 4),
        }[name]
    assert codec.nbytes(n) == expected


@pytest.mark.parametrize("codec", [TopK(), RandomK()], ids=repr)
def test_more_values_than_an_index_can_name_are_refused(codec):
    with pytest.raises(ValueError, match="encode them in parts"):
        codec.nbytes(2**31)


# Bytes


def test_bytes_of_codes():
    assert code_of(Identity(), 1.0, -0.0) == struct.pack("<2f", 1, -0.0)
    assert code_of(FP16(), 1.0, -2.0) == struct.pack("<2e", 1, -2)
    assert code_of(Int8(), 127, -127, 1.4, -1.6) == struct.pack("<4bf", 127, -127, 1, -2, 127)
    assert code_of(Int4(), 7, -7, 1, -1, 3) == bytes([0x97, 0xF1, 0x03]) + struct.pack("<f", 7)
    assert code_of(ScaledSign(), 1, -1, 1, -4, 1, 1, 1, 1, -0.0, 0) == bytes([0b1010, 0b01]) + struct.pack("<f", 1.1)
    assert code_of(E3M0(), 8, -4, 0.125, 0, 1) == bytes([0xE7, 0x01, 0x04]) + struct.pack("<f", 8)
    assert code_of(Threshold(), 0.5, -0.6, 0.4, 9, -9) == bytes([0b01_00_11_01, 0b11])
    assert code_of(TernGrad(), 2, -2, 0, 2, 2) == bytes([0b01_00_11_01, 0b01]) + struct.pack("<f", 2)
    assert code_of(QSGD(3), -5) == bytes([0b101]) + struct.pack("<f", 5)
    assert code_of(Natural(), 1, -4, 0) == bytes([127, 129, 0, 0b010])
    assert code_of(TopK(0.5), 1, -3, 2, 0) == struct.pack("<2i2f", 1, 2, -3, 2)


def test_randomk_writes_a_seed_and_values():
    x = torch.arange(10.0) + 1
    a, b, *values = struct.unpack("<2i3f", bytes(pack(RandomK(0.3), x, seeded()).tolist()))
    assert 0 <= a < 10
    assert math.gcd(b, 10) == 1
    assert values == [1.0 + (a + b * i) % 10 for i in range(3)]


@given(st.integers(1, 8), st.integers(0, 70), st.integers(0, 2**32))
def test_numbers_are_packed_from_the_lowest_bit_on(bits, n, seed):
    half = 1 << bits - 1
    numbers = torch.randint(-half, half, (n,), generator=seeded(seed), dtype=torch.int8)
    stream = sum((int(v) & (2 * half - 1)) << bits * i for i, v in enumerate(numbers))
    code = torch.empty(bits_.packed(n, bits), dtype=torch.uint8)
    bits_.pack(numbers.clone(), bits, code)
    assert bytes(code.tolist()) == stream.to_bytes(len(code), "little")
    assert torch.equal(bits_.unpack(code, bits_.signed(bits), n), numbers)


@pytest.mark.parametrize("codec", [c for c in VARIANTS if not c.stochastic and not isinstance(c, TopK)], ids=repr)
def test_a_code_is_the_codes_of_its_blocks(codec):
    """Spans, which keep memory in the cache, do not show: values are encoded as they are in small parts."""
    block = getattr(codec, "block", 8)
    n = 2 * SPAN // block * block + block + 3
    x = torch.randn(n, generator=seeded())
    whole = unpack(codec, pack(codec, x), x)
    for start in (0, SPAN // block * block - block, SPAN // block * block, n - 3 - block):
        part = x[start : start + block]
        assert torch.equal(whole[start : start + block], unpack(codec, pack(codec, part), part))
    assert torch.equal(whole[-3:], unpack(codec, pack(codec, x[-3:]), x[-3:]))


@each
@pytest.mark.parametrize("n", [1, 1003, SPAN + 11])
def test_codes_are_the_same_on_devices_where_numpy_does_nothing(codec, n, monkeypatch):
    x = torch.randn(n, generator=seeded())
    x[::5] = -0.0
    with_numpy = pack(codec, x, seeded(1))
    for module in (bits_, numpy_ops, sign):
        monkeypatch.setattr(module, "on_cpu", lambda tensor: False)
    for name in ("signbit", "packbits", "flatnonzero", "partition", "greater_equal"):
        monkeypatch.setattr(numpy_ops.np, name, None)
    assert torch.equal(pack(codec, x, seeded(1)), with_numpy)


@pytest.mark.parametrize("codec", [c for c in VARIANTS if not isinstance(c, TopK | RandomK)], ids=repr)
@pytest.mark.parametrize("n", [1, 1003])
def test_on_cuda_all_of_a_code_is_made_on_the_device(codec, n):
    """As far as can be told without one: tensors have a device and a shape here, no values. (Two codecs look at values.)"""
    kept = absmax._rounding, bits_._table, memory.constant
    for constants in kept:
        constants.cache_clear()
    try:
        with FakeTensorMode():
            x = torch.empty(n, device="cuda")
            code = torch.empty(codec.nbytes(n), dtype=torch.uint8, device="cuda")
            codec.encode(x, code)
            codec.decode(code, x)
    finally:  # they have no values
        for constants in kept:
            constants.cache_clear()


def test_values_on_the_host_among_those_on_a_device_would_be_noticed():
    """Negative control."""
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        torch.empty(8, device="cuda").add_(torch.empty(8))


def test_values_that_require_gradients_have_codes():
    x = torch.randn(100, generator=seeded())
    for codec in VARIANTS:
        code = torch.empty(codec.nbytes(100), dtype=torch.uint8)
        codec.encode(x.clone().requires_grad_(), code, seeded(1))
        assert torch.equal(code, pack(codec, x, seeded(1)))


# Memory


@each
@pytest.mark.parametrize("n", [0, 1, 7, 1000, SPAN + 11])
def test_nothing_else_is_written(codec, n):
    x = torch.randn(n, generator=seeded())
    kept, size = x.clone(), codec.nbytes(n)
    code = pack(codec, x, seeded(1))
    out = unpack(codec, code, x)
    for offset in range(1, 4):
        memory = torch.full((size + 8,), 171, dtype=torch.uint8)
        codec.encode(x, memory[offset : offset + size], seeded(1))
        assert torch.equal(x, kept)
        assert torch.equal(memory[offset : offset + size], code)
        assert (memory[:offset] == 171).all()
        assert (memory[offset + size :] == 171).all()
        space = torch.full((n + 8,), 5.0)
        codec.decode(memory[offset : offset + size], space[offset : offset + n])
        assert torch.equal(space[offset : offset + n], out)
        assert (space[:offset] == 5).all()
        assert (space[offset + n :] == 5).all()


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensors_of_any_form(codec, dtype):
    for shape in ((), (0,), (3, 0, 2), (5,), (4, 6), (2, 3, 4), (2, 3, 4, 5)):
        tensor = torch.randn(shape, generator=seeded()).to(dtype)
        turned, broadcast = tensor.permute(tuple(reversed(range(tensor.dim())))), tensor.expand(2, *shape)
        for like in (tensor, turned, broadcast):
            out = unpack(codec, pack(codec, like, seeded()), like)
            assert (out.shape, out.dtype) == (like.shape, like.dtype)
            flat = like.float().reshape(-1).contiguous()
            assert torch.equal(out.reshape(-1), unpack(codec, pack(codec, flat, seeded()), flat).to(dtype))
        if codec.name == "none" and dtype != torch.float64:
            assert torch.equal(unpack(codec, pack(codec, turned), turned), turned)


@each
def test_random_numbers_come_from_the_generator(codec):
    x = torch.randn(999, generator=seeded())
    codes = [pack(codec, x, seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(codes[0], codes[2]) != codec.stochastic


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", [9, 20_000])
def test_what_is_not_finite_does_not_raise(codec, bad, n):
    x = torch.randn(n, generator=seeded())
    for tensor in (torch.full((n,), bad), torch.where(x > 1, bad, x)):
        assert unpack(codec, pack(codec, tensor), tensor).shape == tensor.shape


@pytest.mark.parametrize(
    ("x", "code", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(12, dtype=torch.uint8), "1-D"),
        (torch.zeros(8)[::2], torch.zeros(8, dtype=torch.uint8), "contiguous"),
        (torch.zeros(4).half(), torch.zeros(8, dtype=torch.uint8), "float32"),
        (torch.zeros(4), torch.zeros(9, dtype=torch.uint8), r"uint8 of shape \(8,\)"),
        (torch.zeros(4), torch.zeros(16, dtype=torch.uint8)[::2], "uint8"),
        (torch.zeros(4), torch.zeros(8, dtype=torch.int8), "uint8"),
    ],
)
def test_memory_of_another_form_is_refused_in_one_line(x, code, message):
    for call in (lambda: Int8().encode(x, code), lambda: Int8().decode(code, x)):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_only_floating_point_numbers_have_codes():
    with pytest.raises(ValueError, match="floating-point"):
        pack(Int8(), torch.zeros(3, dtype=torch.int64))


# Names and options


@each
def test_repr_makes_the_codec(codec):
    assert eval(repr(codec), vars(compression)) == codec


def test_codecs_have_names():
    assert {name: type(as_compression(name)) for name in CODECS} == CODECS
    codec = Int8(64)
    assert as_compression(codec) is codec
    assert as_compression(None) is None
    assert as_compression("powersgd") == PowerSGD(rank=2)
    assert as_compression(PowerSGD(rank=3)) == PowerSGD(rank=3)
    for wrong in ("int9", 8):
        with pytest.raises(ValueError, match=r"compression must be .*none, fp16, .*int8.*natural, powersgd; got") as error:
            as_compression(wrong)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        (Int8, {"block": 12}),
        (Int8, {"block": 0}),
        (Int4, {"block": 8.0}),
        (Int8, {"stochastic": 1}),
        (ScaledSign, {"block": True}),
        (E3M0, {"block": -8}),
        (TernGrad, {"unbiased": None}),
        (QSGD, {"levels": 0}),
        (QSGD, {"levels": 128}),
        (QSGD, {"unbiased": "no"}),
        (TopK, {"ratio": 0}),
        (TopK, {"ratio": 1.5}),
        (RandomK, {"ratio": math.nan}),
        (RandomK, {"unbiased": 0}),
        (Threshold, {"threshold": 0}),
        (Threshold, {"threshold": math.inf}),
        (PowerSGD, {"rank": 0}),
        (PowerSGD, {"rank": 2.0}),
        (PowerSGD, {"rank": True}),
    ],
)
def test_options_out_of_range_are_refused_in_one_line(codec, options):
    with pytest.raises(ValueError, match=next(iter(options))) as error:
        codec(**options)
    assert "\n" not in str(error.value)


def test_every_codec_has_a_configuration_with_its_options_and_defaults():
    files = {file.stem: OmegaConf.load(file) for file in (conf_dir() / "compression").glob("*.yaml")}
    chosen = {**CODECS, "powersgd": PowerSGD}
    assert set(files) == set(chosen), "none stands for no codec"
    assert instantiate(files.pop("none")) is None
    for name, cfg in files.items():
        assert instantiate(cfg, _convert_="all") == chosen[name]()
        assert {*cfg} - {"_target_"} == {field.name for field in fields(chosen[name])}
