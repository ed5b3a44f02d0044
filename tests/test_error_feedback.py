"""Error feedback: nothing is lost, and residuals stay bounded, if the codec contracts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cocod.compression import (
    CODECS,
    FP16,
    QSGD,
    ErrorFeedback,
    Identity,
    Int4,
    Int8,
    Natural,
    RandomK,
    TernGrad,
    Threshold,
    TopK,
)

D = 1000


def feed(feedback, g, generator=None, name="w"):
    """c for one g."""
    c = g.clone()
    feedback.encode(name, c, torch.empty(feedback.codec.nbytes(g.numel()), dtype=torch.uint8), generator)
    return c


@pytest.mark.parametrize("codec", [kind() for kind in CODECS.values()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_sent_and_what_is_left_are_what_came(codec, dtype):
    """Σ c + e = Σ g."""
    feedback, generator = ErrorFeedback(codec), torch.Generator().manual_seed(0)
    gs = torch.randn(50, D, generator=generator, dtype=dtype)
    cs = torch.stack([feed(feedback, g, generator) for g in gs])
    e = feedback.residuals["w"]
    largest = float(e.abs().max()) + float(cs.abs().max())
    assert torch.allclose(cs.double().sum(0) + e, gs.double().sum(0), atol=50 * torch.finfo(dtype).eps * largest)
    assert codec.name == "none" or not torch.allclose(cs.double().sum(0), gs.double().sum(0), atol=1e-6)


@given(
    codec=st.sampled_from([kind() for kind in CODECS.values()]),
    shape=st.tuples(st.integers(1, 8), st.integers(1, 600)),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 2**32),
)
def test_nothing_is_lost_whatever_comes_however_often(codec, shape, exponent, seed):
    feedback, generator = ErrorFeedback(codec), torch.Generator().manual_seed(seed)
    gs = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**exponent
    cs = torch.stack([feed(feedback, g, generator) for g in gs])
    e = feedback.residuals["w"]
    largest = float(e.abs().max()) + float(cs.abs().max()) + float(gs.abs().max())
    assert torch.allclose(cs.sum(0) + e, gs.sum(0), rtol=0, atol=50 * torch.finfo(torch.float64).eps * largest)


def test_without_compression_nothing_is_left_and_nothing_changed():
    feedback = ErrorFeedback(Identity())
    for g in torch.randn(20, D):
        assert torch.equal(feed(feedback, g).view(torch.int32), g.view(torch.int32))
        assert not feedback.residuals["w"].any()


def test_each_name_has_its_residual():
    feedback, alone = ErrorFeedback(Int4()), ErrorFeedback(Int4())
    for g, h in torch.randn(5, 2, D):
        first, _ = feed(feedback, g, name="g"), feed(feedback, h[:7], name="h")
        assert torch.equal(first, feed(alone, g))
    assert {name: e.shape for name, e in feedback.residuals.items()} == {"g": (D,), "h": (7,)}
    with pytest.raises(ValueError, match="'h' has 7 values, got 8"):
        feed(feedback, torch.ones(8), name="h")


def test_residuals_go_on_from_a_state():
    gs = torch.randn(6, D)
    whole, first, second = (ErrorFeedback(TopK()) for _ in range(3))
    expected = [feed(whole, g) for g in gs]
    for g in gs[:3]:
        feed(first, g)
    state = first.state_dict()
    second.load_state_dict(state)
    feed(first, gs[3])  # changes neither
    assert all(torch.equal(feed(second, g), c) for g, c in zip(gs[3:], expected[3:], strict=True))
    assert torch.equal(second.residuals["w"], whole.residuals["w"])


@pytest.mark.parametrize(
    "codec",
    [
        RandomK(unbiased=True),
        QSGD(1, unbiased=True),
        TernGrad(unbiased=True),
        Int4(1024, stochastic=True),
    ],
    ids=repr,
)
def test_what_does_not_contract_is_refused_by_name(codec):
    with pytest.raises(ValueError, match=r"needs a contraction") as error:
        ErrorFeedback(codec)
    assert repr(codec) in str(error.value)
    assert "\n" not in str(error.value)


class Unbiased(RandomK):
    """Random-k, scaled up, that says of itself what is not true."""

    @property
    def contraction(self) -> bool:
        return True


def residual(codec, *, varying=False, steps=10_000):
    """The largest ‖e‖ / ‖g‖ on the way; ends early where it has grown beyond all bounds."""
    feedback, generator, most = ErrorFeedback(codec), torch.Generator().manual_seed(0), 0.0
    gs, c = torch.randn(steps if varying else 1, D, generator=generator), torch.empty(D)
    largest, code = float(gs.norm(dim=1).max()), torch.empty(codec.nbytes(D), dtype=torch.uint8)
    for step in range(steps):
        feedback.encode("w", c.copy_(gs[step % len(gs)]), code, generator)
        if step % 20 == 0:
            most = max(most, float(feedback.residuals["w"].norm()) / largest)
            if not most < 1e6:
                return math.inf
    return most


CONTRACTIONS = {  # δ of D values with the default options, by the codecs' own errors
    "none": 1.0,
    "fp16": 1 - 2.0**-22,
    "bf16": 1 - 2.0**-16,
    "int8": 1 - D / (2 * 127) ** 2,  # u/2 a value, u = max|x|/127
    "int4": 1 / 256,
    "e3m0": 8 / (9 * 256),
    "sign": 1 / D,
    "topk": 0.01,
    "randomk": 0.01,
    "qsgd": 1 / (1 + math.sqrt(512) / 7),
    "terngrad": 2 / (1 + math.sqrt(D)),
    "natural": 7 / 8,
}
OTHER_OPTIONS = [
    *((RandomK(0.1), 0.1), (TopK(0.05), 0.05), (QSGD(1, block=1024), 1 / (1 + 32))),
    *((codec, 1 - codec.omega) for codec in (Int8(stochastic=True), Int4(stochastic=True))),
]


@pytest.mark.parametrize(
    ("codec", "δ"),
    [*((codec(), CONTRACTIONS[name]) for name, codec in CODECS.items() if name != "threshold"), *OTHER_OPTIONS],
    ids=repr,
)
@pytest.mark.parametrize("varying", [False, True], ids=["constant", "varying"])
def test_residuals_stay_bounded(codec, δ, varying):
    """E‖e‖² ≤ 4 (1 − δ)/δ² · max ‖g‖²."""
    assert residual(codec, varying=varying) <= 2 * math.sqrt(1 - δ) / δ


@pytest.mark.parametrize("codec", [Unbiased(0.01, unbiased=True), Unbiased(0.1, unbiased=True)], ids=repr)
def test_residuals_of_what_does_not_contract_grow_without_bound(codec):
    assert residual(codec) == math.inf


@pytest.mark.parametrize("varying", [False, True], ids=["constant", "varying"])
def test_residual_of_a_threshold_stays_within_it_for_smaller_values(varying):
    feedback = ErrorFeedback(Threshold(0.5))
    for g in torch.rand(10_000 if varying else 1, D).sub_(0.5).expand(10_000, D):
        c = feed(feedback, g)
        assert float(feedback.residuals["w"].abs().max()) <= 0.5 + 1e-6
    assert set(c.unique().tolist()) == {-0.5, 0.0, 0.5}
    assert not Threshold().contraction
    assert [codec.name for codec in (kind() for kind in CODECS.values()) if codec.needs_feedback] == ["threshold"]


def test_residual_of_a_threshold_grows_by_what_is_above_it_if_values_stay_there():
    """That |g| ≤ θ is what keeps it bounded; larger values may do no harm if their signs change."""
    feedback = ErrorFeedback(Threshold(0.5))
    for t in range(10_000):
        feed(feedback, torch.tensor([0.75, -0.75, 0.5, 0.25, (-1) ** t * 0.75]))
    assert feedback.residuals["w"].tolist() == [2500.0, -2500.0, 0.0, 0.0, 0.0]  # exact: 10,000 times 1/4


def test_residual_of_a_half_grows_by_what_is_beyond_its_range():
    feedback = ErrorFeedback(FP16())
    for _ in range(100):
        feed(feedback, torch.tensor([65504.0 + 32, -65504.0 - 32, 65504.0]))
    assert feedback.residuals["w"].tolist() == [3200.0, -3200.0, 0.0]  # exact


def test_rounding_at_random_is_wrapped_where_it_contracts():
    for codec in (Natural(), Int8(stochastic=True), Int4(stochastic=True), QSGD(), TernGrad(), RandomK()):
        assert ErrorFeedback(codec).codec is codec
