"""A message: what it is about, what is learnt on its way, and the handle by which the training thread waits for it."""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_cocod.comm.errors import TransportError
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.header import Pace
from lightning_cocod.comm.lane import Lane
from lightning_cocod.comm.ledger import Ledger
from lightning_cocod.comm.thread import Handle


@dataclass(frozen=True)
class Subject:
    """What a message is about.

    Attributes:
        algorithm: registered name.
        kind: ``round``, ``gradients``, ``consensus``, …
        step: optimizer steps attempted so far.
        counted: whether its seconds count as training's; evaluation's do not.
        weights: of all workers, where the message is a mean.
        skip: whether a mean is taken without the workers whose part is not finite (it needs ``weights`` for that);
            otherwise they are an error.
    """

    algorithm: str
    kind: str
    step: int
    counted: bool = True
    weights: tuple[float, ...] = ()
    skip: bool = False

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}"

    @property
    def weights_digest(self) -> int:
        """By which workers see whether they weigh alike."""
        return zlib.crc32(struct.pack(f"{len(self.weights)}d", *self.weights))

    def weight(self, rank: int, left_out: tuple[int, ...]) -> float:
        """Of a worker in the mean over those that are not left out, as if there were no others; 0 if it is left out."""
        rest = math.fsum(w for r, w in enumerate(self.weights) if r not in left_out)
        return 0.0 if rank in left_out else self.weights[rank] / rest


@dataclass
class Report:
    """What the communication thread learns about a message: marks of its lane, and the numbers it computed."""

    listening: float = float("inf")  # host time at which this rank's header went out
    announced: float = float("inf")  # host time at which the last header had come
    arrived: Any = None
    numbers: Tensor | None = None
    left_out: tuple[int, ...] = ()
    lacking: bool = False
    paces: list[Pace] = field(default_factory=list)  # of all ranks, when they launched it


class Message:
    """A collective in flight."""

    def __init__(
        self,
        subject: Subject,
        handle: Handle[None],
        report: Report,
        lane: Lane,
        ledger: Ledger,
        waiting: Callable[[], AbstractContextManager[None]],
        on_failure: Callable[[], None],
        on_paces: Callable[[list[Pace]], None],
    ) -> None:
        self.step = subject.step
        """Steps that its sender had attempted."""
        self._counted = subject.counted
        self._handle, self._report, self._lane, self._ledger = handle, report, lane, ledger
        self._waiting, self._on_failure, self._on_paces = waiting, on_failure, on_paces

    def wait(self, *, counted: bool = True) -> None:
        """Block until the result is there. On CUDA the host waits for the launch only, the current stream for the rest.

        Args:
            counted: whether training waits, so that the time belongs into the ledger.

        Raises:
            PeerLost: a peer is gone.
            MessageMismatch: the workers are out of step.
            NonFiniteMessage: a worker's message is not finite.
        """

        def all_of_it() -> None:
            self._handle.wait()
            self._lane.follow(self._report.arrived)

        counts = counted and self._counted
        self._block(all_of_it, counts)
        if counts and self._report.paces:
            self._on_paces(self._report.paces)
            self._report.paces = []  # news once

    def wait_for(self, bucket: int, arrived: Gate) -> None:
        """Block until so much of the result is there, its gate being opened as it is. Otherwise like ``wait``, which
        follows.
        """

        def part() -> None:
            try:
                arrived.pass_(bucket, self._handle.ended)
            except TransportError:
                self._handle.wait()  # and says why
                raise

        self._block(part, self._counted)

    def _block(self, until: Callable[[], None], counted: bool) -> None:
        lane, ledger = self._lane, self._ledger
        asked, before = time.perf_counter(), lane.mark()
        with self._waiting():
            try:
                until()
            except BaseException:
                self._on_failure()
                raise
        if not counted:
            return
        after = lane.mark()
        # Between this rank's header and the last one it is a slower peer that is waited for, not the link.
        late = max(0.0, min(self._report.announced, time.perf_counter()) - max(asked, self._report.listening))

        def stalled() -> float | None:
            return lane.seconds(before, after)

        ledger.add_when_known("skew", lambda: None if (s := stalled()) is None else min(s, late))
        ledger.add_when_known("exposed", lambda: None if (s := stalled()) is None else max(0.0, s - late))

    @property
    def left_out(self) -> tuple[int, ...]:
        """Once it has been waited for: the ranks whose part was not finite. They got the mean of the others."""
        return self._report.left_out

    @property
    def lacking(self) -> bool:
        """Once it has been waited for: whether some rank has not computed all that the message is about."""
        return self._report.lacking

    def numbers(self) -> list[float] | None:
        """What the collective measured on the way, once the device has it; None before and where it measured nothing.

        Never blocks.
        """
        lane, report = self._lane, self._report
        if report.numbers is None or lane.seconds(report.arrived, report.arrived) is None:
            return None
        values: list[float] = report.numbers.tolist()
        return values
