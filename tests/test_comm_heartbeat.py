"""Heartbeats: who lives is judged by counters and the local clock; what a rank says reaches the others."""

import contextlib
import json
import threading
import time

import pytest

from lightning_cocod.comm.heartbeat import Heartbeat

LIMIT = 20.0


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

    def set(self, key, value):
        self._answer()
        self.values[key] = value

    def multi_get(self, keys):
        self._answer()
        return [self.values[key] for key in keys]


class Rank:
    def __init__(self, store, rank, n, *, timeout=LIMIT, start=True, compose=dict, receive=lambda notes: False):
        self.notes, self.loss, self.heard, self._receive = {}, [], 0, receive
        self.changed = threading.Condition()
        self.heartbeat = Heartbeat(
            store, rank, n, "test", timeout=timeout, interval=0.01, compose=compose, receive=self.receive, lost=self.lost
        )
        if start:
            self.heartbeat.start()

    def receive(self, notes):
        with self.changed:
            self.notes = notes
            self.heard += 1
            self.changed.notify_all()
        return self._receive(notes)

    def lost(self, reason):
        with self.changed:
            self.loss.append(str(reason))
            self.changed.notify_all()

    def eventually(self, condition):
        with self.changed:
            return self.changed.wait_for(lambda: condition(self), LIMIT)

    def beats(self, more):
        begun = self.heard
        return self.eventually(lambda me: me.loss or me.heard >= begun + more)


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
    made = [Rank(store, r, n, start=False, **options) for r in range(n)]
    for rank in made:
        rank.heartbeat.start()
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


@pytest.mark.xfail(strict=True, reason="a second reason replaces the first one")
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


def test_a_rank_whose_counter_stands_still_is_lost(store):
    with ranks(store, 2, timeout=0.3) as (a, b):
        assert a.beats(3)
        b.heartbeat._publish = lambda: None
        assert a.eventually(lambda me: me.loss)
        assert a.loss == ["rank 1 is lost: no heartbeat for 0.3 s"]


def test_a_rank_that_never_began_to_beat_is_lost(store):
    a, _ = Rank(store, 0, 2, timeout=0.1, start=False), Rank(store, 1, 2, start=False)
    a.heartbeat.start()
    assert a.eventually(lambda me: me.loss)
    a.heartbeat.close(LIMIT)


def test_a_rank_that_left_in_good_order_is_not_judged(store):
    with ranks(store, 2) as (a, b):
        b.heartbeat.close(LIMIT)
        a.heartbeat.timeout = 0.05
        assert json.loads(store.values["test/1"])["closed"]
        assert a.beats(20)
        assert a.loss == []


@pytest.mark.xfail(strict=True, reason="the time in which nobody ran counts as the peers' silence")
def test_ranks_that_were_all_suspended_together_do_not_accuse_each_other(store, monkeypatch):
    from lightning_cocod.comm import heartbeat as module

    a, b = Rank(store, 0, 2, timeout=5, start=False), Rank(store, 1, 2, timeout=5, start=False)
    slept = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda now=time.perf_counter: now() + slept)
    a.heartbeat.start()  # b counts as stopped from here on: like a, by Ctrl-Z for example
    assert a.beats(2)
    slept = 3600.0  # an hour later both are continued, and a is the first to look
    assert a.beats(2)
    b.heartbeat.start()
    try:
        assert a.beats(5)
        assert a.loss == []
    finally:
        a.heartbeat.close(LIMIT)
        b.heartbeat.close(LIMIT)


def test_a_store_that_does_not_answer_is_the_loss_of_its_host(store):
    with ranks(store, 2) as (_, b):
        assert b.beats(1)
        store.broken = True
        assert b.eventually(lambda me: me.loss)
        assert b.loss == ["rank 0 is lost: its store does not answer (Connection reset by peer)"]


@pytest.mark.xfail(strict=True, reason="nobody watches a heartbeat that is itself stuck in the store")
def test_a_store_that_blocks_for_ever_is_the_loss_of_its_host(store):
    with ranks(store, 2, timeout=0.1) as (_, b):
        assert b.beats(1)
        store.frozen.clear()
        with b.changed:
            assert b.changed.wait_for(lambda: b.loss, 2.0)


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


def test_close_without_start_returns(store):
    rank = Rank(store, 0, 1, start=False)
    rank.heartbeat.close(LIMIT)
    rank.heartbeat.close(LIMIT)


def test_a_note_arrives_as_it_is_whatever_its_fields_are_called(store):
    note = {"closed": 3, "count": -1, "failure": "none"}
    with ranks(store, 2, compose=lambda: note) as (a, b):
        assert b.beats(2)
        assert b.notes == {0: note, 1: note}
        assert a.loss == b.loss == []
