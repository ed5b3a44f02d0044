"""Buckets go round a ring of TCP connections, in the thread that also fills them and drains them.

Gloo's takes two more threads, and they wake for every few packets. Here one thread sleeps until a whole part of a bucket has
come, by the connection's low-water mark, and what is complete is received where it is drained from. Beside training, on
machines that have no CPU time to spare, that takes half as much of it (docs/benchmarks.md).

Every bucket is cut into n parts. In step s = 0, …, 2n − 3 worker r sends part r − 1 − s and receives part r − 2 − s
(modulo n): first sums under way, to which it adds its own part, until part r is complete where it is; then from s = n − 1 on
sums of all. Each is made once, so it is the same on all workers bit for bit. All steps are an all-reduce, the first half is
a reduce-scatter, the other one an all-gather. Two buckets take turns, step by step: one travels while the other one is added
up. Where their bytes lie is a cargo's to say (``cargo.py``).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lightning_cocod.comm.buckets import Part, as_part, parts_of
from lightning_cocod.comm.cargo import Cargo, Filled, Table
from lightning_cocod.comm.errors import TransportError, first_line

IN_FLIGHT = 2
"""Buckets at work."""


class Leg(Enum):
    """How far buckets go."""

    ALL_REDUCE = "all the way"
    REDUCE_SCATTER = "until each worker has the sum of its part"
    ALL_GATHER = "from each worker's part on"

    def steps(self, n: int) -> range:
        """Of n workers."""
        return range(n - 1 if self is Leg.ALL_GATHER else 0, n - 1 if self is Leg.REDUCE_SCATTER else 2 * n - 2)


_LOOK = 0.5  # seconds between two looks at whether communication is over
_LOW_WATER = 2 << 20  # bytes that have to be there before the thread wakes, if as many are expected
_KEPT = 8  # sizes of buckets in the same memory that are cut
_CLOSED = "a connection has been closed"


C = TypeVar("C", bound=Cargo)


class Ring:
    """This worker's place in a ring, and its two connections there.

    Args:
        after: to the worker it sends to. The ring's from now on, as is the other one.
        before: to the worker it receives from.
        place: of this worker.
        n: how many there are, two at least.
        timeout: seconds without a byte moved after which what is under way is given up.
    """

    def __init__(self, after: socket.socket, before: socket.socket, place: int, n: int, timeout: float) -> None:
        self.after, self.before, self.place, self.n, self.timeout = after, before, place, n, timeout
        self._landing: dict[torch.dtype, Tensor] = {}
        self._cuts: dict[torch.dtype, dict[int, dict[int, tuple[list[Part], list[Part]]]]] = {}

    def travel(
        self,
        leg: Leg,
        buckets: Iterator[C],
        count: int,
        over: threading.Event,
        is_there: Callable[[int], bool] | None = None,
    ) -> Iterator[C]:
        """Buckets as they have come as far as they go, in their order.

        Args:
            leg: how far.
            buckets: with what this worker puts in. Asked for one by one, ``IN_FLIGHT`` of them at most before the first is
                taken.
            count: of them, the same on all workers, as are their sizes.
            over: communication is.
            is_there: whether asking for that bucket would not wait. If given, one is asked for that would where nothing else
                can be done.

        Raises:
            TransportError: a connection has broken, nothing has moved for long, or communication is over.
        """
        return _Journey(self, leg, buckets, count, is_there).go(over)

    def gather(self, over: threading.Event, row: bytes) -> list[bytes]:
        """Every worker's row of bytes, which are all as long as this worker's.

        Raises:
            TransportError: see ``travel``.
        """
        table = Table(row, self.place, self.n)
        for _ in self.travel(Leg.ALL_GATHER, iter([table]), 1, over):
            pass
        return table.rows

    def filled(self, memory: Tensor, own: Tensor | None = None) -> Filled:
        """A bucket's cargo.

        Args:
            memory: the bucket: contiguous, on the CPU.
            own: where the sum of this worker's part of it comes to lie, in a reduce-scatter.
        """
        return Filled(memory, *self._cut(memory), {} if own is None else {self.place: own})

    def parts(self, memory: Tensor) -> list[Part]:
        """Of a bucket."""
        return self._cut(memory)[0]

    def _cut(self, memory: Tensor) -> tuple[list[Part], list[Part]]:
        """Parts, and rooms for what is to be added to them. They are kept for memory that comes again."""
        landing, longest = self._landing.get(memory.dtype), -(-memory.numel() // self.n)
        if landing is None or landing.numel() < longest:
            landing = self._landing[memory.dtype] = memory.new_empty(longest)
            self._cuts[memory.dtype] = {}
        kept = self._cuts[memory.dtype]
        if memory.data_ptr() not in kept and len(kept) == IN_FLIGHT:
            del kept[next(iter(kept))]  # it has been replaced
        of_it = kept.setdefault(memory.data_ptr(), {})
        if memory.numel() not in of_it:
            if len(of_it) == _KEPT:
                of_it.clear()
            parts = parts_of(memory, self.n)
            of_it[memory.numel()] = parts, [as_part(landing[: part.values.numel()]) for part in parts]
        return of_it[memory.numel()]

    def close(self) -> None:
        """Give the connections back. Idempotent."""
        self.after.close()
        self.before.close()


class _AtWork(Generic[C]):
    """A bucket at work, and how many steps are behind it."""

    def __init__(self, cargo: C) -> None:
        self.cargo = cargo
        self.sent = self.received = 0


class _Journey(Generic[C]):
    """Some buckets on their way."""

    def __init__(
        self, ring: Ring, leg: Leg, buckets: Iterator[C], count: int, is_there: Callable[[int], bool] | None
    ) -> None:
        self._ring, self._buckets, self._count, self._is_there = ring, buckets, count, is_there
        self._steps = leg.steps(ring.n)
        turns = [
            (bucket, step)
            for first in range(0, count, IN_FLIGHT)
            for step in self._steps
            for bucket in range(first, min(first + IN_FLIGHT, count))
        ]
        self._sends, self._receipts = deque(turns), deque(turns)
        self._begun = 0
        self._at_work: dict[int, _AtWork[C]] = {}
        self._out: memoryview | None = None  # what is left of the part that is being sent
        self._into: memoryview | None = None  # where the rest of the part that is coming goes
        self._has_room = True  # as far as is known, for more of what is sent
        self._low_water = 0
        self._poll, self._awaited = select.poll(), (-1, -1)

    def go(self, over: threading.Event) -> Iterator[C]:
        """See ``Ring.travel``."""
        for number in range(self._count):
            self._begin(number)
            bucket = self._at_work[number]
            while bucket.sent < len(self._steps) or bucket.received < len(self._steps):
                nothing = self._outgoing() is None and self._incoming() is None  # is left of this one or can be done for it
                if bucket.sent == bucket.received == len(self._steps):
                    break
                self._begin(number, wait=nothing)  # it is the turn of the one that is not there yet
                self._move(over)
            del self._at_work[number]
            yield bucket.cargo

    def _begin(self, number: int, *, wait: bool = False) -> None:
        """Let those set out that may beside this one, and this one. ``wait`` for one that is not there."""
        while (following := self._begun) < min(number + IN_FLIGHT, self._count):
            if following > number and not wait and self._is_there is not None and not self._is_there(following):
                break
            wait = False
            self._at_work[following] = _AtWork(next(self._buckets))
            self._begun += 1

    def _move(self, over: threading.Event) -> None:
        """Send and receive what can be; something can."""
        try:
            while (out := self._outgoing()) is not None and self._has_room:
                sent = self._ring.after.send(out)
                self._has_room = sent == len(out)
                self._out = out[sent:]
                if not self._out:
                    self._has_sent()
            into = self._incoming()
            if self._has_room and self._outgoing() is not None:
                return  # that what comes next is empty has freed something to send
            if into is None and self._out is None:
                return  # there were but empty parts, and what else can be sent
            if self._wait(into, over):
                assert into is not None
                if (received := self._ring.before.recv_into(into)) == 0:
                    raise ConnectionResetError(_CLOSED)
                self._into = into[received:]
                if not self._into:
                    self._has_received()
        except BlockingIOError:  # it only seemed to be ready
            self._has_room = False
        except OSError as error:
            raise TransportError(f"the ring is broken: {first_line(error)}") from None

    def _wait(self, into: memoryview | None, over: threading.Event) -> bool:
        """Until there is room to send again what is not sent yet, or something to receive: whether that."""
        ring = self._ring
        if into is not None and (low := min(len(into), _LOW_WATER)) != self._low_water:
            ring.before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
            self._low_water = low
        awaited = 0 if into is None else select.POLLIN, 0 if self._out is None else select.POLLOUT
        if awaited != self._awaited:
            self._poll.register(ring.before, awaited[0])
            self._poll.register(ring.after, awaited[1])
            self._awaited = awaited
        since, was_over = time.monotonic(), False
        while not (events := dict(self._poll.poll(1e3 * _LOOK))):
            if was_over:
                raise TransportError("it was given up")
            if self._low_water > 1:  # something may come, but slowly
                ring.before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                self._low_water = 1
            if time.monotonic() - since > ring.timeout:
                raise TransportError(f"nothing has moved for {ring.timeout:g} s")
            was_over = over.is_set()
        readable, writable = ring.before.fileno() in events, ring.after.fileno() in events
        if (readable and into is None) or (writable and self._out is None):  # what is told unasked
            raise ConnectionResetError(_CLOSED)
        self._has_room = self._has_room or writable
        return readable

    def _outgoing(self) -> memoryview | None:
        """What is to be sent; None while it is not there yet."""
        while self._out is None and self._sends:
            number, step = self._sends[0]
            bucket = self._at_work.get(number)
            if bucket is None or bucket.received < step - self._steps.start:
                break
            self._out = bucket.cargo.leaving(self._part_sent(step))
            if not self._out:
                self._has_sent()
        return self._out

    def _has_sent(self) -> None:
        number, step = self._sends.popleft()
        bucket = self._at_work[number]
        bucket.cargo.left(self._part_sent(step))
        bucket.sent += 1
        self._out = None

    def _part_sent(self, step: int) -> int:
        return (self._ring.place - 1 - step) % self._ring.n

    def _incoming(self) -> memoryview | None:
        """Where what comes is to go; None while there is no room."""
        while self._into is None and self._receipts and self._receipts[0][0] in self._at_work:
            cargo, part, under_way = self._to_come()
            self._into = cargo.landing(part, under_way)
            if self._into is None:
                break
            if not self._into:
                self._has_received()
        return self._into

    def _has_received(self) -> None:
        cargo, part, under_way = self._to_come()
        cargo.landed(part, under_way)
        number, _ = self._receipts.popleft()
        self._at_work[number].received += 1
        self._into = None

    def _to_come(self) -> tuple[C, int, bool]:
        number, step = self._receipts[0]
        return self._at_work[number].cargo, (self._ring.place - 2 - step) % self._ring.n, step < self._ring.n - 1
