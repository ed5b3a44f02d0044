"""Two-way compression: what x has not been told of is in the residuals, whatever the codecs, skips and learning rates."""

import contextlib
import copy
import functools
import itertools
import subprocess
import sys
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from lightning_cocod.algorithms import (
    CDSGD,
    ODSGD,
    SSDSGD,
    SSGD,
    CompSkipDSGD,
    DistEFSGD,
    EveryNth,
    FlexCompressSGD,
    Randomly,
    WhileSmall,
    two_way,
)
from lightning_cocod.algorithms.skipping import Never, as_skip
from lightning_cocod.comm import MessageMismatch, NonFiniteMessage, buckets
from lightning_cocod.comm.coded_shards import CodedPush
from lightning_cocod.comm.compressed import Compression
from lightning_cocod.compression import CODECS, FP16, QSGD, Identity, Int8, RandomK, ScaledSign, TernGrad, TopK

SIZES = [2, 4]
STEPS, LIMIT, TOL = 12, 120.0, 1e-9
RATES = [0.1, 0.1, 0.05, 0.0, 0.0, 0.2, 0.03, 0.1, 0.0, 0.07, 0.07, 0.1]
UNRELATED = list(zip(RATES, [0.0, 0.07, 0.07, 0.2, 0.1, 0.0, 0.0, 0.03, 0.15, 0.01, 0.0, 0.05], strict=True))
"""Of two groups, whose ratios have nothing to do with each other; each rests in steps in which the other one does not."""
HEAVY = {"momentum": 0.9, "weight_decay": 0.01}
NESTEROV = {**HEAVY, "nesterov": True}


class Model(nn.Module):
    """Two groups' parameters, in several buckets, one of them transposed in memory."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.bias, self.last = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            for shape in ((7, 5), (7,), (11, 7))
        )
        self.last.data = self.last.data.t().contiguous().t()

    def forward(self, x, first=True):
        return (torch.tanh((x @ self.first.t() if first else 0) + self.bias) @ self.last.t()).square().mean()


def groups(model, **options):
    return [{"params": [model.first, model.last], **options}, {"params": [model.bias], "lr": 0.03, **options}]


def data(rank, t, dtype=torch.float64):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * rank + t), dtype=torch.float64)
    return (x + 0.3 * rank).to(dtype)


def or_zeros(p, g):
    return torch.zeros_like(p) if g is None else g


def flat(tensors):
    return torch.cat([t.detach().double().flatten() for t in tensors])


@mock.patch.object(buckets, "BUCKET_BYTES", 256)  # of float64, so that there are six
def train(
    rank,
    n,
    algorithm=CompSkipDSGD,
    *,
    rates=None,
    sgd=None,
    unequal=False,
    resume_at=None,
    dtype=torch.float64,
    twice=1,
    branch=False,
    **options,
):
    """What a worker sees: x(t), g_i(t) and where there is one, e_i(t) and ẽ(t), flat; and the bytes it has sent.

    With a `branch` only worker t mod 2 uses the first matrix.
    """
    weights = list(range(1, n + 1)) if unequal else None
    seen = {"x": [], "g": [], "there": [], "e": [], "ẽ": [], "η": []}

    def fresh():
        model = Model(dtype)
        optimizer = torch.optim.SGD(groups(model, **(sgd or {})), 0.1)
        return model, optimizer, algorithm(model, optimizer, weights=weights, **copy.deepcopy(options))

    def run(start, stop):
        for t in range(start, stop):
            if rates is not None:
                each = rates[t] if isinstance(rates[t], tuple) else (rates[t], 0.5 * rates[t])
                for group, η in zip(optimizer.param_groups, each, strict=True):
                    group["lr"] = η
            seen["η"].append(rates_of(model, optimizer))
            seen["x"].append(flat(model.parameters()))
            optimizer.zero_grad()
            first = not branch or rank == t % 2
            for i in range(twice - 1):
                with algo.no_sync():
                    (model(data(rank, 100 * i + t, dtype), first) / twice).backward()
            loss = model(data(rank, t, dtype), first) / twice
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            both = list(zip(parameters, gradients, strict=True))
            seen["g"].append(flat([or_zeros(p, g) + or_zeros(p, p.grad) for p, g in both]))
            seen["there"].append(flat([torch.full_like(p, g is not None) for p, g in both]))
            loss.backward()
            algo.step()
            for one in algo.servers.values():
                if isinstance(one, two_way.TwoWay):
                    residuals = one.residuals(algo.subject("residuals"))
                    for name, which in (("e", 0), ("ẽ", 1)):
                        seen[name].append(flat([residuals[p][which] for p in model.parameters()]))

    model, optimizer, algo = fresh()
    if resume_at is not None:
        with algo:
            run(0, resume_at)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), algo.state_dict()))
        model, optimizer, algo = fresh()
    with algo:
        if resume_at is not None:
            for part, state in zip((model, optimizer, algo), saved, strict=True):
                part.load_state_dict(state)
        run(resume_at or 0, STEPS)
        seen["x"].append(flat(model.parameters()))
        sent = algo.metrics()["comm/sent_bytes"]
    return {name: torch.stack(values).numpy() for name, values in seen.items() if values}, sent


def rates_of(model, optimizer):
    """η of every element."""
    first, second = (group["lr"] for group in optimizer.param_groups)
    return flat([torch.full_like(p, η) for p, η in zip(model.parameters(), (first, second, first), strict=True)])


def weights(n, unequal):
    w = np.arange(1, n + 1) if unequal else np.ones(n)
    return w / w.sum()


def d(run, momentum=0.0, weight_decay=0.0, nesterov=False):
    """What SGD makes of a worker's gradients, all steps: weight decay, then momentum."""
    m, made = 0, []
    for g, there, x in zip(run["g"], run["there"], run["x"], strict=False):  # x has the end as well
        g = g + weight_decay * x
        m = np.where(there, momentum * m + g, m)
        made.append(np.where(there, g + momentum * m if nesterov else m, 0))
    return np.stack(made)


