"""One TCP connection to one peer: headers, tensors straight from and to their memory, and deadlines on silence.

What collectives cannot do, a link can: wait for one peer without taking others along when it dies, be interrupted from
another thread, and tell a slow peer from one that is gone. A time limit here is one on *silence*: while bytes move, in
either direction, a transfer may take as long as it takes. Two peers that wait for each other should not have the same limit:
the one that asks waits longer than the one that answers, and it says now and then that it is there (``ping``). After an
error a link can only be closed.

A message is a header of 24 bytes and, if it has one, a payload:

    kind uint16 · flags uint16 · tag uint32 · step int64 · bytes of the payload int64        (little endian)

Kinds below 16 are this module's: HELLO opens a link (``meeting.py``), BYE ends it in good order, PING says nothing.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cocod.comm.errors import LinkShut, MessageMismatch, PeerLeft, PeerLost
from lightning_cocod.comm.ledger import Ledger

HELLO, BYE, PING = 1, 2, 3
FIRST_FREE = 16
"""The first kind that a user of links may give a meaning of its own."""
_NONFINITE = 1
_FORM = struct.Struct("<HHIqq")
_LOOKS = 4  # a limit on silence is waited for in so many parts: time in which this process was suspended counts as one


class Header(NamedTuple):
    """What announces a message.

    Attributes:
        kind: see above.
        flags: whether the content is finite (see ``finite``).
        tag: for the user of links.
        step: of the sender.
        nbytes: of the payload.
    """

    kind: int
    flags: int = 0
    tag: int = 0
    step: int = 0
    nbytes: int = 0

    @property
    def finite(self) -> bool:
        """False where the sender's content was not; then it has not been sent."""
        return not self.flags & _NONFINITE


