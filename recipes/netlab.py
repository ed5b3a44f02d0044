"""Ranks on slow links on one machine: a network namespace each, joined by links that are shaped to a given rate.

    python recipes/netlab.py --ranks 2 --rate 200 -- python train.py
    python recipes/netlab.py --ranks 3 --up 200,200,50 --down none --outage 1@30+3 --change 2@60=20 -- python train.py
    python recipes/netlab.py --ranks 2 --rate 1000 --loopback -- python train.py
    python recipes/netlab.py --check

Every rank is a node of its own with one process, ``Trainer(strategy="cocod", num_nodes=2, devices=1)`` in Lightning; what
``torch.distributed.init_process_group`` reads is set as well. Rates are in Mbit/s, "none" is no limit. ``up`` is what a rank
sends and ``down`` what it receives; each has a queue of 100 ms, and 10 ms' worth of the rate pass at once. With
``--loopback`` all ranks are in one namespace and share one rate, for both directions and all ranks together.

Latency is left out: a link delays by its rate and its queue only, as the kernels this runs on lack ``netem``. TCP retries at
growing intervals, so after an outage traffic goes on up to as long again as the outage has lasted.

The ranks share the machine in all but the network: CPUs, files, the table of processes. Each computes with its share of the
CPUs (``OMP_NUM_THREADS``, if you have not set it). CoCoD ends a rank that is cut off
for longer than its ``timeout`` as a silent process of its own host. Where that matters, give each rank a table of its own:
``-- unshare --pid --fork --kill-child --mount-proc python train.py``.

It needs Linux, the rights of root over the network (CAP_NET_ADMIN and CAP_SYS_ADMIN), iproute2 and util-linux. Whatever it
creates is gone when it ends, however it ends. No rank reaches any host but the other ranks: torch warns that it cannot look
up their names, and W&B must be offline.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from lab import CommandFailed, Lab, Link, NotPermitted, Ranks, SharedLoopback, checked, missing


class Event(NamedTuple):
    """Something to be done to a lab, ``at`` so many seconds after the start of the ranks."""

    at: float
    what: str
    act: Callable[[Lab], None]


def rates(text: str | None, ranks: int, option: str) -> list[float | None]:
    """A rate for each rank, from one for all ("200") or one for each ("200,none").

    Raises:
        ValueError: neither.
    """
    given = [mbit(word) for word in (text or "none").split(",")]
    if len(given) not in (1, ranks):
        raise ValueError(f"{option} has {len(given)} rates for {ranks} ranks: give one for all, or one for each")
    return given * (ranks // len(given))


def mbit(word: str) -> float | None:
    """A rate in Mbit/s from text; "none" is no limit."""
    if word.strip() == "none":
        return None
    try:
        return checked(float(word))
    except ValueError:
        raise ValueError(f"a rate is a positive number of Mbit/s or 'none', got {word!r}") from None


def member(word: str, ranks: int) -> int:
    """A rank, if there is one of that number."""
    if int(word) >= ranks:
        raise ValueError(f"there is no rank {word} among {ranks}, counted from 0")
    return int(word)


def outage(text: str, ranks: int) -> list[Event]:
    """The events of "1@30+3": rank 1 is cut off after 30 s, for 3 s."""
    found = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)\+(\d+(?:\.\d+)?)", text)
    if found is None:
        raise ValueError(f"--outage is RANK@START+SECONDS, as in 1@30+3, got {text!r}")
    rank, start, length = member(found[1], ranks), float(found[2]), float(found[3])
    return [
        Event(start, f"rank {rank} is cut off", lambda lab: lab.cut(rank)),
        Event(start + length, f"rank {rank} is connected again", lambda lab: lab.mend(rank)),
    ]


def change(text: str, ranks: int) -> list[Event]:
    """The event of "1@60=20" or "1@60=20/none": after 60 s rank 1 gets that rate, for both directions or up/down."""
    found = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)=([^/]+)(?:/(.+))?", text)
    if found is None:
        raise ValueError(f"--change is RANK@START=RATE or RANK@START=UP/DOWN, as in 1@60=20, got {text!r}")
    rank, up, down = member(found[1], ranks), mbit(found[3]), mbit(found[4] or found[3])
    what = f"rank {rank} has {up or 'no limit'} up, {down or 'no limit'} down, in Mbit/s"
    return [Event(float(found[2]), what, lambda lab: lab.rate(rank, up=up, down=down))]


def parse(arguments: Sequence[str]) -> tuple[Ranks, list[Event], list[str]]:
    """The lab, what happens to it in the order of time, and the command of the ranks.

    Raises:
        SystemExit: it was ``--check`` or ``--help``, or the arguments are wrong.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], usage="%(prog)s [options] -- command")
    parser.add_argument("--ranks", type=int, default=2, help="how many (2)")
    parser.add_argument("--rate", metavar="MBIT", help="of all links, in both directions: Mbit/s, or none for no limit")
    parser.add_argument(
        "--up", metavar="MBIT", help="what ranks send: one rate for all or one for each (200,50); over --rate"
    )
    parser.add_argument("--down", metavar="MBIT", help="what ranks receive, likewise")
    parser.add_argument("--outage", action="append", default=[], metavar="RANK@START+SECONDS", help="cut a rank off")
    parser.add_argument("--change", action="append", default=[], metavar="RANK@START=RATE", help="another rate from then on")
    parser.add_argument("--loopback", action="store_true", help="one loopback of this --rate, shared by all ranks")
    parser.add_argument("--check", action="store_true", help="say whether all this is permitted here")
    parser.add_argument("command", nargs="*", help="run on every rank")
    options = parser.parse_args(arguments)
    if options.check:
        why = missing()
        print(why or "all that is needed is here")
        raise SystemExit(0 if why is None else 1)
    if not options.command:
        parser.error("which command? Give it after --, as in -- python train.py")
    if options.loopback and (options.up or options.down or options.outage or options.change):
        parser.error("--loopback has one --rate for all: no --up, --down, --outage or --change")
    try:
        events = [event for text in options.outage for event in outage(text, options.ranks)]
        events += [event for text in options.change for event in change(text, options.ranks)]
        if options.loopback:
            (shared,) = set(rates(options.rate, 1, "--rate"))
            return SharedLoopback(options.ranks, shared), [], options.command
        up = rates(options.up or options.rate, options.ranks, "--up" if options.up else "--rate")
        down = rates(options.down or options.rate, options.ranks, "--down" if options.down else "--rate")
        lab = Lab([Link(*pair) for pair in zip(up, down, strict=True)])
    except ValueError as error:
        parser.error(str(error))
    return lab, sorted(events, key=lambda event: event.at), options.command


