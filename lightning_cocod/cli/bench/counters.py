"""What the system counts about this process: CPU time of its threads, its memory, and the bytes on its network device."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

TICK = 1.0 / os.sysconf("SC_CLK_TCK")  # seconds
GLOO_DEVICE, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
TRAINING, COMMUNICATION, HEARTBEAT, OTHERS = KINDS = ("training", "communication", "heartbeat", "others")


class Seconds(NamedTuple):
    """CPU time in the program and in the kernel."""

    user: float = 0.0
    system: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        """The sum."""
        return Seconds(self.user + other.user, self.system + other.system)


def cpu() -> dict[str, Seconds]:
    """CPU time so far by kind of thread: the one that trains, our communication thread, our heartbeat, and all others.

    The others of this process are the transport's and torch's own; threads that have ended count among them.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent = {kind: Seconds() for kind in (TRAINING, COMMUNICATION, HEARTBEAT)}
    for task in Path("/proc/self/task").iterdir():
        kind = TRAINING if int(task.name) == os.getpid() else names.get(int(task.name), "").partition(" ")[0]
        if kind in spent:
            spent[kind] = spent[kind].plus(_of(task))
    all_threads = os.times()
    user, system = (sum(part) for part in zip(*spent.values(), strict=True))
    return {**spent, OTHERS: Seconds(max(0.0, all_threads.user - user), max(0.0, all_threads.system - system))}


def _of(task: Path) -> Seconds:
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return Seconds(int(fields[11]) * TICK, int(fields[12]) * TICK)


def machine_cpu() -> float:
    """Seconds so far in which CPUs of this machine were at work, whatever for. Only differences mean something.

    They are those in which the CPUs were not idle: interrupts of an idle machine, in which much of a network's work is done,
    belong to no thread and escape the samples that are taken of them.
    """
    now, (line, *others) = time.monotonic(), Path("/proc/stat").read_text().splitlines()
    _, _, _, idle, waiting, _, _, stolen, *_ = map(int, line.split()[1:])
    cpus = sum(other.startswith("cpu") for other in others)
    return now * cpus - (idle + waiting + stolen) * TICK


def peak_memory() -> int:
    """Bytes of memory that this process has had resident at most since it began, pages shared with its parent included."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def device() -> str:
    """The network device of this rank's traffic, as Gloo is told as well."""
    return os.environ.get(GLOO_DEVICE, LOOPBACK)


def device_towards(address: str, routes: str) -> str:
    """The network device on the way to another machine.

    Args:
        address: of that machine, IPv4 or a name.
        routes: the kernel's table, ``/proc/net/route``.

    Raises:
        ValueError: there is no way.
        OSError: the name is nobody's.
    """
    there, ways = int.from_bytes(socket.inet_aton(socket.gethostbyname(address)), sys.byteorder), []
    for line in routes.splitlines()[1:]:
        name, network, _, _, _, _, metric, mask, *_ = line.split()
        if there & int(mask, 16) == int(network, 16):
            ways.append((int(mask, 16).bit_count(), -int(metric), name))
    if not ways:
        raise ValueError("there is no route")
    return max(ways)[-1]


def sent(device: str) -> int:
    """Bytes that the device has sent so far, headers included. A loopback counts what all processes on it send.

    Raises:
        ValueError: there is no such device.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise ValueError(f"there is no network device {device!r} ({GLOO_DEVICE})")
