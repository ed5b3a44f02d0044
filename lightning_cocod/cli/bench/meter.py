"""Measures whole rounds of one contender on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.cli.bench import counters
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.strategies import AlgorithmStrategy

Result = dict[str, Any]


class Meter:
    """Told where each round ends; after the warm-up it measures, and hands over the result with the last round.

    Args:
        warmup: rounds before.
        rounds: measured ones.
        done: takes the result, all of it a round's: `rounds` (seconds of each), `cpu` (seconds by kind of thread: user,
            system), `machine` (CPU seconds of the whole machine), `sent` (bytes), but `peak` (bytes so far).
            `computing` is the part of the time in which the training thread computed. With an algorithm of ours also
            `handed` (bytes, to the transport) and its `metrics`.
        computed: tells the CPU seconds so far in which the training thread computed.
    """

    def __init__(self, warmup: int, rounds: int, done: Callable[[Result], None], computed: Callable[[], float]) -> None:
        self._warmup, self._rounds, self._done, self._computed = warmup, rounds, done, computed
        self._count = 0
        self._times: list[float] = []
        self._device = counters.device()
        self._reading = Reading()
        self.algorithm: Algorithm | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last round to be measured has ended."""
        return self._count >= self._warmup + self._rounds

    def boundary(self) -> None:
        """A round has ended, and the next begins."""
        self._count += 1
        if self._count == self._warmup:
            self._cpu, self._machine, self._sent = counters.cpu(), counters.machine_cpu(), counters.sent(self._device)
            self._begun = self._computed()
            if self.algorithm is not None:
                self._reading = self.algorithm.reading()
        if self._count >= self._warmup:
            self._times.append(time.perf_counter())
        if self._count == self._warmup + self._rounds:
            self._done(self._result())

    def _result(self) -> Result:
        cpu = {
            kind: [max(0.0, now - before) / self._rounds for now, before in zip(spent, self._cpu[kind], strict=True)]
            for kind, spent in counters.cpu().items()
        }
        result: Result = {
            "rounds": [end - begin for begin, end in zip(self._times, self._times[1:], strict=False)],
            "cpu": cpu,
            "machine": (counters.machine_cpu() - self._machine) / self._rounds,
            "sent": (counters.sent(self._device) - self._sent) / self._rounds,
            "peak": counters.peak_memory(),
            "computing": (self._computed() - self._begun) / (self._times[-1] - self._times[0]),
        }
        if self.algorithm is not None:
            handed = self.algorithm.reading().totals.sent - self._reading.totals.sent
            result |= {"handed": handed / self._rounds, "metrics": self.algorithm.metrics(self._reading)}
        return result


class Boundaries(L.Callback):
    """Tells the meter after every `period` steps. Goes last in the list, so that what others do after a step counts.

    Args:
        meter: is told.
        period: steps of a round.
        together: returns when all ranks have called it.
    """

    def __init__(self, meter: Meter, period: int, together: Callable[[], None]) -> None:
        self._meter, self._period, self._together = meter, period, together
        self._steps = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All ranks begin at the same time, communicating or not."""
        if isinstance(trainer.strategy, AlgorithmStrategy):
            self._meter.algorithm = trainer.strategy.algorithm
        self._together()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """One batch is one step."""
        self._steps += 1
        if self._steps % self._period == 0:
            self._meter.boundary()


class TogetherToTheEnd(L.Callback):
    """Where ranks make different numbers of steps, all of them train on until each has been measured.

    Args:
        meter: of this rank.
        is_last: called once, when this rank has been measured; tells whether all others have been.
    """

    def __init__(self, meter: Meter, is_last: Callable[[], bool]) -> None:
        self._meter, self._is_last = meter, is_last
        self._told = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """A stop of one rank's own is everybody's."""
        if self._meter.is_done and not self._told:
            self._told = True
            trainer.should_stop = self._is_last()
