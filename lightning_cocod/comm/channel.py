"""A channel between ranks: one thread, one group, one order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from lightning_cocod.comm.meeting import own_address
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
        encrypted = os.environ.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS"  # which the ring is not
        if self.device.type == "cpu" and self.world_size > 1 and not encrypted:
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
                self._carry_out(subject, operation, report, fit, size, relative_to, tracer, pace)

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

    def _carry_out(
        self,
        subject: Subject,
        operation: Operation,
        report: Report,
        fit: bool | None,
        size: Tensor | None,
        relative_to: Tensor | None,
        tracer: Tracer,
        pace: Pace,
    ) -> None:
        if fit is None:
            with tracer.span("look"):
                size = operation.size() if size is None else size
                fit = operation.is_finite(size)
        header = Header(
            subject.algorithm,
            subject.kind,
            subject.step,
            operation.fingerprint,
            operation.nbytes,
            subject.weights_digest,
            0 if fit else NONFINITE,
            self._home.samples,
            pace,
        )
        report.listening = time.perf_counter()
        with tracer.span("headers", message=str(subject)):
            headers = self._exchange(header)
        for rank, theirs in zip(self.ranks, headers, strict=False):
            self._home.samples_heard[rank] = theirs.samples
        report.paces = [theirs.pace for theirs in headers]
        report.left_out = unfit(headers, self.ranks, skip=subject.skip)
        if report.left_out:
            self._leave_out(report.left_out, subject, operation)
        report.announced = time.perf_counter()
        begun = self.lane.mark()
        with tracer.span("transfer", message=str(subject)):
            waits = self._run(operation, tracer)
        times = 1
        if (late := operation.late_flags()) is not None:
            with tracer.span("headers", message=str(subject)):
                headers = self._exchange(replace(header, flags=late))
            report.lacking = any(theirs.flags & LACKING for theirs in headers)
            report.left_out = unfit(headers, self.ranks, skip=subject.skip)
            if report.left_out:
                self._leave_out(report.left_out, subject, operation)
                self._run(operation, tracer)
                times = 2
        arrived = self.lane.mark()
        numbers = None
        if fit and size is not None and (distance := operation.distance()) is not None:
            both = torch.stack([size if relative_to is None else relative_to, distance])
            numbers = both.to("cpu", non_blocking=True) if both.is_cuda else both
            self.lane.keep([size, *([] if relative_to is None else [relative_to])])
        report.arrived = self.lane.mark()
        report.numbers = numbers
        announced = size_of(self.world_size) * (1 if late is None else 2)
        sent, received = (announced + times * moved for moved in operation.traffic(self.rank, self.world_size))
        raw = announced + operation.uncompressed(self.rank, self.world_size)
        ledger = self._home.ledger
        ledger.add(sent=sent, received=received, raw=raw, messages=1)
        if subject.counted:
            ledger.add_when_known("busy", partial(self._seconds, (begun, arrived), waits))

    def _seconds(self, whole: Wait, without: Sequence[Wait]) -> float | None:
        """Of the lane, without those waits; None while the device has not come so far."""
        seconds = self.lane.seconds(*whole)
        idle = [self.lane.seconds(*wait) for wait in without]
        known = [s for s in idle if s is not None]
        return None if seconds is None or len(known) < len(idle) else seconds - sum(known)

    def _run(self, operation: Operation, tracer: Tracer) -> list[Wait]:
        return carrying.run(operation, self._groups[-1], self._ring, self._scratch, self._home.losses.over, tracer)

    def _leave_out(self, ranks: tuple[int, ...], subject: Subject, operation: Operation) -> None:
        operation.weigh(self.rank, [subject.weight(rank, ranks) for rank in range(self.world_size)])
