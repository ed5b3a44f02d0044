"""What it costs: how much communication is hidden, memory, time a step. Figures first; some of them decide a verdict."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from gpu_checks.library import ALGORITHMS, Algorithm, options, takes
from gpu_checks.rank import Rank, check
from gpu_checks.training import train
from lightning_cocod.comm import Message

COPIES = {
    **{"cocod": 1, "local_sgd": 0, "post_local_sgd": 0, "dc_s3gd": 1, "d_psgd": 1, "sgp": 1, "pipe_sgd": 1},
    **{"overlap_local_sgd": 3, "slowmo": 3, "diloco": 3, "eager_diloco": 5, "co2": 5, "streaming_diloco": 2.5},
    **{"ssgd": 1, "ssd_sgd": 4, "od_sgd": 4.1, "cd_sgd": 4, "dist_ef_sgd": 2, "compskip_dsgd": 2, "flex_compress_sgd": 2},
}
"""Device memory beyond model, gradients and optimizer, in units of the parameters: what the algorithms promise, which
`tests/test_memory.py` sees of resident memory."""
ROOM = 0.1
"""The same for buckets on their way."""
HOST = 300.0
"""Microseconds of the host's that a tiny step may cost in the verbs, waiting for messages left out."""


@check(alone=True)
def overlap(rank: Rank) -> None:
    """From events: how long the link was busy, and how much of that training waited for. Steps in between hide something."""
    for name, algorithm in ALGORITHMS.items():
        with rank.attempt(name):
            train(rank, algorithm, steps=4, size=256)
            run = train(rank, algorithm, steps=64, size=256, period=16)
            _tell(rank, name, run.metrics, run.seconds)
            if takes(algorithm, "overlap"):
                blocking = train(rank, algorithm, steps=64, size=256, period=16, overlap=False)
                _tell(rank, f"{name} blocking", blocking.metrics, blocking.seconds)
                hidden, steps = run.metrics["comm/hidden_fraction"], run.metrics["algo/staleness_steps"]
                rank.expect(not rank.cuda or hidden > 0.1 or not steps, f"{name}: something is hidden ({hidden:.2f})")


def _tell(rank: Rank, name: str, metrics: dict[str, float], seconds: float) -> None:
    busy, exposed, skew = (metrics[f"comm/{part}_ms"] for part in ("busy", "exposed", "skew"))
    hidden = metrics.get("comm/hidden_fraction", 0.0)
    rank.figures[name] = (
        f"exposed/busy {exposed:.2f}/{busy:.2f} ms a step, hidden {hidden:.0%}, skew {skew:.2f} ms, "
        f"step {1e3 * seconds / 64:.2f} ms"
    )


@check(alone=True, cuda=True)
def memory(rank: Rank) -> None:
    """The allocator's peak beyond a model whose gradients are there already, in units of its parameters."""
    for name, algorithm in ALGORITHMS.items():
        with rank.attempt(name):
            _peak(rank, algorithm, layers=1)  # libraries load
            peak = _peak(rank, algorithm, layers=40)
            rank.figures[name] = f"{peak:.3f} P"
            most = 1.05 if name == "cocod" else COPIES[name] + ROOM if name in COPIES else math.inf  # cocod has a target
            rank.expect(peak <= most, f"{name}: {peak:.3f} ≤ {most:.2f} P")


def _peak(rank: Rank, algorithm: type[Algorithm], layers: int) -> float:
    model = nn.ParameterList([torch.ones(1000, 1000, device=rank.device) for _ in range(layers)])
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    gc.collect()  # what an earlier run has left must not go while this one is measured
    rank.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with algorithm(model, optimizer, **options(algorithm, {"period": 2})) as running:
        for _ in range(5):
            running.step()
    rank.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (4e6 * layers)


@check(ranks=1, backend="nccl", alone=True)
def overhead_alone(rank: Rank) -> None:
    """What a step of one rank costs more than without an algorithm."""
    _overhead(rank)


@check(alone=True)
def overhead(rank: Rank) -> None:
    """What a step of two ranks costs more than without an algorithm, both training at the same time in either case."""
    _overhead(rank)


def _overhead(rank: Rank) -> None:
    steps = 400 if rank.cuda else 100
    _steps(rank, None, steps)
    plain, _ = _steps(rank, None, steps)
    rank.figures["plain"] = f"{plain:.0f} µs a step"
    for name, algorithm in ALGORITHMS.items():
        with rank.attempt(name):
            _steps(rank, algorithm, steps)
            step, verbs = _steps(rank, algorithm, steps)
            rank.figures[name] = f"{step - plain:+.0f} µs, of which the host in the verbs {verbs:.0f} µs"
            judged = rank.cuda and (rank.world == 1 or takes(algorithm, "period"))  # not with a message in each tiny step
            rank.expect(verbs <= HOST or not judged, f"{name}: the host is in the verbs for {verbs:.0f} ≤ {HOST:.0f} µs")


@contextmanager
def _waiting() -> Iterator[Callable[[], float]]:
    """Inside, says for how many seconds of the host's messages have been waited for."""
    seconds, block = 0.0, Message._block

    def timed(*args: Any) -> None:
        nonlocal seconds
        entered = time.perf_counter()
        try:
            block(*args)
        finally:
            seconds += time.perf_counter() - entered

    with mock.patch.object(Message, "_block", timed):
        yield lambda: seconds


def _steps(rank: Rank, algorithm: type[Algorithm] | None, count: int) -> tuple[float, float]:
    """Microseconds a step, and of those the host's in the algorithm's verbs but for waiting; rounds of eight steps."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]).to(rank.device)
    x = torch.randn(64, 256, device=rank.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    running = None if algorithm is None else algorithm(net, optimizer, **options(algorithm, {"period": 8}))
    if running is not None:
        running.start()
    dist.barrier()
    rank.synchronize()
    begun, verbs = time.perf_counter(), 0.0
    with _waiting() as waited:

        def timed(verb: Callable[[], None]) -> float:
            entered, before = time.perf_counter(), waited()
            verb()
            return time.perf_counter() - entered - (waited() - before)

        for _ in range(count):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            if running is None:
                optimizer.step()
                continue
            verbs += timed(running.before_step)
            running.step(optimizer.step)
            verbs += timed(running.after_step)
        rank.synchronize()
    seconds = time.perf_counter() - begun
    if running is not None:
        running.finish()
        running.close()
    return 1e6 * seconds / count, 1e6 * verbs / count
