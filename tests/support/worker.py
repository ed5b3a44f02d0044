"""What a warm worker process runs: wait for a job, run it as one rank, check that nothing is left, report.

Three messages go back for every job, each a pickled tuple:

    ("set",)                                          the function is imported, the world group initialised
    ("done", error, value, traceback, ended, clean)   the function returned or raised
    ("free",)                                         the groups are destroyed; the worker can take another job

After "set" the worker waits for the word "go", which comes when all ranks are set: a rank that dies in its first line
must not do so while another one is still connecting.

"done" goes out before the groups are destroyed, because destroying can block behind a peer that hangs, and the
traceback must not wait for that.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing import resource_tracker

LEFTOVER_PATIENCE = 3.0
"""Seconds that threads and child processes which are just ending get to end."""


def main(channel, stacks_fd):
    os.setsid()
    faulthandler.enable(stacks_fd)
    threading.Thread(target=die_with_parent, args=(channel.fileno(),), daemon=True, name="lifeline").start()
    warm_up()
    send(channel, "ready")
    store = None
    with contextlib.suppress(EOFError):  # the parent is gone
        while True:
            job = pickle.loads(channel.recv_bytes())
            # The store of the last call was kept until here: rank 0 hosts it, and a slower rank may still have
            # been reading from it when rank 0 was done.
            del store
            # Again for every job: Lightning's signal handling gives SIGUSR1 back as it found it in Python's table.
            faulthandler.unregister(signal.SIGUSR1)  # without it, registering again would change nothing
            faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
            with surroundings(job["env"], job["cwd"], job["path"]):
                store = run(job, channel)
            gc.collect()  # what fn dropped must not live on, holding groups, into the next call
            if not pristine():
                return
            send(channel, "free")


def die_with_parent(channel_fd):
    """Kill this process and its children when the parent closes its end of the channel, in whatever way it ended."""
    hangup = select.poll()
    hangup.register(channel_fd, 0)  # no events asked for: only the hang-up wakes it
    hangup.poll()
    os.killpg(0, signal.SIGKILL)


def warm_up():
    import lightning.pytorch  # noqa: F401
    import torch.distributed  # noqa: F401

    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # its monitor thread would count as left over
    wait_for_stores()
    gc.collect()
    gc.freeze()  # nothing imported so far needs to be looked at again: the collection after each call stays cheap


def wait_for_stores():
    """Let whoever asks for rank 0's store look every few milliseconds, for a second, whether it listens already.

    Once refused, torch's own client sleeps for 250 to 750 ms, and the strategies for 200. Ranks start at the same moment
    here, so that every second call would. What is said of a store that does not come, and when, stays theirs.
    """
    from lightning_cocod.strategies import base

    torchs = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name
    for module, name in ((torchs, "_create_c10d_store"), (base, "check_master")):
        setattr(module, name, patient(getattr(module, name)))


def patient(function):
    @functools.wraps(function)
    def waits(host, port, rank, *args, **kwargs):
        end = time.monotonic() + 1.0
        while rank != 0 and not listens(host, port) and time.monotonic() < end:
            time.sleep(0.002)
        return function(host, port, rank, *args, **kwargs)

    return waits


def listens(host, port):
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True


@contextlib.contextmanager
def surroundings(env, cwd, path):
    """Give the call the parent's environment, directory and import path, and take back what it changed."""
    before = dict(os.environ), os.getcwd(), list(sys.path)

    def enter(env, cwd, path):
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.path[:] = path

    enter(env, cwd, path)
    try:
        yield
    finally:
        enter(*before)


def run(job, channel):
    """Run one job and report it. Returns the store of the world group, if there was one."""
    import torch.distributed as dist

    threads = set(threading.enumerate())
    error, value, text = True, None, ""
    try:
        fn, args = pickle.loads(job["call"])
        if job["init"]:
            dist.init_process_group("gloo")
        send(channel, "set")
        channel.recv_bytes()
        fresh_state(job["rank"])
        # Plain pickle copies tensors by value; the channel's own pickler would put them into shared memory.
        value = pickle.dumps(fn(job["rank"], job["world_size"], *args))
        error = False
    except BaseException:
        text = traceback.format_exc()
    ended = time.monotonic()
    left = leftovers(threads)
    if left and not job["leftovers_ok"]:
        error = True
        text += "left over after the function: " + ", ".join(left) + "\n"
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    send(channel, "done", error, value, text, ended, not left)
    if not left and dist.is_initialized():
        dist.destroy_process_group()
    return store


def pristine():
    """Whether torch numbers its groups from zero again, and no group lives on in its threads.

    Torch does not after a failed start of the world group, and the next one would then wait for its peers under a name
    that they do not use. Of a group that lost a peer in mid-message a thread may be left that never sleeps again: what came
    too late lies in a socket, and nobody wants it.
    """
    import torch.distributed as dist

    return not dist.is_initialized() and dist.distributed_c10d._world.group_count == 0 and not left_loops()


def fresh_state(rank):
    """Put the process-wide state that tests most often change back to one known value."""
    import numpy as np
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    rank_zero_only.rank = rank
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def leftovers(threads_before):
    """Name every thread, child process and process group beyond the world that the call left behind."""
    deadline = time.monotonic() + LEFTOVER_PATIENCE
    while (left := left_threads(threads_before) + left_children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left + left_groups()


def left_threads(before):
    # A dummy thread was not started by Python: it belongs to torch, whose C++ threads once ran a Python callback.
    new = (t for t in threading.enumerate() if t not in before and not isinstance(t, threading._DummyThread))
    return [f"thread {t.name!r}" for t in new]


def left_loops():
    """Threads of Gloo's, which Python does not know of."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as name:  # it may have ended
            found += [thread] * (name.read().strip() == "gloo_tcp_loop")
    return found


def left_children():
    import psutil

    multiprocessing.active_children()  # reaps those that have ended
    # The tracker of multiprocessing starts once and then lives as long as the process: nobody can leave it behind.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    names = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid != tracker and child.status() != psutil.STATUS_ZOMBIE:
                names.append(f"process {child.pid} {' '.join(child.cmdline())[:80]!r}")
    return names


def left_groups():
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    groups = [group for group in world.pg_map if group is not dist.GroupMember.WORLD]
    return [f"process group {world.pg_names[g]!r} of ranks {dist.get_process_group_ranks(g)}" for g in groups]


def send(channel, *message):
    channel.send_bytes(pickle.dumps(message))
