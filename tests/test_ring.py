"""Sums and headers round a ring: exact, the same everywhere, in any timing, and an end whatever happens to a neighbour."""

import logging
import os
import random
import socket
import threading
import time
from contextlib import ExitStack, closing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.rings import LIMIT, SILENCE, at_once, over_tcp, ring_of
from support.ways import communicator

from lightning_cocod.comm import Communicator, Subject, buckets, ring_connections
from lightning_cocod.comm.errors import PeerLost, TransportError
from lightning_cocod.comm.ring import IN_FLIGHT, Leg, Ring
from lightning_cocod.comm.ring_connections import close_ring
from lightning_cocod.comm.sockets import Connections, _sockets

BIG = 3_000_000  # float64 values: more than sockets buffer


def summed(ring, tensors, over=None, before_each=lambda: None, leg=Leg.ALL_REDUCE, is_there=None):
    def buckets():
        for t in tensors:
            before_each()
            yield ring.filled(t.clone())

    travelled = ring.travel(leg, buckets(), len(tensors), over or threading.Event(), is_there)
    return [cargo.memory.clone() for cargo in travelled]


def everybody(n, sizes, dtype):
    """What each worker adds, drawn anew for each bucket."""
    torch.manual_seed(n)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [[torch.randn(size, dtype=wide).mul(100).to(dtype) for size in sizes] for _ in range(n)]