def error(runs, unequal=False, weigh=None, sgd=None):
    """How far x(t) − η (ẽ(t) + Σ w e) is from x(0) − Σ_τ η Σ w d; ranks have the same x bit for bit."""
    w = weights(len(runs), unequal) if weigh is None else weigh
    first, x = runs[0], runs[0]["x"]
    for run in runs[1:]:
        assert np.array_equal(run["x"], x)
        assert np.array_equal(run["ẽ"], first["ẽ"])
    e, fed = (np.tensordot(w, np.stack(all_), 1) for all_ in ([r["e"] for r in runs], [d(r, **(sgd or {})) for r in runs]))
    η = first["η"]
    last = np.zeros_like(η)  # the last that was not 0, of each parameter
    for t in range(len(η)):
        last[t] = np.where(η[t] > 0, η[t], last[t - 1] if t else 0)
    virtual = x[1:] - last * (first["ẽ"] + e)
    return np.abs(virtual - (x[0] - np.cumsum(η * fed, 0))).max()


def quiet_bucket(step, bucket, values):
    return (step + bucket) % 3 == 0


def as_told(step, bucket, values):
    return float(values[0]) > 0


CODED = {
    "sign": {},
    "topk up": {"compression": TopK(ratio=0.1)},
    "int8 down": {"server_compression": Int8()},
    "random-k": {"compression": RandomK(ratio=0.2, unbiased=False), "server_compression": TopK(ratio=0.3)},
    "qsgd": {"compression": QSGD(levels=7, block=64), "server_compression": FP16()},
    "threshold": {"compression": "threshold"},
    "identity": {"compression": Identity(), "server_compression": Identity()},
}
SKIPS = {
    "randomly": {"worker_skip": 0.5, "server_skip": Randomly(0.4, seed=3)},
    "every third": {"worker_skip": 3, "server_skip": EveryNth(2)},
    "while small": {"worker_skip": WhileSmall(1.5), "server_skip": WhileSmall(1.2)},
    "as told": {"worker_skip": as_told, "server_skip": quiet_bucket},
    "server never": {"server_skip": Randomly(1.0)},
}
CONFIGURATIONS = {
    **{f"{name}, rates": {**options, "rates": RATES} for name, options in CODED.items()},
    **{f"{name} skipped": {**options, "rates": RATES, "unequal": True} for name, options in SKIPS.items()},
    "topk skipped randomly": {**CODED["topk up"], **SKIPS["randomly"], "rates": RATES, "unequal": True},
    "threshold skipped while small": {**CODED["threshold"], **SKIPS["while small"], "rates": RATES},
    "accumulated": {"twice": 3, "rates": RATES},
    "heavy": {**CODED["topk up"], "rates": RATES, "sgd": HEAVY, "unequal": True},
    "nesterov": {**CODED["qsgd"], **SKIPS["randomly"], "rates": RATES, "sgd": NESTEROV, "unequal": True},
    "unrelated rates": {**CODED["topk up"], "rates": UNRELATED, "unequal": True},
    "unrelated rates, skipped": {**SKIPS["randomly"], "rates": UNRELATED, "sgd": HEAVY, "unequal": True},
    "a branch": {**CODED["topk up"], "rates": RATES, "branch": True},
    "a branch, nesterov": {**SKIPS["randomly"], "rates": RATES, "sgd": NESTEROV, "unequal": True, "branch": True},
    "dist_ef": {"algorithm": DistEFSGD, "rates": RATES},
    "dist_ef, a branch": {"algorithm": DistEFSGD, "rates": RATES, "sgd": HEAVY, "branch": True},
    "flex": {"algorithm": FlexCompressSGD, "rates": RATES},
    "half": {"algorithm": DistEFSGD, "dtype": torch.bfloat16},
}
OTHERS = {
    "undisturbed": {**SKIPS["while small"], "rates": RATES, "sgd": HEAVY},
    "waiting": {**SKIPS["while small"], "rates": RATES, "sgd": HEAVY, "overlap": False},
    **{f"resumed at {t}": {**SKIPS["while small"], "rates": RATES, "sgd": HEAVY, "resume_at": t} for t in (1, 4, 7)},
    "told, undisturbed": {**SKIPS["as told"], "rates": RATES, "sgd": HEAVY},
    "told, waiting": {**SKIPS["as told"], "rates": RATES, "sgd": HEAVY, "overlap": False},
}


