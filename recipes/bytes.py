"""What a rank sends in a step: every algorithm and codec, counted on real connections, beside the formula.

    python recipes/bytes.py --workloads resnet18 vgg16 --ranks 2 4 --codecs few --out bytes
    python recipes/bytes.py --imagenet --workers 8 --global-batch 256 --out bytes

Ranks are processes of this machine over Gloo. They do no forward and no backward: gradients are random, and nothing depends
on time. All rounds have k = 4 steps, so that algorithms can be compared; c is 5.

``formula``: ``bytes_formulas``. ``counted``: the growth of ``comm/sent_bytes``, headers included, over a whole number of
rounds, after as many; the mean over the ranks. ``written``: what the ranks' processes have written to their connections in
the same steps, by the kernel's count, with what the transport adds. One MB is 10⁶ bytes.

With ``--imagenet``: what a training of ResNet-50 adds up to, by the formulas alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bytes_imagenet
import bytes_measured
import forked_ranks
import torch
import torch.distributed as dist
from bytes_cases import cases
from bytes_formulas import FORMULAS, Case, Shapes, sent
from rich.console import Console
from rich.table import Table
from table_and_plot import markdown

from lightning_cocod.workloads import resnet18, vgg16

WORKLOADS = {"resnet18": resnet18, "vgg16": vgg16}
"""ResNet-18 with the stem for CIFAR, VGG-16 with its 4096-4096 classifier; ten classes."""
IMPORTS = ["lightning_cocod.algorithms", "lightning_cocod.workloads"]  # what takes long
HEADER = ("run", "formula", "by formula, MB", "counted, MB", "counted / formula", "written / formula", "of an all-reduce")


class Row(NamedTuple):
    """Bytes a step, the mean over the ranks."""

    case: Case
    formula: float
    counted: float | None
    written: float
    all_reduce: float

    def cells(self) -> list[str]:
        ratio = "" if self.counted is None else f"{self.counted / self.formula:.4f}"
        counted = "" if self.counted is None else f"{self.counted / 1e6:.3f}"
        text, share = FORMULAS[self.case.algorithm].text, f"{self.formula / self.all_reduce:.2%}"
        of_written = f"{self.written / self.formula:.4f}"
        return [f"`{self.case}`", text, f"{self.formula / 1e6:.3f}", counted, ratio, of_written, share]


def rank(job: dict[str, Any], say: Callable[[Any], None]) -> None:
    """One rank of all runs."""
    world = {"rank": int(os.environ["LOCAL_RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", **world)
    model = WORKLOADS[job["workload"]]()
    for number, case in enumerate(cases(job["codecs"])):
        say((number, bytes_measured.measure(case, model)))
    dist.destroy_process_group()


def measure(workload: str, ranks: int, codecs: str, *, log: Path, limit: float) -> list[Row]:
    """All runs of a workload.

    Raises:
        RuntimeError: a rank has failed, or the limit is over.
    """
    with torch.device("meta"):
        shapes = [p.shape for p in WORKLOADS[workload]().parameters()]
    wanted = cases(codecs)
    heard: list[list[bytes_measured.Sent]] = [[] for _ in wanted]

    def hear(said: tuple[int, bytes_measured.Sent]) -> None:
        number, its = said
        heard[number].append(its)
        if len(heard[number]) == ranks:
            print(f"{workload}, {ranks} ranks: {wanted[number]}", flush=True)

    job = {"workload": workload, "codecs": codecs}
    forked_ranks.run(ranks, rank, job, hear, log=log, limit=limit, imports=IMPORTS)
    return rows(wanted, heard, ranks, shapes)


def rows(wanted: Sequence[Case], heard: Sequence[Sequence[bytes_measured.Sent]], ranks: int, shapes: Shapes) -> list[Row]:
    """Beside the formula, from what every rank has sent."""
    all_reduce, table = sent(Case("all-reduce"), ranks, shapes), []
    for case, each in zip(wanted, heard, strict=True):
        told = [its.counted for its in each if its.counted is not None]
        counted = sum(told) / len(each) if told else None
        written = sum(its.written for its in each) / len(each)
        case = case._replace(exchanges=sum(its.exchanges for its in each) / len(each))
        table.append(Row(case, sent(case, ranks, shapes), counted, written, all_reduce))
    return table


def show(out: Path, name: str, title: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """In the terminal, and as ``name.md`` and ``name.csv``."""
    table = Table(*header, title=title)
    for line in cells:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(f"{title}\n\n{markdown(header, cells)}\n")
    with (out / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *cells])


def several(text: str) -> int:
    """Ranks that have somebody to send to."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError("must be at least 2: one rank alone sends nothing")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=["resnet18"], help="what is trained (%(default)s)")
    add("--ranks", nargs="+", type=several, default=[2], help="how many, one table each (%(default)s)")
    add("--codecs", choices=("all", "few"), default="all", help="few takes less time (%(default)s)")
    add("--imagenet", action="store_true", help="only add up a training of ResNet-50, by formula")
    add("--workers", type=several, default=8, help="of that training (%(default)s)")
    add("--global-batch", type=int, default=256, help="images a step of all of them (%(default)s)")
    add("--limit", type=float, default=1800.0, help="seconds for a table (%(default)g)")
    add("--out", type=Path, default=Path("bytes"), help="folder for the tables (%(default)s)")
    args = parser.parse_args()
    if args.global_batch < 1:
        parser.error("--global-batch must be at least 1")
    if args.imagenet:
        training = bytes_imagenet.Training(args.workers, args.global_batch)
        show(args.out, "imagenet", str(training), bytes_imagenet.HEADER, training.cells())
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for workload in args.workloads:
        for ranks in args.ranks:
            name = f"{workload}_{ranks}"
            table = measure(workload, ranks, args.codecs, log=args.out / f"{name}.log", limit=args.limit)
            title = f"{workload}, {ranks} ranks: sent by each in a step"
            show(args.out, name, title, HEADER, [row.cells() for row in table])


if __name__ == "__main__":
    main()
