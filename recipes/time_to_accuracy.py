"""Time to accuracy over a slow link: ResNet-20 on CIFAR-10, DDP against the strategies of this package.

    python recipes/time_to_accuracy.py --data data/cifar10.zip --steps 600 --batch-size 48 --period 5 --out tta
    python recipes/time_to_accuracy.py --plot tta

Every rank is a node of its own in a ``Lab``, with one thread, on a link of ``--rate`` Mbit/s. All strategies have the same
model, images, batch size, learning rate (warm-up, then a cosine to zero), momentum and weight decay. Those of this package
may run ``--extra`` times as many steps as DDP, with the schedule stretched to them, as a step costs them less.

The consensus model is measured every ``--eval-every`` steps on ``--test-images`` test images, the same for all, split
between the ranks. The clock, rank 0's, stands still meanwhile: seconds are those of training. So the transfers that
measuring needs are not counted, and a message that is in flight arrives for free: one round between two evaluations, no
more. ``accuracy_curves.py`` says when a target counts as reached.

Into ``--out`` go the points, the table and the plot, what the ranks said on stderr, and the decoded images (a cache).
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import accuracy_curves as curves
import cifar10_job
import lightning as L
import torch
from accuracy_curves import Point
from cifar10_job import KNOWN, Decoded, classifier, decode, strategy
from lab import Lab, Link, NotPermitted
from lightning.pytorch.strategies import Strategy

from lightning_cocod.strategies.asynchronous import AsynchronousStrategy

# A rank


class Clock(L.Callback):
    """Runs while the job trains, and notes a point at every evaluation."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job, self.seconds = job, 0.0
        self.since: float | None = None

    def on_train_start(self, *_):
        self.since = time.perf_counter()

    def on_train_batch_start(self, *_):
        self.since = time.perf_counter() if self.since is None else self.since

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step % self.job["every"] == 0:
            self.seconds, self.since = self.seconds + time.perf_counter() - self.since, None

    def on_validation_end(self, trainer, _):
        if trainer.global_rank == 0:
            accuracy = trainer.callback_metrics["val/acc"].item()
            point = Point(trainer.global_step, round(self.seconds, 3), round(accuracy, 5))
            with Path(self.job["points"]).open("a") as file:
                file.write(json.dumps(point) + "\n")
            print(f"{self.job['strategy']}: step {point.step}, {point.seconds:.0f} s, {point.accuracy:.1%}", flush=True)


def train(job: Mapping[str, Any]) -> None:
    """One rank of one job. Rank 0 writes the points."""
    torch.set_num_threads(1)
    L.seed_everything(job["seed"], verbose=False)
    optimizer = functools.partial(torch.optim.SGD, lr=job["lr"], momentum=0.9, weight_decay=5e-4)
    trainer = cifar10_job.trainer(
        strategy=chosen(job["strategy"], job["period"]),
        num_nodes=job["ranks"],
        devices=1,
        max_epochs=-1,
        max_steps=job["steps"],
        val_check_interval=job["every"],
        check_val_every_n_epoch=None,
        callbacks=[Clock(job)],
    )
    data = Decoded(job["images"], job["batch_size"], job["test_images"])
    trainer.fit(classifier(optimizer, warmup_fraction=0.1), data)


def chosen(name: str, period: str) -> Strategy:
    """The strategy of that name, with the period if it has one.

    Raises:
        ValueError: nobody has that name, its ranks are not in step, or the period is refused.
    """
    if issubclass(KNOWN.get(name, Strategy), AsynchronousStrategy):
        raise ValueError(f"the ranks of {name} are not in step, and here all are evaluated together: leave it out")
    has_one = name in KNOWN and "period" in inspect.signature(KNOWN[name]).parameters
    return strategy(name, **({"period": periods(period)} if has_one else {}))


# The measurement


def measure(job: Mapping[str, Any], rate: float | None, limit: float) -> list[Point]:
    """Run one job in a lab of its own; its points.

    Raises:
        RuntimeError: it has failed, or was not done in time.
        NotPermitted: no lab can be made here.
    """
    points, log = Path(job["points"]), Path(job["out"]) / f"{job['strategy']}.log"
    points.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    root = str(Path(__file__).parent.parent)  # a checkout need not be installed
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    with log.open("w") as errors, Lab([Link(rate, rate)] * job["ranks"]) as lab:
        wait(job["strategy"], lab.run(command, env, stderr=errors, stdin=subprocess.DEVNULL), limit, log)
    found = [Point(*json.loads(line)) for line in points.read_text().splitlines()]
    points.unlink()
    return found


