"""The host of one or several ranks: it forks a process of each for every entry of the schedule.

So whatever happens in one costs one row, every contender begins with nothing left over from another, and libraries are
imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from lightning_cocod.cli.bench import counters
from lightning_cocod.cli.bench.job import Seat, process
from lightning_cocod.cli.bench.meter import Result
from lightning_cocod.cli.bench.plan import Entry, Plan, schedule
from lightning_cocod.comm.meeting import own_address
from lightning_cocod.workloads import InputError

GRACE = 10.0  # seconds that a rank may go on after another has failed
LOOK = 0.5  # seconds between two looks at the other hosts, while the processes here go on
FOLLOWED = "ended, as another rank had failed"

_processes = multiprocessing.get_context("forkserver")


class Host:
    """All ranks of the benchmark, or the one that a launcher has made of this process.

    Args:
        plan: the same on all hosts.
        out: folder. The host of rank 0 writes `trials.jsonl` into it, and each its processes' output into `logs`.
        local: the ranks of this host.
        ranks: how many there are.
        store: in which hosts meet.
        address: of that store.
        port: likewise.
    """

    def __init__(
        self, plan: Plan, out: Path, local: Sequence[int], ranks: int, store: Store, address: str, port: int
    ) -> None:
        self.plan, self.out, self.local, self.ranks = plan, out, local, ranks
        self.store, self._address, self._port = store, address, port
        self.leads = 0 in local
        self.failed: set[str] = set()
        _processes.set_forkserver_preload(["lightning_cocod.cli.bench.job"])  # imports, and nothing that starts a thread
        os.environ["OMP_NUM_THREADS"] = str(plan.threads)

    @classmethod
    def of_all(cls, plan: Plan, out: Path, ranks: int) -> Host:
        """All ranks, on this machine."""
        os.environ[counters.GLOO_DEVICE] = counters.LOOPBACK
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_patience(plan))
        return cls(plan, out, range(ranks), ranks, store, "127.0.0.1", store.port)

    @classmethod
    def of_one(cls, plan: Plan, out: Path) -> Host:
        """The rank that torchrun or srun has started.

        Raises:
            InputError: its variables are incomplete, or say nothing of the network device and no route does either.
        """
        if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
            os.environ.update(_place_in_slurm())
        try:
            store, rank, ranks = next(iter(rendezvous("env://", timeout=_patience(plan))))
        except ValueError as error:
            raise InputError(f"the launcher has not told this rank its place: {error}") from None
        _choose_device(store, rank, ranks)
        return cls(plan, out, [rank], ranks, store, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def run(self) -> None:
        """The whole schedule. A contender that has failed is not tried again."""
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        entries = schedule(self.plan)
        for number, entry in enumerate(entries):
            meeting = PrefixStore(f"entry {number}", self.store)
            if self.leads:
                meeting.set("port", "0" if entry.contender in self.failed else str(free_port()))
            if not (port := int(meeting.get("port"))):
                continue
            begun = time.monotonic()
            seats = [Seat(rank, self.ranks, self._address, self._port, number, port) for rank in self.local]
            for rank, result in self._turn(entry, seats, meeting).items():
                meeting.set(f"result {rank}", json.dumps(result))
            if self.leads:
                results: list[Result] = [json.loads(meeting.get(f"result {rank}")) for rank in range(self.ranks)]
                self._record(entry, results)
                took = f"{time.monotonic() - begun:.0f} s"
                print(f"{number + 1}/{len(entries)} {entry.contender}: {_summary(results)} ({took})", flush=True)
        self._leave()

    def _leave(self) -> None:
        """The store is with rank 0, whose host goes last."""
        for rank in self.local:
            self.store.set(f"{rank} leaves", "")
        if self.leads:
            self.store.wait([f"{rank} leaves" for rank in range(self.ranks)])

    def _record(self, entry: Entry, results: list[Result]) -> None:
        if errors(results):
            self.failed.add(entry.contender)
        with (self.out / "trials.jsonl").open("a") as file:
            file.write(json.dumps({**entry._asdict(), "ranks": results}) + "\n")

    def _turn(self, entry: Entry, seats: Sequence[Seat], meeting: Store) -> dict[int, Result]:
        """Run the processes of this host's ranks, and end them when their time is over."""
        with tempfile.TemporaryDirectory(prefix="cocod-bench-") as folder:
            files = {seat.rank: Path(folder, f"{seat.rank}.json") for seat in seats}
            children: dict[int, ForkServerProcess] = {}
            try:
                for seat in seats:
                    log = self.out / "logs" / f"{seat.number:03d}-{entry.contender}-rank{seat.rank}.txt"
                    told = (self.plan, entry.contender, seat, files[seat.rank], log)
                    children[seat.rank] = _processes.Process(target=process, args=told)
                    children[seat.rank].start()
                late = self._wait(children, meeting)
            finally:
                for child in children.values():
                    end(child)
            results = {rank: json.loads(file.read_text()) if file.exists() else {} for rank, file in files.items()}
        for rank, result in results.items():
            if rank in late:
                result.setdefault("error", late[rank])
            elif code := children[rank].exitcode:
                result.setdefault("error", f"crashed: {_name(code)}")
            elif not result:
                result["error"] = "ended without a result"
        return results

    def _wait(self, children: Mapping[int, ForkServerProcess], meeting: Store) -> dict[int, str]:
        """Until all have ended, or their time is over: then why, for those that have not."""
        why, deadline = f"timed out after {self.plan.limit:g} s", time.monotonic() + self.plan.limit
        running = dict(children)
        while running and time.monotonic() < deadline:
            wait([child.sentinel for child in running.values()], LOOK)
            running = {rank: child for rank, child in running.items() if child.is_alive()}
            if any(child.exitcode for child in children.values()):
                meeting.set("failed", "")
            if meeting.check(["failed"]) and time.monotonic() + GRACE < deadline:
                why, deadline = FOLLOWED, time.monotonic() + GRACE
        if running:
            meeting.set("failed", "")
        return dict.fromkeys(running, why)


