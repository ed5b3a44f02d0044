"""AD-PSGD: the identities of the paper, whatever the schedule; what it refuses; what it does when somebody is gone."""

import itertools
import logging
import math
import os
import random
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn

from lightning_cocod.algorithms.ad_psgd import ADPSGD
from lightning_cocod.comm import NonFiniteMessage, PeerLost
from lightning_cocod.comm import gossip as gossip_module
from lightning_cocod.comm.gossip import Gossip
from lightning_cocod.comm.pairwise import Coded, Plain
from lightning_cocod.comm.topology import Topology
from lightning_cocod.compression import RandomK

LIMIT = 60.0
PATIENCE = 30.0
RATE = 0.05


class Net(nn.Module):
    """Parameters of two shapes, different on every rank if asked for, and a loss that differs from rank to rank."""

    def __init__(self, rank, apart=False, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + rank if apart else 100)
        self.a, self.b = (
            nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))
            for shape in ((7, 5), (11,))
        )
        self.rank = rank

    def loss(self, t):
        target = torch.sin(torch.arange(35, dtype=torch.float64) * (self.rank + 1) + t).view(7, 5)
        return (self.a - target).square().sum() + (self.b.cos() * (self.rank + 1 + t)).sum()


def vector(tensors):
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def eventually(condition, limit=PATIENCE):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)


def master(a):
    """z, at a cut that is consistent over all workers."""
    return vector(a.x) + vector(a.state_dict()["c"])


def grads(model):
    return vector([p.grad for p in model.parameters()])


