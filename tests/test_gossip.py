"""Exchanges of two workers, apart from threads and sockets: what is conserved, what contracts, and what would go wrong."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from lightning_cocod.comm.buckets import Layout
from lightning_cocod.comm.errors import MessageMismatch
from lightning_cocod.comm.gossip import Gossip
from lightning_cocod.comm.lane import HostLane
from lightning_cocod.comm.ledger import Ledger
from lightning_cocod.comm.pairwise import Coded, Coding, Plain
from lightning_cocod.comm.topology import Topology, ring
from lightning_cocod.comm.turn import Turn
from lightning_cocod.compression import CODECS, QSGD, RandomK, TernGrad

LIMIT = 60.0


class Workers:
    """Workers whose exchanges happen one after the other, in one thread. Their values are those of a base and a spread."""

    def __init__(self, topology, codec, n=300, dtype=torch.float64, spread=1.0):
        generator = torch.Generator().manual_seed(5)
        size = topology.world_size
        base = torch.randn(n, generator=generator, dtype=torch.float64)
        draws = [base + spread * torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(size)]
        self.x = [[draw.to(dtype)] for draw in draws]
        self.topology, self.layout = topology, Layout(self.x[0])
        self.s = [self.layout.buffer() for _ in range(size)]
        self.wires = {}
        codings = [None if codec is None else Coding(codec, self.layout, seed=3) for _ in range(size)]
        plain = [Plain(s) for s in self.s]
        for a, p in topology.edges:
            for me in (a, p):
                θ = self.layout.buffer(summed=True)
                θ.copy_([base.to(dtype)])
                self.wires[a, p, me] = plain[me] if codec is None else Coded(codings[me], θ, (a, p, me))

    def exchange(self, a, p):
        for me in (a, p):
            self.s[me].copy_(self.x[me])
            self.wires[a, p, me].encode(self.s[me])
        mine, theirs = self.wires[a, p, a], self.wires[a, p, p]
        for here, there in ((mine, theirs), (theirs, mine)):
            for incoming, outgoing in zip(here.incoming, there.outgoing, strict=True):
                incoming.copy_(outgoing)
        for me in (a, p):
            self.wires[a, p, me].difference_(self.s[me])
            self.s[me].add_to(self.x[me])
        return [torch.cat([b.clone() for b in self.s[me].buckets]) for me in (a, p)]

    def round(self, k):
        for a in range(0, self.topology.world_size, 2):
            self.exchange(a, self.topology.partner(a, k, range(self.topology.world_size)))

    def sum(self):
        return sum(x[0].double() for x in self.x)

    def distance(self):
        mean = self.sum() / len(self.x)
        return float(sum((x[0].double() - mean).square().sum() for x in self.x).sqrt())


UNBIASED = [RandomK(0.05, unbiased=True), QSGD(levels=1, block=304, unbiased=True), TernGrad(unbiased=True)]
ALL = [None, *(codec() for codec in CODECS.values()), *UNBIASED]


@pytest.mark.parametrize("codec", ALL, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_codec_conserves_the_sum_and_keeps_both_sides_of_an_edge_alike(codec, n):
    workers = Workers(ring(n), codec)
    before = workers.sum()
    for k in range(10):
        for a in range(0, n, 2):
            p = workers.topology.partner(a, k, range(n))
            d, other = workers.exchange(a, p)
            assert torch.equal(d, -other)
            if codec is not None:
                θ, other = (workers.wires[a, p, me]._base.buckets[0] for me in (a, p))
                assert torch.equal(θ, other)
    assert torch.allclose(workers.sum(), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("codec", [c for c in ALL if getattr(c, "name", "") != "threshold"], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_contractive_and_unbiased_codecs_alike_bring_the_workers_together(codec, n):
    workers = Workers(ring(n), codec)
    before, largest = workers.distance(), 0.0
    for k in range(300):
        workers.round(k)
        largest = max(largest, workers.distance())
    assert largest < 1.05 * before
    assert workers.distance() < 0.4 * before


@pytest.mark.parametrize("codec", UNBIASED[:2], ids=str)
def test_without_the_projection_unbiased_codecs_drive_them_apart(codec, monkeypatch):  # the negative control
    encode = Coded.encode

    def unscaled(self, s):
        encode(self, s)
        self._coding.sent_scales.fill_(1.0)

    monkeypatch.setattr(Coded, "encode", unscaled)
    workers = Workers(ring(4), codec)
    before = workers.distance()
    for k in range(60):
        workers.round(k)
    assert not workers.distance() < 10 * before


def test_codes_of_differences_are_as_exact_as_the_workers_are_close():
    """Where they are within 1e-6 of each other, so is what int8 does to them: its error is not one of the weights' size."""
    workers = Workers(ring(2), CODECS["int4"](), spread=1e-6)
    x = workers.x[0][0].clone()
    workers.exchange(0, 1)
    assert (workers.x[0][0] - x).abs().max() < 1e-5
    coarse = torch.empty_like(x)  # the negative control: the weights themselves
    code = torch.empty(CODECS["int4"]().nbytes(300), dtype=torch.uint8)
    CODECS["int4"]().encode(x, code)
    CODECS["int4"]().decode(code, coarse)
    assert (coarse - x).abs().max() > 1e-2


