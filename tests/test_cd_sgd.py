"""CD-SGD against its equations: codes with a residual in most steps, gradients as they are in every c-th."""

import functools

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from test_cocod import HEAVY, LIMIT, LR, STEPS, TOL, X0, distance, gradients, normalised, paths_of, positions, problems
from test_cocod import unequal as unequal_weights
from test_ssd_sgd import BRANCH, TWO_GROUPS, clipped, clipping, in_two_groups, servers

from lightning_cocod.algorithms import CDSGD, ODSGD
from lightning_cocod.compression import TernGrad, Threshold

SIZES = [2, 4]
θ = 0.5
ALL_STEPS = tuple(range(STEPS))


def threshold(p):
    return θ * (p >= θ) - θ * (p <= -θ)


def cd_sgd(n, c, *, w=None, warm_up=0, momentum=0.0, weight_decay=0.0, lr=LR, clip=None, branch=False, fault=None):
    """x_i(t) and W(t). With a `branch` only worker t mod 2 has a gradient of the last elements.

    `fault` "whole with e" adds the residual to what travels as it is, "no e" has none, and "local only" does not clip the
    mean; where a gradient is missing "all" have one, "those who have one" are those whose mean it is, "nothing" is sent of
    the residual, "forgotten" is the residual, and "rests" moves nothing.
    """
    w = normalised(np.ones(n) if w is None else w)
    H, b = problems(n)
    W, v, x, e, P = X0, 0 * X0, np.tile(X0, (n, 1)), np.zeros((n, len(X0))), None
    path, server = [], []
    for t in range(STEPS + 1):
        path.append(x)
        server.append(W)
        g, lacks = gradients(x, H, b), np.zeros((n, len(X0)), bool)
        lacks[:, BRANCH:] = branch and (np.arange(n) != t % 2)[:, None]
        g = g if fault == "all" else np.where(lacks, 0, g)
        if t < warm_up or (t + 1) % c == 0:
            sent = g + e if fault == "whole with e" else g
            e = 0 * e if fault == "whole with e" else e
        else:
            p = g + e
            sent = np.where(lacks & (fault == "nothing"), 0, threshold(p))
            e = np.where(lacks & (fault == "forgotten"), 0, 0 * p if fault == "no e" else p - sent)
        mean = w @ sent / (w @ ~lacks if fault == "those who have one" else 1)
        mean = mean if fault == "local only" else clipped(mean, clip)
        v = momentum * v + mean + weight_decay * W
        g = clipped(g, clip)
        W = W - lr * v
        if t < warm_up:
            x = np.tile(W, (n, 1))
            continue
        base, P = (x if P is None else np.tile(P, (n, 1))), W
        x = base - lr * np.where(lacks & (fault == "rests"), 0, g + weight_decay * base)
    return np.stack(path), np.stack(server)


CONFIGURATIONS = {
    "c5": {},
    "c3 heavy": {"compress_steps": 3, "sgd": HEAVY, "unequal": True},
    "never whole": {"compress_steps": 1000},
    "warm-up": {"warmup_steps": 4, "sgd": HEAVY},
}
HOW = {
    "c5": {"c": 5},
    "c3 heavy": {"c": 3, **HEAVY},
    "never whole": {"c": 1000},
    "warm-up": {"c": 5, "warm_up": 4, **HEAVY},
}
OTHERS = {
    "undisturbed": CONFIGURATIONS["c3 heavy"],
    "waiting": {**CONFIGURATIONS["c3 heavy"], "overlap": False},
    **{f"resumed at {t}": {**CONFIGURATIONS["c3 heavy"], "resume_at": t} for t in (1, 3, 5)},
    "always whole": {"compress_steps": 1, "sgd": HEAVY},
    "every other whole": {"compress_steps": 2, "sgd": HEAVY},
}
CLIPPED = {how: {**CONFIGURATIONS["c3 heavy"], "algorithm": clipping(CDSGD, how)} for how in ("norm", "value")}


def all_paths(rank, n):
    configurations = {**CONFIGURATIONS, **CLIPPED}
    watched = {name: {"algorithm": CDSGD, "evaluate": ALL_STEPS, **options} for name, options in configurations.items()}
    others = {name: {**options, "algorithm": CDSGD} for name, options in OTHERS.items()}
    od_sgd = {"od_sgd": {"algorithm": ODSGD, "local_update": "sgd", "sgd": HEAVY}}
    return paths_of(rank, n, {**watched, **others, **od_sgd})


