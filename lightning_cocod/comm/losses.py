"""How communication ends: whoever is at fault, everything of this rank that waits learns of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from lightning_cocod.comm.errors import CommunicationError, PeerLost, TransportError, first_line
from lightning_cocod.comm.heartbeat import Heartbeat
from lightning_cocod.comm.thread import CommunicationThread
from lightning_cocod.comm.watchdog import Watchdog

_log = logging.getLogger(__name__)
_VERDICT = 4.0  # seconds that a broken connection waits for the heartbeat to say whose it was
_CALM = 10.0  # seconds of silence that tell who is gone where the others go on, and one that is only slow must not be ended
_TOGETHER = 0.2  # seconds within which all connections to a peer break that is gone
_BUSY = 1.0  # the same where the transport itself complains: threads that look after them may be late
PATIENCE = _VERDICT + 2.0
"""Seconds in which a communication thread that is still at work comes to an end."""


class Connections(Protocol):
    """Through which a thread reaches other ranks."""

    def cut(self) -> None:
        """Wake who waits for them."""

    def are_broken(self) -> bool:
        """Whether a peer's end is gone."""


class Losses:
    """Failures of one life of a communicator, from ``start``, or a regrouping, to the next one or ``close``.

    The first one stands, for all its threads.

    Args:
        rank: this rank.
        grace: seconds in which the training thread must come back to a verb.
    """

    def __init__(self, rank: int, grace: float) -> None:
        self.over = threading.Event()
        """Set once communication has failed: nobody waits for the transport any longer."""
        self.closing = False
        """Whether peers may be gone rightly."""
        self.outlived = False
        """Whether others go on without a peer that is lost: what needs all fails, and nobody is hurried."""
        self.needs_all = False
        """Whether something goes on, now, that needs all, so that nothing is outlived."""
        self._rank = rank
        self._grace = grace
        self.watchdog = Watchdog(rank, grace)
        self.heartbeat: Heartbeat | None = None
        self.for_good: PeerLost | None = None
        """The loss after which nobody goes on."""
        self._threads: list[CommunicationThread] = []
        self._connections: list[Connections] = []

    def concern(self, thread: CommunicationThread, connections: Connections) -> None:
        """A thread, and what it waits for."""
        self._threads.append(thread)
        self._connections.append(connections)

    def forget(self, thread: CommunicationThread, connections: Connections) -> None:
        """They have come to their end."""
        if thread in self._threads:
            self._threads.remove(thread)
            self._connections.remove(connections)

    @property
    def error(self) -> BaseException | None:
        """What has ended communication, if anything has."""
        return self.for_good or next((thread.error for thread in self._threads if thread.error is not None), None)

    @property
    def is_outlived(self) -> bool:
        """Whether what has failed is outlived, now."""
        return not self.needs_all and self._can_outlive(self.error)

    def _can_outlive(self, error: BaseException | None) -> bool:
        return self.outlived and isinstance(error, PeerLost) and not error.for_good

    def need_all(self, does: bool) -> None:
        """Whether something goes on, from now on, that needs all. Whoever comes to its end without the lost is well."""
        if does == self.needs_all:
            return
        self.needs_all = does
        if self._can_outlive(error := self.error):
            if does:
                assert error is not None
                self.watchdog.alarm(error)
            else:
                self.watchdog.over()
                self.watchdog = Watchdog(self._rank, self._grace)

    def check(self) -> None:
        """Raise it."""
        if (error := self.error) is not None and not self.closing:
            self.watchdog.noticed()
            raise error

    def fail(self, error: BaseException) -> None:
        """No thread takes or ends a job any more."""
        for thread in self._threads:
            thread.fail(error)

    def cut(self) -> None:
        """Wake whoever waits for the transport."""
        self.over.set()
        for connections in self._connections:
            connections.cut()

    def lost(self, reason: PeerLost) -> bool:
        """The heartbeat has lost a peer. Returns whether the others go on."""
        if self.closing:
            return False
        self.for_good = reason if reason.for_good else None
        self.fail(reason)
        self.cut()
        goes_on = self._can_outlive(reason)
        if goes_on:
            _log.info("[rank %d] %s; the others go on without it", self._rank, reason)
        if self.needs_all or not goes_on:
            self.watchdog.alarm(reason)
        return goes_on

    def look(self) -> None:
        """A connection that has broken without anybody using it tells as much."""
        if self.heartbeat is not None and not self.closing and self._are_broken():
            self.heartbeat.suspect(_CALM if self.outlived else None)

    def tell(self, reason: str) -> None:
        """Let the peers know that this rank cannot go on."""
        if self.heartbeat is not None:
            self.heartbeat.failed(reason)

    def explain(self, error: TransportError | PeerLost, what: str) -> CommunicationError:
        """Whose connection broke: the heartbeat knows within a few beats, unless this rank itself has given up.

        Where the heartbeat knows of nothing, a PeerLost stands.
        """
        if self.heartbeat is not None:
            self.heartbeat.suspect(_CALM if self.outlived else None)
        if self.over.wait(_VERDICT) and isinstance(self.error, CommunicationError):
            return self.error
        lost = (
            error
            if isinstance(error, PeerLost)
            else PeerLost(f"the connection to a peer broke during {what} although all of them live ({error})")
        )
        if self.outlived and not self.needs_all:
            return lost
        self.tell(str(lost))
        if self.heartbeat is not None:
            self.watchdog.alarm(lost)
        return lost

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Around a collective of somebody else's: a connection that breaks in it is explained as one of ours would be."""
        try:
            yield
        except RuntimeError as error:
            if not self._threads or isinstance(error, CommunicationError):
                raise
            self.watchdog.noticed()
            raise self.explain(TransportError(first_line(error)), what) from error

    def behind(self, error: BaseException) -> CommunicationError | None:
        """The loss of a peer behind the error of a collective that is neither ours nor ``named``, if there was one.

        A peer that is gone takes its connections to us along, if not in the same moment.
        """
        if not self._threads or not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
            return None
        if self.error is not None and not isinstance(self.error, PeerLost):
            return None  # this rank has failed by itself
        of_the_transport = isinstance(error, dist.DistError) or "gloo" in str(error)
        deadline = time.monotonic() + (_BUSY if of_the_transport else _TOGETHER)
        while not self.over.is_set() and not self._are_broken():
            if time.monotonic() > deadline:
                return None
            time.sleep(_TOGETHER / 20)
        self.watchdog.noticed()
        return self.explain(TransportError(first_line(error)), "a collective")

    def _are_broken(self) -> bool:
        return any(connections.are_broken() for connections in self._connections)
