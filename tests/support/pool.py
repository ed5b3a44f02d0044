"""Warm worker processes: forked from one process that has imported everything, used for many calls, thrown away as soon as
one is not clean.

The process they are forked from has never run anything but imports. A worker is the leader of its own process group, so
that killing it takes its children with it. It shares with this process a channel and an unnamed file into which it writes
its stacks.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from multiprocessing.reduction import DupFd
from unittest import mock

import psutil

from support import worker as script

START_LIMIT = 120.0
"""Seconds a worker may take to import what it needs, and to connect. Not part of a call's time limit."""
FREE_LIMIT = 5.0
"""Seconds a worker may take to destroy its groups after a call; then it is replaced."""
STACK_LIMIT = 2.0
"""Seconds a hung worker may take to write its stacks."""

WORKER_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

processes = multiprocessing.get_context("forkserver")
# Not the workloads: with joblib, which they import, every process has semaphores in shared memory as long as it lives.
processes.set_forkserver_preload(["pytest", "lightning.pytorch", "lightning_cocod"])


class WorkerDied(Exception):
    """The worker process ended without a word."""


class Forked(processes.Process):
    def __init__(self, stacks, channel):
        super().__init__(name="worker")
        self.stacks, self.channel = stacks, channel

    def __getstate__(self):  # called while it starts, which is when a file can be handed on
        return {**self.__dict__, "stacks": DupFd(self.stacks)}

    def run(self):
        multiprocessing.set_start_method(None, force=True)  # the system's, not this one's
        script.main(self.channel, self.stacks.detach())


def start(process):
    """The first start starts the server as well, which keeps these variables."""
    with mock.patch.dict(os.environ, WORKER_ENV):
        process.start()


class Worker:
    def __init__(self):
        self.channel, theirs = processes.Pipe()
        self.stacks = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open as long as the worker)
        self.process = Forked(self.stacks.fileno(), theirs)
        start(self.process)
        theirs.close()
        self.ready = False
        self.clean = True

    @property
    def pid(self):
        return self.process.pid

    @property
    def alive(self):
        return self.process.is_alive()

    def send(self, job):
        self.clean = False  # until it says that it is free again
        self.stacks.seek(0)
        self.stacks.truncate()
        self.tell(pickle.dumps(job))

    def tell(self, words):
        with contextlib.suppress(OSError):  # it died just now: the next `receive` says so
            self.channel.send_bytes(words)

    def receive(self):
        """The next message, or None if there is none yet. Raises WorkerDied once the process has ended."""
        ended = not self.alive  # looked at first: a message sent just before the end still counts
        try:
            if self.channel.poll():
                return pickle.loads(self.channel.recv_bytes())
        except (EOFError, OSError):
            self.process.join(STACK_LIMIT)  # it is on its way out; its own exit code is worth waiting for
            ended = True
        if ended:
            raise WorkerDied
        return None

    def wait_for(self, word, limit):
        """True if the next message is `word`, within `limit` seconds."""
        deadline = time.monotonic() + limit
        try:
            while (message := self.receive()) is None and time.monotonic() < deadline:
                self.channel.poll(0.02)
        except WorkerDied:
            return False
        return message == (word,)

    def read_stacks(self):
        size = os.fstat(self.stacks.fileno()).st_size
        return os.pread(self.stacks.fileno(), size, 0).decode(errors="replace")

    def kill(self):
        """End the worker and its children; returns its exit code. A second time does nothing."""
        if self.channel.closed:
            return self.process.exitcode
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet, or is gone
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.channel.close()
        self.stacks.close()
        return self.process.exitcode


_free: list[Worker] = []


def take(n):
    """Take n workers that are ready. The longest-warm come first, and keep their order from call to call."""
    _free[:] = [worker for worker in _free if worker.alive]
    while len(_free) < n:
        _free.append(Worker())
    taken, _free[:n] = _free[:n], []
    for worker in taken:
        worker.ready = worker.ready or worker.wait_for("ready", START_LIMIT)
        if not worker.ready:
            give_back(taken)
            raise RuntimeError("a worker process did not start; see its output above")
    return taken


def give_back(workers):
    """Keep the clean ones; kill the others, and start their replacements now so that they warm up meanwhile."""
    kept = [worker for worker in workers if worker.clean and worker.ready]
    lost = [worker for worker in workers if worker not in kept]
    for worker in lost:
        worker.kill()
    _free[:0] = kept
    _free.extend(Worker() for _ in lost)


def dump_stacks(workers):
    """Ask all of these workers, at once, where they are; returns their answers in order."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_LIMIT
    texts, before = [w.read_stacks() for w in workers], []
    # The dump has no end mark: it is complete once every file has something in it and none grows any more.
    while not (all(texts) and texts == before) and time.monotonic() < deadline:
        time.sleep(0.1)
        before, texts = texts, [w.read_stacks() for w in workers]
    return [text or "(no stack: the process did not answer; is it stopped?)\n" for text in texts]


@atexit.register
def close():
    """End all idle workers. A later call simply starts new ones."""
    while _free:
        _free.pop().kill()


def running():
    """Pids of all worker processes below this one, asked of the system and not of the pool's own books."""
    pids = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_server(child.parent()) and child.status() != psutil.STATUS_ZOMBIE:
                pids.append(child.pid)
    return pids


def is_server(process):
    return process is not None and any("multiprocessing.forkserver" in word for word in process.cmdline())
