"""Checks on real GPUs what the CPU tests cannot: streams, events, and that training's stream never waits on the host.

    python recipes/cuda_check.py

Two ranks: over NCCL on two GPUs or, where there is only one, both on that GPU over Gloo. Prints a line a check and exits
non-zero if one fails.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lightning_cocod import CoCoD, LocalSGD

STEPS, PERIOD = 48, 8


def model(device):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    net = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    return net.to(device).to(memory_format=torch.channels_last)


def train(algorithm, device, rank, steps=STEPS, amp=False, **options):
    torch.manual_seed(100 + rank)
    batches = [(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))) for _ in range(8)]
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    net = model(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=amp)
    with algorithm(net, optimizer, period=PERIOD, **options) as running:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for step in range(steps):
            x, y = batches[step % 8]
            with torch.autocast("cuda", torch.float16, enabled=amp):
                loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if amp and rank == 1 and step == 5:
                net[0].weight.grad.fill_(float("inf"))
            running.step(scaler=scaler if amp else None)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        metrics = running.metrics()
        counted = running.t
    flat = torch.cat([p.detach().reshape(-1) for p in net.state_dict().values()])
    return {"flat": flat, "seconds": seconds, "metrics": metrics, "t": counted}


def synchronisations(device, rank):
    """Where the training thread waited for the device during twelve steps and three rounds; and whether waits are seen."""
    seen = []
    shown = warnings.showwarning

    def record(message, *_, **__):
        if "synchroniz" in str(message):
            where = [f for f in traceback.extract_stack() if "lightning_cocod" in f.filename or f.filename == __file__][-1]
            seen.append((threading.current_thread().name, f"{os.path.basename(where.filename)}:{where.lineno}"))

    net = model(device)
    x, y = torch.randn(64, 3, 32, 32, device=device), torch.randint(0, 10, (64,), device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with CoCoD(net, optimizer, period=4) as running, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for step in range(13):
                if step == 1:
                    seen.clear()  # the first step's own: libraries that load
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                running.metrics()
            in_training = [place for thread, place in seen if thread == "MainThread"]
            x.sum().item()  # the negative control: this one must be seen
            noticed = len([1 for thread, _ in seen if thread == "MainThread"]) > len(in_training)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown
    return in_training, noticed


def work(rank, world, backend, port, results):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True
    dist.init_process_group(backend)
    report = {}

    def same(a):
        gathered = [None] * world
        dist.all_gather_object(gathered, a.cpu())
        return all(torch.equal(gathered[0], other) for other in gathered)

    train(CoCoD, device, rank, steps=4)  # libraries load
    overlapped = train(CoCoD, device, rank)
    blocking = train(CoCoD, device, rank, overlap=False)
    report["cocod: replicas equal bit for bit at the end"] = same(overlapped["flat"])
    report["cocod: overlap=False gives the same trajectory bit for bit"] = torch.equal(overlapped["flat"], blocking["flat"])
    again = [torch.equal(overlapped["flat"], train(CoCoD, device, rank)["flat"]) for _ in range(5)]
    report["cocod: five more runs give the same bits"] = all(again)
    report["local_sgd: replicas equal bit for bit at the end"] = same(train(LocalSGD, device, rank)["flat"])
    scaled = train(CoCoD, device, rank, amp=True)
    report["fp16: a step skipped by one rank's scaler counts on both"] = scaled["t"] == STEPS and same(scaled["flat"])
    waits, control = synchronisations(device, rank)
    report[f"no host synchronisation in the training thread (seen: {waits or 'none'})"] = not waits
    report["the check for synchronisation does see one"] = control
    if rank == 0:
        m = overlapped["metrics"]
        print(f"{backend}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(f"cocod {overlapped['seconds']:.2f} s, overlap=False {blocking['seconds']:.2f} s, for {STEPS} steps; ", end="")
        print(
            f"busy {m['comm/busy_ms']:.1f} ms, exposed {m['comm/exposed_ms']:.1f} ms, skew {m['comm/skew_ms']:.1f} ms a step"
        )
    results.put((rank, report))
    dist.destroy_process_group()


def main():
    if not torch.cuda.is_available():
        sys.exit("cuda_check needs a GPU")
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (2, backend, 29511, results), nprocs=2)
    failed = 0
    for rank, report in sorted(results.get() for _ in range(2)):
        for check, ok in report.items():
            print(f"rank {rank}: {'ok    ' if ok else 'FAILED'} {check}")
            failed += not ok
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