def expected(tensors):
    """The sums, each part r from the worker after r on."""
    n, out = len(tensors), []
    for bucket in range(len(tensors[0])):
        size = tensors[0][bucket].numel()
        ends = [size * part // n for part in range(n + 1)]
        parts = []
        for part in range(n):
            span = slice(ends[part], ends[part + 1])
            total = tensors[(part + 1) % n][bucket][span].clone()
            for step in range(2, n + 1):
                total = tensors[(part + step) % n][bucket][span] + total
            parts.append(total)
        out.append(torch.cat(parts))
    return out


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.fixture
def no_socket_is_left():
    before = set(_sockets())
    yield
    assert set(_sockets()) <= before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_sums_are_exact_and_the_same_everywhere_bit_for_bit(n, dtype, no_socket_is_left):
    for sizes in ([], [5], [1, 1], [n - 1, 40, 3], [1000, 0, 17, 4096, 1, 2, 64]):
        tensors, rings = everybody(n, sizes, dtype), ring_of(n)
        results = at_once(*(lambda r=r: summed(rings[r], tensors[r]) for r in range(n)))
        assert all(equal(result, expected(tensors)) for result in results), sizes
        for ring in rings:
            ring.close()


def own_part(rank, n, tensors):
    """Of each bucket."""
    return [t[t.numel() * rank // n : t.numel() * (rank + 1) // n] for t in tensors]


@pytest.mark.parametrize("gated", [False, True], ids=["at once", "as they are there"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_reduce_scatter_and_an_all_gather_are_the_halves_of_an_all_reduce(n, gated):
    rings, tensors = ring_of(n), everybody(n, [1000, 0, 17, 4096, 1, 2, 64], torch.float32)
    draw = random.Random(n)

    def worker(r):
        late = random.Random(draw.random())
        is_there = (lambda _: late.random() < 0.5) if gated else None  # a gate that others have open, or not
        sums = summed(rings[r], tensors[r], leg=Leg.REDUCE_SCATTER, is_there=is_there)
        parts = [torch.full_like(t, torch.nan) for t in sums]
        for part, own in zip(own_part(r, n, parts), own_part(r, n, sums), strict=True):
            part.copy_(own)
        return sums, summed(rings[r], parts, leg=Leg.ALL_GATHER, is_there=is_there)

    for r, (sums, gathered) in enumerate(at_once(*(lambda r=r: worker(r) for r in range(n)))):
        assert equal(own_part(r, n, sums), own_part(r, n, expected(tensors)))
        assert not equal(sums, expected(tensors))
        assert equal(gathered, expected(tensors))
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_sum_of_the_own_part_may_come_to_lie_elsewhere_than_in_the_bucket(n, kind):
    """In another dtype, too: rounded once."""
    rings, (tensors, size) = ring_of(n), (everybody(n, [840] * 3, torch.float32), 840 // n)

    def worker(r):
        sums = [torch.full((size,), torch.nan, dtype=kind) for _ in range(3)]
        filled = (rings[r].filled(t.clone(), s) for t, s in zip(tensors[r], sums, strict=True))
        return sums, [cargo.memory.clone() for cargo in rings[r].travel(Leg.REDUCE_SCATTER, filled, 3, threading.Event())]

    for r, (sums, memories) in enumerate(at_once(*(lambda r=r: worker(r) for r in range(n)))):
        assert equal(sums, [part.to(kind) for part in own_part(r, n, expected(tensors))])
        if kind is torch.float32:
            assert equal(own_part(r, n, memories), own_part(r, n, tensors[r]))  # as it was put in
    for ring in rings:
        ring.close()


def test_added_in_the_order_of_the_workers_they_would_differ():
    """The negative control."""
    tensors = everybody(4, [1000], torch.float32)
    assert not equal([sum(t[0] for t in tensors)], expected(tensors))


@pytest.mark.parametrize("n", [2, 4])
def test_timing_changes_no_bit_and_one_round_follows_another(n):
    draw = random.Random(n)
    rings, tensors = ring_of(n), everybody(n, [3000, 1, 5000, 700, 800], torch.float32)

    def worker(r):
        naps = [draw.random() * 3e-3 for _ in range(15)]
        return [summed(rings[r], tensors[r], before_each=lambda: time.sleep(naps.pop())) for _ in range(3)]

    for rounds in at_once(*(lambda r=r: worker(r) for r in range(n))):
        assert all(equal(sums, expected(tensors)) for sums in rounds)
    for ring in rings:
        ring.close()


def test_buckets_larger_than_what_sockets_buffer_go_round_and_two_of_them_are_at_work():
    rings, tensors = ring_of(2), everybody(2, [BIG] * 5, torch.float64)
    ahead, taken = [], []

    def counting():
        def parts():
            for number, t in enumerate(tensors[0]):
                ahead.append(number - len(taken))
                yield rings[0].filled(t.clone())

        for cargo in rings[0].travel(Leg.ALL_REDUCE, parts(), 5, threading.Event()):
            taken.append(cargo.memory)
        return taken

    own, other = at_once(counting, lambda: summed(rings[1], tensors[1]))
    assert equal(own, expected(tensors))
    assert equal(other, own)
    assert max(ahead) == IN_FLIGHT - 1
    for ring in rings:
        ring.close()


def test_a_worker_that_goes_away_ends_the_sums_of_the_others():
    rings, tensors = ring_of(3), everybody(3, [BIG] * 4, torch.float64)

    def leaves():
        filled = (rings[1].filled(t.clone()) for t in tensors[1])
        sums = rings[1].travel(Leg.ALL_REDUCE, filled, 4, threading.Event())
        next(sums)
        rings[1].close()

    first, _, third = at_once(lambda: summed(rings[0], tensors[0]), leaves, lambda: summed(rings[2], tensors[2]))
    for error in (first, third):
        assert isinstance(error, TransportError)
        assert "the ring is broken" in str(error)  # not that nothing has moved
    rings[0].close()
    rings[2].close()


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_every_worker_gets_the_bytes_of_all_between_sums_as_well(n, no_socket_is_left):
    rings, tensors = ring_of(n), everybody(n, [50, 3], torch.float64)
    rows = [bytes([r, 255 - r] * 56) for r in range(n)]

    def rows_and_sums(ring):
        over = threading.Event()
        timing = random.Random(ring.place)
        found = []
        for times in range(5):
            time.sleep(timing.random() / 200)  # any
            found.append((ring.gather(over, rows[ring.place]), ring.gather(over, bytes([times]))))
            found.append(summed(ring, tensors[ring.place]))
        return found

    found = at_once(*(lambda ring=ring: rows_and_sums(ring) for ring in rings))
    for each in found:
        assert each[0::2] == [(rows, [bytes([times])] * n) for times in range(5)]
        assert all(equal(sums, expected(tensors)) for sums in each[1::2])
    for ring in rings:
        ring.close()


def test_a_worker_that_goes_away_after_a_gathering_has_told_all_and_ends_the_next_one_of_the_others():
    rings, told = ring_of(3, connected=over_tcp), []

    def gathers(ring):
        told.append(ring.gather(threading.Event(), b"once"))

    def leaves():
        gathers(rings[1])
        rings[1].close()

    def goes_on(ring):
        gathers(ring)
        ring.gather(threading.Event(), b"more")

    first, _, third = at_once(lambda: goes_on(rings[0]), leaves, lambda: goes_on(rings[2]))
    assert told == [[b"once"] * 3] * 3
    for error in (first, third):
        assert isinstance(error, TransportError)
        assert "the ring is broken" in str(error)  # not that nothing has moved
    rings[0].close()
    rings[2].close()


@pytest.mark.parametrize("why", ["it was given up", "nothing has moved for 0.1 s"])
def test_a_worker_that_is_silent_is_not_waited_for_for_ever(why):
    ring, silent = ring_of(2, timeout=0.1 if "moved" in why else SILENCE)
    over = threading.Event()
    if "given" in why:
        over.set()
    with pytest.raises(TransportError, match=why):
        summed(ring, [torch.ones(10)], over)
    ring.close()
    silent.close()


def test_a_connection_that_is_shut_down_wakes_who_waits_for_it():
    ring, silent = ring_of(2)

    def cut():
        time.sleep(0.05)  # it most likely waits by then; it ends either way
        ring.before.shutdown(socket.SHUT_RDWR)

    error, _ = at_once(lambda: summed(ring, [torch.ones(10)]), cut)
    assert isinstance(error, TransportError)
    ring.close()
    silent.close()


def test_one_that_waits_notices_that_the_next_one_is_gone():
    ring, gone = ring_of(2)

    def goes():
        gone.before.setblocking(True)
        assert len(gone.before.recv(100)) == 4  # all that there is to send
        gone.before.close()

    error, _ = at_once(lambda: summed(ring, [torch.ones(2)], leg=Leg.REDUCE_SCATTER), goes)
    assert "the ring is broken" in str(error)
    ring.close()
    gone.close()


def test_bytes_that_come_slowly_are_not_silence():
    with ExitStack() as stack:
        server = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        sink = stack.enter_context(closing(socket.create_connection(server.getsockname())))
        after, _ = server.accept()
        source = stack.enter_context(closing(socket.create_connection(server.getsockname())))
        before, _ = server.accept()
        for end in (after, before):
            end.setblocking(False)
        ring = stack.enter_context(closing(Ring(after, before, 0, 2, timeout=3.0)))

        def trickle():
            for byte in torch.full((4,), 2.0).numpy().tobytes():  # for longer than the limit on silence
                source.sendall(bytes([byte]))
                time.sleep(0.25)

        with mock.patch("lightning_cocod.comm.ring._LOOK", 0.05):
            (total,), _ = at_once(lambda: summed(ring, [torch.ones(8)], leg=Leg.REDUCE_SCATTER), trickle)
        assert total[:4].tolist() == [3.0] * 4
        assert len(sink.recv(100)) == 16


@pytest.mark.parametrize("leg", Leg)
@pytest.mark.parametrize(("n", "sizes"), [(3, [8, 0, 8]), (4, [1, 1, 1, 1, 1]), (2, [0, 1, 0, 1])], ids=str)
def test_empty_parts_keep_nobody_waiting_where_buckets_come_one_by_one(n, sizes, leg):
    rings, tensors = ring_of(n), everybody(n, sizes, torch.float32)
    results = at_once(*(lambda r=r: summed(rings[r], tensors[r], leg=leg, is_there=lambda _: False) for r in range(n)))
    assert [len(result) for result in results] == [len(sizes)] * n
    if leg is Leg.ALL_REDUCE:
        assert all(equal(result, expected(tensors)) for result in results)
    for ring in rings:
        ring.close()


def test_a_bucket_that_is_complete_does_not_wait_for_the_next_one():
    """Its parts that come last here are empty, so that it is complete when one looks for more of it."""
    rings, tensors = ring_of(2), everybody(2, [0, 3], torch.float32)

    def worker(r):
        gate = threading.Event()

        def parts():
            yield rings[r].filled(tensors[r][0].clone())
            assert gate.wait(LIMIT)
            yield rings[r].filled(tensors[r][1].clone())

        travelled = rings[r].travel(Leg.REDUCE_SCATTER, parts(), 2, threading.Event(), lambda _: gate.is_set())
        first = next(travelled).memory.clone()
        gate.set()
        return first, next(travelled).memory.clone()

    for r, sums in enumerate(at_once(lambda: worker(0), lambda: worker(1))):
        assert equal(own_part(r, 2, list(sums)), own_part(r, 2, expected(tensors)))
    for ring in rings:
        ring.close()


def test_two_buckets_that_are_there_are_at_work_although_buckets_come_one_by_one():
    rings, tensors = ring_of(3), everybody(3, [9, 9], torch.float32)
    asked = []

    def parts():
        for number in range(2):
            asked.append(number)
            yield rings[0].filled(tensors[0][number].clone())

    def worker():
        travelled = rings[0].travel(Leg.REDUCE_SCATTER, parts(), 2, threading.Event(), lambda _: True)
        first = next(travelled).memory.clone()
        return list(asked), [first, next(travelled).memory.clone()]

    others = [lambda r=r: summed(rings[r], tensors[r], leg=Leg.REDUCE_SCATTER, is_there=lambda _: True) for r in (1, 2)]
    (begun, sums), *_ = at_once(worker, *others)
    assert begun == [0, 1]
    assert equal(own_part(0, 3, sums), own_part(0, 3, expected(tensors)))
    for ring in rings:
        ring.close()


def test_memory_that_has_been_replaced_is_not_kept():
    ring, other = ring_of(2)
    for size in (100, 200, 400, 800, 1600):
        for _ in range(IN_FLIGHT):
            memory = torch.empty(size)
            assert ring.parts(memory[: size - 1]) is ring.parts(memory[: size - 1])
            assert [part.values.numel() for part in ring.parts(memory)] == [size // 2] * 2
    kept = {
        parts[0].values.untyped_storage().data_ptr()
        for of_it in ring._cuts[torch.float32].values()
        for parts, _ in of_it.values()
    }
    assert len(kept) <= IN_FLIGHT
    ring.close()
    other.close()


# How it is made


def closed_with_a_stranger(rank, n):
    connect = socket.create_connection

    def listen(address, peers):
        listener = real(address, peers)
        stranger.append(connect(listener.getsockname()[:2]))  # the first to connect
        stranger[0].sendall(b"x" * 100)
        return listener

    real, stranger, logged = ring_connections.listen, [], []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("lightning_cocod.comm.meeting").addHandler(handler)
    with mock.patch.object(ring_connections, "listen", listen):
        ring = Ring(*close_ring(dist.group.WORLD, "127.0.0.1", rank, range(n), LIMIT, lambda: None), rank, n, SILENCE)
    (total,) = summed(ring, [torch.full((9,), float(rank))])
    dist.barrier()
    ring.close()
    stranger[0].close()
    return total.tolist(), len(logged)


def test_a_stranger_is_turned_away_and_the_ring_closes_without_it():
    assert run_ranks(closed_with_a_stranger, 3) == [([3.0] * 9, 1)] * 3


def not_reached(rank, n):
    def refuses(*_, **__):
        raise ConnectionRefusedError("refused")

    with mock.patch.object(ring_connections.socket, "create_connection", refuses), pytest.raises(PeerLost) as caught:
        close_ring(dist.group.WORLD, "127.0.0.1", rank, range(n), LIMIT, lambda: None)
    dist.barrier()
    return str(caught.value).partition(" at ")[0]


def test_a_neighbour_that_cannot_be_reached_is_named():
    assert run_ranks(not_reached, 2) == ["rank 1 cannot be reached", "rank 0 cannot be reached"]


def test_what_the_system_refuses_is_told_in_one_line():
    with pytest.raises(PeerLost, match=r"no ring can be closed at 192\.0\.2\.1: "):  # nobody's address
        close_ring(None, "192.0.2.1", 0, (0, 1), LIMIT, lambda: None)


def test_who_waits_for_a_neighbour_looks_up_now_and_then():
    class Gone(Exception):
        pass

    def gone():
        raise Gone

    def told(everybodys, own, group):
        everybodys[:] = [own, (*listener.getsockname(), b"")]

    with closing(socket.create_server(("127.0.0.1", 0))) as listener, mock.patch.object(dist, "all_gather_object", told):
        with pytest.raises(Gone):
            close_ring(None, "127.0.0.1", 0, (0, 1), LIMIT, gone)
        with pytest.raises(PeerLost, match=r"rank 1 has not connected within 0\.01 s"):
            close_ring(None, "127.0.0.1", 0, (0, 1), 0.01, lambda: None)


def test_the_address_is_that_of_the_transports_own_connections():
    connections = Connections()
    assert connections.address() is None
    with ExitStack() as stack:
        server = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))

        def connect(source):
            return stack.enter_context(closing(socket.create_connection(server.getsockname(), source_address=(source, 0))))

        with connections.being_made():
            connect("127.0.0.3")
        assert connections.address() == "127.0.0.3"
        looked_at = connections._made  # by another thread, which must not find it changing
        connections.add(connect("127.0.0.2"))
        connections.add(connect("127.0.0.2"))  # one of the three is somebody else's
        assert connections.address() == "127.0.0.2"
        assert len(looked_at) == 1


# In a communicator


def encrypted(rank, n):
    comm = Communicator()
    with mock.patch.dict(os.environ, GLOO_DEVICE_TRANSPORT="TCP_TLS"), mock.patch.object(comm, "_new_group") as made:
        made.return_value = dist.group.WORLD  # which is not encrypted: there are no certificates here
        comm.start()
    x = [torch.full((5,), float(rank))]
    comm.mean_(x, 1 / n, Subject("test", "mean", 0)).wait()
    ring = comm._ring
    with mock.patch.object(comm, "_disband_all"):
        comm.close()
    return ring, x[0].tolist()


def test_where_the_transport_encrypts_nothing_goes_round_the_ring():
    assert run_ranks(encrypted, 2) == [(None, [0.5] * 5)] * 2


def over_gloo_and_round_the_ring(rank, n):
    torch.manual_seed(rank)
    results = []
    for ring in (True, False):
        comm = communicator(ring=ring)
        torch.manual_seed(rank)
        x = [torch.randn(300, 7), torch.randn(50).bfloat16(), torch.randn(9, dtype=torch.complex64), torch.randn(())]
        with mock.patch.object(buckets, "BUCKET_BYTES", 1024):
            comm.mean_(x, 1 / n, Subject("test", "mean", 0)).wait()
        totals = comm.ledger.totals()
        results.append(([t.clone() for t in x], totals.sent, totals.received))
        comm.close()
    return results


@pytest.mark.parametrize("n", [2, 4])
def test_means_round_the_ring_are_those_of_the_transport_to_rounding_and_cost_the_same_bytes(n):
    ranks = run_ranks(over_gloo_and_round_the_ring, n)
    for (ring, *bytes_), (gloo, *gloo_bytes) in ranks:
        assert bytes_ == gloo_bytes
        for a, b, first in zip(ring, gloo, ranks[0][0][0], strict=True):
            assert torch.equal(a, first)
            torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-6, atol=1e-6)
