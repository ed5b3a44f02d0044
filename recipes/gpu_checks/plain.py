"""Correctness in a plain loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_checks.library import ALGORITHMS, ASYNCHRONOUS, Algorithm, must_warm_up, options, takes
from gpu_checks.rank import Rank, Skipped, check
from gpu_checks.training import PERIOD, flat, image_net, images, train
from lightning_cocod.algorithms import CDSGD, SSGD, CoCoD, DistEFSGD, LocalSGD
from lightning_cocod.algorithms.mixing import Mixing
from lightning_cocod.comm import Communicator, NonFiniteMessage, Subject, channel, communicator
from lightning_cocod.compression import CODECS, PowerSGD, pack, unpack


@check(ranks=1, lightning=True, limit=120.0)
def imports(rank: Rank) -> None:
    """Importing the library imports no more than Lightning does: what only its commands need comes with them."""
    code = (
        "import sys, lightning.pytorch; before = {m.split('.')[0] for m in sys.modules}; import lightning_cocod; "
        "print(*sorted({m.split('.')[0] for m in sys.modules} - before - {'lightning_cocod'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    rank.expect(run.returncode == 0, f"the library can be imported ({run.stderr.strip().splitlines()[-1:]})")
    more = run.stdout.strip()
    rank.expect(not more, f"it imports nothing more than Lightning does ({more})")


@check()
def bits(rank: Rank) -> None:
    """Replicas end equal; blocking, and running again, change no bit."""
    for name, algorithm in ALGORITHMS.items():
        with rank.attempt(name):
            train(rank, algorithm, steps=4)  # libraries load
            run = train(rank, algorithm)
            rank.expect(rank.same(run.end), f"{name}: replicas equal bit for bit at the end")
            rank.expect(not rank.same(run.before), f"{name}: and not before (the control)")
            if takes(algorithm, "overlap"):
                blocking = train(rank, algorithm, overlap=False)
                rank.expect(torch.equal(run.before, blocking.before), f"{name}: overlap=False is the same bit for bit")
            if takes(algorithm, "overlap_pull"):
                behind = train(rank, algorithm, overlap_pull=True)
                rank.expect(torch.equal(run.before, behind.before), f"{name}: overlap_pull=True is the same bit for bit")
            if algorithm.deterministic:
                again = [torch.equal(run.before, train(rank, algorithm).before) for _ in range(3)]
                rank.expect(all(again), f"{name}: three more runs give the same bits")


@check(asynchronous=True)
def asynchrony(rank: Rank) -> None:
    """Workers that make different numbers of steps hear of each other meanwhile, and end equal and finite."""
    for name, algorithm in ASYNCHRONOUS.items():
        with rank.attempt(name):
            run = train(rank, algorithm, steps=24 + 8 * rank.rank)
            rank.expect(run.t == 24 + 8 * rank.rank, f"{name}: each rank made its own steps")
            rank.expect(run.metrics["comm/received_bytes"] > 0, f"{name}: something was heard of the other")
            rank.expect(rank.same(run.end) and run.end.isfinite().all(), f"{name}: replicas equal and finite at the end")


@check()
def codes(rank: Rank) -> None:
    """Codes mean the same here and on the CPU. Rounds with a codec: replicas end equal, and running again changes no bit.
    Every codec trains, and PowerSGD.
    """
    for name, algorithm in ALGORITHMS.items():
        with rank.attempt(name):
            try:
                run = train(rank, algorithm, compression="int8")
            except ValueError as refused:
                rank.expect("leave compression out" in str(refused), f"{name}: codes are possible or refused ({refused})")
                continue
            again = train(rank, algorithm, compression="int8")
            rank.expect(rank.same(run.end), f"{name}: replicas equal bit for bit at the end")
            rank.expect(torch.equal(run.before, again.before), f"{name}: another run gives the same bits")
            rank.expect(run.metrics["comm/compression_ratio"] > 1, f"{name}: fewer bytes")
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    for name, kind in CODECS.items():
        with rank.attempt(f"a code of {name}"):
            code = pack(kind(), values.to(rank.device), torch.Generator(rank.device).manual_seed(2))
            here, there = unpack(kind(), code, values.to(rank.device)), unpack(kind(), code.cpu(), values)
            rank.expect(torch.allclose(here.cpu(), there, rtol=1e-6), f"{name}: its codes mean the same on the CPU")
    feasible = (name for name, kind in CODECS.items() if kind().contraction or kind().needs_feedback)
    for name in [*feasible, PowerSGD.name]:
        with rank.attempt(name):
            run = train(rank, CoCoD, compression=name)
            rank.expect(rank.same(run.end) and run.end.isfinite().all(), f"{name}: replicas equal and finite at the end")


def spoiling(rank: Rank, value: float) -> Callable[[int, nn.Module], None]:
    """What fills a gradient of rank 1 with this value in the sixth step."""
    hooks: list[Any] = []

    def spoil(step: int, net: nn.Module) -> None:
        if hooks:
            hooks.pop().remove()
        if rank.rank == 1 and step == 5:
            hooks.append(next(net.parameters()).register_hook(lambda gradient: torch.full_like(gradient, value)))

    return spoil


@check()
def float16(rank: Rank) -> None:
    """A step that one rank's scaler skips counts on both."""

    overflow = spoiling(rank, float("inf"))
    for name, algorithm in ALGORITHMS.items():
        if must_warm_up(algorithm) or not algorithm.may_skip_steps:  # refuses a scaler
            continue
        with rank.attempt(name):
            run = train(rank, algorithm, half=True, spoil=overflow)
            rank.expect(run.t == 24 and rank.same(run.end), f"{name}: a step skipped by one rank's scaler counts on both")
            rank.expect(run.end.isfinite().all(), f"{name}: finite")


