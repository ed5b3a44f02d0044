"""Heartbeats: who lives is judged by counters and the local clock; what a rank says reaches the others.

Where silence is judged, the clock is the test's: it moves when a given rank has beaten, so that no verdict depends on the
speed of this machine.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from lightning_cocod.comm import heartbeat as module
from lightning_cocod.comm.fence import Identity
from lightning_cocod.comm.heartbeat import Heartbeat

LIMIT = 20.0
INTERVAL = 0.01
TICK = INTERVAL  # less than the time that counts as a pause of the rank's own


class MemoryStore:
    """The part of a store that heartbeats use, in this process. `broken` makes every call raise, `frozen` makes it block."""

    def __init__(self):
        self.values, self.broken, self.frozen = {}, False, threading.Event()
        self.frozen.set()

    def clone(self):
        return self

    def set_timeout(self, timeout):
        pass

    def _answer(self):
        assert self.frozen.wait(LIMIT)
        if self.broken:
            raise RuntimeError("Connection reset by peer\nstack")

    def add(self, key, amount):
        self._answer()
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def check(self, keys):
        self._answer()
        return all(key in self.values for key in keys)

    def set(self, key, value):
        self._answer()
        self.values[key] = value

    def multi_get(self, keys):
        self._answer()
        return [self.values[key] for key in keys]  # a missing key is an error here; a real store would wait for it

    def last(self, rank, life=1):
        """What a rank has published last."""
        return json.loads(self.values[f"lightning_cocod/life {life}/rank {rank}"])


class Rank:
    def __init__(self, store, rank, n, *, timeout=LIMIT, compose=dict, receive=lambda notes: False):
        self.notes, self.loss, self.heard, self.receive = {}, [], 0, receive
        self.changed = threading.Condition()
        self.heartbeat = Heartbeat(
            store, rank, n, timeout=timeout, interval=INTERVAL, compose=compose, receive=self.received, lost=self.lost
        )

    def received(self, notes):
        with self.changed:
            self.notes = notes
            self.heard += 1
            self.changed.notify_all()
        return self.receive(notes)

    def lost(self, reason):
        with self.changed:
            self.loss.append(str(reason))
            self.changed.notify_all()

    def eventually(self, condition):
        deadline = time.monotonic() + LIMIT
        while not (true := condition(self)) and time.monotonic() < deadline:
            with self.changed:
                self.changed.wait(0.005)
        return true

    def beats(self, more):
        begun = self.heard
        return self.eventually(lambda me: me.loss or me.heard >= begun + more)

    def falls_silent(self):
        self.heartbeat._publish = lambda: None
        assert self.beats(2)  # whatever was being published is out

    def speaks_again(self):
        del self.heartbeat._publish


class Clock:
    """A clock that moves when it is told."""

    def __init__(self):
        self.now, self.looks = 0.0, 0

    def monotonic(self):
        self.looks += 1
        return self.now

    def tick(self, notes):
        self.now += TICK
        return True  # the next beat comes soon


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def store():
    before = set(threading.enumerate())
    store = MemoryStore()
    yield store
    store.frozen.set()
    deadline = time.monotonic() + LIMIT
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert set(threading.enumerate()) <= before


@contextlib.contextmanager
def ranks(store, n, **options):
    made = [Rank(store, r, n, **options) for r in range(n)]
    try:
        yield made
    finally:
        store.frozen.set()
        for rank in made:
            rank.heartbeat.close(LIMIT)


def test_every_rank_hears_what_every_rank_says(store):
    with ranks(store, 3, compose=lambda: {"samples": 7}) as (a, b, c):
        for rank in (a, b, c):
            assert rank.eventually(lambda me: all(note["samples"] == 7 for note in me.notes.values()) and len(me.notes) == 3)


def test_a_failure_reaches_all_peers_once_and_names_the_rank(store):
    with ranks(store, 3) as (a, b, c):
        b.heartbeat.failed("ValueError: boom")
        for rank in (a, c):
            assert rank.eventually(lambda me: me.loss)
        assert a.loss == c.loss == ["rank 1 failed: ValueError: boom"]
        assert b.loss == []


def test_the_first_reason_of_a_failure_stands(store):
    with ranks(store, 2) as (a, b):
        b.heartbeat.failed("ValueError: the cause")
        b.heartbeat.failed("CommunicationError: a consequence")
        assert a.eventually(lambda me: me.loss)
        assert a.loss == ["rank 1 failed: ValueError: the cause"]


def test_a_failure_is_told_even_by_a_rank_that_closes_at_once(store):
    with ranks(store, 2) as (a, b):
        b.heartbeat.failed("ValueError: boom")
        b.heartbeat.close(LIMIT)
        assert a.eventually(lambda me: me.loss)


# Silence


def test_a_rank_whose_counter_stands_still_is_lost(store, clock):
    with ranks(store, 2, timeout=0.3) as (a, b):
        assert a.eventually(lambda me: len(me.notes) == 2)
        b.falls_silent()
        a.receive = clock.tick
        assert a.eventually(lambda me: me.loss)
        assert a.loss == ["rank 1 is lost: no heartbeat for 0.3 s"]


def test_a_rank_that_beats_is_not_lost_however_long_it_takes(store, clock):
    with ranks(store, 2, timeout=10 * TICK) as (a, b):
        assert a.eventually(lambda me: len(me.notes) == 2)
        judged = []

        def slowly(notes):  # between two beats of b there is one of a, if not more
            if a.heard > len(judged):
                judged.append(a.heard)
                clock.tick(notes)
            return False

        b.receive = slowly
        assert b.eventually(lambda me: a.loss or len(judged) > 50)
        assert a.loss == []


def test_meeting_takes_until_every_peer_has_said_who_it_is(store):
    a = Rank(store, 0, 3)
    meeting = threading.Thread(target=a.heartbeat.meet)
    meeting.start()
    b = Rank(store, 1, 3)
    assert a.beats(3)
    assert meeting.is_alive()
    c = Rank(store, 2, 3)
    meeting.join(LIMIT)
    assert not meeting.is_alive()
    assert set(a.heartbeat._processes) == {1, 2}
    for rank in (a, b, c):
        rank.heartbeat.close(LIMIT)


def test_meeting_ends_when_a_peer_is_lost_before_all_are_here(store):
    a, b = Rank(store, 0, 3), Rank(store, 1, 3)
    b.heartbeat.failed("ValueError: boom")
    a.heartbeat.meet()
    assert a.loss == ["rank 1 failed: ValueError: boom"]
    for rank in (a, b):
        rank.heartbeat.close(LIMIT)


def test_a_rank_that_has_not_appeared_is_not_judged_and_one_that_has_is(store, clock):
    a = Rank(store, 0, 2, timeout=10 * TICK, receive=clock.tick)
    try:
        assert a.beats(50)
        assert a.loss == []
        b = Rank(store, 1, 2)
        b.falls_silent()
        assert a.eventually(lambda me: me.loss)
        assert a.loss == ["rank 1 is lost: no heartbeat for 0.1 s"]
        b.heartbeat.close(LIMIT)
    finally:
        a.heartbeat.close(LIMIT)


def test_a_rank_that_left_in_good_order_is_not_judged(store, clock):
    with ranks(store, 2, timeout=10 * TICK) as (a, b):
        assert a.eventually(lambda me: len(me.notes) == 2)
        b.heartbeat.close(LIMIT)
        assert store.last(1)["closed"]
        assert a.beats(2)
        a.receive = clock.tick
        assert a.beats(50)
        assert a.loss == []


def test_a_suspicion_shortens_the_time_to_a_few_beats(store, clock):
    with ranks(store, 2, timeout=3600.0) as (a, b):
        assert a.eventually(lambda me: len(me.notes) == 2)
        b.falls_silent()
        a.receive = clock.tick
        assert a.beats(50)
        assert a.loss == []
        a.heartbeat.suspect()
        assert a.eventually(lambda me: me.loss)
        assert a.loss == ["rank 1 is lost: no heartbeat for 0.04 s"]


def test_a_suspicion_does_not_lengthen_a_short_timeout(store):
    with ranks(store, 1, timeout=0.03) as (a,):
        a.heartbeat.suspect()
        assert a.heartbeat.timeout == 0.03


def test_ranks_that_were_all_suspended_together_do_not_accuse_each_other(store, clock):
    with ranks(store, 2, timeout=5) as (a, b):
        assert a.eventually(lambda me: len(me.notes) == 2)
        b.falls_silent()  # b is stopped, like a: by Ctrl-Z for example
        assert a.beats(2)
        clock.now += 3600.0  # an hour later both are continued, and a is the first to look
        assert a.beats(3)
        assert a.loss == []
        b.speaks_again()
        assert a.beats(5)
        assert a.loss == b.loss == []


def test_a_rank_that_was_suspended_itself_judges_again_afterwards(store, clock):
    with ranks(store, 2, timeout=0.3) as (a, b):
        assert a.eventually(lambda me: len(me.notes) == 2)
        b.falls_silent()
        assert a.beats(2)
        clock.now += 3600.0
        assert a.beats(3)
        a.receive = clock.tick
        assert a.eventually(lambda me: me.loss)
        assert a.loss == ["rank 1 is lost: no heartbeat for 0.3 s"]


def test_a_rank_that_was_suspended_judges_nobody_for_that_time_even_with_a_short_timeout(store, clock):
    with ranks(store, 2, timeout=3 * TICK) as (a, b):
        assert a.eventually(lambda me: len(me.notes) == 2)
        b.falls_silent()
        assert a.beats(2)
        clock.now += 3600.0
        assert a.beats(3)
        assert a.loss == []


# The store


STORE = "rank 0, or the launcher that hosts the store, is lost: the store does not answer"


def test_a_store_that_does_not_answer_is_the_loss_of_its_host(store):
    with ranks(store, 2) as (_, b):
        assert b.beats(1)
        store.broken = True
        assert b.eventually(lambda me: me.loss)
        assert b.loss == [f"{STORE} (Connection reset by peer)"]


def test_a_store_that_blocks_for_ever_is_the_loss_of_its_host(store):
    with ranks(store, 2) as (_, b):
        assert b.beats(1)
        store.frozen.clear()
        b.heartbeat.timeout = 0.1
        assert b.eventually(lambda me: me.loss)
        assert b.loss == [f"{STORE} (no answer for 0.1 s)"]


@pytest.mark.parametrize("how", ["broken", "blocked"])
def test_a_stopped_process_is_ended_whoever_notices_first_that_the_store_is_lost(store, how):
    """The beat, when the store's own time is up, or the guard, when the beat is blocked: which, depends on the load."""
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)
        born = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(") ")[2].split()[19])
        with ranks(store, 2) as (a, b):
            a.heartbeat._fence.me = them = Identity.of_this_process()._replace(pid=sleeper.pid, born=born)
            assert b.eventually(lambda me: me.heartbeat._processes.get(0) == them and me.heartbeat._fence.is_stopped(them))
            if how == "broken":
                store.broken = True
            else:
                store.frozen.clear()
                b.heartbeat.timeout = 0.1
            assert b.eventually(lambda me: me.loss)
            assert b.loss[0].startswith(STORE)
            assert b.loss[0].endswith(f"; its process {sleeper.pid} on this host was ended")
            assert sleeper.wait(LIMIT) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_blocked_store_is_not_blamed_for_the_time_in_which_nobody_ran(store, clock):
    with ranks(store, 2, timeout=5) as (_, b):
        assert b.beats(1)
        for _ in range(3):
            store.frozen.clear()
            clock.now += 3600.0
            looks = clock.looks
            assert b.eventually(lambda me: me.loss or clock.looks > looks + 10)
            store.frozen.set()
            assert b.beats(1)
        assert b.loss == []


