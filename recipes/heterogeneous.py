"""Unequal workers: what equal and proportional batches make of a rank that is slower than the other.

    python recipes/heterogeneous.py                        # factors 1, 2, 3, 4: a few minutes
    python recipes/heterogeneous.py --factors 3 --ms 0     # on a machine with two cores to spare

Two ranks train on images in memory under ``cocod``, one thread each. A sample takes the fast rank 8 ms and the slow one that
times a factor: the model is small, and after its backward they sleep until so much time has passed, as a host does that
waits for its device, so that the figures depend little on who else uses the cores. With ``--ms 0`` it is ResNet-20, the fast
rank does not sleep, and the slow one (factor - 1) times the CPU time of its passes.

In every repeat each rank first trains alone in a plain loop while the other waits, then both train together, with equal and
with proportional batches. Printed is the throughput of both together, once sizes have settled, over the sum of what each
reaches alone: the median of the repeats, and all of them.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import statistics
import time
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_cocod import CoCoDStrategy
from lightning_cocod.workloads import resnet20

SETTLED = 24  # batches before which sizes have changed for the first time
SIZES = ("equal", "proportional")


class Images(L.LightningModule):
    """A classifier on a rank that is slower by a factor; ``seconds`` are those of a sample, 0 for what it takes the CPU."""

    def __init__(self, factor: float, seconds: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)) if seconds else resnet20(10)
        self.factor, self.seconds = factor, seconds
        self.begun: list[tuple[float, int]] = []  # when a batch has begun, and the samples before it
        self.samples = self.size = 0

    def loss(self, batch: Any) -> torch.Tensor:
        """Forward; the clocks of what the backward will end start here."""
        self.busy, self.ends = time.thread_time(), time.perf_counter() + self.factor * self.seconds * len(batch[0])
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def slow_down(self) -> None:
        """After the backward."""
        if self.seconds:
            time.sleep(max(0.0, self.ends - time.perf_counter()))
        else:
            time.sleep((self.factor - 1) * (time.thread_time() - self.busy))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One batch."""
        self.begun.append((time.perf_counter(), self.samples))
        self.size = len(batch[0])
        self.samples += self.size
        return self.loss(batch)

    def on_after_backward(self) -> None:
        """The slow rank sleeps."""
        self.slow_down()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def images(samples: int) -> TensorDataset:
    """Random ones."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 3, 32, 32, generator=generator), torch.randint(10, (samples,), generator=generator)
    )


def alone(factor: float, seconds: float, batch: int, batches: int) -> float:
    """Samples per second of one rank in a plain loop."""
    module = Images(factor, seconds)
    optimizer = module.configure_optimizers()
    begun = 0.0
    for number, data in enumerate(DataLoader(images(batch * (batches + 3)), batch)):
        if number == 3:
            begun = time.perf_counter()
        optimizer.zero_grad()
        module.loss(data).backward()
        module.slow_down()
        optimizer.step()
    return batch * batches / (time.perf_counter() - begun)


def together(factor: float, seconds: float, sizes: str, batch: int, batches: int) -> tuple[float, int]:
    """Samples per second of both ranks, their sizes settled, and this rank's batch size at the end."""
    module, data = Images(factor, seconds), images(2 * batch * batches)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CoCoDStrategy(period=4, batch_sizes=sizes),  # type: ignore[arg-type]  # one of the two
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch, shuffle=True))
    (begun, before), (ended, until) = module.begun[SETTLED], module.begun[-1]
    speed = torch.tensor((until - before) / (ended - begun), dtype=torch.float64)
    dist.all_reduce(speed)  # each over its own time: the fast rank is up to a round ahead
    return speed.item(), module.size


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    """One rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="heterogeneous")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    dist.init_process_group("gloo")
    for factor in options.factors:
        reached: dict[str, list[float]] = {sizes: [] for sizes in SIZES}
        cut: dict[str, list[int]] = {}
        own = factor if rank == 1 else 1.0
        for _ in range(options.repeats):
            speeds = torch.zeros(2, dtype=torch.float64)
            for turn in (0, 1):
                if turn == rank:
                    speeds[rank] = alone(own, options.ms / 1e3, options.batch_size, options.batches // 2)
                dist.barrier()
            dist.all_reduce(speeds)
            for sizes in SIZES:
                throughput, samples = together(own, options.ms / 1e3, sizes, options.batch_size, options.batches)
                both = torch.zeros(2, dtype=torch.int64)
                both[rank] = samples
                dist.all_reduce(both)
                cut[sizes] = both.tolist()
                reached[sizes].append(throughput / speeds.sum().item())
        if rank == 0:
            for sizes in SIZES:
                every = " ".join(f"{r:.3f}" for r in reached[sizes])
                print(
                    f"factor {factor:g}  {sizes:12}  {statistics.median(reached[sizes]):.3f} of the sum of both alone "
                    f"({every})  batches of {cut[sizes][0]} and {cut[sizes][1]}",
                    flush=True,
                )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--factors", type=lambda text: [float(f) for f in text.split(",")], default=[1, 2, 3, 4])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batches", type=int, default=60, help="of a run of both together")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank where they are equal")
    parser.add_argument("--ms", type=float, default=8.0, help="a sample takes the fast rank; 0: what it takes its CPU")
    options = parser.parse_args()
    if min(options.factors) < 1 or options.batches <= SETTLED + 10:
        parser.error(f"factors are at least 1, and batches more than {SETTLED + 10}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, options), nprocs=2)


if __name__ == "__main__":
    main()
