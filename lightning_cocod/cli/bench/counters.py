"""What the system counts about this process: CPU time of its threads, its memory, and the bytes on its network device."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

TICK = 1.0 / os.sysconf("SC_CLK_TCK")  # seconds
TRAINING, COMMUNICATION, OTHERS = "training", "communication", "others"


class Seconds(NamedTuple):
    """CPU time in the program and in the kernel."""

    user: float = 0.0
    system: float = 0.0


def cpu() -> dict[str, Seconds]:
    """CPU time so far: of the thread that trains, of our communication thread, and of all others of this process.

    The others are the transport's, the heartbeat's and torch's own; threads that have ended count among them.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    own = os.times()
    known = {TRAINING: Seconds(), COMMUNICATION: Seconds()}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), "")
        if int(task.name) == os.getpid():
            known[TRAINING] = _of(task)
        elif name.startswith("communication of rank"):
            known[COMMUNICATION] = _of(task)
    user, system = (sum(part) for part in zip(*known.values(), strict=True))
    return {**known, OTHERS: Seconds(max(0.0, own.user - user), max(0.0, own.system - system))}


def _of(task: Path) -> Seconds:
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return Seconds(int(fields[11]) * TICK, int(fields[12]) * TICK)


def machine_cpu() -> float:
    """Seconds so far in which CPUs of this machine were not idle, whatever for, and be it in an interrupt."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) * TICK


def peak_memory() -> int:
    """Bytes of memory that this process has had resident at most since it began, pages shared with its parent included."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def device() -> str:
    """The network device of this rank's traffic."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def sent(device: str) -> int:
    """Bytes that the device has sent so far, headers included. A loopback counts what all processes on it send.

    Raises:
        ValueError: there is no such device.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise ValueError(f"there is no network device {device!r} (GLOO_SOCKET_IFNAME)")
