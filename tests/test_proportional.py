"""Batches in proportion to the ranks' speeds. The speeds are given here, not measured: no verdict depends on a clock."""

import functools
import itertools
import logging
import math
import re
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from support.ranks import run_ranks, run_ranks_raw
from support.resuming import Saver
from support.toys import ASYNCHRONOUS, has, trainer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_cocod import CoCoDStrategy, CommunicationMonitor, strategies
from lightning_cocod.strategies import proportional
from lightning_cocod.strategies.shared_batches import Place, SharedBatches
from lightning_cocod.strategies.shares import GAIN, Plan, improved, shares, totals
from lightning_cocod.strategies.speed import KEPT, NEEDED, SKIPPED, Speedometer

SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)

BY_NAME = {strategy.registered_name: strategy for strategy in strategies.STRATEGIES}


# Shares


@given(SPEEDS, st.data())
def test_shares_add_up_to_the_total_and_leave_nobody_out(speeds, data):
    total = data.draw(st.integers(len(speeds), 300))
    sizes = shares(speeds, total)
    assert sum(sizes) == total
    assert min(sizes) >= 1
    assert sizes == shares([4 * s for s in speeds], total)


@given(st.lists(st.floats(0.05, 20), min_size=2, max_size=3), st.data())
def test_no_other_shares_let_the_slowest_worker_end_sooner(speeds, data):
    total = data.draw(st.integers(len(speeds), 14))
    others = [m for m in itertools.product(range(1, total), repeat=len(speeds)) if sum(m) == total]
    assert seconds(shares(speeds, total), speeds) <= min(seconds(m, speeds) for m in others or [[total]])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([0.5, 1.0, 8.0]))
def test_shares_are_proportional_where_whole_numbers_can_be(sizes, scale):
    assert shares([scale * m for m in sizes], sum(sizes)) == sizes


def test_rounding_each_share_does_not_do():
    speeds, total = [1, 1, 5], 10
    assert sum(round(total * s / sum(speeds)) for s in speeds) != total
    assert sum(shares(speeds, total)) == total


@pytest.mark.parametrize(("speeds", "total"), [([1, 1], 1), ([1, 0], 8), ([1, math.nan], 8)])
def test_what_cannot_be_shared_is_refused(speeds, total):
    with pytest.raises(ValueError, match="cannot be shared by workers of speeds"):
        shares(speeds, total)


@given(SPEEDS, st.data())
def test_shares_change_only_where_enough_is_gained(speeds, data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(speeds), max_size=len(speeds)))
    better, best = improved(sizes, speeds), shares(speeds, sum(sizes))
    gain = 1 - seconds(best, speeds) / seconds(sizes, speeds)
    assert better == (best if gain > GAIN else None) or gain == pytest.approx(GAIN)
    assert improved(best, speeds) is None


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 10)), min_size=2, max_size=4))
def test_measuring_again_finds_the_shares_where_a_batch_has_a_fixed_cost(costs):
    """A batch of m takes a + b m seconds: a speed holds for the size at which it was measured."""
    sizes = [64] * len(costs)

    def took(sizes):
        return [a + b * m for (a, b), m in zip(costs, sizes, strict=True)]

    begun = max(took(sizes))
    for _ in range(40):
        changed = improved(sizes, [m / s for m, s in zip(sizes, took(sizes), strict=True)])
        if changed is None:
            break
        assert max(took(changed)) <= max(took(sizes))  # every change is one for the better
        sizes = changed
    assert changed is None
    assert max(took(sizes)) <= begun
    if min(sizes) > 1:  # nobody waits for long: not more than the threshold and one sample
        fastest = min(took(sizes))
        one = max(b for _, b in costs)
        assert fastest >= (1 - GAIN) * max(took(sizes)) - len(costs) * one - max(took(sizes)) * 0.2


def seconds(sizes, speeds):
    return max(m / s for m, s in zip(sizes, speeds, strict=True))