def test_a_broken_store_after_close_is_nobodys_loss(store):
    with ranks(store, 2) as (a, b):
        assert a.beats(1)
        for rank in (a, b):
            rank.heartbeat._stop.set()
        store.broken = True
        for rank in (a, b):
            rank.heartbeat.close(LIMIT)
        assert a.loss == b.loss == []


def test_close_returns_although_the_store_is_stuck(store):
    with ranks(store, 2) as (a, _):
        assert a.beats(1)
        store.frozen.clear()
        a.heartbeat.close(0.05)
        a.heartbeat.close(0.05)


# Lives


def test_close_can_be_repeated(store):
    rank = Rank(store, 0, 1)
    rank.heartbeat.close(LIMIT)
    rank.heartbeat.close(LIMIT)
    assert store.last(0)["closed"]


def test_a_second_life_on_the_same_store_does_not_meet_the_first(store, clock):
    with ranks(store, 2, compose=lambda: {"life": 1}):
        pass
    a = Rank(store, 0, 2, timeout=10 * TICK, compose=lambda: {"life": 2}, receive=clock.tick)
    try:
        assert a.beats(50)
        assert a.notes == {0: {"life": 2}}
        assert a.loss == []
        b = Rank(store, 1, 2, compose=lambda: {"life": 2})
        b.heartbeat.failed("ValueError: boom")
        assert a.eventually(lambda me: me.loss)
        assert a.loss == ["rank 1 failed: ValueError: boom"]
        b.heartbeat.close(LIMIT)
        assert b.loss == []
    finally:
        a.heartbeat.close(LIMIT)