@functools.cache
def paths(n):
    ranks = run_ranks(all_paths, n, timeout=LIMIT)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_workers_and_server_follow_the_equations(n, name):
    w = unequal_weights(n) if CONFIGURATIONS[name].get("unequal") else None
    x, W = cd_sgd(n, w=w, **HOW[name])
    assert distance(positions(paths(n)[name])[:-1], x[:-1]) < TOL  # at the end all have W
    assert distance(servers(paths(n)[name]), W[:-1, None]) < TOL
    for path in paths(n)[name]:
        assert distance(path.end, W[-1]) < TOL
    for fault in ("no e", *(["whole with e"] if "never" not in name else [])):
        assert distance(servers(paths(n)[name]), cd_sgd(n, w=w, **HOW[name], fault=fault)[1][:-1, None]) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("how", CLIPPED)
def test_the_mean_of_codes_is_clipped_and_the_own_gradient_once_it_is_coded(n, how):
    equations = functools.partial(cd_sgd, n, w=unequal_weights(n), clip=how, **HOW["c3 heavy"])
    x, W = equations()
    assert distance(positions(paths(n)[how])[:-1], x[:-1]) < 1e-6  # a norm has the precision of float32
    assert distance(servers(paths(n)[how]), W[:-1, None]) < 1e-6
    assert distance(servers(paths(n)[how]), equations(fault="local only")[1][:-1, None]) > 1e-3


def with_a_branch(rank, n):
    return in_two_groups(rank, n, CDSGD, branch=True, compress_steps=5)


@pytest.mark.parametrize("n", SIZES)
def test_a_gradient_that_a_worker_lacks_counts_as_zero_and_its_residual_is_sent(n):
    found = np.stack(run_ranks(with_a_branch, n, timeout=LIMIT), axis=1)
    equations = functools.partial(cd_sgd, n, 5, momentum=0.9, branch=True, **TWO_GROUPS)
    assert distance(found, equations()[0][:-1]) < TOL
    for fault in ("all", "those who have one", "nothing", "forgotten", "rests"):
        assert distance(found, equations(fault=fault)[0][:-1]) > 1e-3, fault


@pytest.mark.parametrize("n", SIZES)
def test_with_every_step_whole_it_is_od_sgd(n):
    for cd, od in zip(paths(n)["always whole"], paths(n)["od_sgd"], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(cd.x, od.x, strict=True))
        assert np.array_equal(cd.end, od.end)
    coded = paths(n)["every other whole"]
    assert distance(positions(coded), positions(paths(n)["od_sgd"])) > 1e-3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("other", [name for name in OTHERS if "whole" not in name and name != "undisturbed"])
def test_overlap_and_a_restart_change_nothing(n, other):
    for a, b in zip(paths(n)["undisturbed"], paths(n)[other], strict=True):
        assert np.array_equal(a.x[-1], b.x[-1])
        assert np.array_equal(a.end, b.end)


def bytes_of(rank, n):
    """A step's bytes, whole and coded: the difference between runs that differ in one step."""
    moved = []
    for c in (1000, 8):  # eight steps: none whole, the last whole
        model = torch.nn.Linear(100, 40, bias=False)
        with CDSGD(model, torch.optim.SGD(model.parameters(), 0.1), compress_steps=c, warmup_steps=0) as algo:
            for _ in range(8):
                model(torch.ones(1, 100)).square().mean().backward()
                algo.step()
                model.zero_grad()
            with algo.consensus():  # the last push has arrived
                moved.append(algo.metrics()["comm/sent_bytes"])
    return moved


@pytest.mark.parametrize("n", SIZES)
def test_codes_take_two_bits_a_value(n):
    for coded, once_whole in run_ranks(bytes_of, n, timeout=LIMIT):
        shard = 4000 // n
        assert once_whole - coded == (n - 1) * (4 * shard - Threshold().nbytes(shard))
        assert Threshold().nbytes(shard) == shard // 4


def test_options_are_refused_in_one_line():
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for options, words in [
        ({"compression": TernGrad(unbiased=True)}, "would grow without bound"),
        ({"compress_steps": 0}, "compress_steps must be a whole number of at least 1"),
        ({"on_nonfinite": "skip"}, "cannot go on without a rank"),
    ]:
        with pytest.raises(ValueError, match=words):
            CDSGD(model, sgd, **options)
    adam = torch.optim.Adam(model.parameters())
    assert CDSGD(model, adam).local_update.needs_sgd is False


def in_even_batches(rank, n):
    """Of two optimizers the second steps in every other batch, and counts its own steps."""
    first, second = torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (first, second)]
    whole = []
    with CDSGD(torch.nn.Sequential(first, second), optimizers, compress_steps=2) as algo:
        for t in range(8):
            for optimizer in optimizers if t % 2 == 0 else optimizers[:1]:
                optimizer.zero_grad()
                second(first(torch.ones(2, 4))).square().mean().backward()
                algo.before_step(optimizer)
                if optimizer is optimizers[1]:
                    whole.append(algo.servers[optimizer].whole)
                algo.step(optimizer.step)
            algo.after_step()
    return whole


def test_each_optimizer_counts_its_own_steps():
    assert run_ranks(in_even_batches, 2, timeout=LIMIT) == [[False, True, False, True]] * 2
