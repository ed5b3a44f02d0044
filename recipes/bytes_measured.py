"""What an algorithm sends, counted twice: by its own ledger, and by the kernel for the connections of this process."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from bytes_formulas import Case
from torch import nn

from lightning_cocod import algorithms
from lightning_cocod.algorithms import ADPSGD, Algorithm
from lightning_cocod.algorithms.asynchronous import Asynchronous
from lightning_cocod.comm.topology import is_active

ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.name: kind
    for kind in (getattr(algorithms, name) for name in algorithms.__all__)
    if isinstance(kind, type) and issubclass(kind, Algorithm) and hasattr(kind, "name")
}


class Sent(NamedTuple):
    """Bytes a step of one rank.

    Attributes:
        counted: ``comm/sent_bytes``; nothing where torch.distributed is called directly.
        written: to its connections, with what the transport adds, and acknowledgements of its own.
        exchanges: of a worker that exchanges with another one whenever it can; else 0.
    """

    counted: float | None
    written: float
    exchanges: float = 0.0


def written() -> int:
    """Bytes that this process has written to the TCP connections that are open, those to the store (heartbeats) left out."""
    total, store = 0, int(os.environ["MASTER_PORT"])
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it is gone, or not connected
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as it:
                if it.family not in (socket.AF_INET, socket.AF_INET6) or store in (it.getsockname()[1], it.getpeername()[1]):
                    continue
                info = it.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (waiting,) = struct.unpack_from("=I", info, 144)  # of struct tcp_info, Linux 4.19 and later
            sent, again = struct.unpack_from("=QQ", info, 200)
            total += sent - again + waiting
    return total


def measure(case: Case, model: nn.Module) -> Sent:
    """What this rank sends. Collective, in a process group that is there.

    There is no forward and no backward: gradients are random at first, and then what an algorithm leaves of them. The
    readings are taken at the same phase of rounds, and after the communication thread has done what it has been told, or
    where all workers have come to rest, so that the messages between them are whole.
    """

    def gradients() -> None:
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.empty_like(p).uniform_(-1e-3, 1e-3)

    model.zero_grad(set_to_none=True)
    if case.algorithm == "all-reduce":

        def all_reduce() -> None:
            gradients()
            for p in model.parameters():
                dist.all_reduce(p.grad)

        return _between(all_reduce, lambda: Sent(0.0, written()), case)._replace(counted=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ALGORITHMS[case.algorithm](model, optimizer, **case.options) as algo:

        def step() -> None:
            gradients()
            algo.step()
            if isinstance(algo, ADPSGD):
                _let_exchange(algo)

        def reading() -> Sent:
            with algo.meeting() if isinstance(algo, Asynchronous) else nullcontext():
                algo.comm.do(lambda: None, algo.subject("reading")).wait()
                metrics = algo.metrics()
                return Sent(metrics["comm/sent_bytes"], written(), metrics.get("algo/exchanges", 0.0))

        return _between(step, reading, case)


def _let_exchange(algo: ADPSGD) -> None:
    """Until this worker's exchange is over, if it is one that asks: without passes, steps are too short for any."""
    while is_active(algo.comm.rank) and algo.gossip.exchanges < algo.t:
        algo.gossip.check()
        time.sleep(0.001)


def _between(step: Callable[[], None], reading: Callable[[], Sent], case: Case) -> Sent:
    for _ in range(case.window):
        step()
    begun = reading()
    for _ in range(case.window):
        step()
    return Sent(*((b - a) / case.window for a, b in zip(begun, reading(), strict=True)))