def configured(rank, n, names):
    every = {**CONFIGURATIONS, **OTHERS}
    return {name: train(rank, n, **every[name]) for name in names}


@functools.cache
def runs(n):
    ranks = run_ranks(configured, n, [*CONFIGURATIONS, *OTHERS], timeout=LIMIT)
    return {name: [rank[name][0] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != "half"])
def test_nothing_is_lost(n, name):
    unequal, sgd = (CONFIGURATIONS[name].get(option) for option in ("unequal", "sgd"))
    check(runs(n)[name], unequal, sgd, lossless="identity" in name)


def check(found, unequal=False, sgd=None, *, lossless=False):
    """The identity holds, and could be missed."""
    assert error(found, unequal, sgd=sgd) < TOL
    if not lossless:
        assert max(np.abs(run["e"]).max() for run in found) > 1e-4  # there is something that could have been lost
        assert error(found, weigh=weights(len(found), not unequal), sgd=sgd) > 1e-6


@pytest.mark.parametrize("n", SIZES)
def test_a_worker_that_does_not_use_a_parameter_adds_nothing_to_it_and_others_do(n):
    for name in ("a branch, nesterov", "dist_ef, a branch"):
        unequal, sgd = (CONFIGURATIONS[name].get(option) for option in ("unequal", "sgd"))
        decayed = [{**run, "there": np.ones_like(run["there"])} for run in runs(n)[name]]  # a gradient of 0, as SGD takes it
        assert error(decayed, unequal, sgd=sgd) > 1e-4
    first = runs(n)["dist_ef, a branch"][0]["x"][:, :35]
    assert [not np.array_equal(*pair) for pair in itertools.pairwise(first)] == [η > 0 for η in RATES]


def every_codec(rank, n):
    """In both directions, with random skips in both."""
    made = {name: codec() for name, codec in CODECS.items()}
    skips = {**SKIPS["randomly"], "rates": RATES, "unequal": True}
    return {name: train(rank, n, compression=c, server_compression=c, **skips)[0] for name, c in made.items()}


@functools.cache
def runs_of_codecs():
    return run_ranks(every_codec, 2, timeout=LIMIT)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_lost_whatever_the_codec(codec):
    check([rank[codec] for rank in runs_of_codecs()], unequal=True)


def with_momentum_after(rank, n, sgd):
    """The negative control: error feedback is of gradients, and the optimizer has its momentum in the step of the answer."""

    def value(self, number):
        group = self.optimizer.param_groups[self.group_of[number]]
        options = {"momentum": group["momentum"], "nesterov": group["nesterov"]}
        group.update(momentum=0, nesterov=False)
        made = genuine[0](self, number)
        group.update(options)
        return made

    @contextlib.contextmanager
    def plain(self):
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0
        yield
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    server = two_way.TwoWay
    genuine = server.value, server.plain
    server.value, server.plain = value, plain
    try:
        return train(rank, n, **CODED["topk up"], sgd=sgd)[0]
    finally:
        server.value, server.plain = genuine


@pytest.mark.parametrize("sgd", [HEAVY, NESTEROV], ids=str)
def test_momentum_after_error_feedback_would_lose_something(sgd):
    assert error(run_ranks(with_momentum_after, 2, sgd, timeout=LIMIT), sgd=sgd) > 1e-3


@pytest.mark.parametrize("n", SIZES)
def test_residuals_of_parameters_in_half_precision_are_in_float32(n):
    found = runs(n)["half"]
    assert error(found) < 0.05  # x is rounded to 8 bits, every step
    e = torch.tensor(found[0]["e"][-1])
    assert not torch.equal(e, e.bfloat16().double())


def by_senders(rank, n):
    """The negative control: the mean is over those who send."""

    def drain(self, bucket, scratch):
        genuine(self, bucket, scratch)
        sent = sum(self._weights[rank] for rank in self._coded.of[bucket])
        if sent:
            self._s[bucket].div_(sent)

    genuine, CodedPush.drain = CodedPush.drain, drain
    try:
        return train(rank, n, **SKIPS["randomly"])[0]
    finally:
        CodedPush.drain = genuine


@pytest.mark.parametrize("n", SIZES)
def test_dividing_by_the_number_of_senders_would_lose_something(n):
    assert error(run_ranks(by_senders, n, timeout=LIMIT)) > 1e-3


# Identity codecs


def as_ssgd(rank, n, dtype, sgd, twice):
    identity = {"compression": Identity(), "server_compression": Identity()}
    options = {"dtype": dtype, "sgd": sgd, "twice": twice, "rates": [r or 0.1 for r in RATES]}
    compressed = train(rank, n, **options, **identity)[0]["x"]
    return [compressed, train(rank, n, SSGD, **options)[0]["x"]]


@pytest.mark.parametrize(("sgd", "twice"), [({}, 1), ({}, 2)])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_identity_codecs_are_s_sgd_exactly(n, sgd, twice):
    for compressed, plain in run_ranks(as_ssgd, n, torch.float32, sgd, twice, timeout=LIMIT):
        assert np.array_equal(compressed, plain)
        assert np.abs(plain[-1] - plain[0]).max() > 1e-3


KINDS = [
    HEAVY,
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.5, "dampening": 0.3},
    {"weight_decay": 0.1, "maximize": True},
]


