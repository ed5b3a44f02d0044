"""Accuracy at equal epochs: ResNet-20 on CIFAR-10, DDP against the strategies of this package. The network plays no part.

    python recipes/accuracy.py --data data/cifar10.zip --images 10240 --epochs 12 --seeds 0,1 --ranks 2,4 --out accuracy
    python recipes/accuracy.py --data ... --runs ddp,cocod_4 --extra 'short=cocod(period={0: 1, 320: 4}, lr=0.5)'
    python recipes/accuracy.py --plot accuracy

All runs have the same images, epochs, images per step of the whole job (so two and four ranks are comparable), learning
rate but for the factor of a run, schedule (warm-up, then half a cosine to zero) and augmentation. What is measured is the
consensus model: after every epoch on ``--test-images`` test images, the same for all, and at the end on all of them. An
epoch must end where rounds do, or strategies whose model is that of the end of a round would be measured without the steps
since.

A training that is finished is a file in ``--out``, named after all settings, and is not done again; one that has failed is
left out, and tried again in the next call. All that lies there comes into ``table.md`` and ``curves.svg``, results with
other settings into tables and plots of their own.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import accuracy_results as results
import cifar10_job
import forked_ranks
import lightning as L
import torch
from accuracy_results import Point, Result
from accuracy_runs import OPTIMIZERS, as_run, chosen, fits
from cifar10_job import Decoded, classifier, decode, strategy

# A name and the strategy's options; ``lr`` is a factor of --lr, ``optimizer`` is sgd (with momentum) or adamw. The outer
# momentum of Eager DiLoCo makes η / (1 − β) = 7 times as much of what workers find: at lr=1 it stays at chance at first.
# CD-SGD's authors push sums over a batch, and their θ = 0.5 belongs to those.
RUNS = {
    "ddp": "ddp()",
    "local_sgd_4": "local_sgd(period=4)",
    "cocod_2": "cocod(period=2)",
    "cocod_4": "cocod(period=4)",
    "cocod_8": "cocod(period=8)",
    "cocod_4_int8": "cocod(period=4, compression='int8')",
    "dc_s3gd": "dc_s3gd(period=1)",
    "overlap_local_sgd_2": "overlap_local_sgd(period=2)",
    "eager_diloco_sgd": "eager_diloco(period=16, lr=0.2)",
    "eager_diloco_adamw": "eager_diloco(period=16, optimizer='adamw', lr=0.02)",
    "ddp_adamw": "ddp(optimizer='adamw', lr=0.02)",
    "ssd_sgd_1": "ssd_sgd(period=1, warmup_steps=160)",
    "ssd_sgd_3": "ssd_sgd(period=3, warmup_steps=160)",
    "ssd_sgd_5": "ssd_sgd(period=5, warmup_steps=160)",
    "cd_sgd": "cd_sgd(compression=Threshold(threshold=0.01), warmup_steps=160)",
    "dist_ef_sgd": "dist_ef_sgd()",
    "compskip_sign": "compskip_dsgd(worker_skip=2)",
    "compskip_topk": "compskip_dsgd(compression='topk', worker_skip=2)",
}
SHARED = ("images", "epochs", "batch_size", "lr", "warmup", "test_images", "precision", "compile")
"""Settings that all runs of a table have alike, beside the data."""
CLASSES = 10
IMPORTS = ["lightning_cocod.strategies", "lightning_cocod.workloads"]  # what takes long


# A rank


class Curve(L.Callback):
    """Says a point after every epoch."""

    def __init__(self, say: Callable[[Point], None]) -> None:
        self.say = say

    def on_validation_end(self, trainer, _):
        if trainer.is_global_zero:
            self.say(Point(trainer.current_epoch + 1, round(trainer.callback_metrics["val/acc"].item(), 5)))


def train(job: Mapping[str, Any], say: Callable[[Point], None]) -> None:
    """One rank of one training. Rank 0 says the points, of the last epoch once more, on all test images."""
    run, ranks = as_run(job["run"]), job["ranks"]
    L.seed_everything(job["seed"], verbose=False)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[run.optimizer](parameters, lr=run.lr * job["lr"])

    model = classifier(optimizer, job["warmup"])
    if job["compile"]:
        model.model.compile()
    torch.manual_seed(1000 * job["seed"] + int(os.environ["LOCAL_RANK"]))  # ranks vary their images each in its own way
    data = Decoded(job["cache"], job["batch_size"] // ranks, job["test_images"], job["images"])
    trainer = cifar10_job.trainer(
        strategy=strategy(run.strategy, **run.options),
        devices=ranks,
        max_epochs=job["epochs"],
        precision=job["precision"],
        callbacks=[Curve(say)],
    )
    trainer.fit(model, data)
    (tested,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        say(Point(job["epochs"], round(tested["test/acc"], 5)))


# The measurement


def compare(options: argparse.Namespace) -> bool:
    """All trainings that are not finished yet, one after the other; then the tables. Whether none has failed."""
    options.out.mkdir(parents=True, exist_ok=True)
    cache = decode(options.data, options.out)
    shared = {key: getattr(options, key) for key in SHARED}
    shared["data"] = str(options.data.resolve())
    well = True
    try:
        for seed in options.seeds:
            for ranks in options.ranks:
                for name, run in options.runs.items():
                    settings = {"run": str(run), "ranks": ranks, "seed": seed, **shared}
                    if results.place(options.out, name, settings).exists():
                        print(f"{name}, {ranks} ranks, seed {seed}: finished before", flush=True)
                    else:
                        well &= measure(name, settings, cache, options)
    finally:
        if any(options.out.glob("*.json")):
            results.report(options.out, results.load(options.out), list(RUNS))
    return well


def measure(name: str, settings: dict[str, Any], cache: Path, options: argparse.Namespace) -> bool:
    """One training; it is saved if it ends well. Whether it has."""
    points: dict[int, Point] = {}

    def hear(point: Point) -> None:
        points[point.epoch] = point

    begun, said = time.monotonic(), f"{name}, {settings['ranks']} ranks, seed {settings['seed']}"
    log = results.place(options.out, name, settings).with_suffix(".log")
    job = {**settings, "cache": str(cache)}
    try:
        forked_ranks.run(settings["ranks"], train, job, hear, log=log, limit=options.limit, imports=IMPORTS)
    except RuntimeError as error:
        print(f"{said}: {error}", flush=True)
        return False
    result = Result(name, settings, list(points.values()))
    results.save(options.out, result)
    print(f"{said}: {result.accuracy:.2f} % ({time.monotonic() - begun:.0f} s)", flush=True)
    return True


# The command line


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder or .zip of CIFAR-10, as for cocod-train data=cifar10")
    parser.add_argument("--images", type=int, default=10240, help="to train with, equally many of every class")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step of the whole job")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--warmup", type=float, default=0.1, help="fraction of the run")
    parser.add_argument("--test-images", type=int, default=2000, help="after every epoch but the last")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true", help="of Lightning's Trainer")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile; with bf16-mixed 2 to 3 times as fast where there is AMX"
    )
    parser.add_argument("--seeds", default="0,1", metavar="N,...", help="of the weights, the order and the augmentation")
    parser.add_argument("--ranks", default="2,4", metavar="N,...")
    parser.add_argument("--runs", default=",".join(RUNS), metavar="NAME,...", help=f"some of {', '.join(RUNS)}, or none")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=CALL", help="another run")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a training has failed")
    parser.add_argument("--out", type=Path, default=Path("accuracy"), help="folder of the results")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="tables and plots of an earlier run again")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        return options
    if options.data is None:
        parser.error("where are the images? Name them with --data")
    for name in ("images", "epochs", "batch_size", "lr", "test_images", "limit"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    if not 0 <= options.warmup < 1:
        parser.error(f"--warmup is a fraction in [0, 1), got {options.warmup}")
    try:
        options.seeds, options.ranks = numbers("seeds", options.seeds, 0), numbers("ranks", options.ranks, 1)
        options.runs = {name: as_run(call) for name, call in chosen(options.runs, options.extra, RUNS).items()}
        check(options)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return options


def numbers(name: str, text: str, least: int) -> list[int]:
    """Whole numbers between commas, each once.

    Raises:
        ValueError: they are something else.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= least for word in words):
        raise ValueError(f"--{name} are whole numbers of at least {least} between commas, got {text!r}")
    return list(dict.fromkeys(map(int, words)))


def check(options: argparse.Namespace) -> None:
    """Whether all ranks have the same work, and rounds end with epochs.

    Raises:
        ValueError: they do not.
    """
    for ranks in options.ranks:
        if options.batch_size % ranks or options.test_images % ranks:
            raise ValueError(f"--batch-size and --test-images must be multiples of the number of ranks, {ranks}")
    if options.images % options.batch_size:
        raise ValueError("--images must be a multiple of --batch-size: the last step of an epoch is as large as the others")
    if options.images % CLASSES or options.test_images % CLASSES:
        raise ValueError(f"--images and --test-images must be multiples of the number of classes, {CLASSES}")
    steps = options.images // options.batch_size
    for name, run in options.runs.items():
        if not fits(run, steps, options.epochs):
            raise ValueError(
                f"{name}: an epoch of {steps} steps (--images / --batch-size) must end where a round of {run} does"
            )


def main() -> None:
    options = parse(sys.argv[1:])

    def terminate(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, terminate)
    try:
        if options.plot is not None:
            results.report(options.plot, results.load(options.plot), list(RUNS))
        elif not compare(options):
            raise SystemExit("not all have ended well: see above; call this again to try them again")
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
