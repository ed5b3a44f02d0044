"""Collectives between real processes: exact results, errors on every rank, and an end whatever happens to a peer."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from support.faults import continued_after, in_the_ring
from support.ranks import free_port, run_ranks, run_ranks_raw, torchrun_env

from lightning_cocod.comm import (
    CommunicationError,
    Communicator,
    MessageMismatch,
    NonFiniteMessage,
    PeerLost,
    Subject,
    buckets,
    channel,
)
from lightning_cocod.comm.collectives import Collective
from lightning_cocod.comm.errors import TransportError
from lightning_cocod.comm.header import _FORMAT, Header, Pace
from lightning_cocod.comm.sockets import _sockets
from lightning_cocod.comm.watchdog import Watchdog

LIMIT = 30.0


@pytest.fixture(autouse=True)
def _nothing_of_this_process_is_touched():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def about(kind="round", step=0, **options):
    return Subject("test", kind, step, **options)


@contextmanager
def communicating(**options):
    """With small buckets, so that there are many."""
    communicator = Communicator(**options)
    communicator.start()
    try:
        with mock.patch.object(buckets, "BUCKET_BYTES", 64 << 10):
            yield communicator
    except BaseException as error:
        communicator.abort(error)
        raise
    finally:
        communicator.close()


def numbers(rank, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


SHAPES = [(70_000,), (3, 5), (), (2, 3, 4, 4), (300, 301)]


def tensors_of(rank):
    made = [numbers(rank, shape) for shape in SHAPES] + [numbers(rank, (9, 7), torch.float64)]
    made += [numbers(rank, (33,), torch.bfloat16), numbers(rank, (4, 6)).t(), numbers(rank, (6, 6))[::2, ::3]]
    return made


def eventually(condition):
    deadline = time.monotonic() + LIMIT
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


# Results


def results(rank, n, weights):
    with communicating() as c:
        mine, everyone = tensors_of(rank), [tensors_of(r) for r in range(n)]
        means = [sum(w * t.double() for w, t in zip(weights, same, strict=True)) for same in zip(*everyone, strict=True)]
        close = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}

        snapshot = c.layout(mine).buffer()
        assert len(c.layout(mine)) > 6
        assert max(flat.nbytes for flat in snapshot.buckets) == (64 << 10) * max(1, n // 2)
        assert max(flat.nbytes for flat in c.layout(mine, whole=True).buffer().buckets) == 64 << 10
        snapshot.copy_(mine)
        correction = c.correction_(snapshot, about(weights=weights))
        averaged = [t.clone() for t in mine]
        averaging = c.mean_(averaged, weights[rank], about(step=1), measured=True)
        first = [t.clone() for t in mine]
        spreading = c.broadcast_(first, about("start", 1))
        spreading.wait()
        assert all(torch.equal(t, z) for t, z in zip(first, everyone[0], strict=True))
        averaging.wait()
        for t, mean in zip(averaged, means, strict=True):
            torch.testing.assert_close(t.double(), mean, rtol=0, atol=close[t.dtype])
        correction.wait()
        snapshot.add_to(mine)
        for t, mean in zip(mine, means, strict=True):
            torch.testing.assert_close(t.double(), mean, rtol=0, atol=2 * close[t.dtype])

        size = sum(t.double().square().sum() for t in tensors_of(rank)).sqrt()
        moved = sum((m - t.double()).square().sum() for m, t in zip(means, tensors_of(rank), strict=True)).sqrt()
        assert averaging.numbers() == pytest.approx([float(size), float(moved)], rel=1e-3)
        return [t.clone() for t in averaged]


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.6, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]], ids=len)
def test_means_corrections_and_broadcasts_are_exact_and_equal_on_all_ranks(weights):
    results_of_ranks = run_ranks(results, len(weights), weights)
    for other in results_of_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results_of_ranks[0], other, strict=True))


def many_messages(rank, n):
    with communicating() as c:
        values, messages = [], []
        for step in range(60):
            x = torch.full((1 + 997 * (step % 5) ** 2,), float(step + rank))
            values.append(x)
            if step % 3 == 2:
                messages.append(c.broadcast_([x], about("spread", step)))
            else:
                messages.append(c.mean_([x], 1 / n, about("round", step)))
        other = torch.tensor(1.0)
        dist.all_reduce(other)  # somebody else's collective, on the world group, while ours are in flight
        assert other == n
        order = list(range(60))
        for step in order[::-1] if rank % 2 else order:  # waiting in any order
            messages[step].wait()
            messages[step].wait()
            expected = step if step % 3 == 2 else step + (n - 1) / 2
            torch.testing.assert_close(values[step], torch.full_like(values[step], expected))
        assert c.ledger.totals().messages == 60


def test_many_messages_of_different_kinds_keep_their_order_beside_foreign_collectives():
    run_ranks(many_messages, 3)


def test_one_process_without_a_group_has_nothing_to_start_and_nothing_to_close():
    before = threading.active_count()
    communicator = Communicator()
    communicator.close()
    communicator.start()
    communicator.start()
    communicator.check()
    communicator.samples = 5
    assert (communicator.rank, communicator.world_size, communicator.total_samples()) == (0, 1, 5)
    communicator.abort(ValueError("boom"))
    communicator.close()
    communicator.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["timeout", "process_group_timeout", "connect_timeout", "grace"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True])
def test_times_that_are_not_positive_and_finite_are_refused(name, seconds):
    with pytest.raises(ValueError, match=f"{name} must be a positive, finite number of seconds"):
        Communicator(**{name: seconds})


# Headers


FIELDS = {
    "kind": lambda c, x: c.mean_(x, 0.5, about("gradients", 3)),
    "step": lambda c, x: c.mean_(x, 0.5, about("round", 4)),
    "algorithm": lambda c, x: c.mean_(x, 0.5, replace(about("round", 3), algorithm="other")),
    "layout": lambda c, x: c.mean_([x[0].reshape(3, 2)], 0.5, about("round", 3)),
    "size": lambda c, x: c.mean_([x[0], x[0].clone()], 0.5, about("round", 3)),
}


def mismatches(rank, n):
    texts = {}
    for field, other in FIELDS.items():
        with communicating() as c:
            x, both_are_queued = torch.full((2, 3), float(rank)), threading.Event()
            c.do(partial(both_are_queued.wait, LIMIT), about("round", 3))
            message = other(c, [x]) if rank == n - 1 else c.mean_([x], 0.5, about("round", 3))
            queued = c.mean_([x], 0.5, about("round", 3))
            both_are_queued.set()
            with pytest.raises(MessageMismatch) as caught:
                message.wait()
            for later in (queued.wait, c.check, lambda: c.mean_([x], 0.5, about("round", 3))):
                with pytest.raises(MessageMismatch):
                    later()
            assert (x == rank).all()
            texts[field] = str(caught.value)
    return texts


def test_a_difference_in_any_field_of_the_header_is_an_error_on_all_ranks_that_names_both_sides():
    texts = run_ranks(mismatches, 3)
    for field in FIELDS:
        for rank, text in enumerate(t[field] for t in texts):
            other = 0 if rank == 2 else 2
            assert f"rank {rank} sends" in text, field
            assert f"rank {other} sends" in text, field
            assert "test/round at step 3" in text


def test_a_header_survives_its_bytes():
    header = Header("ssd_sgd", "gradients", 2**40, 2**55, 2**45, 1, 7, 9, Pace(2**41, 0.1))
    assert Header.unpack(header.pack()) == header


@pytest.mark.parametrize("names", [("x" * 25, "round"), ("test", "x" * 25), ("test", "é" * 13)], ids=str)
def test_names_that_a_header_would_cut_are_refused(names):
    with pytest.raises(ValueError, match="too long for a header"):
        Header(*names, 1, 2, 3)


@pytest.mark.parametrize("name", ["x" * 24, "é" * 12])
def test_the_longest_names_survive_their_bytes(name):
    header = Header(name, name, 1, 2, 3)
    assert Header.unpack(header.pack()) == header


def paces(rank, n):
    with communicating() as c:
        x, heard = torch.ones(3), []
        for step in range(3):
            c.pace = Pace(10 * step, 1.5 + rank)
            message = c.mean_([x], 1 / n, about("round", step))
            c.pace = Pace(77, 7.0)  # of a message to come
            if step == 1:
                message.wait(counted=False)  # evaluation's wait: no news for training
                heard.append(list(c.heard))
            message.wait()
            heard.append(list(c.heard))
            c.heard = []
            message.wait()
            heard.append(list(c.heard))
    return heard


def test_all_ranks_hear_the_same_paces_once_where_training_waits():
    everyone = run_ranks(paces, 3)
    assert everyone[0] == everyone[1] == everyone[2]
    told = [[Pace(10 * step, 1.5 + rank) for rank in range(3)] for step in range(3)]
    assert everyone[0] == [told[0], [], [], told[1], [], told[2], []]


def nonfinite(rank, n, value):
    with communicating() as c:
        x = [torch.full((40_000,), float(rank)), torch.tensor([1.0, 2.0], dtype=torch.float64)]
        if rank == 1:
            x[1][1] = value
        before = [t.clone() for t in x]
        with pytest.raises(NonFiniteMessage, match="rank 1;"):
            c.mean_(x, 1 / n, about()).wait()
        assert all(torch.equal(t, b) or rank == 1 for t, b in zip(x, before, strict=True))
        assert torch.equal(x[0], before[0])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_message_that_is_not_finite_is_refused_on_all_ranks_before_anything_is_touched(value):
    run_ranks(nonfinite, 3, value)


# The ledger


def accounting(rank, n):
    with communicating() as c:
        sizes = [10, 70_001]
        for size in sizes:
            c.mean_([torch.ones(size)], 1 / n, about()).wait()
        totals = c.ledger.totals()
        expected = sum(_FORMAT.size * (n - 1) + 2 * 4 * size * (n - 1) // n for size in sizes)
        assert (totals.sent, totals.received, totals.raw, totals.messages) == (expected, expected, expected, 2)
        assert totals.busy > 0

        c.mean_([torch.ones(sizes[1])], 1 / n, about(counted=False)).wait()
        later = c.ledger.totals()
        assert (later.busy, later.exposed, later.skew) == (totals.busy, totals.exposed, totals.skew)
        assert later.sent > totals.sent

        spread = c.broadcast_([torch.ones(sizes[0])], about("spread"))
        spread.wait()
        header, copy = _FORMAT.size * (n - 1), 4 * sizes[0]
        spent = c.ledger.totals() - later
        if rank == 0:
            assert (spent.sent, spent.received) == (header + (n - 1) * copy, header)
        else:
            assert (spent.sent, spent.received) == (header, header + copy)

        before = c.ledger.totals()
        dist.barrier()
        if rank == 0:
            time.sleep(0.4)
        c.mean_([torch.ones(10)], 1 / n, about()).wait()
        late = c.ledger.totals() - before

        dist.barrier()
        before = c.ledger.totals()
        with slow_transport(0.2):
            message = c.mean_([torch.ones(10)], 1 / n, about())
            assert eventually(lambda: message._handle.done())
            message.wait()
        hidden = c.ledger.totals() - before

        dist.barrier()
        before = c.ledger.totals()
        with slow_transport(0.4):
            c.mean_([torch.ones(10)], 1 / n, about()).wait()
        exposed = c.ledger.totals() - before
        return late, hidden, exposed


@contextmanager
def slow_transport(seconds):
    """The communication thread needs so much longer in every bucket."""

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return fast(*args, **kwargs)

    fast = Collective.put_in
    with mock.patch.object(Collective, "put_in", slow):
        yield


def test_seconds_and_bytes_are_booked_where_they_belong():
    ranks = run_ranks(accounting, 3)
    (late_0, _, _), *others = ranks
    for late, _, _ in others:  # a late rank is its peers' skew, and nobody's exposed time
        assert late.skew > late.exposed
        assert late.skew > late_0.skew
        assert late.skew > late_0.exposed
    for _, hidden, exposed in ranks:
        assert hidden.exposed + hidden.skew < hidden.busy / 2  # a slow transport that nobody waits for is hidden
        assert exposed.exposed > exposed.busy / 2  # and one that everybody waits for is exposed
        assert exposed.exposed > exposed.skew


def waiting_behind_another(rank, n):
    with communicating() as c, slow_transport(0.1):
        assert len(c.layout([torch.ones(100_000)])) > 5
        c.mean_([torch.ones(100_000)], 1 / n, about(step=0))
        c.mean_([torch.ones(10)], 1 / n, about(step=1)).wait()
        spent = c.ledger.totals()
        assert spent.exposed > spent.skew


def test_waiting_for_a_message_behind_another_one_is_exposed_time_not_skew():
    run_ranks(waiting_behind_another, 2)


def samples(rank, n):
    with communicating() as c:
        c.samples = 10 * (rank + 1)
        c.mean_([torch.ones(3)], 1 / n, about()).wait()
        assert c.total_samples() == 10 * n * (n + 1) // 2
        dist.barrier()
        c.samples += 1
        assert eventually(lambda: c.total_samples() == 10 * n * (n + 1) // 2 + n)  # by heartbeat
        dist.barrier()


def test_samples_of_all_ranks_are_known_from_headers_and_heartbeats():
    run_ranks(samples, 3)


# What used to look like a lost peer


def odd_tensors(rank, n):
    with communicating() as c:
        x = [torch.full((3,), float(rank)), torch.empty(0, dtype=torch.float64)]
        c.mean_(x, 1 / n, about()).wait()
        assert torch.equal(x[0], torch.full((3,), 0.5))

        x = [torch.full((3,), rank + 7, dtype=torch.int16)]
        c.broadcast_(x, about()).wait()
        assert x[0].tolist() == [7, 7, 7]

        x = [torch.full((3,), 1e25)]  # whose norm overflows in float32
        c.mean_(x, 1 / n, about()).wait()
        assert torch.equal(x[0], torch.full((3,), 1e25))

        with pytest.raises(RuntimeError) as caught:
            c.mean_([torch.ones(3, dtype=torch.int64)], 1 / n, about()).wait()
        assert not isinstance(caught.value, PeerLost)


def test_unusual_tensors_travel_or_are_refused_for_what_they_are():
    run_ranks(odd_tensors, 2)


# Life and death


def lives(rank, n):
    c = Communicator(timeout=LIMIT)
    c.close()  # without start
    for step in range(2):  # start and close, twice
        c.start()
        c.start()
        x = torch.full((3,), float(rank))
        c.mean_([x], 1 / n, about(step=step)).wait()
        assert (x == (n - 1) / 2).all()
        c.close()
        c.close()
    c.start()
    y = torch.full((300_000,), float(rank))
    message = c.mean_([y], 1 / n, about(step=3))
    c.close()  # a message in flight is drained
    message.wait()
    assert (y == (n - 1) / 2).all()


def test_start_and_close_can_be_repeated_and_close_drains():
    run_ranks(lives, 3)


def lost_in_the_second_life(rank, n):
    c = Communicator()
    for _ in range(2):
        c.start()
        c.mean_([torch.ones(3)], 1 / n, about()).wait()
        c.close()
    c.start()
    c.mean_([torch.ones(3)], 1 / n, about(step=1)).wait()
    if rank == 1:
        c.abort(ValueError("boom"))
        c.close()
        return None
    with pytest.raises(PeerLost) as caught:
        c.mean_([torch.ones(3)], 1 / n, about(step=2)).wait()
    c.close()
    return str(caught.value)


def test_a_loss_in_a_later_life_is_noticed():
    assert run_ranks(lost_in_the_second_life, 2) == ["rank 1 failed: ValueError: boom", None]


def leaving(rank, n, folder):
    """Rank 1 leaves last, and says so before."""
    c = Communicator()
    c.start()
    if rank == 1:
        time.sleep(0.3)
        (Path(folder) / "1").touch()
    c.close()
    return (Path(folder) / "1").exists()


def test_close_waits_for_the_peers_that_live(tmp_path):
    assert run_ranks(leaving, 3, str(tmp_path)) == [True] * 3


def leaving_a_failed_peer(rank, n):
    """Rank 1 fails; the others do not hear of it before they close."""
    c = Communicator()
    c.start()
    c.mean_([torch.ones(3)], 1 / n, about()).wait()
    if rank == 1:
        c.abort(ValueError("boom"))
        c.close()
        dist.barrier()
        return None
    with pytest.raises(PeerLost) as caught:
        c.close()
    c.close()
    dist.barrier()  # rank 0 hosts the store
    return str(caught.value)


def test_close_raises_what_nobody_has_been_told_before():
    assert run_ranks(leaving_a_failed_peer, 3) == [reason := "rank 1 failed: ValueError: boom", None, reason]


def deaf(rank, n):
    c = Communicator()
    c.start()
    if rank == 1:
        c.agreement.receive = lambda notes: {}["a bug"]
    assert eventually(lambda: c._thread.error)
    with pytest.raises(PeerLost) as caught:
        c.check()
    c.abort(caught.value)
    c.close()
    return str(caught.value)


def test_an_error_inside_a_heartbeat_ends_the_run_on_all_ranks():
    assert run_ranks(deaf, 2) == ["rank 1 failed: KeyError: 'a bug'", "the heartbeat of rank 1 ended: KeyError: 'a bug'"]


def sockets_of_a_life(rank, n):
    """Those after the first of several lives, and whether there are no more after the last. A peer's may close later."""
    first = None
    for _ in range(4):
        with communicating() as c:
            c.mean_([torch.ones(3)], 1 / n, about()).wait()
        del c
        dist.barrier()
        first = first or len(_sockets())
    return first, eventually(lambda: len(_sockets()) <= first)