@pytest.mark.parametrize("sgd", KINDS, ids=str)
def test_momentum_and_weight_decay_are_those_of_sgd(sgd):
    for compressed, plain in run_ranks(as_ssgd, 2, torch.float32, sgd, 1, timeout=LIMIT):
        assert np.abs(compressed - plain).max() < 2e-6  # Σ w (μ m) and μ Σ w m are rounded in another order


CHANGING = [0.1, 0.1, 0.05, 0.08, 0.02, 0.1, 0.03, 0.1, 0.06, 0.07, 0.07, 0.1]


def accumulated(rank, factor=1.0, rates=None):
    """x after steps of S-SGD with three gradients each, added up."""
    model = Model(torch.float32)
    optimizer = torch.optim.SGD(groups(model), 0.1)
    with SSGD(model, optimizer) as algo:
        for t in range(STEPS):
            if rates is not None:
                for group, times in zip(optimizer.param_groups, (1.0, 0.5), strict=True):
                    group["lr"] = times * rates[t]
            loss = factor * model(data(rank, t, torch.float32))
            if t % 3 == 2:
                loss.backward()
                algo.step()
                optimizer.zero_grad()
            else:
                with algo.no_sync():
                    loss.backward()
    return flat(model.parameters()).numpy()


def skipping_all(rank, n):
    """Everybody sends every third step. The rates are constant, or change."""
    options = {"dtype": torch.float32, "compression": Identity(), "server_compression": Identity(), "worker_skip": 3}
    constant, changing = (train(rank, n, rates=rates, **options)[0]["x"] for rates in (None, CHANGING))
    return constant, changing, accumulated(rank), accumulated(rank, 1 / 3), accumulated(rank, rates=CHANGING)


@pytest.mark.parametrize("n", SIZES)
def test_skipping_all_but_every_third_step_adds_gradients_up(n):
    for path, changing, added, averaged, of_other_rates in run_ranks(skipping_all, n, timeout=LIMIT):
        assert np.abs(path[-1] - added).max() < 1e-6
        for t in (1, 2, 4, 5):
            assert np.array_equal(path[t], path[t - t % 3])
        assert np.abs(path[-1] - averaged).max() > 1e-3
        assert np.abs(changing[-1] - of_other_rates).max() > 1e-3  # each gradient has the rate of its own step there


@pytest.mark.parametrize("n", SIZES)
def test_where_the_server_always_skips_x_rests_and_its_residual_grows(n):
    run = runs(n)["server never skipped"][0]
    assert np.array_equal(run["x"], np.tile(run["x"][0], (len(run["x"]), 1)))
    sizes = np.linalg.norm(run["ẽ"], axis=1)
    assert sizes[-1] > 2 * sizes[0] > 0


# Bytes


def told_to_skip(step, bucket, values):
    return True


