"""Networks for ranks on one machine: namespaces, and links shaped to a given rate. ``netlab.py`` says what they are like.

    with Lab([Link(up=200, down=200), Link(up=50, down=200)]) as lab:
        processes = lab.run([sys.executable, "train.py"])
        lab.rate(1, up=20)  # from now on
        lab.cut(1)
        lab.mend(1)
        codes = [process.wait() for process in processes]

Nothing is created outside namespaces that have no name and no way to any host. Each namespace has a keeper, a process that
ends when this one does, be it by Ctrl-C, an error or ``kill -9``, and that kills all others in its namespace first. The
kernel then removes the namespace and its devices.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
QUEUE, BURST = 0.1, 0.01  # seconds of the rate that wait at a link, and that pass at once
SMALLEST_BURST = 8192  # bytes: more than a packet, or nothing would pass
READY = "ready\n"


class NotPermitted(RuntimeError):
    """Namespaces or shaped links cannot be made here; the text says what is missing."""


class CommandFailed(RuntimeError):
    """A command on a lab's network has failed; the text says which, and why."""


class Link(NamedTuple):
    """What a rank sends and receives at most, in Mbit/s; None is no limit."""

    up: float | None = None
    down: float | None = None


class Traffic(NamedTuple):
    """Bytes with all headers that a rank has put on its link, and that have arrived over it."""

    sent: int
    received: int


def missing() -> str | None:
    """What stands against a lab on this machine, in one line; None if nothing does."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    absent = {tool: package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if absent:
        return f"not installed: {', '.join(absent)} (package {', '.join(sorted(set(absent.values())))})"
    needs = {
        "a network namespace (be root, or have CAP_SYS_ADMIN)": "true",
        "a veth pair (CAP_NET_ADMIN, kernel module veth)": "ip link add probe type veth peer name end",
        "a bridge (kernel module bridge)": "ip link add probe type bridge",
        "a shaped link (kernel module sch_tbf)": "tc qdisc add dev lo root tbf rate 1mbit burst 8192b latency 100ms",
    }
    for what, command in needs.items():
        tried = subprocess.run(["unshare", "--net", *command.split()], capture_output=True, text=True)
        if tried.returncode != 0:
            return f"not permitted: {what}: {' '.join(tried.stderr.split())}"
    return None


def keep() -> None:
    """Hold this process's namespace until whoever has started it closes the pipe or ends; then kill all others inside."""
    print(READY, end="", flush=True)
    sys.stdin.read()
    here = os.readlink("/proc/self/ns/net")
    while others := [pid for pid in inside(here) if pid != os.getpid()]:
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def inside(namespace: str) -> list[int]:
    """The processes in a network namespace, named as in ``/proc/self/ns/net``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                found += [int(entry.name)] if os.readlink(entry / "ns/net") == namespace else []
    return found


class Namespace:
    """A network namespace without a name, which lasts as long as its keeper."""

    def __init__(self) -> None:
        command = ["unshare", "--net", sys.executable, "-IS", __file__]
        pipe = subprocess.PIPE
        self.keeper = subprocess.Popen(command, text=True, start_new_session=True, stdin=pipe, stdout=pipe)
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        self._lifeline = self.keeper.stdin
        with self.keeper.stdout as answer:
            if answer.readline() != READY:
                raise NotPermitted("the keeper of a namespace has ended at once")

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` inside."""
        return ["nsenter", f"--net=/proc/{self.keeper.pid}/ns/net", *command]

    def do(self, command: str) -> str:
        """Run a short command inside; its output.

        Raises:
            CommandFailed: it has.
        """
        done = subprocess.run(self.enter(command.split()), capture_output=True, text=True)
        if done.returncode != 0:
            raise CommandFailed(f"{command!r} failed: {' '.join(done.stderr.split())}")
        return done.stdout

    def shape(self, device: str, rate: float | None) -> None:
        """Let the device send at no more than the rate (Mbit/s), from now on; None takes the limit off."""
        if rate is not None:
            burst = max(SMALLEST_BURST, int(rate * 1e6 / 8 * BURST))
            self.do(f"tc qdisc replace dev {device} root tbf rate {rate}mbit burst {burst}b latency {QUEUE * 1e3:g}ms")
        elif "tbf" in self.do(f"tc qdisc show dev {device}"):
            self.do(f"tc qdisc del dev {device} root")

    def close(self) -> None:
        """Kill every process inside. Idempotent."""
        self._lifeline.close()
        self.keeper.wait()


_R = TypeVar("_R", bound="Ranks")


