"""The ledger: what was spent, and when the device knows it."""

import threading

import pytest

from lightning_cocod.comm.ledger import Ledger, Reading, Totals


def test_amounts_add_up_over_threads():
    ledger = Ledger()
    threads = [threading.Thread(target=lambda: [ledger.add(sent=2, messages=1) for _ in range(500)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (ledger.totals().sent, ledger.totals().messages) == (4000, 2000)


def test_times_count_once_they_are_known_and_only_once():
    ledger, known = Ledger(), []
    ledger.add_when_known("busy", lambda: known[0] if known else None)
    assert ledger.totals().busy == 0
    known.append(3.0)
    assert ledger.totals().busy == 3
    assert ledger.totals().busy == 3


def test_one_unknown_time_does_not_hold_back_those_after_it():
    ledger = Ledger()
    ledger.add_when_known("busy", lambda: None)
    ledger.add_when_known("exposed", lambda: 1.0)
    assert (ledger.totals().busy, ledger.totals().exposed) == (0, 1)


def test_totals_are_a_copy():
    ledger = Ledger()
    before = ledger.totals()
    ledger.add(sent=1)
    assert before.sent == 0
    assert (ledger.totals() - before).sent == 1


@pytest.mark.parametrize(
    ("busy", "exposed", "hidden"), [(0, 0, None), (0, 5, None), (4, 1, 0.75), (4, 0, 1), (4, 9, 0), (4, -1, 1)]
)
def test_hidden_fraction_lies_between_zero_and_one_where_there_was_something_to_hide(busy, exposed, hidden):
    assert Totals(busy=busy, exposed=exposed).hidden_fraction == hidden


def test_a_reading_without_steps_time_or_bytes_divides_by_nothing():
    metrics = Reading().since(Reading())
    assert "comm/hidden_fraction" not in metrics
    assert metrics["comm/compression_ratio"] == 1
    assert "throughput/samples_per_sec" not in metrics


def test_times_are_those_since_the_earlier_reading_per_step_and_bytes_are_totals():
    begun = Reading(10, 2, 100, Totals(busy=1, exposed=1, skew=1, sent=10, received=10, raw=10))
    ended = Reading(14, 6, 180, Totals(busy=3, exposed=1.5, skew=2, sent=30, received=40, raw=60))
    assert ended.since(begun) == {
        "comm/exposed_ms": 125.0,
        "comm/busy_ms": 500.0,
        "comm/skew_ms": 250.0,
        "comm/hidden_fraction": 0.75,
        "comm/sent_bytes": 30.0,
        "comm/received_bytes": 40.0,
        "comm/compression_ratio": 2.0,
        "throughput/step_ms": 1000.0,
        "throughput/samples_per_sec": 20.0,
    }
