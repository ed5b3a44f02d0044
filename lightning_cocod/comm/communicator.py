"""Everything collective of one algorithm: one thread, one group, one order."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_cocod.comm import collectives
from lightning_cocod.comm.agreement import Agreement
from lightning_cocod.comm.buckets import Buffer, Layout
from lightning_cocod.comm.collectives import Broadcast, Collective, Correction, Mean
from lightning_cocod.comm.compressed import Compression, FromBase, FromZero
from lightning_cocod.comm.errors import (
    CommunicationError,
    GivenUp,
    PeerLost,
    TransportError,
    first_line,
    in_one_line,
    transport,
)
from lightning_cocod.comm.header import NONFINITE, WISH, Header, Pace, exchange, size_of, unfit
from lightning_cocod.comm.heartbeat import Heartbeat, Note
from lightning_cocod.comm.lane import Lane, lane_for
from lightning_cocod.comm.ledger import Ledger
from lightning_cocod.comm.message import Message, Report, Subject
from lightning_cocod.comm.sockets import Connections
from lightning_cocod.comm.thread import CommunicationThread, Handle
from lightning_cocod.comm.tracer import Tracer
from lightning_cocod.comm.waiting import abandon, finish
from lightning_cocod.comm.watchdog import Watchdog

_VERDICT = 4.0  # seconds that a broken connection waits for the heartbeat to say whose it was
_TOGETHER = 0.2  # seconds within which all connections to a peer break that is gone


def seconds(name: str, value: object) -> float:
    """A time.

    Raises:
        ValueError: not a positive number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return float(value)


