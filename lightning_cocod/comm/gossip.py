"""Gossip: a worker's weights, averaged with one neighbour's at a time while it goes on training.

The master copy is z = x + c. Of its two parts, the training thread alone moves the live parameters x, and the threads of
this module alone the correction c; the training thread folds c into x between two steps. An exchange between two workers
takes a snapshot s = x + c of each, swaps both, and adds (y − s)/2 to c, y being the other's: local steps taken meanwhile
survive, and the sum over the workers is conserved. A worker has one exchange at a time: two merges from one snapshot would
overshoot.

Active workers ask, one neighbour after the other, at most once in so many local steps. Passive ones answer, with a thread
for each neighbour. Nobody waits for anybody but an active one for the passive one that it asks, which says now and then that
it is there. So no circle of waiting workers can close, and a neighbour that dies costs its own edges only.

    active      ASK →            ← READY        both: snapshot, then DATA with the header's step and, if finite, the content
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_cocod.comm.beside import beside_training
from lightning_cocod.comm.buckets import Layout
from lightning_cocod.comm.errors import CommunicationError, LinkShut, MessageMismatch, NonFiniteMessage, PeerLeft, PeerLost
from lightning_cocod.comm.lane import lane_for
from lightning_cocod.comm.ledger import Ledger
from lightning_cocod.comm.link import FIRST_FREE, Link
from lightning_cocod.comm.meeting import meet
from lightning_cocod.comm.norms import finite, norm
from lightning_cocod.comm.pairwise import Coded, Coding, Plain, Wire
from lightning_cocod.comm.parts import fingerprint
from lightning_cocod.comm.topology import Topology, is_active
from lightning_cocod.comm.tracer import Tracer
from lightning_cocod.comm.turn import Turn
from lightning_cocod.compression import Codec

_log = logging.getLogger(__name__)
_GOODBYE = 1.0  # seconds that nobody who is as good as gone is waited for
ASK, READY, DATA = FIRST_FREE, FIRST_FREE + 1, FIRST_FREE + 2


class Gossip:
    """One worker's part in it.

    The training thread moves x while ``moving``, calls ``stepped`` after each step, and ``fold`` before the next forward.

    Args:
        x: what is averaged.
        topology: of all workers.
        rank: of this one.
        ledger: of bytes and seconds.
        every: an active worker asks at most once in so many local steps.
        most: local steps since the snapshot of the exchange in flight after which ``stepped`` waits for it; None for any.
        codec: of what is sent; None to send the weights.
        seed: of codecs that draw.
        patience: D, seconds of silence after which the other one of an exchange counts as lost: D for the one that answers,
            2 D for the one that asks, 4 D while there is no exchange, in which the active one pings every D/4.
        tracer: the one that records now; by default nobody does.
    """

    def __init__(
        self,
        x: Sequence[Tensor],
        topology: Topology,
        rank: int,
        ledger: Ledger,
        *,
        every: int = 1,
        most: int | None = None,
        codec: Codec | None = None,
        seed: int = 0,
        patience: float = 60.0,
        tracer: Callable[[], Tracer] = Tracer,
    ) -> None:
        self.x = [p.detach() for p in x]
        self.layout = Layout(self.x)
        self.topology, self.rank = topology, rank
        self._ledger, self._every, self._most, self._patience, self._tracer = ledger, every, most, patience, tracer
        self._lane = lane_for(self.x[0].device if self.x else torch.device("cpu"))
        self._c, self._s = self.layout.buffer(), self.layout.buffer()
        for bucket in self._c.buckets:
            bucket.zero_()
        self.turn = Turn(self._lane)
        """Held while x or c is read or moved."""
        self._coding = None if codec is None else Coding(codec, self.layout, seed)
        options = self.layout.fingerprint, topology.edges, None if codec is None else fingerprint(codec)
        self.fingerprint = zlib.crc32(repr(options).encode())
        """Of what must be the same on all workers."""
        self._wires: dict[int, Wire] = {}
        self._merged: list[int] = []  # the steps of the snapshots of what is in c
        self._one = threading.Lock()  # held in an exchange
        self._changed = threading.Condition()  # guards all that follows
        self._links: dict[int, Link] = {}  # to those that live
        self._all: list[Link] = []
        self._threads: list[threading.Thread] = []
        self._steps, self._asked_at, self._asked = 0, 0, 0
        self._asking = self._paused = self._closing = False
        self._snapshot: int | None = None  # of the exchange in flight: the step at which it was taken
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.exchanges = 0
        """Merges of this worker so far."""
        self.distance: tuple[int, float] | None = None
        """Of the last merge: the step of its snapshot, and ‖(y − s)/2‖/‖s‖."""

    # Lifecycle

    def start(self, timeout: float, base: Sequence[Tensor] | None = None, check: Callable[[], None] = lambda: None) -> None:
        """Meet the neighbours and begin. Collective.

        Args:
            timeout: seconds in which they must have appeared.
            check: see ``meet``.
            base: θ, from which codes are differences: like x and close to it, the same on all workers. Not kept.
        """
        neighbours = self.topology.neighbours(self.rank)
        if not neighbours or not self.x:
            return
        if self._coding is None:
            self._wires = dict.fromkeys(neighbours, Plain(self._s))
        else:
            self._wires = {other: self._coded(self._coding, other, base or self.x) for other in neighbours}
        asks = is_active(self.rank)
        asked, answered = meet(
            _get_default_store(),
            self.rank,
            "gossip",
            asks=neighbours if asks else (),
            answers=() if asks else neighbours,
            ledger=self._ledger,
            timeout=timeout,
            check=check,
        )
        self._links = {**asked, **answered}
        self._all = list(self._links.values())
        if asks:
            self._thread(self._ask, f"gossip of rank {self.rank}")
            self._thread(self._ping, f"gossip pings of rank {self.rank}")
        for other, link in answered.items():
            self._thread(partial(self._answer, link), f"gossip of rank {self.rank} with rank {other}")

    def leave(self) -> None:
        """From here on others may be gone rightly. ``close`` follows."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, *, goodbye: bool = False) -> None:
        """Shut all links down and end the threads. Waits for nobody else. Idempotent.

        Args:
            goodbye: to the neighbours, who then do not take this worker for lost. The exchange in flight comes to its end.
        """
        self.leave()
        self._over.set()
        if goodbye:
            with self._changed:
                self._changed.wait_for(lambda: not self._asking)
            with self._one:
                for link in self._links.values():
                    with suppress(CommunicationError):
                        link.bye(_GOODBYE)
                for link in self._all:
                    link.shutdown()
        for link in self._all:
            link.shutdown()
        for thread in self._threads:
            thread.join()
        for link in self._all:
            link.close()
        self._links, self._all, self._threads = {}, [], []

    # For the training thread

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Around every change of x. A snapshot that is being taken is waited for."""
        with self.turn as waited:
            self._ledger.add(exposed=waited)
            yield

    def stepped(self) -> None:
        """x has made a local step: count it, and wait if the exchange in flight is too old.

        Raises:
            NonFiniteMessage: this worker's weights are not finite, so it cannot be averaged with others.
            CommunicationError: something else ended its exchanges.
        """
        with self._changed:
            self._steps += 1
            if self._too_old():
                began = time.perf_counter()
                with self._tracer().span("wait", message=f"exchange at step {self._snapshot}"):
                    self._changed.wait_for(lambda: not self._too_old())
                self._ledger.add(exposed=time.perf_counter() - began)
        self.check()

    def check(self) -> None:
        """Raise what has ended the exchanges of this worker, if anything has."""
        if self._error is not None:
            raise self._error

    def fold(self) -> list[int]:
        """x ← x + c, c ← 0; now an exchange may be due.

        Returns:
            Of each merge in c, the local steps between its snapshot and now.
        """
        with self.moving():
            merged, self._merged = self._merged, []
            if merged:
                with self._tracer().span("fold", exchanges=len(merged)):
                    self._c.add_to(self.x)
                    torch._foreach_zero_(self._c.buckets)
        with self._changed:
            self._changed.notify_all()
        return [self._steps - step for step in merged]

    def add_correction(self) -> None:
        """x ← x + c, for a while: c stays what it is."""
        with self.turn:
            self._c.add_to(self.x)

    def correction(self) -> list[Tensor]:
        """Copies of c, one tensor for each of x."""
        copies = [torch.empty_like(p) for p in self.x]
        with self.turn:
            self._c.copy_to(copies, keep=False)
        return copies

    def set_correction(self, c: Sequence[Tensor]) -> None:
        """c ← these."""
        with self.turn:
            self._c.copy_([value.to(p) for value, p in zip(c, self.x, strict=True)], keep=False)
            self._merged = [self._steps]

    @contextmanager
    def quiet(self, all_paused: Callable[[], None]) -> Iterator[None]:
        """Inside, no worker has an exchange, and c rests. Collective.

        Active workers stop asking; once ``all_paused`` has returned on all of them, nobody is asked. Until then passive ones
        answer, or an active one could not come to its end.
        """
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._asking)
        try:
            all_paused()
            with self._one:
                all_paused()  # all rest now: nobody leaves, and asks again, before the slowest has come to rest
                self.check()  # what failed after the last step must not pass in silence
                yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Those that live."""
        with self._changed:
            return tuple(sorted(self._links))

    def _too_old(self) -> bool:
        in_flight = self._most is not None and self._snapshot is not None and self._error is None
        return in_flight and self._steps - self._snapshot >= self._most  # type: ignore[operator]  # both are numbers

    # The active side

    def _ask(self) -> None:
        def due() -> bool:
            asks = not self._paused and self._steps - self._asked_at >= self._every
            return self._closing or not self._links or asks

        while True:
            with self._changed:
                self._changed.wait_for(due)
                if self._closing or (other := self.topology.partner(self.rank, self._asked, self._links)) is None:
                    return
                self._asking, self._asked_at, self._asked = True, self._steps, self._asked + 1
                link = self._links[other]
            try:
                with self._living(link):
                    link.send(ASK, tag=self.fingerprint, step=self._steps, silence=2 * self._patience)
                    self._expect(link.receive(2 * self._patience), READY, link.peer)  # it pings while it cannot answer
                    with self._one:
                        self._exchange(link, 2 * self._patience)
            finally:
                with self._changed:
                    self._asking = False
                    self._changed.notify_all()

    def _ping(self) -> None:
        while not self._over.wait(self._patience / 4):
            with self._changed:
                links = list(self._links.values())
            for link in links:
                with self._living(link):
                    link.ping(2 * self._patience)

    # The passive side

    def _answer(self, link: Link) -> None:
        with self._living(link):
            while True:
                self._expect(link.receive(4 * self._patience), ASK, link.peer)
                while not self._one.acquire(timeout=self._patience / 4):
                    link.ping(self._patience)
                try:
                    link.send(READY, tag=self.fingerprint, silence=self._patience)
                    self._exchange(link, self._patience)
                finally:
                    self._one.release()

    # Both

    @torch.no_grad()
    def _exchange(self, link: Link, silence: float) -> None:
        """Average with one other worker."""
        tracer, merged = self._tracer(), False
        with self._lane.working():
            with tracer.span("snapshot"), self.turn:
                self._s.copy_(self.x)
                if self._merged:
                    torch._foreach_add_(self._s.buckets, self._c.buckets)
                with self._changed:
                    self._snapshot = step = self._steps
            try:
                size = sum(t.nbytes for t in self._wires[link.peer].outgoing)
                with tracer.span("exchange", message=f"exchange at step {step}", peer=link.peer, bytes=size):
                    merged = self._average(link, silence, step, tracer)
            finally:
                with self._changed:
                    self.exchanges += merged
                    self._snapshot = None
                    self._changed.notify_all()

    def _average(self, link: Link, silence: float, step: int, tracer: Tracer) -> bool:
        """c ← c + (y − s)/2. Returns whether it has been: not where the other one is not finite."""
        wire, message = self._wires[link.peer], f"exchange at step {step}"
        with tracer.span("look"):
            size = norm(self._s.buckets)
            fit = finite(self._s.buckets, size)
        if fit:
            with tracer.span("encode"):
                fit = wire.encode(self._s)
        began = time.perf_counter()
        with tracer.span("transfer", message=message):
            header = link.swap(DATA, wire.outgoing, wire.incoming, step=step, finite=fit, silence=silence)
        self._ledger.add(busy=time.perf_counter() - began, raw=self.layout.nbytes, messages=1)
        if not fit:
            raise NonFiniteMessage(
                f"rank {self.rank} has NaN or infinity in its weights, or in the code of them, at local step {step}"
            )
        if not header.finite:
            return False
        with tracer.span("decode"):
            wire.difference_(self._s)
        with tracer.span("merge"), self.turn:
            torch._foreach_add_(self._c.buckets, self._s.buckets)
            self._merged.append(step)
        self.distance = step, float(norm(self._s.buckets) / size.clamp_min(torch.finfo(torch.float64).tiny))
        return True

    def _expect(self, header: Any, kind: int, other: int) -> None:
        if header.kind != kind or header.tag != self.fingerprint:
            raise MessageMismatch(
                f"rank {self.rank} and rank {other} are to average different things: they need the same parameters, in the "
                "same order, and the same compression"
            )

    @contextmanager
    def _living(self, link: Link) -> Iterator[None]:
        """Around the use of a link: a neighbour that is lost is left out from now on, and named once."""
        try:
            yield
        except LinkShut:
            pass
        except PeerLost as error:
            self._drop(link, error)
        except BaseException as error:  # this worker cannot go on: its training thread is told
            self._fail(error)

    def _drop(self, link: Link, error: PeerLost) -> None:
        with self._changed:
            if self._closing or self._links.pop(link.peer, None) is None:
                return
            left = len(self._links)
            self._changed.notify_all()
        link.shutdown()
        if not isinstance(error, PeerLeft):
            rest = f"{left} left to average with" if left else "none left to average with: this worker trains on alone"
            _log.warning("[rank %d] %s; neighbours: %s", self.rank, error, rest)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            links, self._links = self._links, {}
            self._changed.notify_all()
        for link in links.values():
            link.shutdown()

    def _coded(self, coding: Coding, other: int, base: Sequence[Tensor]) -> Coded:
        θ = self.layout.buffer(summed=True)
        θ.copy_(base, keep=False)
        active, passive = sorted((self.rank, other), key=lambda rank: not is_active(rank))
        return Coded(coding, θ, (active, passive, self.rank))

    def _thread(self, work: Callable[[], None], name: str) -> None:
        self._threads.append(beside_training(work, name))
