"""One slow worker: how much of all workers' speed is left, and what accuracy at equal epochs.

    python recipes/stragglers.py --out stragglers                 # factors 1 to 100, and late steps; half an hour
    python recipes/stragglers.py --factors 4 --runs ddp,ad_psgd --extra 'calm=ad_psgd(every=4)'

Every rank trains a small network on handwritten digits. A sample takes it ``--ms``, and the last rank that times a factor:
after its backward it sleeps until so much time has passed, as a host does that waits for its device, so that the figures
depend little on who else uses the cores. With ``late`` nobody is slow, and every rank takes four times as long in 10 % of
its steps, at random.

Printed for each run and factor, of an epoch's batches from the moment all ranks have begun until the first one has no more:

- the samples per second of all ranks together, over the sum of what each reaches alone in Lightning's own loop, measured
  in the same run: the median of the epochs but the first, and the least and most;
- the tail: from there until the last rank is done, in steps of the slow rank (the most of all epochs);
- how the epoch's batches were shared, the slow rank's last;
- the accuracy on the test images after all epochs.

Where ranks have equal batches they are as slow as the slowest, whatever the factor, and their accuracy does not depend on
it: they train ``--slow-steps`` steps for the speed, and all epochs without sleep for the accuracy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cifar10_job
import forked_ranks
import lightning as L
import torch
from accuracy_runs import ALGORITHMS, OPTIMIZERS, Run, as_run, chosen
from table_and_plot import markdown
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, Dataset

from lightning_cocod.workloads import DigitsDataModule

RUNS = {
    "ddp": "ddp()",
    "local_sgd": "local_sgd(period=4)",
    "cocod": "cocod(period=4)",
    "cocod_proportional": "cocod(period=4, batch_sizes='proportional')",
    "d_psgd": "d_psgd()",
    "ad_psgd": "ad_psgd()",
    "a_psgd": "a_psgd()",
}
ASYNCHRONOUS = {kind.name for kind in ALGORITHMS if kind.asynchronous}
ALONE = 80  # batches of a rank alone that is not slow
LATE = "late"
LATE_SHARE, LATE_FACTOR = 0.1, 4.0
IMPORTS = ["lightning_cocod.strategies", "lightning_cocod.workloads"]  # what takes long


class Batch(NamedTuple):
    """When a batch began and ended, by the machine's one clock, and its samples."""

    begun: float
    ended: float
    samples: int


class Epoch(NamedTuple):
    """The batches of one rank."""

    rank: int
    number: int
    batches: list[Batch]


class Repeated(Dataset[Any]):
    """A data set that is as long as it should be."""

    def __init__(self, data: Any, length: int) -> None:
        self.data, self.length = data, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]


