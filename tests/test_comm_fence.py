"""The fence: it ends exactly the process that it is told, and never another one."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lightning_cocod.comm.fence import Fence, Identity

LIMIT = 20.0
START = 19  # place of the start time among the fields behind the name, see proc(5)


@pytest.fixture(scope="module")
def sleeper():
    """A process that does nothing, and who it is."""
    process = subprocess.Popen(["sleep", "1000"])
    born = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[START])
    yield process, Identity.of_this_process()._replace(pid=process.pid, born=born)
    process.kill()
    process.wait()


def eventually(condition):
    deadline = time.monotonic() + LIMIT
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


DIFFERENCES = {
    "another boot": {"boot": "00000000-0000-0000-0000-000000000000"},
    "another namespace": {"namespace": "pid:[1]"},
    "another start": {"born": 1},
    "another process": {"pid": 2**22 + 1},  # beyond the largest that Linux gives
}


@pytest.mark.parametrize("difference", DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_process_that_differs_in_anything_is_left_alone(difference, sleeper):
    process, identity = sleeper
    assert not Fence().kill(identity._replace(**difference))
    assert not Fence().is_stopped(identity._replace(**difference))
    assert process.poll() is None


def test_nothing_is_known_about_a_process_of_another_host(sleeper):
    _, identity = sleeper
    for name in ("another boot", "another namespace"):
        assert not Fence().is_gone(identity._replace(**DIFFERENCES[name], pid=2**22 + 1))


def test_a_process_whose_id_belongs_to_another_one_now_is_gone(sleeper):
    _, identity = sleeper
    assert not Fence().is_gone(identity)
    assert Fence().is_gone(identity._replace(born=identity.born - 1))
    assert Fence().is_gone(identity._replace(pid=2**22 + 1))


def test_a_process_never_ends_itself():
    me = Identity.of_this_process()
    assert me is not None
    assert not Fence().kill(me)


def test_where_the_system_tells_nothing_nobody_is_touched(sleeper, monkeypatch):
    process, identity = sleeper
    monkeypatch.setattr(Identity, "of_this_process", classmethod(lambda cls: None))
    fence = Fence()
    assert not any(ask(identity) for ask in (fence.kill, fence.is_gone, fence.is_stopped))
    assert process.poll() is None


def test_a_stopped_process_is_ended_and_then_gone(sleeper):
    process, identity = sleeper
    fence = Fence()
    assert not fence.is_stopped(identity)
    os.kill(process.pid, signal.SIGSTOP)
    assert eventually(lambda: fence.is_stopped(identity))
    assert fence.kill(identity)
    assert eventually(lambda: fence.is_gone(identity))  # a zombie: nobody has asked for its exit code yet
    assert process.wait(LIMIT) == -signal.SIGKILL
    assert fence.is_gone(identity)
    assert not fence.kill(identity)