def run(rank, n, steps=15, rate=RATE, sleeps=0.01, in_step=False, **options):
    """Steps of plain SGD from weights of this rank's own: masters before and after, and the sum of the applied gradients.

    There are as many as it takes until every rank has had an exchange. ``in_step``, all make them at the same time, and each
    asks once a step.
    """
    model = Net(rank, apart=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    a = ADPSGD(model, optimizer, **options)
    before, total, draw = vector(a.x), torch.zeros(46, dtype=torch.float64), random.Random(rank)
    a.start(broadcast=False)
    try:
        for t in itertools.count(1):
            optimizer.zero_grad()
            model.loss(t).backward()
            total += grads(model)
            time.sleep(draw.uniform(0, sleeps))
            a.step()
            if in_step and n > 1:
                eventually(lambda: rank % 2 == 1 or a.gossip.exchanges >= t)
                dist.barrier()
            if t >= steps and (in_step or n == 1 or all_have(a.gossip.exchanges > 0, rank, n)):
                break
        dist.barrier()
        after = master(a)
        exchanges = a.gossip.exchanges
        a.finish()
        end = vector(a.x)
    finally:
        a.close()
    return before, after, total, end, exchanges


def all_have(it, rank, n):
    """Whether all ranks have it; once one has said so it stays so."""
    store = dist.distributed_c10d._get_default_store()
    if it:
        store.set(f"rank {rank} has it", "")
    return store.check([f"rank {other} has it" for other in range(n)])


def spread(vectors):
    mean = sum(vectors) / len(vectors)
    return float(sum((v - mean).square().sum() for v in vectors).sqrt())


RANKS = [1, 2, 3, 4, pytest.param(8, id="8 short")]
OPTIONS = [{}, {"topology": "exponential"}, {"topology": "random", "every": 2}]


# The identities


@pytest.mark.parametrize("n", RANKS)
def test_without_steps_the_mean_is_conserved_and_the_workers_come_together(n):
    results = run_ranks(run, n, 8 if n == 8 else 20, 0.0, 0.002, True, timeout=LIMIT)
    before, after = [r[0] for r in results], [r[1] for r in results]
    assert torch.allclose(sum(before), sum(after), rtol=0, atol=1e-12)
    if n > 1:
        assert spread(after) < spread(before) * (0.7 if n == 8 else 0.1)
        assert all(r[4] > 0 for r in results)
    assert all(torch.equal(r[3], results[0][3]) for r in results)  # and end on the consensus
    assert torch.allclose(results[0][3], sum(before) / n, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", RANKS)
def test_whatever_the_schedule_the_sum_moves_by_the_applied_gradients(n):
    for options in OPTIONS[: 1 if n == 8 else 3]:
        results = run_ranks(with_options, n, {"steps": 6 if n == 8 else 15, **options}, timeout=LIMIT)
        assert off(results) < 1e-11
        assert n == 1 or all(r[4] > 0 for r in results)


def with_options(rank, n, options):
    return run(rank, n, **options)


def off(results):
    """By how much the sum of the masters differs from what the applied gradients make of it."""
    before, after, applied = (sum(r[k] for r in results) for k in range(3))
    return float((after - before + RATE * applied).abs().max())


class FromUndecoded(Coded):
    """The mistake: differences from the snapshot, not from what the other one takes it for."""

    def encode(self, s):
        self.kept = [b.clone() for b in s.buckets]
        return super().encode(s)

    def difference_(self, s):
        theirs = [b.clone() for b in self._base.buckets]
        super().difference_(s)
        for j, (mine, kept, base) in enumerate(zip(s.buckets, self.kept, theirs, strict=True)):
            q = self._coding.decode(self._coding.received[j], self._coding.received_scales[j], torch.empty_like(base))
            mine.copy_((base + q - kept) / 2)


class OneSided(Plain):
    """The mistake: the two sides do not move by the same."""

    def difference_(self, s):
        super().difference_(s)
        if threading.current_thread().name.endswith("gossip of rank 0"):
            s.buckets[0].mul_(0.9)


def mistaken(rank, n, name, mistake, options):
    kept = getattr(gossip_module, name)
    setattr(gossip_module, name, mistake)
    try:
        return run(rank, n, **options)
    finally:
        setattr(gossip_module, name, kept)


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk", "qsgd", "sign", RandomK(0.1, unbiased=True)], ids=str)
def test_compressed_as_well(codec):
    results = run_ranks(with_options, 4, {"compression": codec}, timeout=LIMIT)
    assert off(results) < 1e-11
    assert all(r[4] > 0 for r in results)


@pytest.mark.parametrize(
    ("name", "mistake", "options"),
    [("Coded", FromUndecoded, {"compression": "bf16"}), ("Plain", OneSided, {})],
    ids=["undecoded snapshots", "unequal moves"],
)
def test_the_sum_shows_mistakes(name, mistake, options):  # the negative controls
    assert off(run_ranks(mistaken, 2, name, mistake, options, timeout=LIMIT)) > 1e-6


def any_optimizer(rank, n, kind, options):
    """Masters before and after, and the sum of what the optimizer has moved x by itself; whether its state is its own."""
    model = Net(rank, apart=True)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=RATE, **options)
    a = ADPSGD(model, optimizer)
    before, total = vector(a.x), torch.zeros(46, dtype=torch.float64)

    def update():
        was = vector(a.x)
        optimizer.step()
        total.add_(vector(a.x) - was)

    a.start(broadcast=False)
    try:
        for t in range(15):
            optimizer.zero_grad()
            model.loss(t).backward()
            a.before_step()
            a.step(update)
            a.after_step()
        if rank == 0:  # which asks
            eventually(lambda: a.gossip.exchanges > 0)
        dist.barrier()
        after, exchanges = master(a), a.gossip.exchanges
        state = vector([value for of_one in optimizer.state.values() for value in of_one.values() if value.dim()])
        a.finish()
    finally:
        a.close()
    return before, after, total, exchanges, state


@pytest.mark.parametrize(("kind", "options"), [("SGD", {"momentum": 0.9}), ("AdamW", {})])
def test_with_any_optimizer_the_sum_moves_by_its_own_updates_and_its_state_stays_local(kind, options):
    results = run_ranks(any_optimizer, 3, kind, options, timeout=LIMIT)
    before, after, moved, exchanges, states = zip(*results, strict=True)
    assert torch.allclose(sum(after), sum(before) + sum(moved), rtol=0, atol=1e-12)
    assert exchanges[0] > 0
    assert not torch.allclose(states[0], states[1])


def one_exchange(rank, n, exchange):
    """Weights are small whole numbers, so that their mean is exact."""
    model = Net(rank)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).view(p.shape) * (rank + 1))
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), lr=0.0))
    a.start(broadcast=False)
    if exchange:
        model.loss(0).backward()
        if rank == 0:
            a.step()
        eventually(lambda: a.gossip.exchanges == 1)
        ages = a.gossip.fold()
    else:
        ages = []
    got = vector(a.x)
    a.finish()
    a.close()
    return got, ages