def test_no_socket_is_left():
    for first, settled in run_ranks(sockets_of_a_life, 2):
        assert first > 0
        assert settled


def one_aborts(rank, n):
    c = Communicator()
    c.start()
    x = torch.ones(3)
    c.mean_([x], 1 / n, about()).wait()
    if rank == 1:
        c.abort(ValueError("boom\nmore"))
        c.abort(ValueError("boom\nmore"))
        with pytest.raises(CommunicationError, match="boom"):
            c.mean_([x], 1 / n, about(step=1))
        c.close()
        dist.barrier()
        return None
    with pytest.raises(PeerLost) as caught:
        c.mean_([x], 1 / n, about(step=1)).wait()
    with pytest.raises(PeerLost):
        c.check()
    assert c.losses.watchdog.was_noticed
    c.abort(caught.value)
    c.close()
    assert eventually(lambda: not any(t.name == "watchdog" for t in threading.enumerate()))  # called off: this process lives
    dist.barrier()  # rank 0 hosts the store
    return str(caught.value)


def test_a_rank_that_raises_is_named_by_its_peers_with_its_reason():
    texts = run_ranks(one_aborts, 4, timeout=30)
    assert [texts[r] for r in (0, 2, 3)] == ["rank 1 failed: ValueError: boom"] * 3