@mock.patch.object(buckets, "BUCKET_BYTES", 256)
def bytes_sent(rank, n):
    model = Model()
    rest = {"server_skip": Randomly(1.0)}
    skips = {"always": None, "half": 2, "never": Randomly(1.0), "asked": told_to_skip}
    moved = {name: train(rank, n, worker_skip=skip, **rest)[1] for name, skip in skips.items()}
    both = train(rank, n)[1]
    with DistEFSGD(model, torch.optim.SGD(groups(model), 0.1)) as algo:
        (server,) = algo.servers.values()
        codes = [ScaledSign().nbytes(size // n) for size in server.layout.sizes()]
    return moved, both, codes


@mock.patch.object(buckets, "BUCKET_BYTES", 256)
def bytes_of_steps(rank, n):
    """What a worker sends once all have started; and the codes of each group."""
    moved = {}
    for name, (rates, skips) in {
        "sent": ((0.1, 0.03), {}),
        "skipped": ((0.1, 0.03), {"worker_skip": Randomly(1.0), "server_skip": Randomly(1.0)}),
        "one rests": ((0.1, 0.0), {}),
        "both rest": ((0.0, 0.0), {}),
    }.items():
        model = Model()
        optimizer = torch.optim.SGD(groups(model), 0.1)
        for group, η in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = η
        with CompSkipDSGD(model, optimizer, **skips) as algo:
            begun = algo.metrics()["comm/sent_bytes"]
            for t in range(STEPS):
                optimizer.zero_grad()
                model(data(rank, t)).backward()
                algo.step()
            moved[name] = algo.metrics()["comm/sent_bytes"] - begun
            (server,) = algo.servers.values()
            codes = [0, 0]
            for bucket, size in enumerate(server.layout.sizes()):
                codes[server.group_of[server.layout.parts(bucket)[0].index]] += ScaledSign().nbytes(size // n)
    return moved, codes


@pytest.mark.parametrize("n", SIZES)
def test_steps_of_which_nothing_is_sent_cost_three_headers(n):
    for moved, codes in run_ranks(bytes_of_steps, n, timeout=LIMIT):
        headers = STEPS * 3 * 112 * (n - 1)  # of the push, at its end, of the pull
        both_ways = 2 * STEPS * (n - 1)
        assert min(codes) > 0
        assert moved == {
            "sent": headers + both_ways * sum(codes),
            "skipped": headers,
            "one rests": headers + both_ways * codes[0],
            "both rest": headers,
        }


@pytest.mark.parametrize("n", SIZES)
def test_what_is_left_out_costs_nothing_but_its_header(n):
    for moved, both, codes in run_ranks(bytes_sent, n, timeout=LIMIT):
        push = STEPS * (n - 1) * sum(codes)
        assert len(codes) > 3
        assert moved["always"] - moved["never"] == push
        assert moved["half"] - moved["never"] == push // 2
        assert moved["asked"] - moved["never"] == STEPS * (n - 1) * len(codes)
        assert both - moved["always"] == push  # the server's answer is as long


NORMS = [(4.0, 1.0), (1.0, 2.0), (1.0, 4.0), (1.0, 8.0), (2.0, 5.0), (0.5, 1.0), (0.5, 0.0), (9.0, 9.0)]
"""Of the gradients of two buckets, in steps that follow each other; gradients of a bucket point in one direction."""


def while_small(fraction):
    """Which buckets are sent when, of what adds up."""
    last, kept, sent = [0.0, 0.0], [0.0, 0.0], []
    for norms in NORMS:
        kept = [before + now for before, now in zip(kept, norms, strict=True)]
        sent.append([now >= fraction * before for now, before in zip(kept, last, strict=True)])
        last = [now if sends else before for now, before, sends in zip(kept, last, sent[-1], strict=True)]
        kept = [0.0 if sends else now for now, sends in zip(kept, sent[-1], strict=True)]
    return sent


def test_a_bucket_is_kept_while_its_norm_is_small_beside_that_of_the_last_one_sent():
    rule = WhileSmall(0.75)
    direction = torch.full((4,), 0.5)  # of norm 1
    asked = [(0, 4.0), (1, 1.0), (0, 2.9), (1, 0.74), (0, 3.0), (0, 2.24), (1, 0.75), (1, 0.5), (1, 9.0), (0, 2.25)]
    kept = [rule(0, 0, bucket, size * direction) for bucket, size in asked]
    assert kept == [False, False, True, True, False, True, False, True, False, False]
    with_other = WhileSmall(0.75)
    with_other.load_state_dict(rule.state_dict())
    assert with_other(0, 0, 0, 1.6 * direction)
    assert not WhileSmall(0.75)(0, 0, 0, 1.6 * direction)


def bytes_while_small(rank, n):
    """How many buckets' codes a worker sends by the rule, and how many bytes there are beside; and in which steps."""
    moved = []
    for skip in (Randomly(1.0), WhileSmall(0.75)):
        parameters = [nn.Parameter(torch.zeros(64)) for _ in range(2)]  # of a group each: a bucket each, the last one first
        optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], 0.1)
        options = {"compression": Identity(), "worker_skip": skip, "server_skip": Randomly(1.0)}
        with CompSkipDSGD(nn.ParameterList(parameters), optimizer, overlap=False, **options) as algo:
            for norms in NORMS:
                for p, size in zip(parameters, norms, strict=True):
                    p.grad = torch.full_like(p, size / 8)
                algo.step()
            moved.append(algo.metrics()["comm/sent_bytes"])
    return moved[1] - moved[0]


@pytest.mark.parametrize("n", SIZES)
def test_a_bucket_that_is_kept_while_it_is_small_costs_a_byte(n):
    sent = sum(map(sum, while_small(0.75)))
    assert 4 < sent < 2 * len(NORMS) - 2  # some are kept, some are not
    for moved in run_ranks(bytes_while_small, n, timeout=LIMIT):
        assert moved == (n - 1) * (2 * len(NORMS) + sent * Identity().nbytes(64 // n))


# How gradients set out


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("other", [name for name in OTHERS if "undisturbed" not in name])
def test_overlap_and_a_restart_change_nothing(n, other):
    like = "told, undisturbed" if "told" in other else "undisturbed"
    for a, b in zip(runs(n)[like], runs(n)[other], strict=True):
        assert np.array_equal(a["x"][-1], b["x"][-1])
        assert np.array_equal(a["e"][-1], b["e"][-1])
        assert np.array_equal(a["ẽ"][-1], b["ẽ"][-1])


def forgetful(rank, n):
    """The negative control: a restart without the residuals."""
    genuine, two_way.TwoWay.load_state_dict = two_way.TwoWay.load_state_dict, lambda self, state: None
    try:
        return train(rank, n, **OTHERS["resumed at 4"])[0]["x"][-1]
    finally:
        two_way.TwoWay.load_state_dict = genuine


def test_a_restart_without_residuals_is_another_run():
    for rank, x in enumerate(run_ranks(forgetful, 2, timeout=LIMIT)):
        assert np.abs(x - runs(2)["undisturbed"][rank]["x"][-1]).max() > 1e-5


def alone(rank, n):
    return [train(rank, n, sgd=HEAVY)[0]["x"], train(rank, n, SSGD, sgd=HEAVY)[0]["x"]]


def test_one_worker_trains_plainly():
    ((compressed, plain),) = run_ranks(alone, 1, timeout=LIMIT)
    assert np.array_equal(compressed, plain)


@mock.patch.object(buckets, "BUCKET_BYTES", 256)
def joined(rank, n):
    """A parameter that joins later: residuals of the others are kept, whatever their place."""
    model = Model()
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(groups(model), 0.1)
    total, initial = torch.zeros_like(flat(model.parameters())), flat(model.parameters())
    with DistEFSGD(model, optimizer, compression=TopK(ratio=0.1)) as algo:
        for t in range(STEPS):
            if t == 5:
                model.bias.requires_grad_(True)
            optimizer.zero_grad()
            model(data(rank, t)).backward()
            g = flat([or_zeros(p, p.grad) for p in model.parameters()])
            η = rates_of(model, optimizer)
            total += η * g
            algo.step()
        (server,) = algo.servers.values()
        residuals = server.residuals(algo.subject("residuals"))
        e, ẽ = (flat([residuals[p][which] for p in model.parameters()]) for which in (0, 1))
        return initial, flat(model.parameters()), η * e, η * ẽ, total


def test_nothing_is_lost_when_a_parameter_joins():
    ranks = run_ranks(joined, 2, timeout=LIMIT)
    initial, x, _, ẽ, _ = ranks[0]
    e, total = (torch.stack([rank[which] for rank in ranks]).mean(0) for which in (2, 4))
    assert (x - ẽ - e - (initial - total)).abs().max() < TOL
    assert ẽ.abs().max() > 1e-4


# Buckets that nobody sends, between others that are at work


def with_a_resting_group(rank, n):
    """Three groups of a bucket each; the middle one has a rate of 0. How far x is from what S-SGD makes of it."""
    parameters = [nn.Parameter(torch.zeros(500_000)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": η} for p, η in zip(parameters, (0.1, 0.0, 0.1), strict=True)])
    identity = {"compression": Identity(), "server_compression": Identity(), "overlap": False}
    expected = [torch.zeros(500_000) for _ in range(3)]
    with CompSkipDSGD(nn.ParameterList(parameters), optimizer, **identity) as algo:
        for t in range(5):
            for number, (p, x, η) in enumerate(zip(parameters, expected, (0.1, 0.0, 0.1), strict=True)):
                generators = [torch.Generator().manual_seed(100 * i + 10 * t + number) for i in range(n)]
                gradients = [torch.randn(500_000, generator=generator) for generator in generators]
                p.grad = gradients[rank]
                x.sub_(sum(gradients), alpha=η / n)
            algo.step()
        return max(float((p - x).abs().max()) for p, x in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("n", [2, 3])
def test_a_bucket_that_nobody_sends_leaves_the_memory_of_others_alone(n):
    assert max(run_ranks(with_a_resting_group, n, timeout=LIMIT)) < 1e-5


# Several optimizers, and parameters that rest


def stepped(how):
    """Both optimizers' x after some steps; the first one steps in every second batch only."""
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    optimizers = [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in model]
    identity = {"compression": Identity(), "server_compression": Identity()}
    with CompSkipDSGD(model, optimizers, worker_skip=2 if how == "seldom" else None, **identity) as algo:
        for t in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (model[0](torch.ones(1, 5)) - model[1](torch.ones(1, 5)) - 1).square().mean().backward()
            if how == "at once":
                algo.step()
                continue
            if how == "one by one":
                algo.before_step()
                for optimizer in optimizers:
                    algo.step(optimizer.step)
            for optimizer in optimizers[t % 2 :] if how == "seldom" else []:
                algo.before_step(optimizer)
                algo.step(optimizer.step)
            algo.after_step()
    return flat(model[0].parameters()), flat(model[1].parameters())


def all_stepped(rank, n):
    return [stepped(how) for how in ("at once", "one by one", "seldom")]


def test_optimizers_that_step_one_after_the_other_step_plainly():
    for at_once, one_by_one, _ in run_ranks(all_stepped, 2, timeout=LIMIT):
        assert all(map(torch.equal, at_once, one_by_one))


def test_a_skip_counts_the_steps_of_its_optimizer():
    for *_, seldom in run_ranks(all_stepped, 2, timeout=LIMIT):
        for x in seldom:
            assert (x - 0.1).abs().max() > 1e-3


@mock.patch.object(buckets, "BUCKET_BYTES", 256)
def frozen(rank, n):
    """What the first layer is while it is frozen, and how much is lost."""
    model = Model()
    optimizer = torch.optim.SGD(groups(model), 0.1)
    positions, total, initial = [], 0, flat(model.parameters())
    with CompSkipDSGD(model, optimizer, compression=TopK(ratio=0.1), server_compression=TopK(ratio=0.2)) as algo:
        for t in range(STEPS):
            model.first.requires_grad_(not 4 <= t < 9)
            optimizer.zero_grad()
            model(data(rank, t)).backward()
            g = flat([or_zeros(p, p.grad) for p in model.parameters()])
            total += rates_of(model, optimizer) * g
            algo.step()
            positions.append(flat([model.first]))
        (server,) = algo.servers.values()
        residuals = server.residuals(algo.subject("residuals"))
        e, ẽ = (rates_of(model, optimizer) * flat([residuals[p][i] for p in model.parameters()]) for i in (0, 1))
        return torch.stack(positions), flat(model.parameters()) - ẽ - initial, total, e


@pytest.mark.parametrize("n", SIZES)
def test_a_frozen_parameter_rests_and_loses_nothing(n):
    ranks = run_ranks(frozen, n, timeout=LIMIT)
    positions, virtual, _, _ = ranks[0]
    assert (positions[4:9] == positions[3]).all()
    assert not torch.equal(positions[2], positions[3])
    assert not torch.equal(positions[9], positions[8])
    e, total = (torch.stack([rank[which] for rank in ranks]).mean(0) for which in (3, 2))
    assert (virtual - e + total).abs().max() < TOL


def with_a_frozen_group(rank, n, algorithm=DistEFSGD):
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    with algorithm(model, optimizer) as algo:
        for t in range(6):
            if t == 2:
                optimizer.add_param_group({"params": list(model[1].parameters())})
            if t == 4:
                before = flat(model[1].requires_grad_(True).parameters())
            optimizer.zero_grad()
            (model[0](torch.ones(1, 5)) + model[1](torch.ones(1, 5)) - 1).square().mean().backward()
            algo.step()
        return torch.equal(flat(model[1].parameters()), before)


@pytest.mark.parametrize("algorithm", [SSGD, SSDSGD, ODSGD, CDSGD, DistEFSGD], ids=lambda kind: kind.name)
def test_a_group_may_join_frozen(algorithm):
    assert run_ranks(with_a_frozen_group, 2, algorithm, timeout=LIMIT) == [False, False]


def draws(rank, n):
    """From what each code's random numbers follow, in three steps."""
    seeds, encode = [], Compression.encode

    def noted(how, values, code, shard, encoder):
        seeds.append((*shard, encoder))
        encode(how, values, code, shard, encoder)

    model = nn.Linear(40, 30)
    algo = DistEFSGD(model, torch.optim.SGD(model.parameters(), 0.1), compression=TernGrad())
    with mock.patch.object(Compression, "encode", noted), algo:
        for _ in range(3):
            model(torch.ones(1, 40)).square().mean().backward()
            algo.step()
    return seeds


def test_no_code_draws_what_another_has_drawn():
    """An owner's answer is unbiased, given the pushes, only if it draws anew; also where it has pushed to its own shard."""
    both = [seed for seeds in run_ranks(draws, 2, timeout=LIMIT) for seed in seeds]
    answers = {seed for seed in both if seed[-1] == 2}  # the encoder after the last worker
    assert len(answers) == 3 * 2
    assert len(both) == 3 * 2 * 2 + len(answers)
    assert len(set(both)) == len(both)


class Owner(nn.Linear):
    """A module with a rule for skips."""

    def __init__(self):
        super().__init__(5, 5)
        self.asked = 0

    def rule(self, step, bucket, values):
        self.asked += 1
        return False


def asking_a_method(rank, n):
    model = Owner()
    with CompSkipDSGD(model, torch.optim.SGD(model.parameters(), 0.1), worker_skip=model.rule) as algo:
        for _ in range(3):
            model(torch.ones(1, 5)).square().mean().backward()
            algo.step()
        return model.asked


def test_a_method_is_asked_of_its_own_object():
    assert run_ranks(asking_a_method, 2, timeout=LIMIT) == [3, 3]


def kept_gradient(rank, n):
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with DistEFSGD(model, optimizer) as algo:
        model(torch.ones(1, 5)).square().mean().backward()
        gradient = weakref.ref(model.weight.grad)
        algo.step()
        optimizer.zero_grad()
        algo.comm.mean_([torch.zeros(1)], 1.0, algo.subject("another message")).wait()
        return gradient() is None


def test_gradients_are_not_kept_from_one_step_to_the_next():
    assert run_ranks(kept_gradient, 2, timeout=LIMIT) == [True, True]


# What is refused, or does not reach others


def with_a_rule(rank, rules):
    model = nn.Linear(5, 5)
    with CompSkipDSGD(model, torch.optim.SGD(model.parameters(), 0.1), worker_skip=rules[rank]) as algo:
        for _ in range(6):
            model(torch.ones(1, 5)).square().mean().backward()
            algo.step()


def with_other_rules(rank, n, rules):
    with pytest.raises(MessageMismatch, match="every rank needs the same model, the same options"):
        with_a_rule(rank, rules)


@pytest.mark.parametrize("rules", [(2, 3), (2, 0.5), (WhileSmall(1.5), 2), (Randomly(0.4), Randomly(0.4, seed=1))], ids=str)
def test_ranks_that_know_other_senders_are_told(rules):
    run_ranks(with_other_rules, 2, rules, timeout=LIMIT)


class Own(torch.optim.SGD):
    """A subclass that changes nothing about the step."""


def test_a_subclass_is_sgd_whether_or_not_sgd_has_been_made_before():
    program = (
        "import torch; from lightning_cocod.algorithms import DistEFSGD; model = torch.nn.Linear(2, 2);"
        "Own = type('Own', (torch.optim.SGD,), {}); DistEFSGD(model, Own(model.parameters(), 0.1))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"needs torch\.optim\.SGD, not Other"):
        DistEFSGD(model, type("Other", (Own,), {"step": lambda self: None})(model.parameters(), 0.1))


def change(rank, what):
    model = Model()
    model.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([*groups(model), {"params": [model.unused]}], 0.1)
    with DistEFSGD(model, optimizer) as algo:
        model(data(rank, 0)).backward()
        if what == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif what == "given":
            algo.after_backward()
            model.unused.grad = torch.ones(3, dtype=torch.float64)
        elif what == "rate":
            optimizer.param_groups[0]["lr"] = 0.2
        else:
            model(data(rank, 1)).backward()
        algo.step()


def changed(rank, n):
    said = []
    for what in ("clip", "given", "rate", "second"):
        with pytest.raises(RuntimeError) as error:
            change(rank, what)
        said.append(str(error.value))
        torch.distributed.barrier()
    return said


def test_what_has_been_sent_cannot_be_changed():
    for clip, given, rate, second in run_ranks(changed, 2, timeout=LIMIT):
        assert "a gradient was changed after it had been sent" in clip
        assert "a gradient was changed after it had been sent" in given
        assert "the learning rate was changed between backward and the step" in rate
        assert "a second backward in one step" in second


def clipped(rank, n):
    model = Model(torch.float32)
    optimizer = torch.optim.SGD(groups(model), 0.1)
    norms = []
    with CompSkipDSGD(model, optimizer, compression=Identity(), server_compression=Identity(), overlap=False) as algo:
        for t in range(3):
            optimizer.zero_grad()
            model(data(rank, t, torch.float32)).backward()
            algo.before_step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            mine = flat([p.grad for p in model.parameters()])
            algo.step(optimizer.step)
            algo.after_step()
            norms.append((mine, flat([p.grad for p in model.parameters()])))
    return norms


def test_each_worker_clips_its_own_gradient():
    ranks = run_ranks(clipped, 2, timeout=LIMIT)
    for (one, U), (two, other) in zip(*ranks, strict=True):
        assert torch.equal(U, other)
        assert (U - (one + two) / 2).abs().max() < 1e-8
        assert max(one.norm(), two.norm()) < 0.0101


def poisoned_run(rank, model, seen):
    optimizer = torch.optim.SGD(groups(model), 0.1)
    with DistEFSGD(model, optimizer) as algo:
        for t in range(4):
            optimizer.zero_grad()
            seen.append(flat(model.parameters()))
            loss = model(data(rank, t))
            (loss * float("nan") if (rank, t) == (1, 2) else loss).backward()
            algo.step()


def poisoned(rank, n):
    model, seen = Model(), []
    with pytest.raises(NonFiniteMessage, match="NaN or infinity in the message of rank 1"):
        poisoned_run(rank, model, seen)
    return len(seen), torch.equal(seen[-1], flat(model.parameters())), bool(seen[-1].isfinite().all())


def test_a_gradient_that_is_not_finite_moves_nobody():
    for found in run_ranks(poisoned, 2, timeout=LIMIT):
        assert found == (3, True, True)


@pytest.mark.parametrize("none", [0, 0.0, None])
def test_a_sweep_over_skips_may_begin_with_none(none):
    model = nn.Linear(2, 2)
    algorithm = CompSkipDSGD(model, torch.optim.SGD(model.parameters(), 0.1), worker_skip=none, server_skip=1)
    assert isinstance(algorithm.worker_skip, Never)
    assert isinstance(algorithm.server_skip, EveryNth)


def test_options_are_refused_in_one_line():
    model = nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
    for algorithm, optimizer, options, words in [
        (DistEFSGD, adam, {}, "needs torch.optim.SGD, not Adam"),
        (DistEFSGD, [sgd, torch.optim.SGD(model.parameters(), 0.1)], {}, "without a parameter in common"),
        (DistEFSGD, sgd, {"on_nonfinite": "skip"}, "cannot go on without a rank"),
        (DistEFSGD, sgd, {"compression": "terse"}, "compression must be a codec"),
        (DistEFSGD, sgd, {"compression": TernGrad(unbiased=True)}, "would grow without bound"),
        (FlexCompressSGD, sgd, {"server_compression": QSGD(levels=1, unbiased=True)}, "would grow without bound"),
        (CompSkipDSGD, sgd, {"worker_skip": -2}, "worker_skip must be a whole number of at least 1"),
        (CompSkipDSGD, sgd, {"server_skip": 1.5}, "server_skip must be greater than 0 and at most 1"),
        (CompSkipDSGD, sgd, {"server_skip": 1.0}, "server_skip=1.0 is a probability, and nothing would be sent"),
        (CompSkipDSGD, sgd, {"server_skip": "often"}, r"server_skip must be a period \(an int\), a prob"),
        (CompSkipDSGD, sgd, {"overlap": 1}, "overlap must be True or False"),
    ]:
        with pytest.raises(ValueError, match=words):
            algorithm(model, optimizer, **options)
    with pytest.raises(ValueError, match="the fraction of a norm must be"):
        WhileSmall(0.0)


def test_workers_draw_their_own_skips_and_all_know_them():
    assert isinstance(as_skip("worker_skip", 0.0), Never)
    rule = Randomly(0.5, seed=1)
    drawn = np.array([[rule(step, who, 0, None) for step in range(400)] for who in range(3)])
    assert (abs(drawn.mean(1) - 0.5) < 0.1).all()
    assert all((a != b).mean() > 0.3 for a, b in itertools.combinations(drawn, 2))
    assert np.array_equal(drawn[1], [Randomly(0.5, seed=1)(step, 1, 0, None) for step in range(400)])