@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 6), st.booleans())
def test_an_epoch_is_cut_into_as_many_batches_as_equal_ranks_would_have(samples, each, workers, drop_last):
    batch = each * workers
    if 0 < samples < workers and not drop_last:
        with pytest.raises(ValueError, match=f"{samples} samples are too few for {workers} ranks"):
            totals(samples, batch, workers, drop_last=drop_last)
        return
    cut = totals(samples, batch, workers, drop_last=drop_last)
    rest = samples % batch
    assert sum(cut) == (samples - rest if drop_last else samples)
    assert all(total >= workers for total in cut)
    assert max(cut, default=0) <= batch + workers
    if drop_last or each > 1:
        assert len(cut) == (samples // batch if drop_last else -(-samples // batch))


def test_the_remainder_is_shared_by_the_last_two_batches():
    assert totals(50, 16, 2, drop_last=False) == [16, 16, 9, 9]
    assert totals(50, 16, 2, drop_last=True) == [16, 16, 16]
    assert totals(13, 16, 2, drop_last=False) == [13]
    assert totals(7, 3, 3, drop_last=False) == [3, 4]  # two of two could not be


# The sampler


@st.composite
def epochs(draw):
    """Samples, size of a batch, ranks, drop_last, batches accumulated, number of the first batch, changes of the plan."""
    ranks = draw(st.integers(1, 4))
    each, samples = draw(st.integers(1, 6)), draw(st.integers(ranks, 90))
    origin, accumulated = draw(st.integers(0, 30)), draw(st.integers(1, 4))
    speeds = st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks)
    steps = sorted(draw(st.sets(st.integers(1, 50), max_size=4)))
    changes = [(0, [each] * ranks), *((first, shares(draw(speeds), each * ranks)) for first in steps)]
    return samples, each * ranks, ranks, draw(st.booleans()), accumulated, origin, changes


def samplers(samples, batch, ranks, drop_last, accumulated, origin, changes, *, epoch=0):
    def of(rank):
        order = DistributedSampler(range(samples), num_replicas=1, rank=0, seed=7)
        order.set_epoch(epoch)
        begin = functools.partial(Place, origin, accumulated)
        return SharedBatches(order, batch, drop_last=drop_last, plan=Plan(changes), rank=rank, begin=begin)

    return [of(rank) for rank in range(ranks)]