def given_up_at_the_end(rank, n):
    """What the communication thread waits for is given up while the training thread is already waiting for its end."""
    c = Communicator()
    c.start()
    thread, begun, disbanded = c._thread, threading.Event(), []

    def stuck():
        begun.set()
        assert eventually(lambda: thread._closed)
        time.sleep(0.1)  # the other thread has begun to join this one
        raise TransportError("it was given up")

    with mock.patch.object(channel, "abandon", lambda group: disbanded.append(group)):
        c._send(thread, stuck, "a job")
        assert begun.wait(LIMIT)
        c.abort(ValueError("boom"))
        groups = list(c._groups)
        c.close()
    for group in groups:
        dist.destroy_process_group(group)
    dist.barrier()
    return disbanded == groups


def test_a_group_whose_operation_was_given_up_at_the_very_end_is_not_waited_for():
    assert run_ranks(given_up_at_the_end, 2, timeout=LIMIT) == [True, True]


def one_starts_late(rank, n):
    c = Communicator()
    if rank == 2:
        time.sleep(0.3)
    c.start()
    c.mean_([torch.ones(3)], 1 / n, about()).wait()
    if rank == 0:
        c.abort(ValueError("boom"))
        c.close()
        dist.barrier()
        return None
    with pytest.raises(PeerLost) as caught:
        c.mean_([torch.ones(3)], 1 / n, about(step=1)).wait()
    c.close()
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_started_later_than_the_host_of_the_store_still_hears_the_reason():
    assert run_ranks(one_starts_late, 3) == [None] + ["rank 0 failed: ValueError: boom"] * 2


