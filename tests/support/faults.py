"""Faults by name: what happens to one rank, and where in its run.

    model = Faulty("is killed", "while reducing", rank=1)
    trainer("cocod", 2, max_epochs=100).fit(model, loader(), loader())

`forked` runs a rank in a child of the warm worker, so that a rank that dies costs no new worker.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing import Pipe

import torch
import torch.distributed as dist
from support import worker
from support.toys import Toy

from lightning_cocod.comm import collectives


def _raise(module):
    raise ValueError("my own bug")


def _forget(module):
    with torch.no_grad():
        module.net[0].weight.fill_(float("nan"))


def _signal(number):
    return lambda module: os.kill(os.getpid(), number)


WHAT = {
    "raises": _raise,
    "is killed": _signal(signal.SIGKILL),
    "is stopped": _signal(signal.SIGSTOP),
    "is terminated": _signal(signal.SIGTERM),
    "is interrupted": _signal(signal.SIGINT),
    "leaves": lambda module: os._exit(0),
    "exits": lambda module: sys.exit(0),
    "diverges": _forget,
}
"""What can happen to a rank."""
WHERE = (
    "before the first step",
    "between rounds",
    "while sending",
    "while reducing",
    "in validation",
    "in a checkpoint",
    "in a test",
)
"""Where it can happen. Each comes once, in the middle of the second epoch if it can."""


class Faulty(Toy):
    """One rank meets a fault; `rank=None`: all of them do."""

    def __init__(self, what, where, rank=1, **options):
        super().__init__(**{"dropout": 0.0, **options})
        assert where in WHERE
        self.what, self.where, self.rank = WHAT[what], where, rank
        self.steps, self.happened = 0, False

    def here(self, *places):
        if self.where in places and not self.happened and self.rank in (None, self.trainer.global_rank):
            self.happened = True
            self.what(self)

    def on_train_start(self):
        self.here("before the first step")
        if self.where in ("while sending", "while reducing") and self.trainer.global_rank == self.rank:
            in_the_transport(self.where, lambda: self.what(self))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        if self.steps == 9:
            self.here("between rounds")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.steps > 6:
            self.here("in validation")
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.here("in a test")
        return super().test_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        self.here("in a checkpoint")


def in_the_transport(where, happens):
    """From now on, this rank's next message meets the fault: its bytes are handed over, or have been reduced here."""
    launch = dist.all_reduce

    def all_reduce(*args, **kwargs):
        work = launch(*args, **kwargs)
        if where == "while reducing":
            work.wait()
        happens()
        return work

    collectives.dist.all_reduce = all_reduce


def forked(rank, world_size, fn, *args):
    """`fn(rank, world_size, *args)` in a child of this process. Returns how the child ended, and what it had to say.

    The exit code is that of a script in which the exception is not caught. A child that ends by itself says as well what
    it has left behind.
    """
    mine, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        threads, text, code = set(threading.enumerate()), "", 0
        try:
            theirs.send_bytes(repr(fn(rank, world_size, *args)).encode())
        except BaseException as error:
            text = traceback.format_exc()
            code = (error.code or 0) if isinstance(error, SystemExit) else 1
        with contextlib.suppress(BaseException):
            left = [name for name in worker.leftovers(threads) if "lifeline" not in name]
            theirs.send_bytes((text + "".join(f"left over: {name}\n" for name in left)).encode())
        os._exit(code if isinstance(code, int) else 1)
    theirs.close()
    said = []
    with contextlib.suppress(EOFError):
        while True:
            said.append(mine.recv_bytes().decode())
    mine.close()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), "\n".join(said)


def gone(pids, limit=20.0):
    """Whether these processes end by themselves, all of them."""
    deadline = time.monotonic() + limit
    while (left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left