def test_a_note_arrives_as_it_is_whatever_its_fields_are_called(store):
    note = {"closed": 3, "count": -1, "failure": "none"}
    with ranks(store, 2, compose=lambda: note) as (a, b):
        assert b.eventually(lambda me: len(me.notes) == 2)
        assert b.notes == {0: note, 1: note}
        assert a.loss == b.loss == []


# A heartbeat that breaks


@pytest.fixture
def unhandled(monkeypatch):
    """Exceptions that ended a thread."""
    caught = []
    monkeypatch.setattr(threading, "excepthook", caught.append)
    return caught


def broken(error):
    raise error


def test_an_error_in_receive_is_told_to_this_rank_and_to_all_others(store, unhandled):
    with ranks(store, 3) as (a, b, c):
        b.receive = lambda notes: broken(ValueError("boom\nmore"))
        for rank in (a, b, c):
            assert rank.eventually(lambda me: me.loss)
        assert b.loss == ["the heartbeat of rank 1 ended: ValueError: boom"]
        assert a.loss == c.loss == ["rank 1 failed: ValueError: boom"]
    assert unhandled == []


def test_an_error_in_compose_is_told_to_this_rank(store, unhandled):
    with ranks(store, 2) as (_, b):
        b.heartbeat._compose = lambda: broken(ValueError("boom\nmore"))
        assert b.eventually(lambda me: me.loss)
        assert b.loss == ["the heartbeat of rank 1 ended: ValueError: boom"]


def test_an_error_in_compose_is_told_to_all_others(store, unhandled):
    with ranks(store, 2) as (a, b):
        b.heartbeat._compose = lambda: broken(ValueError("boom\nmore"))
        assert b.eventually(lambda me: me.loss)
        b.heartbeat._threads[0].join(LIMIT)
        assert unhandled == []
        assert store.last(1)["failure"] == "ValueError: boom"
        assert a.eventually(lambda me: me.loss)
        assert a.loss == ["rank 1 failed: ValueError: boom"]


def test_a_runtime_error_in_compose_is_not_the_stores(store, unhandled):
    with ranks(store, 2) as (_, b):
        b.heartbeat._compose = lambda: broken(RuntimeError("dictionary changed size during iteration"))
        assert b.eventually(lambda me: me.loss)
        assert "store" not in b.loss[0]