def dying_while(doing):
    """Patches the transport of this rank so that the rank dies in the middle of a message of many buckets."""
    calls = itertools.count(1)

    def die():
        if next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    in_the_ring(doing, die)


def stay_until_all_know(rank, n, folder):
    """Rank 0 hosts the store: were it to leave now, the others might hear of that first."""
    (Path(folder) / str(rank)).touch()
    assert eventually(lambda: len(list(Path(folder).iterdir())) == n - 1)


def one_dies(rank, n, victim, when, folder):
    c = Communicator(timeout=60, grace=LIMIT)
    c.start()
    x = torch.ones(12_000_000)  # many buckets
    if rank == victim:
        if when == "leaving":
            os._exit(0)
        dying_while(when)
    with pytest.raises(PeerLost) as caught:
        c.mean_([x], 1 / n, about()).wait()
    c.close()  # waits for nobody
    stay_until_all_know(rank, n, folder)
    return str(caught.value)


@pytest.mark.parametrize(("when", "victim"), [("sending", 1), ("reducing", 2), ("leaving", 0)], ids=lambda v: str(v))
def test_a_rank_that_dies_is_named_by_all_others_although_the_timeout_is_long(when, victim, tmp_path):
    outcomes = run_ranks_raw(one_dies, 4, victim, when, str(tmp_path), timeout=60, grace=40)  # one is no neighbour of it
    assert outcomes[victim].status == "died"
    assert outcomes[victim].exitcode == (0 if when == "leaving" else -signal.SIGKILL)
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.status == "ok", outcome.traceback
            assert outcome.value.startswith("rank 0, or the launcher" if victim == 0 else f"rank {victim} is lost: ")
            assert "\n" not in outcome.value


