"""Checks on one GPU what CPU tests cannot, in less than five minutes.

    PYTHONPATH=. python recipes/gpu_check.py                        # all of it
    PYTHONPATH=. python recipes/gpu_check.py --only bits,nccl       # some
    PYTHONPATH=. python recipes/gpu_check.py --of cocod,ad_psgd     # of some strategies
    PYTHONPATH=. python recipes/gpu_check.py --device cpu           # what means something without a GPU

Every algorithm whose ranks are in step is checked in plain loops, and its strategy under a Trainer: all precisions that
it allows, resuming, traces, moving averages. Those whose ranks are not in step (AD-PSGD, A-PSGD, DC-ASGD, EAMSGD) have
no bits to compare: they train in plain loops (``asynchrony``) and under a Trainer in all precisions but 16-mixed
(``trainer_asynchrony``), and no more is looked at. One rank over NCCL (``nccl``) has all algorithms that are in step but
D-PSGD and SGP, whose messages are for the other rank, and S-SGD, SSD-SGD, OD-SGD and CD-SGD, of whose servers it has a part.

Two ranks share the GPU over Gloo (NCCL, if there are two GPUs), one rank runs over NCCL. Each check is a group of
processes with a hard limit, so that one that fails, hangs or crashes leaves the others alone. Prints a line as each is
done, then a table, and exits with 0 only if none failed. What cannot be checked here is "skipped", with the reason,
never "ok". What is not reached within ``--limit`` has failed, and is told apart.

Needs torch, torchvision and lightning (``pip install lightning torchvision``), nothing else, no network. Without Lightning
only the plain loops are checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_checks import costs, plain, rank, trainers  # noqa: F401  # importing them registers their checks
from gpu_checks.library import ALGORITHMS, ASYNCHRONOUS, NO_LIGHTNING, ROOT, only
from gpu_checks.rank import CHECKS, Check

GRACE = 15.0
"""Seconds in which the other ranks must end once one has failed."""
LEAST = 10.0
"""Seconds without which no check is begun."""
NOT_REACHED = "not reached within --limit"


@dataclass
class Result:
    """A line of the table."""

    name: str
    verdict: str
    text: str
    seconds: float

    def __str__(self) -> str:
        head = f"{self.name:20} {self.verdict:8} {self.seconds:5.1f} s  "
        return textwrap.fill(head + self.text, 150, subsequent_indent=" " * len(head)) if self.text else head.rstrip()


class Group:
    """The processes of one check, which all run this command."""

    def __init__(self, check: Check, folder: Path, command: list[str]) -> None:
        self.check, self.folder = check, folder
        self.ended: dict[int, float] = {}
        self.processes = []
        for number, port in ((n, port) for port in [_free_port()] for n in range(check.ranks)):
            ours = {"GPU_CHECK_FOLDER": str(folder), "GPU_CHECK_PARENT": str(os.getpid())}
            environment = {**os.environ, **_as_torchrun_sets(number, check.ranks, port), **ours}
            with (folder / f"rank-{number}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                )

    def wait(self, left: float) -> str:
        """Until all have ended, so many seconds at most. Returns what was wrong with that, or nothing."""
        seconds = min(self.check.limit, left)
        deadline, why = time.monotonic() + seconds, f"hung: ended after {seconds:.0f} s"
        if left < self.check.limit:
            why = f"not done within --limit: ended after {left:.0f} of the {self.check.limit:.0f} s that it may take"
        try:
            while len(self.ended) < len(self.processes):
                for number, process in enumerate(self.processes):
                    if number not in self.ended and process.poll() is not None:
                        self.ended[number] = time.monotonic()
                        if process.returncode and deadline > time.monotonic() + GRACE and number != self.check.loses:
                            deadline = time.monotonic() + GRACE
                            why = f"rank {number} ended with {process.returncode}, the others did not within {GRACE:.0f} s"
                if time.monotonic() > deadline:
                    return why
                time.sleep(0.05)
            return ""
        finally:
            self.kill()

    def kill(self) -> None:
        """And what they have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def judge(self, hung: str) -> tuple[str, str]:
        """The verdict, and the reasons or the figures."""
        reports = [self._report(number) for number in range(self.check.ranks)]
        figures = "; ".join(f"{name}: {value}" for name, value in reports[0]["figures"].items())
        if self.check.loses is not None:
            return self._judge_loss(hung, reports)
        wrong = [hung] if hung else []
        for number, report in enumerate(reports):
            wrong += [f"rank {number}: {reason}" for reason in report["failed"]]
            if self.processes[number].returncode and not report["failed"] and not hung:
                wrong.append(f"rank {number} ended with {self.processes[number].returncode}: {self._last_words(number)}")
        if wrong:
            return "FAILED", "; ".join([*wrong, figures])
        skipped = next((report["skipped"] for report in reports if report["skipped"]), "")
        return ("skipped", skipped) if skipped else ("ok", figures)

    def _judge_loss(self, hung: str, reports: list[dict]) -> tuple[str, str]:
        lost = self.check.loses
        killed, codes = self.processes[lost].returncode == -signal.SIGKILL, [p.returncode for p in self.processes]
        said = "; ".join(reports[0]["failed"])
        if hung or not killed or codes[0] <= 0 or "PeerLost" not in said or f"rank {lost}" not in said:
            return "FAILED", f"exit codes {codes}, rank 0 said {said or self._last_words(0)!r}; {hung}"
        return (
            "ok",
            f"rank 0 ended with {codes[0]}, {self.ended[0] - self.ended[lost]:.1f} s after rank {lost} was killed: {said}",
        )

    def _report(self, number: int) -> dict:
        try:
            return json.loads((self.folder / f"rank-{number}.json").read_text())
        except (OSError, ValueError):
            return {"failed": [], "figures": {}, "skipped": ""}

    def _last_words(self, number: int) -> str:
        lines = (self.folder / f"rank-{number}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    def log(self) -> str:
        """The end of what each rank printed."""
        logs = [(self.folder / f"rank-{n}.log").read_text(errors="replace")[-2500:] for n in range(self.check.ranks)]
        return "\n".join(f"--- rank {number}\n{text}" for number, text in enumerate(logs) if text.strip())


def run(name: str, device: str, until: float, of: list[str]) -> tuple[Result, str]:
    """One check; and what its ranks printed, if it failed."""
    check, begun = CHECKS[name.partition(":")[0]], time.monotonic()
    if check.cuda and device != "cuda":
        return Result(name, "skipped", "means something on a GPU only", 0.0), ""
    if check.lightning and NO_LIGHTNING:
        return Result(name, "skipped", NO_LIGHTNING, 0.0), ""
    if not (ASYNCHRONOUS if check.asynchronous else ALGORITHMS):
        return Result(name, "skipped", "of none of these strategies (--of)", 0.0), ""
    left = until - begun
    if left < LEAST:
        return Result(name, "FAILED", NOT_REACHED, 0.0), ""
    folder = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    try:
        command = [sys.executable, __file__, "--rank-of", name, "--device", device, *of]
        group = Group(check, folder, command)
        verdict, text = group.judge(group.wait(left))
        return Result(name, verdict, text, time.monotonic() - begun), group.log() if verdict == "FAILED" else ""
    except Exception as error:
        return Result(name, "FAILED", f"could not be run: {error!r}", time.monotonic() - begun), ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_all(names: list[str], device: str, jobs: int, until: float, of: list[str]) -> list[Result]:
    """Those that measure come last, one after the other."""
    results: list[Result] = []
    printing = threading.Lock()

    def work(waiting: queue.SimpleQueue[str]) -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            result, log = run(name, device, until, of)
            with printing:
                results.append(result)
                print(result, *([textwrap.indent(log, "    | ")] if log else []), sep="\n", flush=True)

    for alone in (False, True):
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            if CHECKS[name.partition(":")[0]].alone is alone:
                waiting.put(name)
        threads = [threading.Thread(target=work, args=(waiting,), daemon=True) for _ in range(1 if alone else jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sorted(results, key=lambda result: names.index(result.name))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_torchrun_sets(number: int, world: int, port: int) -> dict[str, str]:
    """Each rank is a node of its own: so a Trainer lets several have the same device."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(number),
        "GROUP_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "gpu_check",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it matrix products on CUDA are not deterministic
    }


def _chosen(only: str | None) -> list[str]:
    """Names as they are run: a check that is made for each algorithm is several."""
    wanted = only.split(",") if only else list(CHECKS)
    if unknown := [name for name in wanted if name.partition(":")[0] not in CHECKS]:
        sys.exit(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    return [
        full
        for name in wanted
        for full in ([f"{name}:{a}" for a in ALGORITHMS] if ":" not in name and CHECKS[name].each else [name])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME[,NAME]", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--of", metavar="STRATEGY[,STRATEGY]", help="only these; by default all of the package")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=max(1, min(6, cores // 3)), help="checks at a time (%(default)s)")
    parser.add_argument("--limit", type=float, help="seconds for everything (285; on a CPU 900)")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --device cpu runs what means something without one")
    if args.of and (unknown := only(args.of.split(","))):
        sys.exit(f"no such strategy: {', '.join(unknown)}; there are {', '.join([*ALGORITHMS, *ASYNCHRONOUS])}")
    if args.rank_of:
        rank.main(args.rank_of, args.device)
    begun = time.monotonic()
    until = begun + (args.limit or (285 if args.device == "cuda" else 900))
    card = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    strategies = ", ".join([*ALGORITHMS, *ASYNCHRONOUS])
    print(f"{card}, torch {torch.__version__}, {cores} cores, {strategies}. {NO_LIGHTNING}", flush=True)
    results = run_all(_chosen(args.only), args.device, args.jobs, until, ["--of", args.of] if args.of else [])
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("ok", "skipped", "FAILED")}
    print(f"\n{card}, torch {torch.__version__}", *results, sep="\n")
    unreached = sum(result.text == NOT_REACHED for result in results)
    apart = f" ({unreached} {NOT_REACHED})" if unreached else ""
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{told}{apart} in {time.monotonic() - begun:.0f} s")
    sys.exit(bool(counts["FAILED"]) or not counts["ok"])


if __name__ == "__main__":
    main()
