"""The watchdog: it ends the process after a loss, unless the training thread notices and then leaves in time."""

import threading
import time
from types import SimpleNamespace

import pytest

from lightning_cocod.comm import watchdog as module
from lightning_cocod.comm.errors import PeerLost
from lightning_cocod.comm.watchdog import Watchdog

LIMIT = 20.0
SHORT = 0.02
LOSS = PeerLost("rank 1 is lost")


@pytest.fixture
def exits(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(module, "os", SimpleNamespace(_exit=codes.append))
    yield codes
    assert not watching()


def watching():
    return [t for t in threading.enumerate() if t.name == "watchdog"]


def ended():
    """The watchdog has come to its decision."""
    deadline = time.monotonic() + LIMIT
    while watching() and time.monotonic() < deadline:
        time.sleep(0.002)
    return not watching()


def test_a_loss_that_nobody_notices_ends_the_process_and_says_why(exits, capfd):
    watchdog = Watchdog(3, grace=SHORT, patience=LIMIT)
    watchdog.alarm(LOSS)
    assert ended()
    assert exits == [1]
    assert not watchdog.was_noticed
    assert capfd.readouterr().err.startswith("[rank 3] rank 1 is lost; ")


def test_a_loss_that_is_noticed_ends_the_process_if_the_thread_does_not_leave(exits, capfd):
    watchdog = Watchdog(0, grace=LIMIT, patience=SHORT)
    watchdog.alarm(LOSS)
    watchdog.noticed()
    assert watchdog.was_noticed
    assert ended()
    assert exits == [1]
    assert "rank 1 is lost" in capfd.readouterr().err


def test_the_patience_begins_when_the_loss_is_noticed(exits):
    watchdog = Watchdog(0, grace=LIMIT, patience=SHORT)
    watchdog.alarm(LOSS)
    time.sleep(3 * SHORT)
    assert watching()
    watchdog.noticed()
    assert ended()
    assert exits == [1]


@pytest.mark.parametrize("first", ["alarm", "noticed", "over"])
def test_a_thread_that_has_left_is_let_alone_whatever_comes_first(exits, first):
    watchdog = Watchdog(0, grace=LIMIT, patience=LIMIT)
    calls = {"alarm": lambda: watchdog.alarm(LOSS), "noticed": watchdog.noticed, "over": watchdog.over}
    calls.pop(first)()
    for call in calls.values():
        call()
    assert ended()
    assert exits == []
    assert watchdog.was_noticed


def test_several_alarms_are_one(exits):
    watchdog = Watchdog(0, grace=LIMIT, patience=LIMIT)
    for _ in range(3):
        watchdog.alarm(LOSS)
    assert len(watching()) == 1
    watchdog.over()
    assert ended()
    watchdog.alarm(LOSS)
    assert not watching()
    assert exits == []
