"""Parameters in bfloat16 and float16: summed in float32, rounded once; the identities hold to their resolution."""

import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, loader, made, parameters, trainer
from test_comm_communicator import about, communicating, numbers

from lightning_cocod import CoCoD, LocalSGDStrategy
from lightning_cocod.comm.buckets import Layout

HALVES = [torch.bfloat16, torch.float16]
UNEQUAL = [0.5, 0.3, 0.15, 0.05]


def values(rank, dtype):
    """Of many magnitudes, so that the workers' exponents differ."""
    return numbers(rank, (40_000,), dtype) * torch.logspace(-3, 3, 40_000, dtype=torch.float64).to(dtype)


def exact_mean(n, dtype, weights):
    return sum(w * values(r, dtype).double() for r, w in enumerate(weights[:n]))


def half_results(rank, n, weights):
    """Mean, correction and traffic of 40,000 values in each half precision, and the same in float32 for comparison."""
    found = {}
    with communicating() as c:
        for step, dtype in enumerate([*HALVES, torch.float32]):
            mean, before = values(rank, dtype), c.ledger.totals().sent
            c.mean_([mean], weights[rank], about(step=step)).wait()
            sent = c.ledger.totals().sent - before
            mine = values(rank, dtype)
            snapshot = c.layout([mine]).buffer()
            snapshot.copy_([mine])
            c.correction_(snapshot, about("correction", step=step, weights=weights)).wait()
            correction = torch.empty_like(mine)
            snapshot.copy_to([correction])
            found[str(dtype)] = {"mean": mean, "correction": correction, "sent": sent}
        moved = [f.numel() * f.element_size() for pool in c._scratch for f in pool.values()]
        found["scratch"] = max(moved)
    return found


@functools.cache
def results(n, weights):
    return run_ranks(half_results, n, weights)


def distance_to_tie(x, dtype):
    """How far x is from the middle between the two numbers of this dtype around it."""
    near = x.to(dtype)
    up, down = (torch.nextafter(near, torch.full_like(near, side)) for side in (torch.inf, -torch.inf))
    return ((near.double() + torch.where(near.double() < x, up, down).double()) / 2 - x).abs()


@pytest.mark.parametrize(("n", "weights"), [(2, [1 / 2] * 2), (3, [1 / 3] * 3), (4, [1 / 4] * 4), (4, UNEQUAL)])
def test_a_mean_of_halves_is_the_exact_mean_rounded_once(n, weights):
    ranks = results(n, tuple(weights))
    for dtype in HALVES:
        exact = exact_mean(n, dtype, weights)
        once = exact.to(dtype)
        largest = torch.stack([values(r, dtype).double().abs() for r in range(n)]).amax(0)
        rounded_products = any(w not in (1 / 2, 1 / 4) for w in weights)
        # Where the weighted terms themselves are rounded, float32 cannot tell on which side of a tie the mean lies.
        undecided = (distance_to_tie(exact, dtype) <= 2**-22 * largest) & rounded_products
        assert undecided.float().mean() < 0.1
        for rank in ranks:
            mean = rank[str(dtype)]["mean"]
            assert torch.equal(mean, ranks[0][str(dtype)]["mean"])
            assert torch.equal(mean[~undecided], once[~undecided])
        naive = sum(w * values(r, dtype) for r, w in enumerate(weights))  # the negative control: summed in its own dtype
        assert n == 2 or (naive != once)[~undecided].float().mean() > 0.01


@pytest.mark.parametrize(("n", "weights"), [(2, [1 / 2] * 2), (3, [1 / 3] * 3), (4, UNEQUAL)])
def test_a_correction_of_halves_loses_nothing_of_the_mean(n, weights):
    """c_i = A - S_i, rounded once: Σ w_i (x_i + c_i) = Σ w_i x_i to the resolution of the corrections, not of the mean."""
    ranks = results(n, tuple(weights))
    for dtype in HALVES:
        mean, resolution = exact_mean(n, dtype, weights), torch.finfo(dtype).eps / 2
        tiny = torch.finfo(dtype).smallest_normal * resolution
        for r, rank in enumerate(ranks):
            exact = mean - values(r, dtype).double()
            error = (rank[str(dtype)]["correction"].double() - exact).abs()
            assert bool((error <= resolution * exact.abs() * (1 + 2**-10) + tiny + 2**-22 * mean.abs()).all())
        # the negative control: the mean rounded before its difference is taken
        rounded = mean.to(dtype).double() - values(0, dtype).double()
        exact = mean - values(0, dtype).double()
        assert bool(((rounded - exact).abs() > 2 * resolution * exact.abs() + tiny + 2**-22 * mean.abs()).any())