class Communicator:
    """The workers of one training run, seen from one of them.

    Messages are submitted by the training thread and carried out by the communication thread in that order. Each is
    announced by a header that all workers compare before anything is reduced. All methods are for the training thread.

    Args:
        device: of the tensors that travel.
        timeout: seconds without a heartbeat after which a peer counts as lost, and its process is ended if it is one of
            this host. Heartbeats need the interpreter lock: choose more than the longest call that holds it.
        process_group_timeout: seconds after which a collective fails although all peers live.
        connect_timeout: seconds that ``start`` waits for a peer to appear.
        grace: seconds after a loss in which the training thread must come back to a verb, or the process is ended.

    Raises:
        ValueError: a time that is not positive.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        timeout: float = 60.0,
        process_group_timeout: float = 1800.0,
        connect_timeout: float = 300.0,
        grace: float = 5.0,
    ) -> None:
        self.device = torch.device(device)
        self.timeout = seconds("timeout", timeout)
        self.process_group_timeout = seconds("process_group_timeout", process_group_timeout)
        self.connect_timeout = seconds("connect_timeout", connect_timeout)
        self.ledger = Ledger()
        self.samples = 0
        """Samples that this rank has trained on; the caller counts."""
        self.pace = Pace()
        """What this rank's next message tells of it; the caller measures."""
        self.heard: list[Pace] = []
        """The paces of all ranks in the last message of training that has been waited for: the same on all of them."""
        self.tracer = Tracer()
        """Told what both threads do. A message that is on its way keeps the one under which it was launched."""
        distributed = _is_distributed()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self.lane: Lane = lane_for(self.device)
        self.agreement = Agreement(self.rank, self.world_size, check=self.check)
        self.grace = grace
        self._watchdog = Watchdog(self.rank, grace)
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._scratch = collectives.new_scratch()
        self._notes: dict[int, Note] = {}
        self._samples_heard = [0] * self.world_size
        self._loss = threading.Event()
        self._closing = False
        self._under_way = False  # an operation of a group was given up: the group cannot be destroyed
        self._thread: CommunicationThread | None = None
        self._heartbeat: Heartbeat | None = None
        self._connections = Connections()
        self._groups: list[dist.ProcessGroup] = []

    # Lifecycle

    def start(self) -> None:
        """Make the heartbeat, the groups and the thread. Collective: every rank calls it at the same place."""
        if self.world_size == 1 or self._thread is not None:
            return
        self._under_way = False
        self._closing, self._loss, self._watchdog = False, threading.Event(), Watchdog(self.rank, self.grace)
        self._thread = CommunicationThread(f"communication of rank {self.rank}")
        atexit.register(self._at_exit)
        try:
            self._heartbeat = Heartbeat(
                _get_default_store(),
                self.rank,
                self.world_size,
                timeout=self.timeout,
                connect_timeout=self.connect_timeout,
                compose=self._note,
                receive=self._receive,
                lost=self._lost,
            )
            self._heartbeat.meet()
            self.check()
            patience = timedelta(seconds=self.process_group_timeout)
            with self._connections.being_made():
                self._groups = [_new_group("gloo", patience)]
                dist.barrier(self._groups[0])  # connects everybody now: nobody waits for a dead peer's first message
            if self.device.type == "cuda" and "nccl" in dist.get_backend():
                self._groups.append(_new_group("nccl", patience))
        except BaseException as error:
            self.abort(error)
            self.close()
            raise

    def close(self) -> None:
        """Leave together: wait for the queued messages and for the peers, then end thread, heartbeat and groups.

        Idempotent. A peer that lives is waited for, up to ``process_group_timeout``; after a failure nobody is.

        Raises:
            PeerLost: a peer was lost and this rank has not been told so before.
        """
        if self._thread is None:
            return
        atexit.unregister(self._at_exit)
        lost = self._farewell(self._thread)
        self._closing = True
        if lost is not None:
            self._loss.set()
            self._connections.cut()
        ended = self._thread.close(timeout=_VERDICT + 2.0)
        if self._heartbeat is not None:
            self._heartbeat.close(timeout=2.0)
        self._heartbeat, self._thread = None, None
        for group in reversed(self._groups):
            if ended and not self._under_way:
                dist.destroy_process_group(group)
            else:
                abandon(group)
        self._groups = []
        known = self._watchdog.was_noticed
        self._watchdog.over()
        if lost is not None and not known:
            raise lost

    def abort(self, reason: BaseException) -> None:
        """This rank cannot go on. The peers are told why; nothing is waited for. ``close`` follows."""
        if self._thread is None:
            return
        self._watchdog.noticed()
        if self._heartbeat is not None and not self._loss.is_set():
            self._heartbeat.failed(in_one_line(reason))
        self._thread.fail(CommunicationError(f"communication ended by {in_one_line(reason)}"))
        self._loss.set()
        self._connections.cut()

    @property
    def failed(self) -> bool:
        """Whether communication has ended by a failure, this rank's or a peer's."""
        return self._thread is not None and self._thread.error is not None

    def check(self) -> None:
        """Raise if communication has failed. Cheap enough for every step."""
        if self._thread is not None and self._thread.error is not None and not self._closing:
            self._watchdog.noticed()
            raise self._thread.error

    def _farewell(self, thread: CommunicationThread) -> BaseException | None:
        """Wait until all ranks are here. Returns the failure that stands against it."""

        def all_here() -> None:
            with transport:
                work = dist.barrier(self._groups[0], async_op=True)
            assert work is not None  # every rank is a member of the group
            finish(work, self._groups[0], self._loss)
            self._closing = True  # from here on a peer may be gone

        try:
            self._send(thread, all_here, "the end of the run").wait()
        except Exception as error:  # raised by close() once everything is put away
            return error
        return None

    def _at_exit(self) -> None:
        """The interpreter must not tear a thread out of the transport: the process would abort."""
        self.abort(RuntimeError("the process ended without close()"))
        self.close()

    # Collectives

    def mean_(
        self,
        tensors: Sequence[Tensor],
        weight: float,
        subject: Subject,
        *,
        measured: bool = False,
        relative_to: Tensor | None = None,
        fit: bool | None = None,
    ) -> Message:
        """x ← Σ_j w_j x_j in place, w_j being each worker's own ``weight``. The tensors must rest until it is done.

        With ``measured`` the message's numbers are the size, ‖x‖ before unless it is given as ``relative_to``, and the
        distance, ‖mean - x‖. This worker's part is ``fit`` if it is finite; telling so spares the look, and lets NaN and
        infinity travel like other values.
        """
        mean = Mean(tensors, self.layout(tensors), weight, measured=measured)
        return self._submit(subject, mean, fit=fit, relative_to=relative_to)

    def correction_(
        self,
        snapshot: Buffer,
        weight: float,
        subject: Subject,
        *,
        own: float = 1.0,
        size: Tensor | None = None,
        relative_to: Tensor | None = None,
    ) -> Message:
        """S ← Σ_j w_j S_j - a S in place, a being ``own``. Its numbers are the size, ‖S‖ before unless it is given as
        ``relative_to``, and the distance, ‖Σ_j w_j S_j - S‖.

        Where this worker is left out, S ← Σ_j w_j S_j, and there are no numbers. ``size`` is ‖S‖ where it is known.
        """
        return self._submit(subject, Correction(snapshot, weight, own), size=size, relative_to=relative_to)

    def compressed_correction_(
        self, snapshot: Buffer, base: Buffer, how: Compression, subject: Subject, *, size: Tensor | None = None
    ) -> Message:
        """S ← m - c and θ ← θ + m in place, with c = C(S - θ) and m = C(Σ_j w_j c_j), w as in the subject.

        The base θ, in float32 at least, is and stays the same on all workers. Its numbers are the size, ‖S‖ before, and the
        distance, ‖θ - S‖ with the new θ. Where this worker is left out, S ← θ. ``size`` is ‖S‖ where it is known.
        """
        return self._submit(subject, FromBase(snapshot, base, how, subject.weights, self.rank, subject.step), size=size)

    def compressed_mean_(
        self,
        parts: Buffer,
        residual: Sequence[Tensor],
        how: Compression,
        subject: Subject,
        *,
        own: float = 0.0,
        relative_to: Tensor | None = None,
    ) -> Message:
        """D ← m - a c and R ← D - c in place, with c = C(D), m = C(Σ_j w_j c_j), w as in the subject, and a = ``own``.

        Its numbers are the size, ‖D‖ before unless it is given as ``relative_to``, and the distance, ‖m - D‖. Where this
        worker is left out, D ← m and R ← 0.
        """
        mean = FromZero(parts, residual, how, subject.weights, self.rank, subject.step, own)
        return self._submit(subject, mean, relative_to=relative_to)

    def broadcast_(self, tensors: Sequence[Tensor], subject: Subject, *, source: int = 0, wanted: bool = True) -> Message:
        """x ← x of the source, in place, on the ranks that want it."""
        return self._submit(subject, Broadcast(tensors, self.layout(tensors), source, wanted=wanted), fit=True)

    def who(self, wish: bool, subject: Subject) -> list[int]:
        """The ranks that wish it. Blocking; nothing but headers travels, and they show whether all are in step."""
        if self.world_size == 1:
            return [0] if wish else []
        self.check()
        if self._thread is None:
            raise RuntimeError("nothing can be sent before start() or after close()")
        wishing: list[int] = []
        tracer = self.tracer

        def work() -> None:
            flags = WISH if wish else 0
            header = Header(subject.algorithm, subject.kind, subject.step, layout=0, nbytes=0, flags=flags)
            with self.lane.working(), tracer.span("headers", message=str(subject)):
                headers = exchange(header, self._groups[0], self._loss)
            wishing.extend(rank for rank, h in enumerate(headers) if h.flags & WISH)

        handle = self._send(self._thread, work, str(subject))
        try:
            with tracer.span("wait", message=str(subject)):
                handle.wait()
        except BaseException:
            self._watchdog.noticed()
            raise
        return wishing

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Around a collective of somebody else's: a connection that breaks in it is explained as one of ours would be."""
        try:
            yield
        except RuntimeError as error:
            if self._thread is None or isinstance(error, CommunicationError):
                raise
            self._watchdog.noticed()
            raise self._explain(TransportError(first_line(error)), what) from error

    def loss_behind(self, error: BaseException) -> CommunicationError | None:
        """The loss of a peer behind the error of a collective that is neither ours nor ``named``, if there was one.

        A peer that is gone takes its connections to us along, if not in the same moment.
        """
        if self._thread is None or not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
            return None
        if self._thread.error is not None and not isinstance(self._thread.error, PeerLost):
            return None  # this rank has failed by itself
        deadline = time.monotonic() + _TOGETHER
        while not self._loss.is_set() and not self._connections.are_broken():
            if time.monotonic() > deadline:
                return None
            time.sleep(_TOGETHER / 20)
        self._watchdog.noticed()
        return self._explain(TransportError(first_line(error)), "a collective")

    def layout(self, tensors: Sequence[Tensor]) -> Layout:
        """The layout of these tensors; made once for equal shapes."""
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)  # a superset of what the layout depends on
        if key not in self._layouts:
            self._layouts[key] = Layout(tensors)
        return self._layouts[key]

    def total_samples(self) -> int:
        """Samples that all ranks together have trained on, as of the last header or heartbeat; no collective."""
        noted = [int(self._notes[r]["samples"]) if r in self._notes else 0 for r in range(self.world_size)]
        heard = [max(pair) for pair in zip(noted, self._samples_heard, strict=True)]
        heard[self.rank] = self.samples
        return sum(heard)

    def _submit(
        self,
        subject: Subject,
        collective: Collective,
        *,
        fit: bool | None = None,
        size: Tensor | None = None,
        relative_to: Tensor | None = None,
    ) -> Message:
        self.check()
        if self._thread is None:
            raise RuntimeError("nothing can be sent before start() or after close()")
        what, tracer, pace = str(subject), self.tracer, self.pace
        report, departed = Report(), self.lane.mark()

        def work() -> None:
            with self.lane.working(), tracer.span(subject.kind, message=what, bytes=collective.nbytes):
                self.lane.follow(departed)
                self._carry_out(subject, collective, report, fit, size, relative_to, tracer, pace)

        with tracer.span("launch", message=what):
            handle = self._send(self._thread, work, what)
        return Message(
            subject,
            handle,
            report,
            self.lane,
            self.ledger,
            waiting=lambda: self.tracer.span("wait", message=what),
            on_failure=lambda: self._watchdog.noticed(),
            on_paces=lambda paces: setattr(self, "heard", paces),
        )

    def _send(self, thread: CommunicationThread, work: Callable[[], None], what: str) -> Handle[None]:
        """Submit a job in which a broken connection becomes the name of the peer that broke it."""

        def explained() -> None:
            try:
                work()
            except TransportError as error:
                self._under_way |= isinstance(error, GivenUp)
                raise self._explain(error, what) from None

        return thread.submit(explained)

    def _carry_out(
        self,
        subject: Subject,
        collective: Collective,
        report: Report,
        fit: bool | None,
        size: Tensor | None,
        relative_to: Tensor | None,
        tracer: Tracer,
        pace: Pace,
    ) -> None:
        if fit is None:
            with tracer.span("look"):
                size = collectives.size_of(collective) if size is None else size
                fit = collectives.is_finite(collective, size)
        header = Header(
            subject.algorithm,
            subject.kind,
            subject.step,
            collective.fingerprint,
            collective.nbytes,
            subject.weights_digest,
            0 if fit else NONFINITE,
            self.samples,
            pace,
        )
        report.listening = time.perf_counter()
        with tracer.span("headers", message=str(subject)):
            headers = exchange(header, self._groups[0], self._loss)
        self._samples_heard = [h.samples for h in headers]
        report.paces = [h.pace for h in headers]
        report.left_out = unfit(headers, skip=subject.skip)
        if report.left_out:
            collective.weigh(self.rank, [subject.weight(rank, report.left_out) for rank in range(self.world_size)])
        report.announced = time.perf_counter()
        begun = self.lane.mark()
        with tracer.span("transfer", message=str(subject)):
            collectives.run(collective, self._groups[-1], self._scratch, self._loss, tracer)
        arrived = self.lane.mark()
        numbers = None
        if fit and size is not None and (distance := collective.distance()) is not None:
            both = torch.stack([size if relative_to is None else relative_to, distance])
            numbers = both.to("cpu", non_blocking=True) if both.is_cuda else both
        report.arrived = self.lane.mark()
        report.numbers = numbers
        announced = size_of(self.world_size)
        sent, received = (announced + moved for moved in collective.traffic(self.rank, self.world_size))
        raw = announced + collective.uncompressed(self.rank, self.world_size)
        self.ledger.add(sent=sent, received=received, raw=raw, messages=1)
        if subject.counted:
            self.ledger.add_when_known("busy", lambda: self.lane.seconds(begun, arrived))

    def _explain(self, error: TransportError, what: str) -> CommunicationError:
        """Whose connection broke: the heartbeat knows within a few beats, unless this rank itself has given up."""
        if self._heartbeat is not None:
            self._heartbeat.suspect()
        if self._loss.wait(_VERDICT) and self._thread is not None and isinstance(self._thread.error, CommunicationError):
            return self._thread.error
        lost = PeerLost(f"the connection to a peer broke during {what} although all of them live ({error})")
        if self._heartbeat is not None:
            self._heartbeat.failed(str(lost))
            self._watchdog.alarm(lost)
        return lost

    # Heartbeat

    def _note(self) -> Note:
        return {"samples": self.samples, **self.agreement.note()}

    def _receive(self, notes: dict[int, Note]) -> bool:
        self._notes = notes
        if self._heartbeat is not None and not self._closing and self._connections.are_broken():
            self._heartbeat.suspect()
        return self.agreement.receive(notes)

    def _lost(self, reason: PeerLost) -> None:
        if self._closing or self._thread is None:
            return
        self._thread.fail(reason)
        self._loss.set()
        self._connections.cut()
        self._watchdog.alarm(reason)


def promised_group_is_there() -> None:
    """Raise where there are to be several workers and nothing connects them.

    Raises:
        RuntimeError: the launcher has promised them, and there is no process group.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _is_distributed():
        raise RuntimeError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but there is no process group: "
            "call torch.distributed.init_process_group() first"
        )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # all ranks are members
    return group