def echo(rank: int, process: subprocess.Popen[str]) -> threading.Thread:
    """Print what a rank prints, with its number before each line."""

    def copy() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(BrokenPipeError):  # nobody reads any more: the rank must not wait for that
                print(f"[{rank}] {line}", end="", flush=True)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def threads(ranks: int) -> str:
    """With how many threads each rank computes, unless the user has said so: every rank takes all CPUs for its own."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // ranks))


def supervise(lab: Ranks, events: Sequence[Event], command: Sequence[str]) -> int:
    """Run the command on all ranks while the events happen; the worst rank's exit code."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "errors": "replace"}
    processes = lab.run(command, env={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads(lab.ranks)}, **pipes)
    begun, to_come = time.monotonic(), list(events)
    copies = [echo(rank, process) for rank, process in enumerate(processes)]
    while any(process.poll() is None for process in processes):
        while to_come and time.monotonic() - begun >= to_come[0].at:
            event = to_come.pop(0)
            assert isinstance(lab, Lab)
            event.act(lab)
            print(f"[netlab] {event.at:g} s: {event.what}\n", end="", flush=True)  # in one piece
        time.sleep(0.02)
    for event in to_come:
        print(f"[netlab] not done, as all ranks had ended before: {event.at:g} s: {event.what}\n", end="", flush=True)
    for thread in copies:
        thread.join(10.0)  # a descendant of a rank may hold its output open for ever
    return max(code if code >= 0 else 128 - code for code in (process.returncode for process in processes))


@contextmanager
def orderly() -> Iterator[None]:
    """Whatever ends what is inside, a signal or a lab that fails, leaves nothing behind and takes one line at most.

    Raises:
        SystemExit: in place of all that.
    """

    def terminate(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, terminate)
    try:
        yield
    except NotPermitted as error:
        raise SystemExit(f"no lab here: {error}") from None
    except CommandFailed as error:
        raise SystemExit(f"the lab has failed: {error}") from None


def main() -> None:
    lab, events, command = parse(sys.argv[1:])
    with orderly(), lab:
        code = supervise(lab, events, command)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
