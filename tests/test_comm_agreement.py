"""Agreeing on a step: whatever the order of steps, beats and wishes, all ranks do the same after the same steps."""

import functools
import json
import random
import threading
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks

from lightning_cocod.comm import Communicator
from lightning_cocod.comm import agreement as module
from lightning_cocod.comm import communicator as communicating
from lightning_cocod.comm.agreement import Agreement


class Blocked(Exception):
    """The training thread waits for a verdict."""


class Impatient(threading.Condition):
    def wait(self, timeout=None):
        raise Blocked


class Ranks:
    """Simulated ranks. A heartbeat publishes, reads and hands over in three moments; anything may happen in between."""

    def __init__(self, n, first_step=0):
        with mock.patch.object(module.threading, "Condition", Impatient):
            self.ranks = [Agreement(r, n, check=lambda: None) for r in range(n)]
        self.store = {}
        self.moment, self.read = [0] * n, [None] * n
        self.steps = [first_step] * n
        self.blocked = [False] * n
        self.done = [[] for _ in range(n)]

    def ask(self, rank, what):
        self.ranks[rank].request(what)

    def beat(self, rank):
        agreement = self.ranks[rank]
        if self.moment[rank] == 0:
            self.store[rank] = json.dumps(agreement.note())
        elif self.moment[rank] == 1:
            self.read[rank] = dict(self.store)
        else:
            agreement.receive({r: json.loads(note) for r, note in self.read[rank].items()})
        self.moment[rank] = (self.moment[rank] + 1) % 3

    def appear(self, *, whole_beats=2):
        """Every rank says where it begins, and all have heard it."""
        for rank, agreement in enumerate(self.ranks):
            assert agreement.reached(self.steps[rank]) is None
        for _ in range(3 * whole_beats):
            for rank in range(len(self.ranks)):
                self.beat(rank)

    def train(self, rank):
        """One step, unless the rank still waits at the last one."""
        self.steps[rank] += not self.blocked[rank]
        try:
            what = self.ranks[rank].reached(self.steps[rank])
        except Blocked:
            self.blocked[rank] = True
            return
        self.blocked[rank] = False
        if what is not None:
            self.done[rank].append((what, self.steps[rank]))

    def satisfied(self):
        return not any(a.wishes for a in self.ranks) and len({len(d) for d in self.done}) == 1

    def go_on(self, rounds=3000):
        """Everybody trains and beats until all wishes are fulfilled; returns whether they are."""
        for _ in range(rounds):
            front = max(self.steps) + 1
            for rank in range(len(self.ranks)):
                self.train(rank)
                while self.steps[rank] < front and not self.blocked[rank]:
                    self.train(rank)
                for _ in range(3):
                    self.beat(rank)
            if self.satisfied():
                return True
        return False

    def check(self):
        """What holds at every moment."""
        longest = max(self.done, key=len)
        for done in self.done:
            assert done == longest[: len(done)]
        for rank, done in enumerate(self.done):
            for _, step in longest[len(done) :]:
                assert self.steps[rank] <= step, f"rank {rank} passed a step that others have agreed on"


def actions(n):
    rank = st.integers(0, n - 1)
    return st.lists(
        st.one_of(
            st.tuples(st.just("train"), rank, st.integers(1, 12)),
            st.tuples(st.just("beat"), rank, st.integers(1, 7)),
            st.tuples(st.just("ask"), rank, st.sampled_from(["stop", "checkpoint", "SIGTERM"])),
        ),
        max_size=120,
    )


schedules = st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), actions(n)))


def play(ranks, schedule):
    asked = set()
    for name, rank, amount in schedule:
        if name == "ask":
            ranks.ask(rank, amount)
            asked.add(amount)
        else:
            for _ in range(amount):
                getattr(ranks, name)(rank)
                ranks.check()
    return asked


@settings(deadline=None, max_examples=200)
@given(schedules)
def test_all_ranks_do_the_same_after_the_same_steps_and_every_wish_is_fulfilled(case):
    n, schedule = case
    ranks = Ranks(n)
    asked = play(ranks, schedule)
    assert ranks.go_on()
    ranks.check()
    assert all(done == ranks.done[0] for done in ranks.done)
    assert {what for what, _ in ranks.done[0]} == asked


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_the_same_on_long_runs_of_ranks_with_very_different_speeds(n, seed):
    generator = random.Random(seed)
    ranks = Ranks(n)
    speed = [generator.choice([1, 3, 20]) for _ in range(n)]
    for _ in range(400):
        rank = generator.randrange(n)
        if generator.random() < 0.02:
            ranks.ask(rank, generator.choice(["stop", "checkpoint"]))
        for _ in range(generator.randrange(speed[rank] + 1)):
            ranks.train(rank)
        for _ in range(generator.randrange(5)):
            ranks.beat(generator.randrange(n))
        ranks.check()
    assert ranks.go_on()
    ranks.check()