class Sleeper(L.LightningModule):
    """A classifier on a rank on which a sample takes so many seconds, in some steps more."""

    def __init__(
        self, optimizer: Callable[[Any], torch.optim.Optimizer], seconds: float, late: bool, say: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )
        self.optimizer, self.seconds, self.say = optimizer, seconds, say
        self.late = random.Random(os.environ["LOCAL_RANK"]) if late else None
        self.batches: list[Batch] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        late = self.late is not None and self.late.random() < LATE_SHARE
        self.begun, self.samples = time.perf_counter(), len(labels)
        self.ends = self.begun + self.seconds * len(labels) * (LATE_FACTOR if late else 1)
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def on_after_backward(self) -> None:
        time.sleep(max(0.0, self.ends - time.perf_counter()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches.append(Batch(self.begun, time.perf_counter(), self.samples))

    def on_train_epoch_end(self) -> None:
        self.say(Epoch(int(os.environ["LOCAL_RANK"]), self.current_epoch, self.batches))
        self.batches = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("right", right, on_epoch=True, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class Together(L.Callback):
    """Ranks that know nothing of each other begin at the same time, so that none trains while others load libraries."""

    def __init__(self, store: TCPStore, ranks: int) -> None:
        self.store, self.ranks = store, ranks

    def on_train_start(self, *_: Any) -> None:
        if self.store.add("here", 1) == self.ranks:
            self.store.set("all here", "")
        self.store.wait(["all here"])


def train(job: dict[str, Any], say: Callable[[Any], None]) -> None:
    """One rank of a training, or for ``alone`` one of several that know nothing of each other."""
    rank, ranks, alone = int(os.environ["LOCAL_RANK"]), job["ranks"], job["run"] is None
    run = as_run(job["run"] or "ddp()")
    slow = job["factor"] if rank == ranks - 1 and job["factor"] != LATE else 1.0
    meeting = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, rank == 0) if alone else None
    if alone:  # not even the launcher's environment
        os.environ.update(WORLD_SIZE="1", LOCAL_RANK="0")
    L.seed_everything(0, verbose=False)
    digits = DigitsDataModule(job["batch_size"])
    digits.prepare_data()
    digits.setup("fit")
    images = digits.train_dataloader().dataset

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[run.optimizer](parameters, lr=run.lr * job["lr"])

    model = Sleeper(optimizer, slow * job["ms"] / 1e3, job["factor"] == LATE, lambda epoch: say(epoch._replace(rank=rank)))
    trainer = cifar10_job.trainer(
        strategy="auto" if alone else cifar10_job.strategy(run.strategy, **run.options),
        devices=1 if alone else ranks,
        max_epochs=job["epochs"],
        callbacks=[] if meeting is None else [Together(meeting, ranks)],
        limit_train_batches=max(4, round(ALONE / slow)) if alone else job["batches"],
    )
    trainer.fit(model, DataLoader(Repeated(images, job["samples"]), job["batch_size"], shuffle=True, drop_last=True))
    if not alone:
        digits.setup("test")
        (tested,) = trainer.test(model, digits.test_dataloader(), verbose=False)
        if rank == 0:
            say(tested["right"])


# What the batches tell


def speed(epoch: Sequence[Sequence[Batch]]) -> float:
    """Samples per second of all ranks while all have batches: from the last one's beginning to the first one's end.

    A batch lasts until the next one begins, so waiting counts; one that reaches beyond is counted in part.
    """
    begun, ended = max(batches[0].begun for batches in epoch), min(batches[-1].ended for batches in epoch)
    samples = 0.0
    for batches in epoch:
        ends = [*(after.begun for after in batches[1:]), batches[-1].ended]
        for batch, end in zip(batches, ends, strict=True):
            inside = max(0.0, min(end, ended) - max(batch.begun, begun))
            samples += batch.samples * inside / (end - batch.begun)
    return samples / (ended - begun)


def settled(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Without the first quarter, in which libraries load."""
    return batches[len(batches) // 4 :]


def tail(epoch: Sequence[Sequence[Batch]]) -> float:
    """Seconds from when the first rank has no more batches to when the last one has none."""
    last = [batches[-1].ended for batches in epoch]
    return max(last) - min(last)


def shared(run: Run) -> bool:
    """Whether the ranks' batches follow their speeds."""
    return run.options.get("batch_sizes") == "proportional" or run.strategy in ASYNCHRONOUS


# The measurement


class Figures(NamedTuple):
    """Of a run at a factor."""

    speeds: list[float]
    tail: float
    batches: list[int]
    accuracy: float


def listen(job: dict[str, Any], options: argparse.Namespace) -> tuple[list[list[list[Batch]]], float]:
    """The batches of every epoch and rank, and the accuracy."""
    epochs: dict[int, dict[int, list[Batch]]] = {}
    heard: list[float] = []

    def hear(what: Any) -> None:
        if isinstance(what, Epoch):
            epochs.setdefault(what.number, {})[what.rank] = what.batches
        else:
            heard.append(what)

    forked_ranks.run(options.ranks, train, job, hear, log=options.out / "ranks.log", limit=options.limit, imports=IMPORTS)
    ordered = [[epochs[number][rank] for rank in range(options.ranks)] for number in sorted(epochs)]
    return ordered, heard[0] if heard else float("nan")


def measure(run: Run, factor: float | str, options: argparse.Namespace) -> Figures:
    """A run at a factor, beside the ranks alone."""
    base = {"ranks": options.ranks, "factor": factor, "ms": options.ms, "batch_size": options.batch_size, "lr": options.lr}
    slow = 1.0 if factor == LATE else float(factor)
    (alone,), _ = listen({**base, "epochs": 1, "samples": options.samples, "run": None}, options)
    own = sum(speed([settled(batches)]) for batches in alone)
    whole = {**base, "epochs": options.epochs, "batches": None, "samples": options.samples, "run": str(run)}
    if shared(run):
        epochs, accuracy = listen(whole, options)
        measured = epochs[1:] or epochs
    else:
        _, accuracy = listen({**whole, "ms": 0.0}, options)
        epochs, _ = listen({**whole, "epochs": 1, "batches": options.slow_steps}, options)
        measured = [list(map(settled, epoch)) for epoch in epochs]
    seconds = slow * options.ms / 1e3 * options.batch_size
    return Figures(
        [speed(epoch) / own for epoch in measured],
        max(map(tail, epochs)) / seconds,
        [len(batches) for batches in epochs[-1]],
        accuracy,
    )


HEADER = ["run", "slow by", "of all speeds", "tail, slow steps", "batches of the ranks", "accuracy, %"]


def compare(options: argparse.Namespace) -> None:
    """All runs at all factors."""
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for factor, (name, run) in itertools.product(options.factors, options.runs.items()):
        try:
            found = measure(run, factor, options)
        except RuntimeError as error:
            print(f"{name}, {factor}: {error}", flush=True)
            continue
        middle, least, most = statistics.median(found.speeds), min(found.speeds), max(found.speeds)
        rows.append(
            [
                name,
                f"{factor}",
                f"{middle:.3f} ({least:.3f}–{most:.3f})",
                f"{found.tail:.2f}" if shared(run) else "",
                " ".join(map(str, found.batches)) if shared(run) else "equal",
                f"{100 * found.accuracy:.2f}",
            ]
        )
        print("  ".join(rows[-1]), flush=True)
        (options.out / "table.md").write_text(markdown(HEADER, rows) + "\n", encoding="utf-8")


def factor_of(word: str) -> float | str:
    """A number of at least 1, or "late".

    Raises:
        ValueError: neither.
    """
    if word == LATE:
        return LATE
    if not (number := float(word)) >= 1:
        raise ValueError(f"a factor is at least 1, or {LATE}; got {word}")
    return int(number) if number.is_integer() else number


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--factors", default=f"1,2,4,10,100,{LATE}", metavar="F,...")
    parser.add_argument("--runs", default=",".join(RUNS), metavar="NAME,...", help=f"some of {', '.join(RUNS)}, or none")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=CALL", help="another run")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=19200, help="of an epoch")
    parser.add_argument("--batch-size", type=int, default=16, help="of a rank, where they are equal")
    parser.add_argument("--ms", type=float, default=1.0, help="a sample takes a rank that is not slow")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--slow-steps", type=int, default=24, help="of runs with equal batches, for the speed")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a training has failed")
    parser.add_argument("--out", type=Path, default=Path("stragglers"), help="folder of table.md and the log")
    options = parser.parse_args(arguments)
    for name in ("ranks", "epochs", "samples", "batch_size", "ms", "lr", "slow_steps", "limit"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    try:
        options.factors = [factor_of(word) for word in options.factors.split(",")]
        options.runs = {name: as_run(call) for name, call in chosen(options.runs, options.extra, RUNS).items()}
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    compare(parse(sys.argv[1:]))
