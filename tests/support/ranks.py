"""Run a function on n ranks, each a process with a Gloo world group of its own, under a hard time limit.

    from support.ranks import run_ranks

    def total(rank, world_size, scale):
        x = torch.tensor(scale * rank)
        dist.all_reduce(x)
        return x

    def test_total():
        assert run_ranks(total, 2, 10) == [10, 10]

The function must live at the top of its test module: it travels by name. Its arguments and its result are copied by
value. Each call gives every rank

* the environment, the directory and the import path that the test has at that moment, plus the variables that
  `torchrun` sets, so that Lightning finds its TorchElastic environment;
* the seed 0 for `random`, NumPy and torch, one torch thread, and the dtype float32 as the default;
* an initialised Gloo world group or, with `init=False`, none: for functions in which `Trainer.fit` makes it.

and afterwards checks that no thread, no child process and no process group beyond the world is left
(`leftovers_ok=True` turns that off). A test that wants a rank to fail says so, `expect={1: "died"}`, or looks at the
outcomes that `run_ranks_raw` returns.
"""

import math
import os
import pickle
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Literal

from support import pool

Status = Literal["ok", "error", "died", "timeout"]


@dataclass
class Outcome:
    """How one rank ended.

    `traceback` is the exception's text ("error"), where the rank hung ("timeout") or where it crashed ("died", for a
    segmentation fault and its like). `ended` orders the ranks in time; it is the system's monotonic clock.
    """

    rank: int
    status: Status
    value: Any = None
    traceback: str = ""
    exitcode: int | None = None
    ended: float = 0.0

    def __str__(self):
        how = {"ok": "ended well", "error": "failed", "died": "died", "timeout": "did not finish"}[self.status]
        if self.status == "died":
            killed_by = self.exitcode is not None and self.exitcode < 0
            how += f" by {signal.Signals(-self.exitcode).name}" if killed_by else ""
            how += f" (exit code {self.exitcode})"
        return f"rank {self.rank} {how}"


class RankError(RuntimeError):
    """Some rank did not end as it should. Carries all `outcomes`, and rank -> text in `tracebacks`."""

    def __init__(self, outcomes, wrong):
        self.outcomes = outcomes
        self.tracebacks = {o.rank: o.traceback for o in outcomes if o.traceback}
        self.ranks = [o.rank for o in wrong]
        super().__init__("; ".join(map(str, outcomes)) + "\n\n" + self.details(wrong))

    def details(self, wrong):
        """The first to go wrong: the others most often only follow."""
        first = min(wrong, key=lambda o: o.ended)
        return f"{first}:\n{first.traceback}"


class RankFailed(RankError):
    """A rank raised, left something behind, or ended well although it was expected not to."""


class RankDied(RankError):
    """A rank's process ended by itself."""


class RankTimeout(RankError):
    """The time was up; `ranks` had not finished. The message shows where each of them hung."""

    def details(self, wrong):
        return "\n".join(f"{o}:\n{o.traceback}" for o in wrong if o.status == "timeout")


def run_ranks(
    fn, n, *args, timeout=60.0, expect: dict[int, Status] | None = None, grace=10.0, init=True, leftovers_ok=False
):
    """Run `fn(rank, n, *args)` on n ranks and return the results in the order of the ranks.

    Raises RankDied, RankFailed or RankTimeout (the first that applies) unless every rank ends "ok". `expect` names
    the ranks that have to end in another way, as in `{1: "died"}`; the result of such a rank is None, and the others
    have all the time that is left. The other parameters are those of `run_ranks_raw`.
    """
    expect = expect or {}
    outcomes = run_ranks_raw(fn, n, *args, timeout=timeout, expect=expect, grace=grace, init=init, leftovers_ok=leftovers_ok)
    wrong = [o for o in outcomes if o.status != expect.get(o.rank, "ok")]
    if wrong:
        statuses = {o.status for o in wrong}
        kinds = {"died": RankDied, "error": RankFailed, "timeout": RankTimeout, "ok": RankFailed}
        raise next(error for status, error in kinds.items() if status in statuses)(outcomes, wrong)
    return [o.value if o.status == "ok" else None for o in outcomes]