class Ranks:
    """Processes in namespaces, one a rank: what a lab does whatever its network looks like."""

    device, address = "lo", "127.0.0.1"

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ValueError(f"a lab needs one rank at least, got {ranks}")
        self.ranks = ranks
        self._namespaces: list[Namespace] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._ports = count(29500)  # nobody else is in the namespaces: all ports are free

    def __enter__(self: _R) -> _R:
        """Make the network.

        Raises:
            NotPermitted: it cannot be made here.
            CommandFailed: not of these links.
        """
        if (why := missing()) is not None:
            raise NotPermitted(why)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def home(self, rank: int) -> Namespace:
        """The namespace of a rank."""
        raise NotImplementedError

    def _build(self) -> None:
        raise NotImplementedError

    def _made(self, index: int) -> Namespace:
        if not self._namespaces:
            raise RuntimeError("there is no network yet, or no more: use it inside `with ... as lab:`")
        return self._namespaces[index]

    def _new(self) -> Namespace:
        made = Namespace()
        self._namespaces.append(made)
        made.do("ip link set lo up")
        return made

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """What tells a process which rank it is, and how to reach the others."""
        node = {"RANK": rank, "NODE_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        devices = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), self.device)
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(port), **{k: str(v) for k, v in node.items()}, **devices}

    def run(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> list[subprocess.Popen[str]]:
        """Start a command on every rank, with further variables ``env``; ``popen`` goes to ``subprocess.Popen``.

        Args:
            command: the same for all, or a function of the rank that returns it.

        Returns:
            The ranks' own processes, in their order. Leaving the lab kills those that still run.

        Raises:
            RuntimeError: outside of the ``with`` block.
        """
        port = next(self._ports)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
        started = []
        for rank in range(self.ranks):
            argv = [str(word) for word in (command(rank) if callable(command) else command)]
            variables = {**inherited, **self.environment(rank, port), **(env or {})}
            process = subprocess.Popen(
                self.home(rank).enter(argv), env=variables, text=True, start_new_session=True, **popen
            )
            self._processes.append(process)
            started.append(process)
        return started

    def close(self) -> None:
        """Kill whatever runs inside and remove the namespaces. Idempotent."""
        for process in self._processes:  # first, as one that has just been started is not inside yet
            process.kill()
            process.wait()
        for namespace in self._namespaces:
            namespace.close()
        self._namespaces, self._processes = [], []


class Lab(Ranks):
    """Every rank in a namespace of its own, on a link of its own to a switch that is as fast as the machine.

    Args:
        links: one for each rank, in Mbit/s.

    Raises:
        ValueError: no rank, more than 250, or a rate that is not positive.
    """

    device, address = "eth0", "10.77.0.1"

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__(len(links))
        if len(links) > 250:
            raise ValueError(f"a lab has addresses for 250 ranks, got {len(links)}")
        self.links = [Link(*map(checked, link)) for link in links]

    def home(self, rank: int) -> Namespace:
        """The namespace of a rank."""
        if rank not in range(self.ranks):
            raise ValueError(f"there is no rank {rank}: the lab has {self.ranks}, counted from 0")
        return self._made(1 + rank)  # the first is the switch's

    def _build(self) -> None:
        self._switch = self._new()
        self._switch.do("ip link add switch type bridge")
        self._switch.do("ip link set switch up addrgenmode none")  # IPv4 only: nothing but the ranks' traffic
        for rank in range(self.ranks):
            home = self._new()
            self._switch.do(f"ip link add port{rank} type veth peer name eth0 netns {home.keeper.pid}")
            self._switch.do(f"ip link set port{rank} up addrgenmode none master switch")
            home.do("ip link set eth0 addrgenmode none")
            home.do(f"ip address add 10.77.0.{rank + 1}/24 dev eth0")
            home.do("ip link set eth0 up")
            self._shape(rank)

    def _shape(self, rank: int) -> None:
        self.home(rank).shape("eth0", self.links[rank].up)  # each end of a link shapes what it sends
        self._switch.shape(f"port{rank}", self.links[rank].down)

    def rate(self, rank: int, **rates: float | None) -> None:
        """Change ``up``, ``down`` or both, in Mbit/s, while it is in use; None takes the limit off."""
        self.home(rank)
        self.links[rank] = Link(*map(checked, self.links[rank]._replace(**rates)))
        self._shape(rank)

    def cut(self, rank: int) -> None:
        """From now on nothing passes between the rank and the switch. Neither end is told; connections stay."""
        self.home(rank)
        self._switch.do(f"ip link set port{rank} nomaster")  # a port taken down would be seen as a cable pulled out

    def mend(self, rank: int) -> None:
        """Undo ``cut``. TCP finds out when it next tries, up to as long from now as the link has been cut."""
        self.home(rank)
        self._switch.do(f"ip link set port{rank} master switch")

    def traffic(self, rank: int) -> Traffic:
        """What has passed over the rank's link so far, in bytes."""
        (device,) = json.loads(self.home(rank).do("ip -json -statistics link show dev eth0"))
        return Traffic(device["stats64"]["tx"]["bytes"], device["stats64"]["rx"]["bytes"])


class SharedLoopback(Ranks):
    """All ranks in one namespace, on a loopback of one rate (Mbit/s) for all that any of them sends.

    Raises:
        ValueError: no rank, or a rate that is not positive.
    """

    def __init__(self, ranks: int, rate: float | None) -> None:
        super().__init__(ranks)
        self._mbit = checked(rate)

    def home(self, rank: int) -> Namespace:
        """The one namespace."""
        return self._made(0)

    def _build(self) -> None:
        self._new().do("ip link set lo mtu 1500")  # packets as on a link; one of 64 kB would not fit into a small burst
        self.rate(self._mbit)

    def rate(self, rate: float | None) -> None:
        """Change the rate (Mbit/s) while it is in use; None takes the limit off."""
        self.home(0).shape("lo", checked(rate))


def checked(value: float | None) -> float | None:
    """A rate.

    Raises:
        ValueError: not positive, or not finite.
    """
    if value is not None and not 0 < value < float("inf"):
        raise ValueError(f"a rate must be a positive number of Mbit/s, or None for no limit, got {value!r}")
    return value


if __name__ == "__main__":
    keep()