def dies_inside_start(rank, n):
    if rank == 1:
        Communicator._new_group = lambda *args: os._exit(3)
    c = Communicator(timeout=1, grace=0.2)
    try:
        c.start()
    finally:
        c.close()


def test_a_rank_that_dies_inside_start_does_not_leave_the_others_there():
    survivor, dead = run_ranks_raw(dies_inside_start, 2, timeout=60, grace=40)
    assert (dead.status, dead.exitcode) == ("died", 3)
    assert survivor.status in ("died", "error"), str(survivor) + survivor.traceback
    assert survivor.status == "error" or survivor.exitcode == 1


def one_stops(rank, n, victim, folder):
    """The stopped rank is ended by its peers, nobody else."""
    c = Communicator(timeout=2, grace=LIMIT)
    c.start()
    x = torch.ones(3)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(PeerLost) as caught:
        c.mean_([x], 1 / n, about()).wait()
    c.close()
    stay_until_all_know(rank, n, folder)
    return str(caught.value)


def test_a_stopped_rank_is_lost_after_the_timeout_and_its_process_is_ended(tmp_path):
    outcomes = run_ranks_raw(one_stops, 3, 1, str(tmp_path), timeout=60, grace=40)
    assert [o.status for o in outcomes] == ["ok", "died", "ok"], [str(o) + o.traceback for o in outcomes]
    assert outcomes[1].exitcode == -signal.SIGKILL
    reasons = outcomes[0].value, outcomes[2].value
    assert all(reason.startswith("rank 1 is lost: ") for reason in reasons)
    assert any("no heartbeat for 2 s; its process " in reason for reason in reasons)


