"""When workers communicate: answers that depend on the number of steps alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cocod import Every, Schedule, WarmUp
from lightning_cocod.algorithms.when import Rounds, as_when

periods = st.integers(1, 9)
schedules = st.dictionaries(st.integers(1, 60), periods, max_size=4).flatmap(
    lambda later: periods.map(lambda first: {**later, 0: first})
)


def boundaries(when, steps):
    """The steps before whose forward a round begins."""
    rounds = Rounds(when)
    return [t for t in range(steps + 1) if rounds.begin(t)]


@given(periods, st.integers(0, 100))
def test_rounds_of_k_begin_at_the_multiples_of_k(k, steps):
    assert boundaries(Every(k), steps) == list(range(0, steps + 1, k))


@given(schedules, st.integers(0, 100))
def test_a_round_has_the_length_that_holds_where_it_begins(lengths, steps):
    begins = boundaries(Schedule(lengths), steps)
    assert begins[0] == 0
    for t, following in itertools.pairwise(begins):
        assert following - t == lengths[max(s for s in lengths if s <= t)]


def test_a_new_length_waits_for_the_round_to_end():
    assert boundaries(Schedule({0: 4, 5: 2}), 12) == [0, 4, 8, 10, 12]


@given(st.integers(0, 20), periods, st.integers(0, 60))
def test_rounds_begin_when_the_warm_up_is_over(warmup, k, steps):
    rule = WarmUp(warmup, Every(k))
    assert [rule.synchronous(t) for t in range(steps)] == [t < warmup for t in range(steps)]
    assert boundaries(rule, steps) == list(range(warmup, steps + 1, k))


def test_a_schedule_counts_its_steps_from_the_beginning_of_training():
    assert boundaries(WarmUp(3, Schedule({0: 1, 5: 3})), 12) == [3, 4, 5, 8, 11]


def test_warm_ups_nest():
    rule = WarmUp(2, WarmUp(5, Every(2)))
    assert [rule.synchronous(t) for t in range(7)] == [True] * 5 + [False] * 2


@given(schedules, st.integers(0, 10), st.integers(0, 50), st.integers(0, 50))
def test_the_end_of_the_round_is_all_that_a_resumed_count_needs(lengths, warmup, stop, more):
    when = WarmUp(warmup, Schedule(lengths))
    first, second = Rounds(when), Rounds(when)
    begins = [t for t in range(stop) if first.begin(t)]
    second.ends = first.ends
    begins += [t for t in range(stop, stop + more + 1) if second.begin(t)]
    assert begins == boundaries(when, stop + more)


def test_asking_twice_begins_one_round():
    rounds = Rounds(Every(2))
    assert [rounds.begin(t) for t in (0, 0, 1, 2, 2)] == [True, False, False, True, False]


def test_what_a_user_writes():
    rule = Every(7)
    assert as_when(rule) is rule
    assert repr(as_when(3)) == "Every(3)"
    assert repr(as_when({5: 2, 0: 1})) == "Schedule({0: 1, 5: 2})"
    assert repr(as_when(3, warmup_steps=2)) == "WarmUp(2, Every(3))"


@pytest.mark.parametrize(
    ("period", "warmup", "names"),
    [(bad, 0, "period") for bad in (0, -1, 2.5, True, "often", None, {1: 2}, {}, {0: 0}, {0: 1, 5: 2.5})]
    + [({0: 1, bad: 2}, 0, "a step of the period") for bad in (-1, 2.5, "late")]
    + [(4, bad, "warmup_steps") for bad in (-1, 2.5, True)],
)
def test_a_bad_rule_is_a_value_error_of_one_line_that_names_the_option(period, warmup, names):
    with pytest.raises(ValueError, match=names) as error:
        as_when(period, warmup)
    assert "\n" not in str(error.value)
