"""One contender's training on one rank: the process that a host forks for it."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lightning_cocod.algorithms.heap import keep_freed_memory
from lightning_cocod.cli.bench.contenders import contenders
from lightning_cocod.cli.bench.meter import Boundaries, Meter, Result, TogetherToTheEnd
from lightning_cocod.cli.bench.plan import GIVING_BACK, Plan
from lightning_cocod.cli.bench.work import WORK, Batches, Training, numbered
from lightning_cocod.strategies import AsynchronousStrategy

UNEQUAL = 4  # times the batches that equal ranks need: an epoch of fewer might end, where all meet, while one is measured


class Seat(NamedTuple):
    """Where a rank's process finds the others.

    Attributes:
        rank: of this process.
        ranks: how many there are.
        address: of rank 0.
        port: of the store in which the hosts meet.
        number: of the entry in the schedule.
        free_port: on which rank 0's process may listen, for this entry alone.
    """

    rank: int
    ranks: int
    address: str
    port: int
    number: int
    free_port: int

    def environment(self) -> dict[str, str]:
        """Every rank is a node of its own with one process: that is all that a launcher of Lightning's would tell."""
        there = {"MASTER_ADDR": self.address, "MASTER_PORT": self.free_port}
        who = {"RANK": self.rank, "NODE_RANK": self.rank, "WORLD_SIZE": self.ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        return {name: str(value) for name, value in {**there, **who}.items()}


class Job:
    """What a contender is given: the plan, its seat among the ranks, and the training.

    Args:
        plan: of the run.
        seat: of this rank.
        file: takes the result as soon as it is there.
    """

    def __init__(self, plan: Plan, seat: Seat, file: Path) -> None:
        self.plan, self.seat, self._file = plan, seat, file
        store = TCPStore(seat.address, seat.port, is_master=False, timeout=timedelta(seconds=plan.limit))
        self.store: Store = PrefixStore(f"entry {seat.number} job", store)
        """Where the ranks' processes of this entry can tell each other something before training."""
        self._meetings = 0
        torch.manual_seed(plan.seed)
        self.module = Training(WORK[plan.workload], plan.batch_size)
        self.meter = Meter(plan.warmup, plan.rounds, self._done, lambda: self.module.computed)

    @property
    def own_address(self) -> str:
        """The address of this rank under which the others reach it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.seat.address, self.seat.port))
            return str(probe.getsockname()[0])

    def join(self) -> None:
        """Make the process group, for contenders that train without one of Lightning's."""
        dist.init_process_group("gloo", timeout=timedelta(seconds=self.plan.limit))

    def together(self) -> None:
        """Return when all ranks have come here as often."""
        self._meetings += 1
        if self.store.add(f"at meeting {self._meetings}", 1) == self.seat.ranks:
            self.store.set(f"meeting {self._meetings}", "")
        self.store.wait([f"meeting {self._meetings}"])

    def fit(self, strategy: Strategy, *callbacks: L.Callback) -> None:
        """Train as long as it takes to measure, as a user would: with the Trainer.

        Where ranks share CPUs, for a round longer: one that ends early must not make room for those still being measured.
        Ranks that claim their batches, as many as each is fast, train until all have been measured.
        """
        shared = self.seat.ranks * self.plan.threads > (os.cpu_count() or 1)
        steps = self.plan.steps + (self.plan.period if shared else 0)
        boundaries = Boundaries(self.meter, self.plan.period, self.together)
        if isinstance(strategy, AsynchronousStrategy):
            loader: Any = numbered(self.module.batch, UNEQUAL * steps * self.seat.ranks)
            end: dict[str, Any] = {"max_epochs": -1}
            callbacks = *callbacks, boundaries, TogetherToTheEnd(self.meter, self._is_last)
        else:
            loader, end = Batches(self.module.batch, steps), {"max_steps": steps}
            callbacks = *callbacks, boundaries
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            num_nodes=self.seat.ranks if isinstance(strategy, ParallelStrategy) else 1,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **end,
        )
        trainer.fit(self.module, loader)

    def _is_last(self) -> bool:
        return self.store.add("measured", 1) == self.seat.ranks

    def _done(self, result: Result) -> None:
        parameters = sum(p.numel() * p.element_size() for p in self.module.parameters())
        write(self._file, {**result, "parameters": parameters})


def process(plan: Plan, name: str, seat: Seat, file: Path, log: Path) -> None:
    """The whole life of a rank's process for one entry: train, and write the result or an error into a file."""
    os.setsid()  # whatever it starts is ended with it
    with log.open("wb", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    foreign = [key for key in os.environ if key.startswith(("TORCHELASTIC_", "SLURM_", "GROUP_", "ROLE_"))]
    for key in foreign:
        del os.environ[key]
    os.environ.update(seat.environment())
    torch.set_num_threads(plan.threads)
    if name not in GIVING_BACK:  # as our strategies do: with the same heap fractions tell of communication alone
        keep_freed_memory()
    try:
        job = Job(plan, seat, file)
        contenders()[name](job)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        done = json.loads(file.read_text()) if file.exists() else {}
        write(file, {**done, "error": reason(error)})
        sys.stderr.flush()
        os._exit(1)  # what it has started may not let it end


def reason(error: BaseException) -> str:
    """An error in one line; a library that is missing is just that."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"not installed: {error.name.partition('.')[0]}"
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def write(file: Path, content: Mapping[str, Any]) -> None:
    """The reader sees a whole file or none."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(file)
