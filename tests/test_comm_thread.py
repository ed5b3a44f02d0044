"""The communication thread: one order, one first error, and an end that is bounded in time."""

import gc
import threading
import time
import weakref

import pytest

from lightning_cocod.comm.thread import CommunicationThread

LIMIT = 20.0
"""Seconds after which a condition that should come counts as never coming."""


def eventually(condition):
    deadline = time.monotonic() + LIMIT
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return true


@pytest.fixture
def thread():
    before = set(threading.enumerate())
    thread = CommunicationThread("communication under test")
    yield thread
    assert thread.close(LIMIT)
    assert eventually(lambda: set(threading.enumerate()) <= before)


class Gate:
    """A job that is stuck until it is opened."""

    def __init__(self, thread):
        self.entered, self.open = threading.Event(), threading.Event()
        self.handle = thread.submit(self)
        assert self.entered.wait(LIMIT)

    def __call__(self):
        self.entered.set()
        assert self.open.wait(LIMIT)
        return "through"


def fail_with(error):
    def job():
        raise error

    return job


def test_jobs_run_one_after_the_other_in_the_order_of_submission(thread):
    ran, inside = [], []

    def job(number):
        inside.append(number)
        assert len(inside) == 1
        ran.append((number, threading.current_thread()))
        inside.remove(number)
        return number

    handles = [thread.submit(lambda n=n: job(n)) for n in range(100)]
    assert [h.wait() for h in handles] == list(range(100))
    assert [n for n, _ in ran] == list(range(100))
    assert {t.name for _, t in ran} == {"communication under test"}


def test_wait_raises_what_the_job_raised_every_time(thread):
    error = KeyError("mine")
    handle = thread.submit(fail_with(error))
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            handle.wait()
        assert caught.value is error
    assert handle.done()
    assert handle.join(0) is False


def test_after_a_failure_neither_queued_nor_later_jobs_run_and_all_raise_the_first_error(thread):
    ran, gate = [], Gate(thread)
    first = ValueError("first")
    thread.submit(fail_with(first))
    queued = [thread.submit(lambda: ran.append("queued")), thread.submit(fail_with(ValueError("second")))]
    gate.open.set()
    assert gate.handle.wait() == "through"
    for handle in queued:
        with pytest.raises(ValueError, match="first"):
            handle.wait()
    assert eventually(lambda: thread.error is first)
    with pytest.raises(ValueError, match="first"):
        thread.submit(lambda: ran.append("later"))
    assert thread.close(LIMIT)
    assert ran == []


def test_fail_releases_those_who_wait_for_a_stuck_job_and_for_those_behind_it(thread):
    ran, gate = [], Gate(thread)
    behind = thread.submit(lambda: ran.append("behind"))
    raised = []

    def waiter(handle):
        try:
            handle.wait()
        except ConnectionError as error:
            raised.append(str(error))

    waiters = [threading.Thread(target=waiter, args=(h,)) for h in (gate.handle, behind)]
    for w in waiters:
        w.start()
    thread.fail(ConnectionError("lost"))
    thread.fail(ConnectionError("too late"))
    for w in waiters:
        w.join(LIMIT)
    assert raised == ["lost", "lost"]
    gate.open.set()
    assert thread.close(LIMIT)
    assert ran == []


def test_a_result_that_comes_after_the_failure_does_not_replace_it(thread):
    gate = Gate(thread)
    thread.fail(ConnectionError("lost"))
    gate.open.set()
    assert thread.close(LIMIT)
    with pytest.raises(ConnectionError, match="lost"):
        gate.handle.wait()


def test_every_handle_is_settled_when_submissions_race_with_a_failure(thread):
    handles, refused = [], []

    def submitter():
        try:
            while True:
                handles.append(thread.submit(lambda: None))
        except ConnectionError as error:
            refused.append(error)

    submitters = [threading.Thread(target=submitter) for _ in range(4)]
    for s in submitters:
        s.start()
    assert eventually(lambda: len(handles) > 200)
    thread.fail(ConnectionError("lost"))
    for s in submitters:
        s.join(LIMIT)
    assert len(refused) == 4
    assert all(eventually(h.done) for h in handles)


def test_close_lets_queued_jobs_end_then_refuses(thread):
    gate = Gate(thread)
    queued = [thread.submit(lambda n=n: n) for n in range(10)]
    assert thread.close(0) is False
    gate.open.set()
    assert thread.close(LIMIT)
    assert [h.wait() for h in queued] == list(range(10))
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(lambda: None)
    assert thread.close(0)
    assert thread.close(LIMIT)


def test_close_returns_although_a_job_is_stuck(thread):
    gate = Gate(thread)
    assert thread.close(0.05) is False
    assert thread.close(0.05) is False
    assert not gate.handle.done()
    gate.open.set()


def test_a_job_may_close_its_own_thread(thread):
    assert thread.submit(lambda: thread.close(LIMIT)).wait() is False
    assert thread.close(LIMIT)


def test_a_job_that_fails_while_the_thread_closes_gives_its_error_to_those_behind_it(thread):
    gate = Gate(thread)
    thread.submit(fail_with(ValueError("first")))
    behind = thread.submit(lambda: None)
    thread.close(0)
    gate.open.set()
    with pytest.raises(ValueError, match="first"):
        behind.wait()


def test_inputs_live_until_the_job_is_done_and_no_longer(thread):
    class Input:
        pass

    gate, value = Gate(thread), Input()
    alive = weakref.ref(value)
    handle = thread.submit(lambda value=value: value and None)
    del value
    gc.collect()
    assert alive() is not None
    gate.open.set()
    handle.wait()
    assert eventually(lambda: gc.collect() >= 0 and alive() is None)


def test_inputs_of_jobs_that_never_run_are_released(thread):
    class Input:
        pass

    gate, value = Gate(thread), Input()
    alive = weakref.ref(value)
    handle = thread.submit(lambda value=value: None)
    del value
    thread.fail(ConnectionError("lost"))
    assert handle.done()
    assert eventually(lambda: gc.collect() >= 0 and alive() is None)
    gate.open.set()