def test_a_stopped_rank_is_lost_and_ended_although_it_hosts_the_store(tmp_path):
    outcomes = run_ranks_raw(one_stops, 2, 0, str(tmp_path), timeout=60, grace=40)
    assert [o.status for o in outcomes] == ["died", "ok"], [str(o) + o.traceback for o in outcomes]
    assert outcomes[0].exitcode == -signal.SIGKILL
    assert outcomes[1].value.startswith("rank 0, or the launcher that hosts the store, is lost")
    assert "; its process " in outcomes[1].value


def blocked_elsewhere(rank, n):
    """Rank 1 fails while rank 0 is in a collective of somebody else's."""
    c = Communicator(grace=0.2)
    c.start()
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank == 0:
        dist.barrier()
    c.abort(ValueError("boom"))
    assert eventually(lambda: not psutil.pid_exists(int(pids[0])))
    c.close()


def test_a_rank_that_is_blocked_elsewhere_when_a_peer_is_lost_is_ended_with_a_non_zero_code():
    outcomes = run_ranks_raw(blocked_elsewhere, 2, timeout=60, grace=40)
    assert (outcomes[0].status, outcomes[0].exitcode) == ("died", 1), outcomes[0].traceback
    assert outcomes[1].status == "ok", outcomes[1].traceback