def test_two_merges_from_one_snapshot_overshoot():
    """Three active workers at 1 around a passive one at 0: means of two lie in between, merges of one snapshot do not."""
    topology, reached = Topology(6, [(0, 1), (2, 1), (4, 1), (0, 3), (0, 5)]), []
    for same_snapshot in (False, True):
        workers = Workers(topology, None)
        for rank in range(6):
            workers.x[rank][0].fill_(1.0 - rank % 2)
        moves = []
        for a in (0, 2, 4):
            x = workers.x[1][0].clone()
            moves.append(workers.exchange(a, 1)[1])
            if same_snapshot:
                workers.x[1][0].copy_(x)
        reached.append(float(workers.x[1][0].max()) if not same_snapshot else float(sum(moves).max()))
    assert reached == [0.875, 1.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("codec", [None, CODECS["int8"]()], ids=str)
def test_other_dtypes_travel_as_well(dtype, codec):
    workers = Workers(
        ring(2), None if codec is None else codec, n=64, dtype=dtype if not dtype.is_complex else torch.complex64
    )
    d, other = workers.exchange(0, 1)
    assert d.dtype == dtype
    assert torch.equal(d, -other)
    assert (workers.x[0][0] - workers.x[1][0]).abs().max() < 0.05


def test_a_turn_lets_nobody_else_in():
    turn, inside, seen = Turn(HostLane()), [0], []

    def enters():
        for _ in range(200):
            with turn:
                inside[0] += 1
                seen.append(inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=enters) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {1}
    with pytest.raises(ValueError, match="mine"), turn:
        raise ValueError("mine")
    with turn:  # it has been given back
        pass


def serial(rank, n, steps, steps_to_see=5):
    """A passive rank with two active neighbours has one exchange at a time. How many were at work at once, at most."""
    x = [torch.full((100_000,), float(rank))]
    gossip = Gossip(x, ring(n), rank, Ledger(), patience=20.0)
    at_work, most, lock = [0], [0], threading.Lock()
    exchange = gossip._exchange

    def counted(link, silence):
        with lock:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        exchange(link, silence)
        with lock:
            at_work[0] -= 1

    gossip._exchange = counted
    gossip.start(20.0)
    for _ in range(steps):
        gossip.stepped()
        gossip.fold()
    deadline = time.monotonic() + 20
    while gossip.exchanges < steps_to_see and time.monotonic() < deadline:
        gossip.stepped()
        gossip.fold()
        time.sleep(0.001)
    with gossip.quiet(dist.barrier):
        gossip.leave()
        total = x[0].double() + gossip.correction()[0].double()
        dist.barrier()
    gossip.close()
    return most[0], float(total.mean()), gossip.exchanges


def test_a_worker_has_one_exchange_at_a_time():
    results = run_ranks(serial, 3, 50, timeout=LIMIT)
    assert all(most <= 1 for most, *_ in results)
    assert abs(sum(total for _, total, _ in results) - 3) < 1e-5
    assert results[1][2] == results[0][2] + results[2][2] > 0


def unlike(rank, n):
    """Two that average different things, if nobody has compared before: the one that is asked raises."""
    gossip = Gossip([torch.zeros(4 + rank)], ring(n), rank, Ledger(), patience=20.0)
    gossip.start(20.0)
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline and gossip.neighbours:  # what is raised ends them
            gossip.stepped()
            gossip.fold()
            time.sleep(0.001)
        gossip.check()
        return None
    except MessageMismatch as error:
        return str(error)
    finally:
        gossip.close()


def test_an_exchange_of_different_things_is_not_begun():
    first, second = run_ranks(unlike, 2, timeout=LIMIT)
    assert first is None  # its neighbour is gone
    assert "rank 1 and rank 0 are to average different things" in second


def slow_to_rest(rank, n):
    """The passive worker is slow to rest, and the active one asks again as soon as it may. The sum at each of the cuts."""
    x = [torch.full((50,), 4.0 * rank, dtype=torch.float64)]
    gossip = Gossip(x, ring(n), rank, Ledger(), patience=20.0)
    gossip.start(20.0)

    def all_paused():
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)

    totals = []
    for cut in range(3):
        for _ in range(5):
            with gossip.moving():
                x[0] += rank + 1.0  # both move, and differently
            gossip.stepped()
            gossip.fold()
        with gossip.quiet(all_paused):
            totals.append(float((x[0] + gossip.correction()[0]).mean()) - 5 * (cut + 1) * (rank + 1))
            gossip.leave() if cut == 2 else None
            dist.barrier() if cut == 2 else None
    gossip.close()
    return totals


def test_nobody_goes_on_before_the_slowest_has_come_to_rest():
    totals = run_ranks(slow_to_rest, 2, timeout=LIMIT)
    assert [a + b for a, b in zip(*totals, strict=True)] == pytest.approx([4.0] * 3, abs=1e-12)
