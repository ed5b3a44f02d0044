"""Heartbeats: every worker publishes a small note a few times a second, and reads the notes of the others.

The notes go through the store of the process group, from a thread of their own, so a rank that compiles, validates or writes
a checkpoint is not taken for dead. They carry whatever must reach the peers without a collective: that this rank has
failed, how many samples it has seen, and its part in agreeing on a step (agreement.py). They also say which process
speaks, so that peers on the same host see at once that it has ended, and end it if it is silent for good (fence.py).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from lightning_cocod.comm.errors import PeerLost, first_line, in_one_line, store_lost
from lightning_cocod.comm.fence import Fence, Identity

Note = dict[str, Any]
_SILENT_BEATS = 4  # a peer that misses as many, once some connection has broken, is the one that is gone


class Heartbeat:
    """Publishes this rank's note and watches the others'.

    Args:
        store: the store of the process group; a clone of its connection is used, so nobody else's wait blocks a beat.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds without a new note after which a peer counts as lost. Judged by the peer's counter and the local
            clock only: the clocks of two machines are never compared. The beats need the interpreter lock: a call that
            holds it for as long makes a healthy rank look lost.
        connect_timeout: seconds from this rank's own start after which a peer that has never appeared counts as lost.
        interval: seconds between beats.
        compose: returns this rank's note.
        receive: gets every rank's latest note after each beat; returns whether the next beat should come soon.
        lost: called with the reason when a peer is lost, or all communication is. The first loss is the last one, unless it
            returns that it was a peer's and the others go on.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        connect_timeout: float = 300.0,
        interval: float = 0.5,
        compose: Callable[[], Note],
        receive: Callable[[dict[int, Note]], bool],
        lost: Callable[[PeerLost], bool],
    ) -> None:
        self.rank, self.timeout, self.interval = rank, timeout, interval
        self._patience = timeout
        self._connect_timeout, self._born = connect_timeout, time.monotonic()
        self._compose, self._receive, self._lost = compose, receive, lost
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=timeout))
        # A key of its own for every start on this store, the same on all ranks: each counts its own starts.
        life = self._store.add(f"lightning_cocod/starts of rank {rank}", 1)
        self._keys = [f"lightning_cocod/life {life}/rank {r}" for r in range(world_size)]
        self._absent = set(self._keys)
        self._fence = Fence()
        self._processes: dict[int, Identity] = {}  # of the ranks that have said who they are
        self._ended: set[int] = set()  # ranks whose process was gone at an earlier look
        self._gone: frozenset[int] = frozenset()
        self._left: frozenset[int] = frozenset()  # in good order
        self._failure: str | None = None
        self._count = 0
        self._note: Note = {}
        self._answered = time.monotonic()
        self._wake, self._stop, self._met = threading.Event(), threading.Event(), threading.Event()
        self._told, self._is_over = threading.Lock(), False
        self._note = compose()
        self._publish()
        self._threads = [
            threading.Thread(target=self._run, name=f"heartbeat of rank {rank}", daemon=True),
            threading.Thread(target=self._guard, name=f"heartbeat guard of rank {rank}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def meet(self) -> None:
        """Wait until every peer has said who it is, or one is lost. A peer is ended only if it is known."""
        self._met.wait()

    @property
    def living(self) -> frozenset[int]:
        """The ranks that are not lost, as far as is known."""
        return frozenset(range(len(self._keys))) - self._gone - self._left

    def suspect(self, patience: float | None = None) -> None:
        """A connection has broken, so somebody is gone: from now on a few missed beats tell who, or so many seconds."""
        short = patience or _SILENT_BEATS * self.interval
        if self.timeout > short:
            self.timeout = short
            self._wake.set()

    def failed(self, reason: str) -> None:
        """Tell the peers that this rank cannot go on. They fail within a beat instead of waiting for a time-out."""
        self._failure = self._failure or reason
        self._wake.set()

    def close(self, timeout: float) -> None:
        """Publish a last time and end. Idempotent and bounded: a store that does not answer is left to the daemon."""
        if self.rank == 0 and self._failure is not None:
            self._stop.wait(2 * self.interval)  # the store may end with this process: let the peers read why first
        self._stop.set()
        self._wake.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _publish(self) -> None:
        self._count += 1
        beat = {
            "count": self._count,
            "failure": self._failure,
            "closed": self._stop.is_set(),
            "process": self._fence.me,
            "note": self._note,
        }
        self._store.set(self._keys[self.rank], json.dumps(beat))

    def _read(self) -> dict[int, dict[str, Any]]:
        self._absent = {key for key in self._absent if not self._store.check([key])}  # reading a missing key would block
        present = [(rank, key) for rank, key in enumerate(self._keys) if key not in self._absent]
        answers = self._store.multi_get([key for _, key in present])
        return {rank: json.loads(raw) for (rank, _), raw in zip(present, answers, strict=True)}

    def _run(self) -> None:
        try:
            self._beat()
        except Exception as error:  # this rank would be deaf and mute from here on: that must not pass in silence
            self._failure = self._failure or in_one_line(error)
            self._tell(PeerLost(f"the heartbeat of rank {self.rank} ended: {self._failure}", for_good=True))
        with contextlib.suppress(Exception):  # the last words go out even if there is nothing new to add
            self._note = self._compose()
        with contextlib.suppress(RuntimeError):  # the store may be gone: then nobody is left to read it
            self._publish()

    def _beat(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        last = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            # Time in which this process itself was suspended is no silence of the others'.
            paused = self._pause(last, now)
            seen = {rank: (count, at + paused) for rank, (count, at) in seen.items()}
            last = now
            self._note = self._compose()
            try:
                self._publish()
                beats = self._read()
            except RuntimeError as error:  # what torch's store raises
                return self._store_lost(first_line(error))
            self._answered = time.monotonic()
            if self._absent and now - self._born > self._connect_timeout:
                missing = ", ".join(str(rank) for rank, key in enumerate(self._keys) if key in self._absent)
                self._tell(PeerLost(f"rank {missing} has not appeared within {self._connect_timeout:g} s", for_good=True))
                return
            self._left = frozenset(rank for rank, beat in beats.items() if beat["closed"]) - {self.rank}
            for rank in sorted(beats.keys() - {self.rank} - self._gone):
                if (why := self._why_lost(rank, beats[rank], seen, now)) is None:
                    continue
                self._gone |= {rank}
                if not self._tell(PeerLost(f"rank {rank} {why}")):
                    return
                self.timeout = self._patience  # that was who was suspected
            if not self._absent:
                self._met.set()
            notes = {rank: beat["note"] for rank, beat in beats.items() if rank not in self._gone}
            hurry = self._receive(notes) or bool(self._absent)
            self._wake.wait(self.interval / 10 if hurry else self.interval)
            self._wake.clear()

    def _why_lost(self, rank: int, beat: dict[str, Any], seen: dict[int, tuple[int, float]], now: float) -> str | None:
        if beat["failure"] is not None:
            return f"failed: {beat['failure']}"
        if beat["closed"]:
            return None
        if rank in self._ended:
            return "is lost: its process has ended"
        self._look_at_process(rank, beat["process"])
        if rank not in seen or seen[rank][0] != beat["count"]:
            seen[rank] = beat["count"], now
        elif now - seen[rank][1] > self.timeout:
            return f"is lost: no heartbeat for {self.timeout:g} s{self._end(rank)}"
        return None

    def _look_at_process(self, rank: int, process: list[Any] | None) -> None:
        """A process that has ended may have left in good order: its last words, read at the next beat, will tell."""
        if process is None:
            return
        self._processes[rank] = Identity(*process)
        if self._fence.is_gone(self._processes[rank]):
            self._ended.add(rank)
            self._wake.set()

    def _end(self, rank: int) -> str:
        """End a silent rank's process if it is one of this host, and say so."""
        process = self._processes.get(rank)
        if process is None or not self._fence.kill(process):
            return ""
        return f"; its process {process.pid} on this host was ended"

    def _pause(self, last: float, now: float) -> float:
        """The part of the time between two looks in which this process was suspended, as far as one can tell."""
        return max(0.0, now - last - min(_SILENT_BEATS * self.interval, self.timeout / 2))

    def _guard(self) -> None:
        """A store whose host is stopped or cut off blocks the beat for ever; this thread never touches it."""
        last = self._born
        while not self._stop.wait(self.interval):
            now = time.monotonic()
            self._answered += self._pause(last, now)
            last = now
            if not self._threads[0].is_alive():
                return
            if now - self._answered > self.timeout:
                return self._store_lost(f"no answer for {self.timeout:g} s")

    def _store_lost(self, why: str) -> None:
        """Seen by the beat or the guard, whichever comes first. The run is over: a stopped peer would stay for ever."""
        stopped = [rank for rank, process in list(self._processes.items()) if self._fence.is_stopped(process)]
        reason = store_lost(why)
        self._tell(PeerLost(f"{reason}{''.join(map(self._end, stopped))}", for_good=True))

    def _tell(self, reason: PeerLost) -> bool:
        """Returns whether the others go on. If not, nothing more is told."""
        with self._told:
            if not self._is_over and not self._stop.is_set():
                self._is_over = not self._lost(reason)
        self._met.set()
        return not self._is_over