@given(epochs())
def test_an_epoch_sees_each_sample_once_under_any_plan(case):
    samples, batch, _, drop_last, accumulated, origin, changes = case
    made = samplers(*case)
    drawn = [list(s) for s in made]
    assert {len(batches) for batches in drawn} == {len(made[0])}
    together = [list(itertools.chain(*parts)) for parts in zip(*drawn, strict=True)]
    order = list(made[0].sampler)
    assert list(itertools.chain(*together)) == order[: sum(map(len, together))]
    assert sum(map(len, together)) == (samples // batch * batch if drop_last else samples)
    assert all(parts for batches in drawn for parts in batches)
    for number, parts in enumerate(zip(*drawn, strict=True)):
        assert list(map(len, parts)) == made[0].sizes(number)
        first = Plan(changes).sizes(origin + number - number % accumulated)
        if len(together[number]) == batch:
            assert made[0].sizes(number) == first


def test_epochs_have_orders_of_their_own_and_ranks_have_one():
    case = (40, 8, 2, False, 1, 0, [(0, [4, 4])])
    orders = [[list(s.sampler) for s in samplers(*case, epoch=epoch)] for epoch in (0, 1)]
    assert orders[0][0] == orders[0][1] != orders[1][0]


def test_ranks_with_different_plans_would_share_samples():
    """The negative control of the partition."""
    case = (40, 8, 2, False, 1, 0)
    (first, _), (_, second) = (samplers(*case, [(0, [4, 4]), (at, [6, 2])]) for at in (2, 3))
    seen = list(itertools.chain(*first, *second))
    assert len(seen) != len(set(seen))


# The speedometer


class Clock:
    """A lane whose time goes on when it is told to."""

    now = 0.0

    def mark(self):
        return self.now

    def seconds(self, start, end):
        return end - start


class LateClock(Clock):
    """A device that is two marks behind."""

    def __init__(self):
        self.marks = []

    def mark(self):
        self.marks.append(self.now)
        return self.now

    def seconds(self, start, end):
        return end - start if end in self.marks[:-2] else None


def timed(clock, *, waits=0.0, apart=0.0, interrupted=(), sizes=None, batches=30):
    """The speed of a rank that needs 0.25 s for each sample."""
    waited = [0.0]
    meter = Speedometer(clock, lambda: waited[0])
    speeds = []
    for number in range(batches):
        size, planned = (8, 8) if sizes is None else sizes(number)
        meter.begin(size, planned)
        speeds.append(meter.speed)
        clock.now += size / 4
        clock.now += waits
        waited[0] += waits
        if apart:
            with meter.apart(), meter.apart():
                clock.now += apart
        if number in interrupted:
            clock.now += 1000
            meter.interrupt()
    return speeds


@pytest.mark.parametrize("clock", [Clock, LateClock])
@pytest.mark.parametrize("idle", [{}, {"waits": 3.0}, {"apart": 2.0}, {"waits": 1.0, "apart": 1.0, "interrupted": (7, 12)}])
def test_a_speed_is_of_a_ranks_own_work(clock, idle):
    speeds = timed(clock(), **idle)
    assert speeds[-1] == pytest.approx(4.0, rel=0.15 if clock is LateClock and "waits" in idle else 1e-9)
    assert speeds[: SKIPPED + NEEDED] == [0.0] * (SKIPPED + NEEDED)


def test_time_that_is_not_left_out_would_count():
    clock = Clock()
    meter = Speedometer(clock, lambda: 0.0)
    for _ in range(20):
        meter.begin(8, 8)
        clock.now += 8 / 4 + 3.0
    assert meter.speed == pytest.approx(8 / 5)


def test_sizes_that_change_are_measured_anew_and_the_end_of_an_epoch_is_left_out():
    speeds = timed(Clock(), sizes=lambda number: (12, 12) if number >= 15 else (8, 8))
    assert speeds[14] == 4.0
    assert speeds[15 : 15 + SKIPPED + NEEDED] == [0.0] * (SKIPPED + NEEDED)
    assert speeds[-1] == 4.0
    assert all(timed(Clock(), sizes=lambda number: (3 if number % 10 == 9 else 8, 8))[SKIPPED + NEEDED + 1 :])


def test_an_old_speed_is_forgotten():
    clock = Clock()
    meter = Speedometer(clock, lambda: 0.0)
    for number in range(2 * KEPT + 10):
        meter.begin(8, 8)
        clock.now += 2.0 if number < KEPT else 6.0
    assert meter.speed == pytest.approx(8 / 6)


# What is refused


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(32))


class OwnBatches(BatchSampler):
    pass


DATA = list(range(32))
WHOLE = DistributedSampler(DATA, num_replicas=1, rank=0)


class Stateful(DataLoader):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("loader", "needs"),
    [
        (DATA, "a DataLoader of torch, not list"),
        (Stateful(DATA, batch_size=4, sampler=WHOLE), "a DataLoader of torch, not Stateful"),
        (DataLoader(Stream(), batch_size=4), "a data set with a length"),
        (DataLoader(DATA, batch_size=None), "a data set with a length and a loader with a batch_size"),
        (DataLoader(DATA, batch_sampler=OwnBatches(RandomSampler(DATA), 4, False)), "it cuts the batches itself"),
        (DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * 32, 32)), "without a sampler of its own"),
        (DataLoader(DATA, batch_size=4, shuffle=True), "use_distributed_sampler=True"),
        (DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, num_replicas=2, rank=0)), "of its own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loaders_whose_batches_cannot_be_cut_are_refused_in_one_line(loader, needs):
    with pytest.raises(MisconfigurationException, match=needs) as caught:
        proportional._refuse(loader)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("use batch_sizes='equal'")


def test_a_loader_that_can_be_cut_is_not_refused():
    proportional._refuse(DataLoader(DATA, batch_size=4, sampler=WHOLE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": "fair"}, "batch_sizes must be 'equal' or 'proportional', got 'fair'"),
        ({"batch_sizes": "proportional", "weights": [3, 1]}, "leave weights out"),
    ],
)
def test_options_that_contradict_each_other_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        CoCoDStrategy(**options)


# Runs of several ranks, whose speeds are given