class Link:
    """A connection to one peer. One thread uses it; ``ping`` and ``shutdown`` may be called by others.

    Args:
        connection: a connected stream socket, which is the link's from now on.
        peer: the rank at the other end, for messages of errors.
        ledger: where bytes are counted, headers included.
    """

    def __init__(self, connection: socket.socket, peer: int, ledger: Ledger) -> None:
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._socket, self._ledger = connection, ledger
        self._sending = threading.Lock()
        self._shut = False
        self._head = bytearray(_FORM.size)

    def send(
        self,
        kind: int,
        tensors: Sequence[Tensor] = (),
        *,
        silence: float,
        step: int = 0,
        tag: int = 0,
        finite: bool = True,
    ) -> None:
        """Send a message. If both ends send long ones to each other at a time, let them ``swap``.

        Args:
            kind: at least ``FIRST_FREE``.
            tensors: dense, on the CPU, of any dtype. They are not copied: they rest until this returns.
            silence: seconds without a byte moved after which the peer counts as lost.
            step: for the header, like ``tag``.
            tag: at most 32 bits.
            finite: False where the content is not finite: then the header says so, and no content is sent.

        Raises:
            PeerLost: the peer is gone, or silent.
            LinkShut: ``shutdown`` was called.
        """
        with self._sending:
            self._run(self._outgoing(kind, tensors, step, tag, finite), iter(()), silence)

    def receive(self, silence: float) -> Header:
        """The header of the next message, PINGs left out; each of those begins the time anew. ``take`` its payload next.

        Raises:
            PeerLeft: the peer has said goodbye.
            PeerLost, LinkShut: see ``send``.
        """
        headers: list[Header] = []
        self._run(iter(()), self._next_header(headers), silence)
        return headers[0]

    def take(self, header: Header, tensors: Sequence[Tensor], silence: float) -> None:
        """The payload that a header has announced, into these tensors; into none of them if the header says not finite.

        Raises:
            MessageMismatch: it is not as long as they are.
            PeerLost, LinkShut: see ``send``.
        """
        self._run(iter(()), self._payload(header, tensors), silence)

    def swap(
        self,
        kind: int,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        silence: float,
        step: int = 0,
        tag: int = 0,
        finite: bool = True,
    ) -> Header:
        """Send a message and receive the peer's of the same kind, both at once; the peer swaps as well.

        Args:
            kind: see ``send``, as for the other arguments.
            outgoing: what is sent.
            incoming: where the peer's goes, of as many bytes. If the peer's content is not finite they stay as they are.
            silence: see ``send``.
            step: see ``send``.
            tag: see ``send``.
            finite: see ``send``. The peer's content comes whether or not this one's is finite.

        Returns:
            The peer's header.

        Raises:
            MessageMismatch: the peer's message is of another kind or length.
            PeerLost, LinkShut: see ``send``.
        """
        headers: list[Header] = []

        def both() -> Iterator[memoryview]:
            yield from self._next_header(headers)
            if headers[0].kind != kind:
                raise MessageMismatch(f"rank {self.peer} sent a message of kind {headers[0].kind}, not of kind {kind}")
            yield from self._payload(headers[0], incoming)

        with self._sending:
            self._run(self._outgoing(kind, outgoing, step, tag, finite), both(), silence)
        return headers[0]

    def ping(self, silence: float) -> None:
        """Tell the peer that this end is there, unless a message of this link is doing so right now. For any thread.

        Raises:
            PeerLost, LinkShut: see ``send``.
        """
        self._say(PING, silence)

    def bye(self, silence: float) -> None:
        """Say goodbye, so that this end does not count as lost; unless a message is under way. ``close`` follows."""
        self._say(BYE, silence)

    def shutdown(self) -> None:
        """Wake whoever is using the link, with LinkShut; the peer finds it closed. For any thread. Idempotent."""
        self._shut = True
        with suppress(OSError):  # the peer, or close(), was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection back. Not while another thread is using it. Idempotent."""
        self._shut = True
        self._socket.close()

    # Inside

    def _say(self, kind: int, silence: float) -> None:
        if self._sending.acquire(blocking=False):
            try:
                self._run(self._outgoing(kind, (), 0, 0, True), iter(()), silence)
            finally:
                self._sending.release()

    def _outgoing(self, kind: int, tensors: Sequence[Tensor], step: int, tag: int, finite: bool) -> Iterator[memoryview]:
        views = [memory_of(tensor) for tensor in tensors] if finite else []
        nbytes = sum(view.nbytes for view in views)
        yield memoryview(_FORM.pack(kind, 0 if finite else _NONFINITE, tag, step, nbytes))
        yield from views

    def _next_header(self, headers: list[Header]) -> Iterator[memoryview]:
        while True:
            yield memoryview(self._head)
            kind, flags, tag, step, nbytes = _FORM.unpack(self._head)
            if kind == BYE:
                raise PeerLeft(f"rank {self.peer} has left")
            if kind != PING:
                headers.append(Header(kind, flags, tag, step, nbytes))
                return

    def _payload(self, header: Header, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
        if not header.finite:
            return
        views = [memory_of(tensor) for tensor in tensors]
        if header.nbytes != (expected := sum(view.nbytes for view in views)):
            raise MessageMismatch(f"rank {self.peer} sent {header.nbytes} bytes where {expected} were expected")
        yield from views

    def _run(self, outgoing: Iterator[memoryview], incoming: Iterator[memoryview], silence: float) -> None:
        """Send all that one iterator yields, and fill all that the other one yields: it goes on when a part is full."""
        sent = received = 0
        poll = select.poll()  # of this call: a ping may come from another thread
        try:
            out, into = _next(outgoing), _next(incoming)
            while out is not None or into is not None:
                events = self._wait(poll, reading=into is not None, writing=out is not None, silence=silence)
                if into is not None and events & ~select.POLLOUT:
                    n = self._socket.recv_into(into)
                    if n == 0:
                        raise ConnectionResetError
                    received += n
                    into = into[n:] if n < len(into) else _next(incoming)
                if out is not None and events & ~select.POLLIN:
                    n = self._socket.send(out)
                    sent += n
                    out = out[n:] if n < len(out) else _next(outgoing)
        except OSError:
            raise self._gone("its connection closed") from None
        finally:
            if sent or received:
                self._ledger.add(sent=sent, received=received)

    def _wait(self, poll: select.poll, *, reading: bool, writing: bool, silence: float) -> int:
        if self._shut:
            raise self._gone("")
        poll.register(self._socket, (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0))
        for _ in range(_LOOKS):
            until = time.monotonic() + silence / _LOOKS
            while (left := until - time.monotonic()) > 0:
                if found := poll.poll(1e3 * left):
                    return found[0][1]
        raise self._gone(f"it was silent for {silence:g} s")

    def _gone(self, why: str) -> LinkShut | PeerLost:
        if self._shut:
            return LinkShut(f"this rank has shut down its link to rank {self.peer}")
        with suppress(OSError):  # somebody who only sends has not read the peer's last words yet
            if self._socket.recv(1 << 16, socket.MSG_PEEK)[-_FORM.size :] == _FORM.pack(BYE, 0, 0, 0, 0):
                return PeerLeft(f"rank {self.peer} has left")
        return PeerLost(f"rank {self.peer} is lost: {why}")


def _next(parts: Iterator[memoryview]) -> memoryview | None:
    return next((part for part in parts if part.nbytes), None)


def memory_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes.

    Raises:
        ValueError: they do not lie in the CPU's memory without gaps.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a link sends contiguous tensors of the CPU, got one on {tensor.device}, strides {tensor.stride()}"
        )
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # NumPy's arrays are buffers