def test_a_rank_that_waits_for_the_verdict_stops_exactly_at_the_step():
    ranks = Ranks(2)
    ranks.appear()
    ranks.ask(1, "stop")
    for rank in (1, 0):
        for _ in range(3):
            ranks.beat(rank)
    _, _, step = ranks.ranks[0].note()["proposal"]
    for _ in range(step + 5):
        ranks.train(0)
    assert ranks.blocked[0]
    assert ranks.steps[0] == step
    assert ranks.done[0] == []


def test_a_proposal_that_somebody_has_passed_is_replaced_by_a_later_one():
    ranks = Ranks(2)
    ranks.appear()
    ranks.ask(0, "stop")
    for _ in range(3):
        ranks.beat(0)
    _, _, step = ranks.ranks[0].note()["proposal"]
    for _ in range(step + 3):
        ranks.train(1)
    assert ranks.go_on()
    assert ranks.done[0] == ranks.done[1]
    assert ranks.done[0][0][1] > step + 3


def test_wishes_of_one_rank_are_fulfilled_in_their_order_and_once_each():
    ranks = Ranks(3)
    for what in ("a", "b", "a", "c"):
        ranks.ask(2, what)
    assert ranks.go_on()
    assert [what for what, _ in ranks.done[0]] == ["a", "b", "c"]


def test_the_same_wish_of_all_ranks_is_fulfilled_once():
    ranks = Ranks(3)
    for rank in range(3):
        ranks.ask(rank, "stop")
    assert ranks.go_on()
    assert [what for what, _ in ranks.done[0]] == ["stop"]


def test_one_rank_gets_what_it_wants_at_once():
    alone = Agreement(0, 1, check=lambda: None)
    assert alone.reached(1) is None
    alone.request("stop")
    alone.request("stop")
    alone.request("checkpoint")
    assert alone.wishes == ("stop", "checkpoint")
    assert [alone.reached(2), alone.reached(3), alone.reached(4)] == ["stop", "checkpoint", None]


def test_a_wish_made_before_the_first_step_of_a_resumed_run_is_fulfilled():
    ranks = Ranks(2, first_step=1000)
    ranks.ask(1, "SIGTERM")
    for _ in range(6):  # both are still compiling
        ranks.beat(1)
        ranks.beat(0)
    assert ranks.ranks[0].note()["proposal"] is None
    assert ranks.go_on()
    assert ranks.done[0] == ranks.done[1]
    assert 1000 < ranks.done[0][0][1] < 1040


def test_nothing_is_proposed_before_every_rank_has_said_where_it_is():
    ranks = Ranks(3, first_step=7)
    ranks.ask(0, "stop")
    for told in range(3):
        for _ in range(6):
            for rank in range(3):
                ranks.beat(rank)
        assert ranks.ranks[0].note()["proposal"] is None
        ranks.ranks[told].reached(7)
    for _ in range(6):
        for rank in range(3):
            ranks.beat(rank)
    number, what, step = ranks.ranks[0].note()["proposal"]
    assert (number, what) == (1, "stop")
    assert step > 7


def test_a_phase_of_fast_steps_does_not_make_later_wishes_wait():
    ranks = Ranks(2)
    ranks.ask(0, "first")
    while not ranks.satisfied():  # rank 1 takes a hundred steps a beat
        for _ in range(100):
            ranks.train(1)
        ranks.train(0)
        for _ in range(3):
            ranks.beat(1)
            ranks.beat(0)
    for rank in range(2):
        while ranks.steps[rank] < max(ranks.steps):
            ranks.train(rank)
    begun = max(ranks.steps)
    ranks.ask(0, "second")
    assert ranks.go_on()
    assert ranks.done[0][-1][1] - begun < 40


def test_waiting_for_a_verdict_ends_when_the_peers_are_gone():
    def gone():
        raise ConnectionError("lost")

    agreement, other = Agreement(0, 2, check=gone), Agreement(1, 2, check=gone)
    agreement.request("stop")
    agreement.reached(0)
    other.reached(0)
    agreement.receive({0: agreement.note(), 1: other.note()})
    _, _, proposed = agreement.note()["proposal"]
    for step in range(1, proposed):
        agreement.reached(step)
    with pytest.raises(ConnectionError, match="lost"):
        agreement.reached(proposed)


def wish_while_training(rank, n, wishes):
    communicator = Communicator()
    with mock.patch.object(communicating, "Heartbeat", functools.partial(communicating.Heartbeat, interval=0.05)):
        communicator.start()
    dice, done, step = random.Random(rank), [], 0
    while len(done) < len(wishes):
        step += 1
        time.sleep(0.004 * dice.random())
        if rank == len(done) % n:
            communicator.agreement.request(wishes[len(done)])
        if what := communicator.agreement.reached(step):
            done.append((what, step))
    communicator.close()
    return done


def test_real_ranks_agree_again_and_again_while_they_train_at_their_own_pace():
    done = run_ranks(wish_while_training, 3, ["checkpoint", "checkpoint", "stop"], timeout=40)
    assert done[0] == done[1] == done[2]
    assert [what for what, _ in done[0]] == ["checkpoint", "checkpoint", "stop"]