class Numbers(Dataset):
    """Sample i is (i, a value that belongs to i)."""

    def __init__(self, samples):
        self.values = values(samples)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return index, self.values[index]


def values(samples):
    return np.random.default_rng(3).normal(size=samples)


LR, X0 = 0.1, 2.0


class Recorder(L.LightningModule):
    """½ (x - c)² over the batch's c, in float64, and everything that a rank sees."""

    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor(X0, dtype=torch.float64))
        self.seen = []

    def training_step(self, batch, batch_idx):
        indices, c = batch
        self.seen.append((self.current_epoch, batch_idx, indices.tolist(), self.x.item()))
        self.log("mean", c.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("total", c.sum(), on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
        self.after_log()
        return 0.5 * (self.x - c).square().mean()

    def after_log(self):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LR)


class Reads(L.Callback):
    """What has been logged, and the weights of every message."""

    def __init__(self):
        self.steps, self.epochs, self.sizes, self.launched = [], [], [], []

    def on_train_start(self, trainer, module):
        subject = trainer.strategy.algorithm.subject

        def told(kind, **options):
            made = subject(kind, **options)
            self.launched.append((kind, made.step, made.weights))
            return made

        trainer.strategy.algorithm.subject = told

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append((trainer.callback_metrics["mean_step"].item(), trainer.callback_metrics["total"].item()))
        self.sizes.append(trainer.strategy.metrics().get("algo/batch_size"))

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(trainer.callback_metrics["mean_epoch"].item())


@contextmanager
def told(rank, speeds):
    """A rank's speed is what it is given at each number of batches."""
    with mock.patch.object(
        proportional.Proportional,
        "before_verb",
        lambda self: setattr(self._comm, "pace", proportional.Pace(self._weighed, speeds(self._weighed)[rank])),
    ):
        yield


def once(*speeds):
    """Measured after the third batch."""
    return functools.partial(_changing, {3: speeds})


def changing(when):
    return functools.partial(_changing, when)


def _changing(when, batches):
    known = [speeds for first, speeds in when.items() if first <= batches]
    return known[-1] if known else [0.0] * len(next(iter(when.values())))


def run(rank, world, speeds, *, samples=101, strategy="cocod", period=2, callbacks=(), path=None, loader=None, **options):
    L.seed_everything(10 + rank, verbose=False)  # ranks that are seeded apart still share one order
    loader, rounds = loader or {}, {"period": period} if has(BY_NAME[strategy], "period") else {}
    made = {**rounds, "batch_sizes": "proportional", **options.pop("made", {})}
    module, reads = Recorder(), Reads()
    options = {"max_epochs": 2, **options}
    t = trainer(BY_NAME[strategy](**made), world, callbacks=[reads, *callbacks], **options)
    with told(rank, speeds):
        t.fit(module, DataLoader(Numbers(samples), **{"batch_size": 4, "shuffle": True, **loader}), ckpt_path=path)
    return SimpleNamespace(seen=module.seen, end=module.x.item(), **vars(reads))


CHANGES = changing({3: (3.0, 1.0), 14: (1.0, 1.0), 20: (1.0, 3.0)})
FOUR = changing({3: (4.0, 1.0, 2.0, 1.0), 8: (1.0, 5.0, 1.0, 1.0)})
CASES = {
    2: {
        "changing": {"speeds": CHANGES},
        "once": {"speeds": once(3.0, 1.0)},
        "accumulated": {"speeds": CHANGES, "accumulate_grad_batches": 3, "period": 1},
        "warm-up": {"speeds": once(3.0, 1.0), "made": {"warmup_steps": 9}},
        "workers": {"speeds": CHANGES, "loader": {"num_workers": 1, "prefetch_factor": 3}, "samples": 150},
        "limited": {"speeds": CHANGES, "limit_train_batches": 7, "max_epochs": 4},
        "drop_last": {"speeds": CHANGES, "loader": {"drop_last": True}},
        "blocking launch": {"speeds": CHANGES, "made": {"overlap": False}},
        "equal": {"speeds": once(3.0, 1.0), "made": {"batch_sizes": "equal"}},
    },
    4: {
        "changing": {"speeds": FOUR, "samples": 203},
        "gradients in nodes": {"speeds": FOUR, "samples": 203, "made": {"intra_node": 1, "ranks_per_node": 2}},
        "means in nodes": {"speeds": FOUR, "samples": 203, "period": 4, "made": {"intra_node": 2, "ranks_per_node": 2}},
    },
}


def runs(rank, world):
    return {name: run(rank, world, **case) for name, case in CASES[world].items()}


@functools.cache
def ran(world):
    """Every case, in one start of the ranks: name to what each rank saw."""
    ranks = run_ranks(runs, world, init=False, timeout=100)
    return {name: [rank[name] for rank in ranks] for name in CASES[world]}


def sizes(ranks):
    """[batch, rank]"""
    return np.array([[len(indices) for *_, indices, _ in rank.seen] for rank in ranks]).T


UNEQUAL = [(world, name) for world, cases in CASES.items() for name in cases if name != "equal"]


@pytest.mark.parametrize(("world", "name"), UNEQUAL)
def test_an_epoch_of_all_ranks_sees_each_sample_once_in_batches_of_the_same_total(world, name):
    ranks, case = ran(world)[name], CASES[world][name]
    samples = case.get("samples", 101)
    numbers = [{(epoch, batch) for epoch, batch, *_ in rank.seen} for rank in ranks]
    assert all(n == numbers[0] for n in numbers)
    for epoch in range(case.get("max_epochs", 2)):
        seen = [i for rank in ranks for e, _, indices, _ in rank.seen for i in indices if e == epoch]
        limit = case.get("limit_train_batches", math.inf)
        whole = samples // (4 * world) * 4 * world if "drop_last" in case.get("loader", {}) else samples
        assert len(seen) == len(set(seen)) == min(whole, limit * 4 * world)
    total = sizes(ranks).sum(1)
    assert (total[:9] == 4 * world).all() or "limit_train_batches" in case
    assert set(total) <= {4 * world, *totals(samples, 4 * world, world, drop_last=False)}


def test_sizes_follow_the_speeds_at_the_first_batch_that_cannot_have_been_drawn():
    """Speeds are known after batch 3, told at the end of a round of two (4), heard a round later (6): from batch 7 on."""
    once = sizes(ran(2)["once"])
    assert (once[:7] == [4, 4]).all()
    assert (once[7:11] == [6, 2]).all()
    changes = sizes(ran(2)["changing"])
    assert (changes[7:11] == [6, 2]).all()
    assert (changes[13:17] == [6, 2]).all()
    assert (changes[17:23] == [4, 4]).all()  # told at 14, heard at 16
    assert (changes[23:24] == [2, 6]).all()  # told at 20, heard at 22
    # four ranks of 16 samples
    assert sizes(ran(4)["changing"])[7].tolist() == [8, 2, 4, 2]
    assert (sizes(ran(2)["workers"])[:10] == [4, 4]).all()  # three more may have been drawn
    assert (sizes(ran(2)["workers"])[10] == [6, 2]).all()


@pytest.mark.parametrize(("world", "name"), UNEQUAL)
def test_the_metric_is_the_size_of_a_ranks_batch(world, name):
    for rank, column in zip(ran(world)[name], sizes(ran(world)[name]).T, strict=True):
        full = sizes(ran(world)[name]).sum(1) == 4 * world
        assert (np.array(rank.sizes)[full] == column[full]).all()


def test_sizes_stay_the_same_within_an_optimizer_step():
    ranks = ran(2)["accumulated"]
    full = sizes(ranks).sum(1) == 8
    numbers = np.array([batch for _, batch, *_ in ranks[0].seen])
    assert (numbers[full] // 3 != numbers[full].max() // 3).any()
    for epoch in (0, 1):
        epochs = np.array([e for e, *_ in ranks[0].seen]) == epoch
        for step in range(4):
            assert len(np.unique(sizes(ranks)[full & epochs & (numbers // 3 == step)], axis=0)) == 1
    assert len(np.unique(sizes(ranks)[full], axis=0)) > 1


def paper(ranks, *, period, world, accumulated=1, warmup=0, every=None, weigh=None):
    """x_i before every batch: CoCoD with the weights of what was computed in each round (or of `weigh`).

    With `every`, nodes of two workers average among themselves every so many steps.
    """
    batches = list(zip(*(rank.seen for rank in ranks), strict=True))
    steps, group = [], []
    for position, parts in enumerate(batches):
        group.append(parts)
        epoch, number = parts[0][:2]
        last = position + 1 == len(batches) or batches[position + 1][0][0] != epoch
        if (number + 1) % accumulated == 0 or last:
            steps.append(group)
            group = []
    c = values(max(i for rank in ranks for *_, indices, _ in rank.seen for i in indices) + 1)
    x, path = np.full(world, X0), []
    S, A = x, X0
    computed, begun = np.zeros(world), False
    ends = warmup
    for t, group in enumerate(steps):
        sized = np.array([[len(part[2]) for part in parts] for parts in group])
        if t == ends:
            if begun:
                x = x + (A - S)
            w = np.ones(world) if weigh else computed
            w = w / w.sum() if begun else np.ones(world) / world
            S, A, computed, begun, ends = x, w @ x, np.zeros(world), True, t + period
        path += [x] * len(group)
        if t >= warmup:
            computed = computed + sized.sum(0)
        g = sum(x - np.array([c[part[2]].mean() for part in parts]) for parts in group) / accumulated
        if t < warmup:
            w = np.ones(world) if weigh else sized.sum(0)
            g = np.full(world, w / w.sum() @ g)
        if every == 1:
            g = in_nodes(g, np.ones(world) if weigh else sized.sum(0))
        x = x - LR * g
        if every and every > 1 and (t + 1 - (ends - period)) % every == 0:
            x = in_nodes(x, np.ones(world) if weigh else computed)
    return np.array(path)


def in_nodes(values, weights):
    """The weighted means of the first two, the next two, …, each twice."""
    means = (values * weights).reshape(-1, 2).sum(1) / weights.reshape(-1, 2).sum(1)
    return means.repeat(2)


@pytest.mark.parametrize(("world", "name"), UNEQUAL)
def test_the_path_is_cocods_with_the_weights_of_what_each_round_computed(world, name):
    ranks, case = ran(world)[name], CASES[world][name]
    options = {
        "period": case.get("period", 2),
        "world": world,
        "accumulated": case.get("accumulate_grad_batches", 1),
        "warmup": case.get("made", {}).get("warmup_steps", 0),
        "every": case.get("made", {}).get("intra_node"),
    }
    seen = np.array([[x for *_, x in rank.seen] for rank in ranks]).T
    np.testing.assert_allclose(seen, paper(ranks, **options), rtol=0, atol=1e-12)
    assert np.abs(seen - paper(ranks, **options, weigh="equally")).max() > 1e-4  # the negative control


def test_messages_are_weighed_by_the_sizes_of_the_round_that_they_report():
    ranks = ran(2)["changing"]
    cut = sizes(ranks)
    rounds = {step: weights for kind, step, weights in ranks[0].launched if kind == "round"}
    assert len(rounds) >= 10
    for step, weights in rounds.items():
        if step:
            computed = cut[step - 2 : step].sum(0)
            np.testing.assert_allclose(weights, computed / computed.sum())
    assert ranks[0].launched == ranks[1].launched


# Metrics


@pytest.mark.parametrize(("world", "name"), [*UNEQUAL, (2, "equal")])
def test_means_over_the_ranks_are_those_over_all_samples(world, name):
    """On-step means are weighted by the batch sizes, sums are not, and epoch means are those over the epoch's samples."""
    ranks, case = ran(world)[name], CASES[world][name]
    c = values(case.get("samples", 101))
    parts = list(zip(*(rank.seen for rank in ranks), strict=True))
    for rank in ranks:
        for (mean, total), batch in zip(rank.steps, parts, strict=True):
            all_of_it = np.concatenate([c[part[2]] for part in batch])
            assert mean == pytest.approx(all_of_it.mean(), abs=1e-12)
            assert total == pytest.approx(all_of_it.sum(), abs=1e-12)
        for epoch, mean in enumerate(rank.epochs):
            of_epoch = np.concatenate([c[part[2]] for batch in parts for part in batch if part[0] == epoch])
            assert mean == pytest.approx(of_epoch.mean(), abs=1e-6)  # sizes are added up in float32


def test_plain_means_would_be_others():
    """The negative control: of unequal batches the mean of the means is not the mean."""
    ranks = ran(2)["once"]
    c = values(101)
    plain = [np.mean([c[part[2]].mean() for part in batch]) for batch in zip(*(r.seen for r in ranks), strict=True)]
    logged = [mean for mean, _ in ranks[0].steps]
    assert np.abs(np.array(plain[:7]) - logged[:7]).max() < 1e-12  # equal so far
    assert np.abs(np.array(plain) - logged).max() > 1e-2


def monitored(rank, world, folder):
    monitor = CommunicationMonitor(every_n_steps=5)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(proportional.__name__).addHandler(handler)
    run(rank, world, once(3.0, 1.0), callbacks=[monitor], logger=CSVLogger(folder, name="", version=""))
    logging.getLogger(proportional.__name__).removeHandler(handler)
    return monitor.summary, lines


def test_samples_are_counted_and_a_change_is_told_once(tmp_path):
    (summary, lines), (_, lines_elsewhere) = run_ranks(monitored, 2, str(tmp_path), init=False)
    samples = summary["throughput/samples_per_sec"] * summary["throughput/step_ms"] / 1e3 * 26
    assert samples == pytest.approx(2 * 101)
    assert summary["algo/batch_size"] == 6
    assert lines == ["batch sizes of the ranks from batch 7 on: 6, 2"]
    assert lines_elsewhere == []
    assert "algo/batch_size" in (tmp_path / "metrics.csv").read_text()


# Resuming


RESUMED = (2, 5, 9, 12, 13, 16, 22)
"""Batches after which a run of two epochs of 13 batches is resumed; steps are of two batches, rounds of two steps."""
WITHIN = (2, 10, 21)
"""Batches within which a run is interrupted: a resumed one does them again, and must not weigh them again."""
IN_FLIGHT = [5, 16]
"""Where a message was in flight by whose speeds something is decided: it is decided a round later, on all ranks alike."""


def resumed(rank, world, folder):
    options = {"speeds": CHANGES, "accumulate_grad_batches": 2, "period": 2}
    saver = Saver(folder)
    expected = run(rank, world, **options, callbacks=[saver])
    again = {n: run(rank, world, **options, path=saver.saved[n]) for n in RESUMED}
    interrupted = Saver(f"{folder}/within", hook="on_train_batch_start", times={number + 1 for number in WITHIN})
    run(rank, world, **options, callbacks=[interrupted])
    within = [run(rank, world, **options, path=path) for path in interrupted.saved]
    return expected, again, within


def test_a_resumed_run_continues_with_the_plan_and_sees_each_sample_once(tmp_path):
    (tmp_path / "within").mkdir()
    ranks = run_ranks(resumed, 2, str(tmp_path), init=False, timeout=150)
    expected = [rank[0] for rank in ranks]
    assert len({tuple(row) for row in sizes(expected).tolist()}) > 4
    inexact = []
    for number in RESUMED:
        again = [rank[1][number] for rank in ranks]
        every_sample_once(expected, again, begun=number + 1)
        inexact += [number] * any(a.end != e.end for a, e in zip(again, expected, strict=True))
    assert inexact == IN_FLIGHT
    for place, number in enumerate(WITHIN):
        again = [rank[2][place] for rank in ranks]
        every_sample_once(expected, again, begun=number)
        assert all(a.end == e.end for a, e in zip(again, expected, strict=True))


def every_sample_once(expected, again, *, begun):
    """What was trained on before a checkpoint after `begun` batches, and what after it, are the epochs."""
    for epoch in (0, 1):
        before = [i for rank in expected for e, _, indices, _ in rank.seen[:begun] for i in indices if e == epoch]
        after = [i for rank in again for e, _, indices, _ in rank.seen for i in indices if e == epoch]
        assert sorted(before + after) == list(range(101))
    assert (sizes(again)[0] == sizes(expected)[begun]).all()


# The other strategies, and what goes wrong


ALIKE = ("d_psgd", "sgp")
"""Those that weigh all workers alike."""
OTHERS = [s.registered_name for s in strategies.STRATEGIES if s.registered_name not in ("cocod", *ALIKE, *ASYNCHRONOUS)]


def others(rank, world):
    made = {"post_local_sgd": {"warmup_steps": 3}}
    return {name: run(rank, world, once(3.0, 1.0), strategy=name, made=made.get(name, {})) for name in OTHERS}


def test_every_strategy_has_proportional_batches():
    ranks = run_ranks(others, 2, init=False, timeout=100)
    for name in OTHERS:
        of_name = [rank[name] for rank in ranks]
        every_sample_once(of_name, of_name, begun=0)
        assert (sizes(of_name)[9] == [6, 2]).all(), name
        weights = {weights for kind, step, weights in of_name[0].launched if kind != "finish" and step > 12}
        assert (0.75, 0.25) in weights, name


@pytest.mark.parametrize("name", ALIKE)
def test_those_that_weigh_all_workers_alike_say_so(name):
    with pytest.raises(ValueError, match=f"{name} weighs all workers alike: leave batch_sizes='proportional' out"):
        BY_NAME[name](batch_sizes="proportional")


class Hasty(L.Callback):
    """A loader that has drawn further ahead than it says."""

    def on_train_start(self, trainer, module):
        trainer.strategy._sizes._ahead = -1


class Two(Recorder):
    def training_step(self, batch, batch_idx):
        return self.x.square()


class Draws(Recorder):
    def training_step(self, dataloader_iter):
        return super().training_step(*next(dataloader_iter)[:2])


def wrong(rank, world, what):
    def fit(module=None, loader=None, callbacks=()):
        t = trainer(CoCoDStrategy(period=2, batch_sizes="proportional"), world, callbacks=list(callbacks))
        t.fit(module or Recorder(), loader or DataLoader(Numbers(64), batch_size=4))

    if what == "ahead":
        with told(rank, once(3.0, 1.0)):
            fit(callbacks=[Hasty()])
    elif what == "apart":
        apart = mock.patch.object(proportional, "improved", return_value=[7, 1] if rank else [6, 2])
        with told(rank, once(3.0, 1.0)), apart:
            fit()
    elif what == "out of step":
        speeds = once(3.0, 1.0)
        with mock.patch.object(
            proportional.Proportional,
            "before_verb",
            lambda self: setattr(self._comm, "pace", proportional.Pace(self._weighed + rank, speeds(5)[rank])),
        ):
            fit()
    elif what == "two loaders":
        fit(Two(), {"a": DataLoader(Numbers(64), batch_size=4), "b": DataLoader(Numbers(64), batch_size=4)})
    elif what == "own batches":
        fit(Draws())
    elif what == "too few":
        fit(loader=DataLoader(Numbers(1), batch_size=4))
    elif what == "own sampler":
        fit(loader=DataLoader(Numbers(64), batch_size=4, sampler=WeightedRandomSampler([1.0] * 64, 64)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("ahead", "has drawn batch . already, further ahead than its num_workers and prefetch_factor say"),
        ("apart", "workers are out of step"),
        ("out of step", "needs optimizer steps after the same batches on all ranks"),
        ("two loaders", "needs one DataLoader for training"),
        ("own batches", "needs one DataLoader for training, whose batches training_step is given"),
        ("too few", "1 samples are too few for 2 ranks: each needs one in every batch"),
        ("own sampler", "without a sampler of its own"),
    ],
)
def test_what_cannot_be_ends_all_ranks_with_one_line(what, message):
    outcomes = run_ranks_raw(wrong, 2, what, init=False, leftovers_ok=True)
    assert all(outcome.status == "error" for outcome in outcomes)
    assert any(re.search(message, outcome.traceback) for outcome in outcomes)


def alone(rank, world):
    return run(rank, world, once(1.0), samples=50)


def test_one_rank_has_all_of_it():
    (only,) = run_ranks(alone, 1, init=False)
    assert [len(indices) for *_, indices, _ in only.seen] == 2 * ([4] * 12 + [2])
