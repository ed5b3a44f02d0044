"""`cocod-bench`: measure strategies, or join what several runs have measured.

cocod-bench --workload resnet18 --contenders none,cocod,ddp
torchrun --nnodes=2 ... -m lightning_cocod.cli.bench.main --workload resnet18 --out bench
cocod-bench report outputs/bench/*
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from lightning_cocod.cli.bench import plots, tables
from lightning_cocod.cli.bench.contenders import contenders, own
from lightning_cocod.cli.bench.counters import device
from lightning_cocod.cli.bench.host import Host
from lightning_cocod.cli.bench.plan import CEILING, Plan
from lightning_cocod.cli.bench.statistics import TRANSPORT, Row, rows
from lightning_cocod.cli.bench.work import WORK
from lightning_cocod.cli.ranks import started_by_launcher
from lightning_cocod.workloads import InputError

WRONG_INPUT = 2
RUN, TRIALS = "run.json", "trials.jsonl"


def main() -> None:
    """Run the command line; exits with 2 if the input is wrong, with 1 if the benchmark itself fails."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))  # what has been started is ended
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["report"]:
            report(arguments[1:])
        else:
            measure(arguments)
    except InputError as error:
        print(f"cocod-bench: {error}", file=sys.stderr, flush=True)
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        sys.exit(130)


def measure(arguments: Sequence[str]) -> None:
    """Run the schedule: all ranks of it, or the one that a launcher has started.

    Raises:
        InputError: an option is wrong.
        SystemExit: training alone has failed, so that there is nothing to compare with.
    """
    options = parse(arguments)
    plan, launched = plan_of(options), started_by_launcher()
    if launched and options.out is None:
        raise InputError("ranks that a launcher has started need one folder for their results: --out FOLDER")
    out = options.out or Path("outputs/bench") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    host = Host.of_one(plan, out) if launched else Host.of_all(plan, out, options.ranks)
    if host.leads:
        begin(host)
    host.run()
    if host.leads:
        conclude(read(out), out)
        if CEILING in host.failed:
            sys.exit(f"training alone has failed; what it has printed is in {out / 'logs'}")


def report(arguments: Sequence[str]) -> None:
    """Join runs.

    Raises:
        InputError: a folder is no run's.
    """
    parser = argparse.ArgumentParser("cocod-bench report", description="Join runs into one table and plots.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of runs (--out)")
    parser.add_argument("--out", type=Path, default=Path(), help="where the tables and plots go (here)")
    options = parser.parse_args(arguments)
    make(options.out)
    conclude([row for folder in options.folders for row in read(folder)], options.out)


def conclude(made: Sequence[Row], out: Path) -> None:
    """Print the table; write it, and the plots if there is matplotlib."""
    print("\n" + tables.plain(made))
    written = tables.save(made, out)
    try:
        written += plots.save(made, out)
    except ModuleNotFoundError as error:
        print(f"no plots, as {error.name} is not installed: pip install -e '.[bench]' in a clone")
    for path in written:
        print(path)


def read(folder: Path) -> list[Row]:
    """The rows of a run.

    Raises:
        InputError: there is none in this folder.
    """
    if not (folder / RUN).exists():
        raise InputError(f"{folder} has no {RUN}: give folders that a run of cocod-bench has written (--out)")
    try:
        run: dict[str, Any] = json.loads((folder / RUN).read_text())
        whole = (folder / TRIALS).read_text().rpartition("\n")[0]  # a run that was killed may end within a line
        return rows(run, [json.loads(line) for line in whole.splitlines()])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder} cannot be read as a run of cocod-bench: {type(error).__name__}: {error}") from error


def make(folder: Path) -> None:
    """A folder for results.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}") from error


def begin(host: Host) -> None:
    """Write what is to be measured, and where.

    Raises:
        InputError: a run is in the folder already.
    """
    if (host.out / RUN).exists():
        raise InputError(f"{host.out} has the results of a run: give another --out, or remove it")
    make(host.out)
    facts = {"ranks": host.ranks, "cpus": len(os.sched_getaffinity(0)), "device": device(), "own": list(own())}
    (host.out / RUN).write_text(json.dumps({**vars(host.plan), **facts}, indent=2) + "\n")
    (host.out / TRIALS).touch()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a run."""
    default = Plan("", (), 0, 0)
    parser = argparse.ArgumentParser(
        "cocod-bench",
        description="How fast strategies train, in one run and interleaved.",
        epilog="cocod-bench report FOLDER ... --out FOLDER: several runs in one table, and plots.",
    )
    add = parser.add_argument
    add("--workload", choices=WORK, default="resnet18", help="what is trained (%(default)s)")
    names = ", ".join(contenders())
    add("--contenders", metavar="A,B", help=f"all, or of {names} (by default none, transport, bare, ddp, this package)")
    add("--period", type=int, help="steps of a round (8)")
    add("--batch-size", type=int, help="samples of a rank in a step (of the workload: 16, huge 4)")
    add("--ranks", type=int, default=2, help="to start here, where no launcher has started them (%(default)s)")
    add("--rounds", type=int, default=default.rounds, help="measured in each repeat (%(default)s)")
    add("--warmup", type=int, default=default.warmup, metavar="ROUNDS", help="before measuring begins (%(default)s)")
    add("--repeats", type=int, default=default.repeats, help="trainings of each contender (%(default)s)")
    add("--seed", type=int, default=default.seed, help="of the order, the weights and the data (%(default)s)")
    add("--threads", type=int, default=default.threads, help="of a rank (%(default)s)")
    add("--limit", type=float, default=default.limit, metavar="SECONDS", help="of one training (%(default)g)")
    add("--link-rate", type=float, metavar="MBIT", help="for the table: what somebody has shaped the link to")
    add("--out", type=Path, help="folder for the results (outputs/bench/…)")
    return parser.parse_args(arguments)


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan, with the defaults of its workload.

    Raises:
        InputError: a contender that there is not, or a number that is too small.
    """
    for name in ("period", "batch_size", "ranks", "rounds", "warmup", "repeats", "threads", "limit", "link_rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise InputError(f"--{name.replace('_', '-')} must be positive, got {value:g}")
    known = contenders()
    usual = [CEILING, TRANSPORT, "bare", *own(), "ddp"]
    asked = {None: usual, "all": list(known)}.get(options.contenders) or options.contenders.split(",")
    for name in asked:
        if name not in known:
            raise InputError(f"--contenders: there is no {name!r}; choose from {', '.join(known)}")
    work = WORK[options.workload]
    as_given = ("warmup", "rounds", "repeats", "seed", "threads", "limit", "link_rate")
    return Plan(
        workload=options.workload,
        contenders=tuple(dict.fromkeys([CEILING, *asked])),  # fractions need the ceiling
        period=options.period or work.period,
        batch_size=options.batch_size or work.batch_size,
        **{name: getattr(options, name) for name in as_given},
    )


if __name__ == "__main__":
    main()
