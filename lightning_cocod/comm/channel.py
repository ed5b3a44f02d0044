"""A channel between ranks: one thread, one group, one order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_cocod.comm import carrying
from lightning_cocod.comm.collectives import Operation
from lightning_cocod.comm.default_group import set_timeout
from lightning_cocod.comm.errors import TransportError
from lightning_cocod.comm.gate import Wait
from lightning_cocod.comm.header import LACKING, NONFINITE, Header, Pace, exchange, gather_over, size_of, unfit
from lightning_cocod.comm.lane import Lane, lane_for
from lightning_cocod.comm.ledger import Ledger
from lightning_cocod.comm.losses import PATIENCE, Losses
from lightning_cocod.comm.meeting import gloo_encrypts, own_address
from lightning_cocod.comm.message import Message, Report, Subject
from lightning_cocod.comm.ring import Ring
from lightning_cocod.comm.ring_connections import close_ring
from lightning_cocod.comm.sockets import Connections
from lightning_cocod.comm.thread import CommunicationThread, Handle
from lightning_cocod.comm.tracer import Tracer
from lightning_cocod.comm.waiting import abandon, finish


class Home(Protocol):
    """What the channels of a rank have in common."""

    device: torch.device
    ledger: Ledger
    tracer: Tracer
    pace: Pace
    samples: int
    samples_heard: list[int]
    losses: Losses


@dataclass
class Errand:
    """What the channel's thread carries out, and how far it has come.

    Attributes:
        subject: of the message.
        operation: what is done.
        report: what the training thread will hear.
        tracer: of when it was submitted, as is the pace.
        pace: of this rank.
        fit: whether this rank's part is finite; None until somebody has looked.
        size: norm of this rank's part; None where nobody needs it, or until somebody has looked.
        relative_to: what its distance is measured by, if that is not its size.
        announcements: headers that have been exchanged.
        runs: how often the operation has been carried out.
    """

    subject: Subject
    operation: Operation
    report: Report
    tracer: Tracer
    pace: Pace
    fit: bool | None
    size: Tensor | None
    relative_to: Tensor | None
    announcements: int = 0
    runs: int = 0


class Channel:
    """Messages between some ranks, or all.

    The training thread submits them, and the channel's own thread carries them out in that order. Each is announced by a
    header that its ranks compare before anything is reduced.

    Args:
        home: what is shared with other channels of this rank.
        rank: this rank.
        ranks: that the channel connects, in ascending order.
    """

    def __init__(self, home: Home, rank: int, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        """Where a channel counts its ranks from 0, they are these of the run."""
        self.rank = self.ranks.index(rank)
        self.world_size = len(self.ranks)
        self.device = home.device
        self.lane: Lane = lane_for(home.device)  # of its own: on CUDA the messages of another do not queue before these
        self._home = home
        self._scratch = carrying.new_scratch()
        self._under_way = False  # operations of a group have been given up: destroying it would wait for them
        self._thread: CommunicationThread | None = None
        self._connections = Connections()
        self._groups: list[dist.ProcessGroup] = []
        self._ring: Ring | None = None
        """For headers and sums, on the CPU."""

    # Lifecycle

    def _open(self, name: str) -> None:
        """The thread begins. It is called ``name`` of its rank."""
        self._under_way = False
        self._thread = CommunicationThread(f"{name} of rank {self.ranks[self.rank]}")
        self._home.losses.concern(self._thread, self._connections)

    def _connect(self, timeout: float, parts: Sequence[Sequence[int]], making: float | None = None) -> None:
        """Make the groups: all ranks of the run, at the same place, those of all parts. Each keeps that of its own.

        Args:
            timeout: of their operations, in seconds.
            parts: of the ranks.
            making: seconds in which they must have been made, if that is another time.
        """
        patience = timedelta(seconds=making or timeout)
        with self._connections.being_made():
            self._groups = [self._new_group("gloo", parts, patience)]
            dist.barrier(self._groups[0])  # connects everybody now: nobody waits for a dead peer's first message
        if self.device.type == "cuda" and "nccl" in dist.get_backend():
            self._groups.append(self._new_group("nccl", parts, patience))
        for group in self._groups if making else ():
            set_timeout(timeout, group)
        if self.device.type == "cpu" and self.world_size > 1 and not gloo_encrypts():
            self._ring = self._new_ring(timeout, making or timeout)

    def _new_ring(self, timeout: float, patience: float) -> Ring:
        address = self._connections.address() or own_address(_get_default_store())
        me, check = self.ranks[self.rank], self._home.losses.check
        after, before = close_ring(self._groups[0], address, me, self.ranks, patience, check)
        self._connections.add(after)
        self._connections.add(before)
        return Ring(after, before, self.rank, self.world_size, timeout)

    def _new_group(self, backend: str, parts: Sequence[Sequence[int]], patience: timedelta) -> dist.ProcessGroup:
        groups = [dist.new_group(list(part), backend=backend, timeout=patience) for part in parts]
        mine = groups[[tuple(part) for part in parts].index(self.ranks)]
        assert isinstance(mine, dist.ProcessGroup)  # this rank is a member
        return mine

    def _end(self) -> None:
        """The thread comes to its end, if it can. Then the groups are ``_disbanded``."""
        if self._thread is not None and not self._thread.close(timeout=PATIENCE):
            self._under_way = True

    def _disband(self) -> None:
        for group in reversed(self._groups):
            if self._under_way:
                abandon(group)
            else:
                dist.destroy_process_group(group)
        if self._ring is not None and not self._under_way:
            self._ring.close()
        self._groups, self._thread, self._ring = [], None, None

    # Messages

    def _submit(
        self,
        subject: Subject,
        operation: Operation,
        *,
        fit: bool | None = None,
        size: Tensor | None = None,
        relative_to: Tensor | None = None,
    ) -> Message:
        home = self._home
        thread, what, tracer, pace = self._working(), str(subject), home.tracer, home.pace
        report, departed = Report(), self.lane.mark()

        def work() -> None:
            with self.lane.working(), tracer.span(subject.kind, message=what, bytes=operation.nbytes):
                self.lane.follow(departed)
                self._carry_out(Errand(subject, operation, report, tracer, pace, fit, size, relative_to))

        with tracer.span("launch", message=what):
            handle = self._send(thread, work, what)
        return Message(
            subject,
            handle,
            report,
            self.lane,
            home.ledger,
            waiting=lambda: home.tracer.span("wait", message=what),
            on_failure=lambda: home.losses.watchdog.noticed(),
            on_paces=self._hear,
        )

    def _working(self) -> CommunicationThread:
        self._home.losses.check()
        if self._thread is None:
            raise RuntimeError("nothing can be sent before start() or after close()")
        return self._thread

    def _hear(self, paces: list[Pace]) -> None:
        """A message of training has been waited for."""

    def _send(self, thread: CommunicationThread, work: Callable[[], None], what: str) -> Handle[None]:
        """Submit a job in which a broken connection becomes the name of the peer that broke it.

        Where it fails, the other channels of this rank fail with it.
        """
        losses = self._home.losses

        def explained() -> None:
            try:
                work()
            except TransportError as error:
                self._under_way = True  # others of the message are, and may never be told
                explanation = losses.explain(error, what)
                losses.fail(explanation)
                raise explanation from None
            except BaseException as error:
                losses.fail(error)
                raise

        return thread.submit(explained)

    def _exchange(self, header: Header) -> list[Header]:
        over = self._home.losses.over
        gather = partial(gather_over, self._groups[0], over) if self._ring is None else partial(self._ring.gather, over)
        return exchange(header, self.ranks[self.rank], self.ranks, gather)

    def _finish(self, work: dist.Work) -> None:
        finish(work, self._groups[0], self._home.losses.over)

    def _carry_out(self, errand: Errand) -> None:
        operation, report = errand.operation, errand.report
        self._look(errand)
        header = self._header(errand)
        report.listening = time.perf_counter()
        self._announce(errand, header)
        report.announced = time.perf_counter()
        begun = self.lane.mark()
        with errand.tracer.span("transfer", message=str(errand.subject)):
            waits = self._run(errand)
        if (late := operation.late_flags()) is not None:
            self._announce(errand, replace(header, flags=late))
            if report.left_out:
                self._run(errand)
        arrived = self.lane.mark()
        numbers = self._numbers(errand)
        report.arrived = self.lane.mark()
        report.numbers = numbers  # last: whoever sees them reads the mark as well
        self._account(errand, (begun, arrived), waits)

    def _look(self, errand: Errand) -> None:
        """Whether what this rank sends is finite, unless somebody has said so."""
        if errand.fit is None:
            with errand.tracer.span("look"):
                errand.size = errand.operation.size() if errand.size is None else errand.size
                errand.fit = errand.operation.is_finite(errand.size)

    def _header(self, errand: Errand) -> Header:
        subject, operation = errand.subject, errand.operation
        return Header(
            subject.algorithm,
            subject.kind,
            subject.step,
            operation.fingerprint,
            operation.nbytes,
            subject.weights_digest,
            0 if errand.fit else NONFINITE,
            self._home.samples,
            errand.pace,
        )

    def _announce(self, errand: Errand, header: Header) -> None:
        """Compare headers. Whoever is not finite is left out of what follows, or ends it."""
        subject, report = errand.subject, errand.report
        with errand.tracer.span("headers", message=str(subject)):
            headers = self._exchange(header)
        errand.announcements += 1
        for rank, theirs in zip(self.ranks, headers, strict=False):
            self._home.samples_heard[rank] = theirs.samples
        report.paces = [theirs.pace for theirs in headers]
        report.lacking = any(theirs.flags & LACKING for theirs in headers)
        report.left_out = unfit(headers, self.ranks, skip=subject.skip)
        if report.left_out:
            weights = [subject.weight(rank, report.left_out) for rank in range(self.world_size)]
            errand.operation.weigh(self.rank, weights)

    def _run(self, errand: Errand) -> list[Wait]:
        errand.runs += 1
        over = self._home.losses.over
        return carrying.run(errand.operation, self._groups[-1], self._ring, self._scratch, over, errand.tracer)

    def _numbers(self, errand: Errand) -> Tensor | None:
        """The norm that a distance is relative to, and the distance, on their way to the host."""
        if not errand.fit or errand.size is None or (distance := errand.operation.distance()) is None:
            return None
        size = errand.size if errand.relative_to is None else errand.relative_to
        both = torch.stack([size, distance])
        self.lane.keep([errand.size, size])
        return both.to("cpu", non_blocking=True) if both.is_cuda else both

    def _account(self, errand: Errand, transfer: Wait, waits: list[Wait]) -> None:
        announced = errand.announcements * size_of(self.world_size)
        moved = errand.operation.traffic(self.rank, self.world_size)
        sent, received = (announced + errand.runs * nbytes for nbytes in moved)
        raw = announced + errand.operation.uncompressed(self.rank, self.world_size)
        ledger = self._home.ledger
        ledger.add(sent=sent, received=received, raw=raw, messages=1)
        if errand.subject.counted:
            ledger.add_when_known("busy", partial(self._seconds, transfer, waits))

    def _seconds(self, whole: Wait, without: Sequence[Wait]) -> float | None:
        """Of the lane, without those waits; None while the device has not come so far."""
        seconds = self.lane.seconds(*whole)
        idle = [self.lane.seconds(*wait) for wait in without]
        known = [s for s in idle if s is not None]
        return None if seconds is None or len(known) < len(idle) else seconds - sum(known)