def blocked_after_the_loss(rank, n, folder):
    """Rank 1 is stopped, for good; rank 0 is told so, gives up, and is then blocked by a callback."""
    c = Communicator(timeout=3)
    c.start()
    c.losses.watchdog = Watchdog(rank, grace=LIMIT, patience=2)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(PeerLost) as caught:
        c.mean_([torch.ones(3)], 1 / n, about()).wait()
    c.abort(caught.value)
    (Path(folder) / "told").write_text(str(caught.value))
    time.sleep(LIMIT)
    c.close()


def test_a_rank_that_is_blocked_after_it_was_told_of_a_loss_is_ended_with_a_non_zero_code(tmp_path):
    outcomes = run_ranks_raw(blocked_after_the_loss, 2, str(tmp_path), timeout=60, grace=40)
    assert (outcomes[0].status, outcomes[0].exitcode) == ("died", 1), outcomes[0].traceback
    assert (outcomes[1].status, outcomes[1].exitcode) == ("died", -signal.SIGKILL)  # by its peer
    assert (tmp_path / "told").read_text().startswith("rank 1 is lost: no heartbeat for 3 s; its process ")


def slow_but_alive(rank, n):
    with communicating(timeout=3) as c:
        x = torch.full((3,), float(rank))
        resume = None
        if rank == 0:
            time.sleep(c.timeout + 0.5)
        if rank == 1:
            resume = continued_after(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        c.mean_([x], 1 / n, about()).wait()
        assert (x == (n - 1) / 2).all()
        if resume:
            resume.wait()


def test_a_slow_rank_and_one_that_is_stopped_for_a_moment_are_not_lost():
    run_ranks(slow_but_alive, 3, timeout=30)


FORGETFUL = """
import torch, torch.distributed as dist
from lightning_cocod.comm import Communicator, Subject
dist.init_process_group("gloo")
c = Communicator()
c.start()
message = c.mean_([torch.ones(3_000_000)], 0.5, Subject("test", "round", 0))
"""


def test_a_process_that_ends_without_close_and_with_a_message_in_flight_ends_well():
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FORGETFUL],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **torchrun_env(rank, 2, port)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        assert [p.wait(120) for p in processes] == [0, 0]
    finally:
        for p in processes:
            p.kill()
            p.wait()