def test_what_travels_is_counted_as_float32_and_buckets_stay_small():
    for rank in results(2, (1 / 2, 1 / 2)):
        sent = {dtype: rank[str(dtype)]["sent"] for dtype in [*HALVES, torch.float32]}
        assert len(set(sent.values())) == 1
        assert sent[torch.float32] > 40_000 * 4
        assert rank["scratch"] <= 64 << 10
    one, other = (Layout([torch.empty(10**6, dtype=dtype)]) for dtype in (torch.bfloat16, torch.float32))
    assert (one.nbytes, one.summed_nbytes, other.nbytes) == (2 * 10**6, 4 * 10**6, 4 * 10**6)


def merged(rank, n, dtype):
    """Rounds of three steps with gradients of the worker's own; x of every worker before and after each merge."""
    x = torch.nn.Parameter(numbers(0, (5_000,), dtype))
    model = torch.nn.Module()
    model.x = x
    optimizer, path = torch.optim.SGD([x], lr=0.05), []
    generator = torch.Generator().manual_seed(rank)
    with CoCoD(model, optimizer, period=3) as cocod:
        for _ in range(12):
            x.grad = torch.randn(5_000, generator=generator).to(dtype)
            before = x.detach() - (0.05 * x.grad.float()).to(dtype)  # to know x as it is between the step and the merge
            optimizer.step()
            path.append((before, x.detach().clone()))
        with cocod.consensus():
            seen = x.detach().clone()
    return {"path": path, "seen": seen, "end": x.detach()}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n", [2, 3])
def test_a_merge_of_halves_leaves_the_mean_where_it_was_to_their_resolution(n, dtype):
    """The second exact test of the specification. Roundings are unbiased, so in the mean over 5,000 values they vanish."""
    ranks = run_ranks(merged, n, dtype)
    eps = torch.finfo(dtype).eps
    moved = 0.0
    for step in (5, 8, 11):  # merges that have something to fold
        before, after = (torch.stack([rank["path"][step][i].double() for rank in ranks]) for i in (0, 1))
        drift = (after - before).mean(0)
        assert bool((drift.abs() <= 2 * eps * before.abs().amax(0).clamp_min(0.1)).all())
        assert drift.mean().abs() < 0.05 * eps
        moved = max(moved, float((after - before).abs().max()))
        assert (after.max(0).values - after.min(0).values).mean() < (before.max(0).values - before.min(0).values).mean()
    assert moved > 20 * eps
    for rank in ranks:
        assert torch.equal(rank["seen"], ranks[0]["seen"])
        assert torch.equal(rank["end"], ranks[0]["end"])


class Path(Callback):
    def __init__(self):
        self.path, self.seen = [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.path.append(parameters(module))

    def on_validation_batch_end(self, trainer, module, *_):
        self.seen.append(parameters(module))


def true_half(rank, world, strategy, precision):
    L.seed_everything(5, verbose=False)
    model, kept = Toy(dropout=0.0), Path()
    t = trainer(strategy, world, callbacks=[kept], precision=precision, max_epochs=2, num_sanity_val_steps=0)
    t.fit(model, loader(), loader(shuffle=False))
    return {"path": torch.stack(kept.path), "seen": torch.stack(kept.seen), "end": parameters(model), "state": state(model)}


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("strategy", made(period=3), ids=STRATEGIES)
def test_a_fit_in_half_precision_evaluates_and_ends_on_the_rounded_mean(strategy, precision):
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}[precision]
    first, second = run_ranks(true_half, 2, strategy, precision, init=False)
    assert first["end"].dtype == dtype
    assert not torch.equal(first["path"], second["path"])
    assert torch.equal(first["seen"], second["seen"])
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name])
    mean = (first["path"][5].double() + second["path"][5].double()) / 2
    torch.testing.assert_close(first["seen"][0].double(), mean, rtol=4 * torch.finfo(dtype).eps, atol=2e-3)
    if isinstance(strategy, LocalSGDStrategy):  # nothing is in flight: no roundings but the mean's own
        assert torch.equal(first["seen"][0], mean.to(dtype))
        assert torch.equal(first["path"][2], second["path"][2])