def test_one_exchange_of_two_workers_is_exact_consensus():
    (first, ages), (second, ages_1) = run_ranks(one_exchange, 2, True, timeout=LIMIT)
    expected = torch.cat([torch.arange(35), torch.arange(11)]).double() * 1.5
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert (ages, ages_1) == ([0], [0])
    (first, _), (second, _) = run_ranks(one_exchange, 2, False, timeout=LIMIT)  # the negative control
    assert not torch.equal(first, second)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=0.01)


def by_itself(rank, n, every):
    """What a worker has after ten steps, and what the optimizer alone makes of the same."""
    ends = []
    for alone in (False, True):
        model = Net(rank, dtype=torch.float32)
        optimizer = momentum(model)
        a = ADPSGD(model, optimizer, every=every)
        if not alone:
            a.start()
        for t in range(10):
            optimizer.zero_grad()
            model.loss(t).backward()
            if alone:
                optimizer.step()
            else:
                a.step()
                if every == 1 and n > 1:
                    eventually(lambda: a.gossip.exchanges > t)
        ends.append(torch.cat([p.detach().clone().reshape(-1) for p in a.x]))
        if not alone:
            dist.barrier()
            a.finish()
        a.close()
    return torch.equal(*ends)


def test_one_worker_is_the_optimizer_bit_for_bit():
    assert run_ranks(by_itself, 1, 1, timeout=LIMIT) == [True]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_without_exchanges_every_worker_is(n):
    assert run_ranks(by_itself, n, 1000, timeout=LIMIT) == [True] * n
    if n == 2:
        assert run_ranks(by_itself, n, 1, timeout=LIMIT) == [False] * n  # the negative control