@check(cuda=True)
def no_host_wait(rank: Rank) -> None:
    """Where the training thread waits for the device during twelve steps and three rounds: nowhere."""
    for name, algorithm in ALGORITHMS.items():
        with rank.attempt(name):
            waits, control = _synchronisations(rank, algorithm)
            rank.expect(not waits, f"{name}: no host synchronisation in the training thread ({', '.join(waits)})")
            rank.expect(control, f"{name}: one that is made is seen (the control)")


def _synchronisations(rank: Rank, algorithm: type[Algorithm]) -> tuple[list[str], bool]:
    seen: list[tuple[str, str]] = []
    shown = warnings.showwarning

    def record(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            stack = traceback.extract_stack()[:-1]
            ours = [f for f in stack if "lightning_cocod" in f.filename or f.filename == __file__] or stack
            seen.append((threading.current_thread().name, f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno}"))

    def in_training() -> list[str]:
        return [place for thread, place in seen if thread == "MainThread" or thread.startswith("Dummy")]  # autograd's

    net, (x, y) = image_net(rank), images(rank)[0]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with algorithm(net, optimizer, **options(algorithm, {"period": 4})) as running, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for step in range(13):
                if step == 1:
                    seen.clear()  # the first step's own: libraries that load
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                running.step()
                running.metrics()
            waits = in_training()
            x.sum().item()
            control = len(in_training()) > len(waits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown
    return waits, control


@check(ranks=1, backend="nccl")
def nccl(rank: Rank) -> None:
    """One rank, which takes itself for one of two, over NCCL: the same bits as over Gloo, however often, blocking or not."""
    possible = {name: kind for name, kind in ALGORITHMS.items() if not issubclass(kind, Mixing | SSGD)}
    if not possible:
        raise Skipped("what goes to the other one alone, or comes from its shard, needs it to be there")
    for name, algorithm in possible.items():
        with rank.attempt(name):
            alone = train(rank, algorithm).before
            over_gloo = _as_one_of_two(rank, algorithm, "gloo")
            rank.expect(not torch.equal(over_gloo, alone), f"{name}: messages are merged (the control)")
            for overlap in (True, False, True):
                over_nccl = _as_one_of_two(rank, algorithm, rank.backend, overlap=overlap)
                rank.expect(torch.equal(over_nccl, over_gloo), f"{name}: {rank.backend} as Gloo, overlap={overlap}")


def _as_one_of_two(rank: Rank, algorithm: type[Algorithm], backend: str, **wanted: Any) -> Tensor:
    """The other one's weights are zero: with half the weight, every mean is half of what this one has."""
    comm = Communicator(rank.device)
    comm.world_size, comm.samples_heard = 2, [0, 0]
    with (
        mock.patch.object(communicator, "Heartbeat"),
        mock.patch.object(channel.Channel, "_new_ring", return_value=None),  # which the CPU has, and here closes with itself
        mock.patch.object(channel, "exchange", lambda header, *_: [header] * 2),  # the same of the other one
        mock.patch.object(dist, "get_backend", return_value=backend),
    ):
        return train(rank, algorithm, communicator=comm, **wanted).before


def _double(device: torch.device, rank: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A model and batches in float64, made on the CPU."""
    generator = torch.Generator().manual_seed(10 + rank)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1)).double().to(device)
    x = torch.randn(12, 8, 6, generator=generator, dtype=torch.float64)
    return net, [(b.to(device), b.sum(1, keepdim=True).tanh().to(device)) for b in x]


def _doubles(rank: Rank, device: torch.device, algorithm: type[Algorithm], period: int = 3) -> tuple[Tensor, Tensor]:
    """This rank's replica after every step, and the end."""
    net, batches = _double(device, rank.rank)
    optimizer, path = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), []
    with algorithm(net, optimizer, **options(algorithm, {"period": period})) as running:
        for x, y in batches:
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            running.step()
            path.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    return torch.stack(path).cpu(), flat(net).cpu()


@check()
def float64(rank: Rank) -> None:
    """A run in float64 agrees with that on the CPU; Local SGD with a period of 1 is the mean of all ranks' steps."""
    worst = 0.0
    for name, algorithm in ALGORITHMS.items():
        with rank.attempt(name):
            path, end = _doubles(rank, rank.device, algorithm)
            rank.expect(rank.same(end), f"{name}: replicas equal bit for bit at the end")
            if algorithm.deterministic and not issubclass(
                algorithm, DistEFSGD | CDSGD
            ):  # codes jump where values hardly move
                on_cpu, cpu_end = _doubles(rank, torch.device("cpu"), algorithm)
                off = max(float((path - on_cpu).abs().max()), float((end - cpu_end).abs().max()))
                worst = max(worst, off)
                rank.expect(off < 1e-11, f"{name}: as on the CPU (off by {off:.1e})")
    rank.figures["GPU - CPU, float64" if rank.cuda else "CPU - CPU, float64"] = f"{worst:.0e}"

    path, _ = _doubles(rank, rank.device, LocalSGD, period=1)
    both = [_double(torch.device("cpu"), other) for other in range(rank.world)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net, _ in both]
    for step, ours in enumerate(path):
        for (net, batches), optimizer in zip(both, optimizers, strict=True):
            x, y = batches[step]
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for same in zip(*(net.parameters() for net, _ in both), strict=True):
                mean = torch.stack([p.data for p in same]).mean(0)
                torch._foreach_copy_([p.data for p in same], [mean] * len(same))
        by_hand = torch.cat([p.detach().reshape(-1) for p in both[0][0].parameters()])
        rank.expect(torch.allclose(ours, by_hand, rtol=0, atol=1e-11), f"period=1 is the mean, at step {step}")


@check()
def halves(rank: Rank) -> None:
    """A mean of bfloat16 and float16 is the exact mean, computed on the CPU in float64 and rounded once."""

    def values(of: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(of)
        drawn = torch.randn(40_000, generator=generator, dtype=torch.float64).to(dtype)
        return drawn * torch.logspace(-3, 3, 40_000, dtype=torch.float64).to(dtype)

    comm = Communicator(rank.device)
    comm.start()
    for step, dtype in enumerate((torch.bfloat16, torch.float16)):
        exact = sum(values(r, dtype).double() for r in range(2)) / 2
        mine = values(rank.rank, dtype).to(rank.device)
        snapshot = comm.layout([mine]).buffer()
        snapshot.copy_([mine])
        mean, correction = mine.clone(), torch.empty_like(mine)
        comm.mean_([mean], 0.5, Subject("check", "mean", step)).wait()
        comm.correction_(snapshot, Subject("check", "correction", step, weights=(0.5, 0.5))).wait()
        snapshot.copy_to([correction])
        rank.expect(torch.equal(mean.cpu(), exact.to(dtype)), f"{dtype}: the exact mean, rounded once")
        difference = exact.float() - mine.cpu().float()
        rank.expect(torch.equal(correction.cpu(), difference.to(dtype)), f"{dtype}: A - S, rounded once")
        naive = sum(0.25 * values(r, dtype).square() for r in range(2))  # the control: rounded on the way
        precise = sum(0.25 * values(r, dtype).double().square() for r in range(2)).to(dtype)
        rank.expect(not torch.equal(naive, precise), f"{dtype}: rounding on the way is seen (the control)")
    comm.close()


@check()
def nonfinite(rank: Rank) -> None:
    """A rank with NaN: left out and repaired under "skip", named on all ranks under "raise"."""

    spoil = spoiling(rank, float("nan"))
    for name, algorithm in ALGORITHMS.items():
        with rank.attempt(name):
            try:
                run = train(rank, algorithm, spoil=spoil, on_nonfinite="skip")
            except ValueError as refused:
                rank.expect("on_nonfinite" in str(refused), f'{name}: "skip" is possible or refused ({refused})')
                continue
            rank.expect(run.end.isfinite().all() and rank.same(run.end), f'{name}: "skip" ends finite and equal')
        with rank.attempt(name):
            try:
                train(rank, algorithm, spoil=spoil, on_nonfinite="raise")
                rank.expect(False, f'{name}: "raise" raises')
            except NonFiniteMessage as error:
                rank.expect("message of rank 1;" in str(error), f"{name}: rank 1 is named ({error})")


@check(loses=1, each=True, limit=50.0)
def lost_rank(rank: Rank, name: str) -> None:
    """Rank 1 is killed in the middle of a run."""

    def die(step: int, _: nn.Module) -> None:
        time.sleep(0.01)
        if rank.rank == 1 and step == 2 * PERIOD + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(rank, ALGORITHMS[name], steps=10_000, spoil=die)
