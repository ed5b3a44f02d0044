"""A scheduler that is unkind, for tests whose verdict must not depend on the one there is.

    PYTHONPATH=tests/perturbed pytest -n 2 --dist worksteal

Python imports this module in every process that finds it. Then half of all threads begin late, now and then whoever has been
woken sleeps on, and threads that compute are interrupted a tenth as often. A test that fails with it and not without takes
for granted that one thread is faster than another.
"""

import os
import sys
import threading
import time
from random import Random

LATE = 0.15  # seconds at most by which a thread begins late
SLEEPY = 0.05  # seconds at most for which somebody who has been woken sleeps on
sys.setswitchinterval(0.05)

_dice = Random()  # of its own: seeds of tests stay what they are
os.register_at_fork(after_in_child=_dice.seed)
_run, _wait = threading.Thread._bootstrap_inner, threading.Condition.wait


def _begin_late(thread):
    work = thread.run

    def late():
        time.sleep(_dice.uniform(0, LATE))
        work()

    if _dice.random() < 0.5:
        thread.run = late
    _run(thread)


def _sleep_on(condition, timeout=None):
    woken = _wait(condition, timeout)
    if _dice.random() < 0.03:
        condition.release()
        time.sleep(_dice.uniform(0, SLEEPY))
        condition.acquire()
    return woken


threading.Thread._bootstrap_inner, threading.Condition.wait = _begin_late, _sleep_on