def wait(name: str, processes: Sequence[subprocess.Popen[str]], limit: float, log: Path) -> None:
    """Until all ranks are done.

    Raises:
        RuntimeError: one has failed, or the limit is over.
    """
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} was not done within {limit:g} s (--limit)")
        time.sleep(0.1)
        if any(process.poll() for process in processes):
            break
    if codes := [process.returncode for process in processes if process.returncode]:
        raise RuntimeError(f"{name} failed with exit code {codes[0]}: see {log}")


def compare(options: argparse.Namespace) -> None:
    """All jobs, one after the other. What is finished when one fails is reported all the same."""
    options.out.mkdir(parents=True, exist_ok=True)
    job = {
        "images": str(decode(options.data, options.out)),
        "out": str(options.out),
        "points": str(options.out / "points.part"),
        "test_images": options.test_images,
        "every": options.eval_every,
        "batch_size": options.batch_size,
        "period": options.period,
        "ranks": options.ranks,
        "seed": options.seed,
        "lr": options.lr,
    }
    done: dict[str, list[Point]] = {}
    try:
        for name in options.strategies:
            steps = options.steps if name == "ddp" else longer(options.steps, options.extra, options.eval_every)
            done[name] = measure({**job, "strategy": name, "steps": steps}, options.rate, options.limit)
            curves.save(options.out, done)
    finally:
        if done:
            curves.report(options.out, done)


def longer(steps: int, extra: float, every: int) -> int:
    """``extra`` times the steps, up to the next evaluation."""
    return -(-round(steps * extra) // every) * every


# The command line


def periods(text: str) -> int | dict[int, int]:
    """``4``, or a schedule ``0:1,200:4``.

    Raises:
        ValueError: it is neither.
    """
    try:
        if ":" in text:
            return {int(step): int(length) for step, length in (pair.split(":") for pair in text.split(","))}
        return int(text)
    except ValueError:
        raise ValueError(f"a period is a number of steps or a schedule such as 0:1,200:4, got {text!r}") from None


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder or .zip of CIFAR-10, as for cocod-train data=cifar10")
    parser.add_argument("--rate", default="10", help="Mbit/s of every link in each direction, or none for no limit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of DDP")
    parser.add_argument("--extra", type=float, default=1.5, help="times as many steps for the others")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--period", default="4", help="local steps of a round, or a schedule such as 0:1,200:4")
    parser.add_argument("--strategies", default="ddp,local_sgd,cocod", help="ddp and this package's whose ranks are in step")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order and the augmentation")
    parser.add_argument("--eval-every", type=int, default=30, help="steps between evaluations")
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds after which a job has failed")
    parser.add_argument("--out", type=Path, default=Path("time_to_accuracy"), help="folder of the results")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="table and plot of an earlier run again")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job is not None or options.plot is not None:
        return options
    if options.data is None:
        parser.error("where are the images? Name them with --data")
    for name in ("ranks", "steps", "extra", "batch_size", "lr", "eval_every", "test_images", "limit"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    if options.steps % options.eval_every or options.steps // options.eval_every < curves.WINDOW:
        parser.error(f"--steps must be a multiple of --eval-every, {curves.WINDOW} times it at least")
    if options.extra < 1:
        parser.error(f"--extra must be 1 at least, got {options.extra:g}")
    options.strategies = list(dict.fromkeys(options.strategies.split(",")))
    try:
        options.rate = None if options.rate == "none" else float(options.rate)
        Lab([Link(options.rate, options.rate)] * options.ranks)  # the rates and ranks it would refuse
        for name in options.strategies:
            chosen(name, options.period)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    if options.job is not None:
        return train(options.job)

    def terminate(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, terminate)
    try:
        if options.plot is not None:
            curves.report(options.plot, curves.load(options.plot))
        else:
            compare(options)
    except NotPermitted as error:
        raise SystemExit(f"no lab here: {error}") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
