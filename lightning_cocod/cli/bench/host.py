"""A rank's host: it forks a process for every entry of the schedule, so that whatever happens in one costs one row.

Every contender so begins with nothing left over from another, and libraries are imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_cocod.cli.bench.job import Seat, process
from lightning_cocod.cli.bench.meter import Result
from lightning_cocod.cli.bench.plan import Entry, Plan, schedule

GRACE = 10.0  # seconds that a rank may go on after another has failed
LOOK = 0.5  # seconds between two looks at a process
FOLLOWED = "ended, as another rank had failed"

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["lightning_cocod.cli.bench.job"])  # imports, and nothing that starts a thread


class Host:
    """One rank of the benchmark.

    Args:
        plan: the same on all ranks.
        out: an existing folder; rank 0 writes `trials.jsonl` into it, and every rank its processes' output into `logs`.

    Raises:
        ValueError: the variables of a launcher are incomplete.
    """

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan, self.out = plan, out
        patience = timedelta(seconds=plan.limit + 120)  # for the slowest rank to end an entry
        self.store, self.rank, self.ranks = next(iter(rendezvous("env://", timeout=patience)))
        self.address, self.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.failed: set[str] = set()

    def run(self) -> None:
        """The whole schedule. A contender that has failed is not tried again."""
        entries = schedule(self.plan)
        for number, entry in enumerate(entries):
            meeting = PrefixStore(f"entry {number}", self.store)
            if self.rank == 0:
                meeting.set("port", "0" if entry.contender in self.failed else str(free_port()))
            seat = Seat(self.rank, self.ranks, self.address, self.port, number, int(meeting.get("port")))
            if seat.free_port == 0:
                continue
            begun = time.monotonic()
            meeting.set(f"result {self.rank}", json.dumps(self._turn(entry, seat, meeting)))
            if self.rank == 0:
                results: list[Result] = [json.loads(meeting.get(f"result {rank}")) for rank in range(self.ranks)]
                self._record(entry, results)
                took = f"{time.monotonic() - begun:.0f} s"
                print(f"{number + 1}/{len(entries)} {entry.contender}: {_summary(results)} ({took})", flush=True)
        self._leave()

    def _leave(self) -> None:
        """Rank 0 holds the store: it goes last."""
        self.store.set(f"{self.rank} leaves", "")
        if self.rank == 0:
            self.store.wait([f"{rank} leaves" for rank in range(self.ranks)])

    def _record(self, entry: Entry, results: list[Result]) -> None:
        if errors(results):
            self.failed.add(entry.contender)
        with (self.out / "trials.jsonl").open("a") as file:
            file.write(json.dumps({**entry._asdict(), "ranks": results}) + "\n")

    def _turn(self, entry: Entry, seat: Seat, meeting: Store) -> Result:
        """Run the process of this rank, and end it when its time is over."""
        log = self.out / "logs" / f"{seat.number:03d}-{entry.contender}-rank{self.rank}.txt"
        with tempfile.TemporaryDirectory(prefix="cocod-bench-") as folder:
            file = Path(folder, "result.json")
            child = _processes.Process(target=process, args=(self.plan, entry.contender, seat, file, log))
            child.start()
            assert child.pid is not None
            ended_for, deadline = f"timed out after {self.plan.limit:g} s", time.monotonic() + self.plan.limit
            try:
                while child.is_alive() and time.monotonic() < deadline:
                    child.join(LOOK)
                    if meeting.check(["failed"]) and deadline > time.monotonic() + GRACE:
                        ended_for, deadline = FOLLOWED, time.monotonic() + GRACE
                late = child.is_alive()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # it leads a group of its own
                child.kill()
                child.join()
            result: Result = json.loads(file.read_text()) if file.exists() else {}
        if late:
            result["error"] = ended_for
        elif child.exitcode != 0 and "error" not in result:
            result["error"] = f"crashed: {_name(child.exitcode)}"
        elif not result:
            result["error"] = "ended without a result"
        if "error" in result:
            meeting.set("failed", "")
        return result


def errors(results: Sequence[Result]) -> list[str]:
    """What went wrong in one entry, on the ranks where it began."""
    found = list(dict.fromkeys(str(result["error"]) for result in results if "error" in result))
    return [error for error in found if error != FOLLOWED] or found


def _summary(results: Sequence[Result]) -> str:
    if wrong := errors(results):
        return wrong[0]
    return " ".join(f"{sum(result['rounds']) / len(result['rounds']):.3f}" for result in results) + " s a round"


def _name(exit_code: int | None) -> str:
    return signal.Signals(-exit_code).name if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