def in_lock_step(rank, n, steps):
    """Every worker has one exchange while it computes a gradient, then all make a step."""
    model = Net(rank, apart=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    a = ADPSGD(model, optimizer)
    a.start(broadcast=False)
    trajectory = [vector(a.x)]
    for t in range(steps):
        optimizer.zero_grad()
        model.loss(t).backward()
        dist.barrier()
        a.step()
        trajectory.append(vector(a.x))
        dist.barrier()  # not before all have made it are snapshots taken
        a.gossip.allow()
        eventually(lambda: a.gossip.exchanges == t + 1)
    a.finish()
    a.close()
    return trajectory


def d_psgd(n, steps, matchings, mixing_first=False):
    """X ← X W_t − γ g(X), or γ g(X W_t)."""
    models = [Net(rank, apart=True) for rank in range(n)]
    trajectories = [[vector(m.parameters())] for m in models]
    for t in range(steps):
        gradients, X = [], [vector(m.parameters()) for m in models]
        partner = matchings[(t - 1) % len(matchings)] if t else list(range(n))
        mixed = [(X[i] + X[partner[i]]) / 2 for i in range(n)]
        for i, model in enumerate(models):
            if mixing_first:
                fill(model, mixed[i])
            model.zero_grad()
            model.loss(t).backward()
            gradients.append(grads(model))
            fill(model, mixed[i] - RATE * gradients[-1])
            trajectories[i].append(vector(model.parameters()))
    return trajectories


@torch.no_grad()
def fill(model, values):
    model.a.copy_(values[:35].view(7, 5))
    model.b.copy_(values[35:])


@pytest.mark.parametrize(("n", "matchings"), [(2, [[1, 0]]), (4, [[1, 0, 3, 2], [3, 2, 1, 0]])])
def test_in_lock_step_a_perfect_matching_is_d_psgd(n, matchings):
    got = run_ranks(held_back, n, 6, timeout=LIMIT)
    expected, other = d_psgd(n, 6, matchings), d_psgd(n, 6, matchings, mixing_first=True)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.allclose(torch.stack(mine), torch.stack(theirs), rtol=0, atol=1e-12)
    assert not torch.allclose(got[0][-1], other[0][-1], rtol=0, atol=1e-6)  # the negative control


def held_back(rank, n, steps):
    """``in_lock_step`` with active workers that ask when they are let."""
    allowed = threading.Semaphore(0)
    kept = Gossip._exchange, Topology.partner

    def partner(self, *args):
        allowed.acquire()
        return kept[1](self, *args)

    Gossip.allow = lambda self: allowed.release()
    Topology.partner = partner
    try:
        return in_lock_step(rank, n, steps)
    finally:
        allowed.release()
        Topology.partner = kept[1]
        del Gossip.allow


# Meetings


def meetings(rank, n, codec):
    model = Net(rank, apart=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    looks = []
    with ADPSGD(model, optimizer, compression=codec, topology="random") as a:
        for meeting in range(3):
            for t in range(3 + 4 * rank):  # as many steps as it likes
                optimizer.zero_grad()
                model.loss(t).backward()
                a.step()
            if n > 1 and rank % 2 == 0:
                eventually(lambda: a.gossip.exchanges > 0)
            before = vector(a.x)
            with a.consensus():
                cut = a.state_dict()
                inside, own = vector(a.x), before + vector(cut["c"])
                time.sleep(0.02 * rank)
                quiet = torch.equal(vector(a.state_dict()["c"]), vector(cut["c"]))
            looks.append((own, inside, quiet, torch.equal(before, vector(a.x)), cut["meetings"] == meeting + 1))
        exchanges = a.gossip.exchanges
    return looks, exchanges, a.t, vector(a.x)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_consensus_is_the_mean_of_the_masters_and_leaves_no_trace(n):
    for codec in (None, "int8"):
        results = run_ranks(meetings, n, codec, timeout=LIMIT)
        for k in range(3):
            own, inside, *same = zip(*(looks[k] for looks, *_ in results), strict=True)
            assert all(map(all, same[: 2 if n == 1 else 3]))
            assert all(torch.equal(i, inside[0]) for i in inside)
            assert torch.allclose(inside[0], sum(own) / n, rtol=0, atol=1e-12)
        assert [t for *_, t, _ in results] == [9 + 12 * rank for rank in range(n)]
        assert all(torch.equal(end, results[0][3]) for *_, end in results)
        assert n == 1 or any(exchanges > 0 for _, exchanges, *_ in results)


def resumed(rank, n):
    model = Net(rank, apart=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    a = ADPSGD(model, optimizer)
    a.start()
    for t in range(6):
        model.loss(t).backward()
        a.step()
    state, x = a.state_dict(), [p.detach().clone() for p in a.x]
    z = vector(x) + vector(state["c"])
    a.finish()
    a.close()
    other = Net(rank)
    b = ADPSGD(other, torch.optim.SGD(other.parameters(), lr=0.0))
    b.start(broadcast=False)
    fill(other, vector(x))
    b.load_state_dict(state)
    again = b.state_dict()
    z_again = vector(b.x) + vector(again["c"])
    b.finish()
    b.close()
    return z, z_again, vector(b.x), b.t == 6 and again["meetings"] == state["meetings"] + 1


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_run_continues_from_a_cut(n):
    results = run_ranks(resumed, n, timeout=LIMIT)
    assert all(torch.equal(z, again) and counts for z, again, _, counts in results) or n == 1
    mean = sum(z for z, *_ in results) / n
    assert all(torch.allclose(end, mean, rtol=0, atol=1e-12) for *_, end, _ in results)


def joining(rank, n):
    """A parameter is frozen at first. It is averaged once it has been free and there was a consensus."""
    model = Net(rank)
    model.b.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with ADPSGD(model, optimizer) as a:
        sizes = [len(a.gossip.x)]
        for free in (False, True):
            model.b.requires_grad_(free)
            for t in range(4):
                optimizer.zero_grad()
                model.loss(t).backward()
                a.step()
            sizes.append(len(a.gossip.x))
            with a.consensus():
                mean = vector(model.parameters())
            sizes.append(len(a.gossip.x))
        before = a.gossip.exchanges
        dist.barrier()  # nobody asks before all have looked
        model.loss(0).backward()
        a.step()
        if n > 1:
            eventually(lambda: a.gossip.exchanges > before)
    return sizes, mean


@pytest.mark.parametrize("n", [1, 2, 3])
def test_parameters_that_are_freed_are_averaged_from_the_next_consensus_on(n):
    results = run_ranks(joining, n, timeout=LIMIT)
    assert all(sizes == [1, 1, 1, 1, 2] for sizes, _ in results)
    assert all(torch.equal(mean, results[0][1]) for _, mean in results)


# Staleness


def slow_link(rank, n, most):
    model = Net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with ADPSGD(model, optimizer, max_staleness=most) as a:
        encode = Plain.encode
        begun, passing = threading.Event(), threading.Event()

        def held(self, s):
            begun.set()
            passing.wait(PATIENCE)
            return encode(self, s)

        Plain.encode = held
        try:
            for t in range(24):
                model.loss(t).backward()
                if most is None and t == 20:
                    passing.set()
                if most is not None:
                    threading.Timer(0.05, passing.set).start()
                a.step()
                if most is None and t == 0:
                    eventually(begun.is_set)  # its snapshot has been taken
                if t == 20:
                    eventually(lambda: a.gossip.exchanges > 0)
        finally:
            passing.set()
            Plain.encode = encode
        dist.barrier()
        metrics = a.metrics()
    return metrics


def test_with_a_bound_no_merge_is_older_and_without_one_some_are():
    for metrics in run_ranks(slow_link, 2, 3, timeout=LIMIT):
        assert 0 <= metrics["algo/staleness_max"] <= 3
        assert metrics["algo/staleness_le_4"] == 1
    free = run_ranks(slow_link, 2, None, timeout=LIMIT)  # the negative control
    assert max(m["algo/staleness_max"] for m in free) > 3
    for m in free:
        assert 0 <= m["algo/gradient_staleness"] <= m["algo/gradient_staleness_max"]
        assert 0 <= m["algo/gradient_staleness_le_0"] <= m["algo/gradient_staleness_le_32"] == 1
        assert 0 < m["algo/staleness_steps"] <= m["algo/staleness_max"]
        shares = [m[f"algo/staleness_le_{bound}"] for bound in (0, 1, 2, 4, 8, 16, 32)]
        assert shares == sorted(shares)
        assert m["algo/exchanges"] > 0
        assert m["comm/sent_bytes"] > m["algo/exchanges"] * 46 * 8


def counted(rank, n):
    """Bytes of exchanges that are counted one by one."""
    model = Net(rank)
    with ADPSGD(model, torch.optim.SGD(model.parameters(), lr=RATE)) as a:
        start = a.metrics()["comm/sent_bytes"]
        dist.barrier()  # nobody asks before all have looked
        for t in range(5):
            model.loss(t).backward()
            a.step()
            if rank == 0:
                eventually(lambda: a.gossip.exchanges == t + 1)
        eventually(lambda: a.gossip.exchanges == 5)
        return a.metrics()["comm/sent_bytes"] - start


def test_bytes_are_those_of_the_weights_and_two_headers():
    assert run_ranks(counted, 2, timeout=LIMIT) == [5 * (46 * 8 + 2 * 24)] * 2


# Faults


def sleepy(rank, n, options):
    """Workers that sleep wherever they can, meet now and then, and never hang: the limit of the call is hard."""
    draw = random.Random(rank * 31 + n)
    exchange = Gossip._exchange

    def slowly(self, link, silence):
        time.sleep(draw.choice([0, 0, 0.02]))
        exchange(self, link, silence)
        time.sleep(draw.choice([0, 0, 0.02]))

    Gossip._exchange = slowly
    try:
        model = Net(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with ADPSGD(model, optimizer, **options) as a:
            for _ in range(3):
                for t in range(draw.randrange(12)):
                    model.loss(t).backward()
                    time.sleep(draw.choice([0, 0.001, 0.01]))
                    a.step()
                time.sleep(draw.choice([0, 0.1]))
                with a.consensus():
                    time.sleep(draw.choice([0, 0.1]))
        return vector(a.x)
    finally:
        Gossip._exchange = exchange


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_random_sleeps_never_deadlock(n):
    for options in ({}, {"topology": "random", "max_staleness": 1}, {"compression": "topk", "timeout": 20.0}):
        ends = run_ranks(sleepy, n, options, timeout=LIMIT)
        assert all(torch.equal(end, ends[0]) for end in ends)


def killed(rank, n, how, victim=1):
    """One rank is killed or stopped after some steps; the others make all of theirs. What they log, and how they end."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("lightning_cocod.comm.gossip")
    logger.addHandler(handler)
    model = Net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    error = None
    try:
        with ADPSGD(model, optimizer, timeout=4.0 if how == signal.SIGSTOP else 20.0) as a:
            for t in range(60):
                model.loss(t).backward()
                if rank == victim and t == 5:
                    os.kill(os.getpid(), how)
                a.step()
                time.sleep(0.1 if how == signal.SIGSTOP else 0.02)
            eventually(lambda: victim not in a.gossip.neighbours)
            if n == 4:  # the rest goes on among itself
                count = a.gossip.exchanges
                for t in range(3):
                    model.loss(t).backward()
                    a.step()
                store = dist.distributed_c10d._get_default_store()
                if rank in (0, 2):
                    eventually(lambda: a.gossip.exchanges > count)
                    store.set(f"rank {rank} has gone on", "")
                store.wait(["rank 0 has gone on", "rank 2 has gone on"])
    except PeerLost as lost:
        error = str(lost)
    finally:
        logger.removeHandler(handler)
    return a.t, messages, error, vector(a.x).isfinite().all().item()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_peer_that_is_killed_is_named_once_and_the_rest_go_on(n):
    results = run_ranks(killed, n, signal.SIGKILL, timeout=LIMIT, expect={1: "died"})
    for rank, result in enumerate(results):
        if rank == 1:
            continue
        t, messages, error, sound = result
        assert t == (63 if n == 4 else 60)
        assert sound
        assert len(messages) == (1 if rank in (0, 2) else 0)  # rank 3 is no neighbour of it
        assert all("rank 1 is lost: its connection closed" in text for text in messages)
        assert all(("trains on alone" in text) == (n < 4) for text in messages)
        assert error is None


def test_a_peer_that_is_stopped_is_too():
    results = run_ranks(killed, 3, signal.SIGSTOP, timeout=LIMIT, expect={1: "died"})
    for rank in (0, 2):
        t, messages, error, *_ = results[rank]
        assert t == 60
        assert len(messages) == 1
        assert "rank 1 is lost" in messages[0]
        assert error is None


def test_without_the_rank_that_hosts_the_store_the_others_train_until_they_meet():
    results = run_ranks(killed, 3, signal.SIGKILL, 0, timeout=LIMIT, expect={0: "died"})
    for rank in (1, 2):
        t, messages, error, sound = results[rank]
        assert (t, sound) == (60, True)
        assert len(messages) == (rank == 1)
        assert all("rank 0 is lost" in text and "1 left to average with" in text for text in messages)
        assert "rank 0" in error


def poisoned(rank, n):
    """Rank 1's weights become NaN. How it ends, and whether the others' ever do."""
    model = Net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    error = None
    try:
        with ADPSGD(model, optimizer) as a:
            for t in range(40):
                optimizer.zero_grad()
                model.loss(t).backward()
                if rank == 1 and t == 5:
                    model.a.grad[0, 0] = math.nan
                a.step()
                time.sleep(0.01)
    except (NonFiniteMessage, PeerLost) as failure:
        error = type(failure).__name__, str(failure)
    return error, a.t, vector(a.x).isfinite().all().item()


def test_what_is_not_finite_stays_where_it_is():
    results = run_ranks(poisoned, 3, timeout=LIMIT)
    name, text = results[1][0]
    assert name == "NonFiniteMessage"
    assert re.match(r"rank 1 has NaN or infinity in its weights, .* at local step \d", text)
    assert 5 < results[1][1] < 40
    assert not results[1][2]
    for rank in (0, 2):
        error, t, sound = results[rank]
        assert (error, t, sound) == (None, 40, True)


def idle(rank, n):
    """The processor time of this process in a second in which nobody steps."""
    model = Net(rank)
    with ADPSGD(model, torch.optim.SGD(model.parameters(), lr=RATE), timeout=10.0) as a:
        model.loss(0).backward()
        a.step()
        dist.barrier()
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in a.gossip._threads]
        before = [time.clock_gettime(clock) for clock in clocks]
        time.sleep(1.0)
        spent = [time.clock_gettime(clock) - was for clock, was in zip(clocks, before, strict=True)]
        dist.barrier()
    return spent, busy()


def busy():
    """What the same clock says of a thread that does not rest."""
    over = threading.Event()

    def spins():
        while not over.is_set():
            pass

    thread = threading.Thread(target=spins)
    thread.start()
    clock = time.pthread_getcpuclockid(thread.ident)
    eventually(lambda: time.clock_gettime(clock) > 0.2)
    over.set()
    thread.join()
    return True


def test_idle_threads_cost_no_time_of_the_processor():
    spent, controls = zip(*run_ranks(idle, 2, timeout=LIMIT), strict=True)
    assert all(controls)
    assert [len(times) for times in spent] == [2, 1]  # asking and pinging, answering
    assert all(time < 0.05 for times in spent for time in times)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "star"}, "topology must be 'ring', 'exponential', 'random' or a list of edges"),
        ({"topology": [(0, 1)]}, "there is no rank 1 among 1"),
        ({"every": 0}, "every must be a whole number"),
        ({"max_staleness": 0}, "max_staleness must be a whole number"),
        ({"seed": -1}, "seed must be"),
        ({"compression": "powersgd"}, "is no codec"),
        ({"compression": "zip"}, "compression must be"),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite"),
        ({"intra_node": 2}, "no rounds at whose ends"),
        ({"weights": [1.0]}, "weighs all workers alike"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(options, message):
    model = Net(0)
    with pytest.raises(ValueError, match=message) as caught:
        ADPSGD(model, torch.optim.SGD(model.parameters(), lr=RATE), **options)
    assert "\n" not in str(caught.value)


def all_active(rank, n):
    model = Net(rank)
    with pytest.raises(ValueError, match="joins equals"):
        ADPSGD(model, torch.optim.SGD(model.parameters(), lr=RATE), topology=[(0, 1), (1, 2), (0, 2)])


def test_a_circle_in_which_all_could_wait_for_each_other_cannot_be_made():
    run_ranks(all_active, 3, timeout=LIMIT)


def test_the_optimizers_own_step_is_refused():
    model = Net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with ADPSGD(model, optimizer) as a:
        model.loss(0).backward()
        with pytest.raises(RuntimeError, match="must not see half a step"):
            optimizer.step()
        a.step()
    assert a.t == 1


def others(rank, n):
    """Ranks that average different things. Both sides are told."""
    model = Net(rank)
    try:
        with ADPSGD(model, torch.optim.SGD(model.parameters(), lr=RATE), compression="int8" if rank else None) as a:
            for t in range(200):
                model.loss(t).backward()
                a.step()
                time.sleep(0.01)
    except Exception as error:
        return type(error).__name__, str(error)


def test_workers_that_average_different_things_are_told():
    told = run_ranks(others, 2, timeout=LIMIT)
    assert [name for name, _ in told] == ["MessageMismatch"] * 2
    assert all("ad_psgd/options" in text and "the same options" in text for _, text in told)


def whole_job(rank, n):
    model = Net(rank)
    with ADPSGD(model, torch.optim.SGD(model.parameters(), lr=RATE)) as a:
        for t in range(3 + rank):
            model.loss(t).backward()
            a.step()
        eventually(lambda: a.global_steps == 3 + 4)
        a.claimed(12)
        return a.global_steps


def test_steps_of_the_whole_job_are_known_from_heartbeats_or_claims():
    assert run_ranks(whole_job, 2, timeout=LIMIT) == [12, 12]


def loads_late(rank, n):
    """Rank 1 loads long after rank 0 has; a step of rank 0 would have it asked meanwhile."""
    model = Net(rank, apart=True)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), lr=0.0))
    a.start(broadcast=False)
    state = a.state_dict()
    state["c"] = [torch.full_like(c, rank + 1.0) for c in state["c"]]
    before = vector(a.x) + rank + 1.0
    if rank == 1:
        deadline = time.monotonic() + 1.0
        while a.gossip.exchanges == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        a.load_state_dict(state)
    else:
        a.load_state_dict(state)
        model.loss(0).backward()
        a.step()
        eventually(lambda: a.gossip.exchanges > 0)
    after = master(a)
    a.finish()
    a.close()
    return before, after


def test_nobody_exchanges_with_a_worker_that_has_yet_to_load_its_state():
    results = run_ranks(loads_late, 2, timeout=LIMIT)
    torch.testing.assert_close(sum(after for _, after in results), sum(before for before, _ in results))


def state_at_the_end(rank, n):
    model = Net(rank, apart=True)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), lr=0.0))
    a.start(broadcast=False)
    a.gossip.set_correction([torch.ones_like(p) for p in a.x])  # as a merge does that comes after the last step
    before = vector(a.x).mean()
    a.finish()
    c = a.state_dict()["c"]
    a.close()
    return vector(c), before, vector(a.x).mean()


def test_what_finish_has_put_into_the_model_is_not_saved_beside_it():
    results = run_ranks(state_at_the_end, 2, timeout=LIMIT)
    for c, _, after in results:
        assert not c.any()
        assert after == pytest.approx(sum(before for _, before, _ in results) / 2 + 1)


def codes_overflow(rank, n):
    """Weights of rank 0 that are finite, and whose squares are not."""
    model = Net(rank, dtype=torch.float32)
    a = ADPSGD(model, torch.optim.SGD(model.parameters(), lr=0.0), compression="int8")
    a.start()
    if rank == 0:
        with torch.no_grad():
            model.a.fill_(1e20)
    model.loss(0).backward()
    a.step()
    if rank == 0:
        eventually(lambda: a.gossip._error is not None or a.gossip.exchanges > 0)
        with pytest.raises(NonFiniteMessage):
            a.gossip.check()
    else:
        eventually(lambda: not a.gossip.neighbours or a.gossip.exchanges > 0)
    c = vector(a.gossip.correction())
    a.release()
    a.comm.abort(RuntimeError("the end of the test"))
    a.close()
    return c


def test_a_code_that_overflows_reaches_nobody():
    for c in run_ranks(codes_overflow, 2, timeout=LIMIT):
        assert not c.any()
