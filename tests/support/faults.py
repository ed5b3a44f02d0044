"""Faults by name: what happens to one rank, and where in its run.

    model = Faulty("is killed", "while reducing", rank=1)
    trainer("cocod", 2, max_epochs=100).fit(model, loader(), loader())

`forked` runs a rank in a child of the warm worker, so that a rank that dies costs no new worker.
"""

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from functools import partial
from multiprocessing import Pipe

from lightning_cocod.comm import ring
from lightning_cocod.comm.cargo import Table
from support import worker
from support.toys import Toy


def nothing(module):
    """The undisturbed run."""


def _raise(module):
    raise ValueError("my own bug")


def _gradient(value, module):
    module.net[0].weight.grad[0, 0] = value


def _signal(number, module):
    os.kill(os.getpid(), number)


def _exit(leave, module):
    leave(0)


def continued_after(seconds):
    """Starts what continues this process, so many seconds after it has been stopped."""
    stopped = f"grep -q '^State:.T' /proc/{os.getpid()}/status"
    return subprocess.Popen(["sh", "-c", f"until {stopped}; do sleep 0.01; done; sleep {seconds}; kill -CONT {os.getpid()}"])


WHAT = {
    "raises": _raise,
    "is killed": partial(_signal, signal.SIGKILL),
    "is stopped": partial(_signal, signal.SIGSTOP),
    "is terminated": partial(_signal, signal.SIGTERM),
    "is interrupted": partial(_signal, signal.SIGINT),
    "leaves": partial(_exit, os._exit),
    "exits": partial(_exit, sys.exit),
    "gets NaN": partial(_gradient, float("nan")),
    "gets infinity": partial(_gradient, float("inf")),
}
"""What can happen to a rank."""
WHERE = (
    "before the first collective",
    "in the sanity check",
    "before the first step",
    "between rounds",
    "in a gradient",
    "while announcing",
    "while sending",
    "while reducing",
    "in validation",
    "in a checkpoint",
    "in an evaluation",
    "at the end",
)
"""Where it can happen. Each comes once, in the middle of the second epoch if it can."""


class Faulty(Toy):
    """One rank meets a fault, `what` by its name or any function of the module; `rank=None`: all of them do."""

    def __init__(self, what, where, rank=1, **options):
        super().__init__(**{"dropout": 0.0, **options})
        assert where in WHERE
        self.what, self.where, self.rank = WHAT.get(what, what), where, rank
        self.steps, self.happened = 0, False

    def here(self, *places):
        if self.where in places and not self.happened and self.rank in (None, self.trainer.global_rank):
            self.happened = True
            self.what(self)

    def prepare_data(self):
        self.here("before the first collective")

    def setup(self, stage):
        self.here("before the first collective")

    def on_train_start(self):
        self.here("before the first step")
        if self.where.startswith("while ") and self.trainer.global_rank == self.rank:
            in_the_transport(self.where, lambda: self.what(self))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        if self.steps == 9:
            self.here("between rounds")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        if self.steps == 9:
            self.here("in a gradient")

    def validation_step(self, batch, batch_idx):
        if self.trainer.sanity_checking:
            self.here("in the sanity check")
        elif self.steps > 6:
            self.here("in validation")
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.here("in an evaluation")
        return super().test_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.here("in an evaluation")
        return self.net(batch[0])

    def on_save_checkpoint(self, checkpoint):
        self.here("in a checkpoint")

    def on_train_end(self):
        self.here("at the end")


def in_the_transport(where, happens):
    """From now on, this rank's next message meets the fault: it is announced, or bytes of it are handed over, or have been
    reduced here.
    """
    in_the_ring(where.removeprefix("while "), happens)


def in_the_ring(doing, happens):
    """From now on, that happens whenever a header or a part of a bucket has been handed over, or a bucket has gone round."""
    has_sent, travel = ring._Journey._has_sent, ring.Ring.travel

    def sending(self):
        cargo = self._at_work[self._sends[0][0]].cargo
        has_sent(self)
        if isinstance(cargo, Table) == (doing == "announcing"):
            happens()

    def reducing(*args):
        for cargo in travel(*args):
            if not isinstance(cargo, Table):
                happens()
            yield cargo

    if doing == "reducing":
        ring.Ring.travel = reducing
    else:
        ring._Journey._has_sent = sending


LIMIT = 50.0
"""Seconds after which a child hangs. Below the limit of `run_ranks`, which would show where its parent waits."""


def forked(rank, world_size, fn, *args):
    """`fn(rank, world_size, *args)` in a child of this process. Returns how the child ended, and what it had to say.

    The exit code is that of a script in which the exception is not caught. A child that ends by itself says as well what
    it has left behind, and one that hangs, where.
    """
    mine, theirs = Pipe()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 (open in the child as well)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=stacks)
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
    with stacks:
        stacks.seek(0)
        if text := stacks.read().decode():
            said.append(text)
    return os.waitstatus_to_exitcode(status), "\n".join(said)


class Relay:
    """A port through which this machine's own port `target` is reached, and which can be down for a while.

    What is sent meanwhile waits, as it does on a link: connections stay, nothing is lost. It is a process of its own: a
    rank that connects may hold its interpreter's lock.
    """

    def __init__(self, target):
        self.target, self.server = target, socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]

    def __enter__(self):
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its rank
            try:
                self._accept()
            finally:
                os._exit(1)
        self.server.close()
        return self

    def __exit__(self, *_):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    @contextlib.contextmanager
    def down(self):
        os.kill(self.pid, signal.SIGSTOP)
        yield
        os.kill(self.pid, signal.SIGCONT)

    def _accept(self):
        while True:
            near, _ = self.server.accept()
            far = self._connect()
            for source, drain in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, drain), daemon=True).start()

    def _connect(self):
        while True:  # the relay may be asked before anybody listens at its target
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.target))
            time.sleep(0.05)

    def _pump(self, source, drain):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                drain.sendall(data)
            drain.shutdown(socket.SHUT_WR)


def gone(pids, limit=20.0):
    """Whether these processes end by themselves, all of them."""
    deadline = time.monotonic() + limit
    while (left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def not_in_shared_memory(pids):
    """Whether none of these processes has left something there under its name."""
    owners = [re.search(r"\d+", name) for name in os.listdir("/dev/shm")]  # the numbers after a process's own are random
    return not {int(owner[0]) for owner in owners if owner}.intersection(pids)
