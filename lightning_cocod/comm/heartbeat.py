"""Heartbeats: every worker publishes a small note a few times a second, and reads the notes of the others.

The notes go through the store of the process group, from a thread of their own, so a rank that compiles, validates or writes
a checkpoint is not taken for dead. They carry whatever must reach the peers without a collective: that this rank has
failed, how many samples it has seen, and its part in agreeing on a step (agreement.py).
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

from lightning_cocod.comm.errors import PeerLost

Note = dict[str, Any]


class Heartbeat:
    """Publishes this rank's note and watches the others'.

    Args:
        store: the store of the process group; a clone of its connection is used, so nobody else's wait blocks a beat.
        rank: this rank.
        world_size: number of ranks.
        prefix: of the keys in the store; the same on all ranks, new for every group.
        timeout: seconds without a new note after which a peer counts as lost. Judged by the peer's counter and the local
            clock only: the clocks of two machines are never compared.
        interval: seconds between beats.
        compose: returns this rank's note.
        receive: gets every rank's latest note after each beat; returns whether the next beat should come soon.
        lost: called once, with the reason, when a peer is lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        prefix: str,
        *,
        timeout: float,
        interval: float = 0.5,
        compose: Callable[[], Note],
        receive: Callable[[dict[int, Note]], bool],
        lost: Callable[[PeerLost], None],
    ) -> None:
        self.rank, self.timeout = rank, timeout
        self._keys = [f"{prefix}/{r}" for r in range(world_size)]
        self._interval, self._compose, self._receive, self._lost = interval, compose, receive, lost
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=timeout))
        self._failure: str | None = None
        self._count = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of rank {rank}", daemon=True)

    def start(self) -> None:
        """Begin to watch. Every rank must have been constructed: a barrier belongs between the two."""
        self._thread.start()

    def soon(self) -> None:
        """Beat now rather than at the next interval."""
        self._wake.set()

    def failed(self, reason: str) -> None:
        """Tell the peers that this rank cannot go on. They fail within a beat instead of waiting for a time-out."""
        self._failure = reason
        self.soon()

    def close(self, timeout: float) -> None:
        """Publish a last time and end. Idempotent and bounded: a store that does not answer is left to the daemon."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _publish(self) -> None:
        self._count += 1
        beat = {"count": self._count, "failure": self._failure, "closed": self._stop.is_set(), "note": self._compose()}
        self._store.set(self._keys[self.rank], json.dumps(beat))

    def _read(self) -> dict[int, dict[str, Any]]:
        return {rank: json.loads(raw) for rank, raw in enumerate(self._store.multi_get(self._keys))}

    def _run(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        while not self._stop.is_set():
            try:
                self._publish()
                beats = self._read()
            except (RuntimeError, ValueError) as error:  # torch's store errors are RuntimeErrors
                if not self._stop.is_set():
                    self._lost(PeerLost(f"rank 0 is lost: its store does not answer ({_first_line(error)})"))
                return
            now = time.monotonic()
            for rank, beat in beats.items():
                if rank == self.rank:
                    continue
                if beat["failure"] is not None:
                    return self._lost(PeerLost(f"rank {rank} failed: {beat['failure']}"))
                if beat["closed"]:
                    continue
                if rank not in seen or seen[rank][0] != beat["count"]:
                    seen[rank] = beat["count"], now
                elif now - seen[rank][1] > self.timeout:
                    return self._lost(PeerLost(f"rank {rank} is lost: no heartbeat for {self.timeout:g} s"))
            hurry = self._receive({rank: beat["note"] for rank, beat in beats.items()})
            self._wake.wait(self._interval / 10 if hurry else self._interval)
            self._wake.clear()
        with contextlib.suppress(RuntimeError):  # rank 0 and its store may be gone: then nobody is left to read it
            self._publish()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