def _place_in_slurm() -> dict[str, str]:
    """What torch reads, from the variables of srun."""
    try:
        slurm = SLURMEnvironment()
    except RuntimeError as error:  # which number of tasks it wants to be told
        raise InputError(f"srun: {error}") from None
    place = {"RANK": slurm.global_rank(), "WORLD_SIZE": slurm.world_size(), "MASTER_PORT": slurm.main_port}
    return {"MASTER_ADDR": slurm.main_address, **{name: str(value) for name, value in place.items()}}


def _choose_device(store: Store, rank: int, ranks: int) -> None:
    """For Gloo and the counters, where nobody has: that of the way to rank 0's machine, or the loopback if all are on it."""
    store.set(f"{rank} is at", own_address(store))
    machines = {store.get(f"{other} is at") for other in range(ranks)}
    address = os.environ["MASTER_ADDR"]
    if counters.GLOO_DEVICE not in os.environ:
        try:
            routes = Path("/proc/net/route").read_text()
            device = counters.LOOPBACK if len(machines) == 1 else counters.device_towards(address, routes)
        except (OSError, ValueError) as error:
            raise InputError(f"{counters.GLOO_DEVICE}: name the network device to MASTER_ADDR={address} ({error})") from None
        os.environ[counters.GLOO_DEVICE] = device
    try:
        counters.sent(counters.device())
    except ValueError as error:
        raise InputError(str(error)) from None


def end(child: ForkServerProcess) -> None:
    """Kill a process and whatever it has started, if anything is left of them."""
    if child.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # it leads a group of its own
        child.kill()
        child.join()


def errors(results: Sequence[Result]) -> list[str]:
    """What went wrong in one entry, on the ranks where it began."""
    found = list(dict.fromkeys(str(result["error"]) for result in results if "error" in result))
    return [error for error in found if error != FOLLOWED] or found


def _summary(results: Sequence[Result]) -> str:
    if wrong := errors(results):
        return wrong[0]
    return " ".join(f"{sum(result['rounds']) / len(result['rounds']):.3f}" for result in results) + " s a round"


def _patience(plan: Plan) -> timedelta:
    """For the slowest rank to end an entry."""
    return timedelta(seconds=plan.limit + 300)


def _name(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