def run_ranks_raw(
    fn, n, *args, timeout=60.0, expect: dict[int, Status] | None = None, grace=10.0, init=True, leftovers_ok=False
) -> list[Outcome]:
    """Run `fn(rank, n, *args)` on n ranks and return how each of them ended; no end of a rank raises.

    `timeout` counts from the moment when all ranks have imported `fn` and are connected. Once one rank has gone wrong,
    and not as one is to `expect`, the others have at most `grace` more seconds; what has not ended then is killed and
    counts as "timeout".
    """
    call = pickle.dumps((fn, args))  # a function that cannot travel is an error here, in the test
    workers = pool.take(n)
    try:
        port = str(free_port())
        for rank, worker in enumerate(workers):
            worker.send(
                {
                    "call": call,
                    "rank": rank,
                    "world_size": n,
                    "init": init,
                    "leftovers_ok": leftovers_ok,
                    "env": {**os.environ, **pool.WORKER_ENV, **torchrun_env(rank, n, port)},
                    "cwd": os.getcwd(),
                    "path": [os.path.abspath(entry) for entry in sys.path],
                }
            )
        outcomes = collect(workers, timeout, grace, expect or {})
        for outcome, worker in zip(outcomes, workers, strict=True):
            if outcome.status in ("ok", "error") and worker.alive:
                worker.clean = worker.wait_for("free", pool.FREE_LIMIT)
        return outcomes
    finally:
        pool.give_back(workers)


def collect(workers, timeout, grace, expect):
    """Wait for every rank to end, one way or another; returns the outcomes in the order of the ranks."""
    outcomes = {}
    pending = set(range(len(workers)))
    unset = set(pending)
    deadline = time.monotonic() + pool.START_LIMIT  # to be set; the time limit proper starts with "go"
    end_of_grace = math.inf
    while pending and time.monotonic() < min(deadline, end_of_grace):
        connection.wait([workers[rank].channel for rank in pending], timeout=0.02)
        for rank in sorted(pending):
            try:
                message = workers[rank].receive()
            except pool.WorkerDied:
                stacks, code = workers[rank].read_stacks(), workers[rank].kill()
                outcomes[rank] = Outcome(rank, "died", None, stacks, code, ended=time.monotonic())
            else:
                if message is None:
                    continue
                if message == ("set",):
                    unset.discard(rank)
                    if not unset:
                        deadline = time.monotonic() + timeout
                        for worker in workers:
                            worker.tell(b"go")
                else:
                    *report, clean = message[1:]
                    outcomes[rank] = outcome_of(rank, *report)
                    if not clean:
                        workers[rank].kill()  # its peers must not wait for what is left in it
            if rank in outcomes:
                pending.discard(rank)
                if outcomes[rank].status not in ("ok", expect.get(rank)):
                    end_of_grace = min(end_of_grace, time.monotonic() + grace)
    hung = sorted(pending)
    for rank, stacks in zip(hung, pool.dump_stacks([workers[rank] for rank in hung]), strict=True):
        outcomes[rank] = Outcome(rank, "timeout", None, stacks, ended=time.monotonic())
        workers[rank].kill()
    return [outcomes[rank] for rank in range(len(workers))]


def outcome_of(rank, error, value, traceback, ended):
    if not error:
        try:
            return Outcome(rank, "ok", pickle.loads(value), traceback, ended=ended)
        except Exception as reason:
            traceback = f"the result could not be unpickled: {reason!r}\n"
    return Outcome(rank, "error", None, traceback, ended=ended)


def torchrun_env(rank, n, port):
    """The variables that `torchrun` sets on one node. Without its agent's store: rank 0 hosts one at the port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "tests",
    }


def free_port():
    """A free port below the range from which the system serves everybody who asks for any port.

    Between this look and the moment when rank 0 listens, nobody is given such a port by chance.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port found")
