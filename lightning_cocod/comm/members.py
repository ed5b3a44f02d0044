"""Who takes part in a run, where it goes on without a worker that is lost, and takes in one that has come back.

A run has generations. In each, its members are the ranks 0, 1, … of torch's default group, and the run of a generation is
like any other run of as many ranks. A member keeps its name: the rank that it had, or has come back for, in the first one.

All members that live come to an election, wherever their algorithm says that they meet. The first who sees all of them there
says who is in the next generation: those and, where it is wanted, whoever waits at the door. Then they make the groups, in a
part of the store of their own, and the generation counts once all of them have; else the next one is elected. What one says
for all goes through the store that all generations share, which takes one answer to a question.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_cocod.comm.default_group import set_timeout
from lightning_cocod.comm.door import LOOK, Door, Signs
from lightning_cocod.comm.errors import PeerLost, first_line, store_lost

RUN = "lightning_cocod/run"
"""Where a store tells of the run that is under way."""
_BEAT = 0.5  # seconds between two signs that the run is under way


class Members:
    """The members of a run, seen from one that is, or waits to be, among them.

    Args:
        store: that all generations share; whoever hosts it cannot be spared.
        run: the run's name in it.
        name: of this one.

    Attributes:
        names: of the members of the present generation, by rank; nobody's as long as this one waits.
        newcomers: ranks of those that were not in the generation before.
        fingerprint: of what must be the same on all members, for whoever wants to be let in.
    """

    def __init__(self, store: Store, run: str, name: int) -> None:
        self._hosted, self._store = store, store.clone()  # whoever hosts it goes on hosting
        self._run, self.name = f"{RUN} {run}", name
        self.generation = 0
        self.names: tuple[int, ...] = ()
        self.newcomers: tuple[int, ...] = ()
        self.fingerprint = ""
        self._let_in = 0  # arrivals that have been seen to
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    @classmethod
    def founding(cls, store: Store, rank: int, world_size: int) -> Members:
        """Of a run that begins. Collective: every rank calls it at the same place."""
        number = store.add(f"{RUN}s that rank {rank} has begun", 1)  # the same on all: each counts its own
        root, key = root_of(store), f"{RUN} number {number}"
        if rank == 0:
            run = uuid.uuid4().hex
            root.set(RUN, run)  # first: whoever has begun may be lost at once, and come back
            store.set(key, run)
        members = cls(root, store.get(key).decode(), rank)
        members.names = tuple(range(world_size))
        members._begin()
        return members

    @property
    def rank(self) -> int:
        """Of this one in the present generation."""
        return self.names.index(self.name)

    @property
    def is_waiting(self) -> bool:
        """Whether this one has yet to be let in."""
        return not self.names

    def somebody_waits(self) -> bool:
        """Whether somebody waits to be let in. A look into the store."""
        with suppress(RuntimeError):  # nobody can come any more if the store is gone
            return self._store.add(f"{self._run}/arrivals", 0) > self._let_in
        return False

    def settle(self, question: str, answer: str) -> str:
        """The answer of whoever answers first, among the members of this generation.

        Raises:
            PeerLost: the store is gone.
        """
        try:
            return self._settle(f"{self._place(self.generation)}/{question}", answer)
        except RuntimeError as error:  # what torch's store raises
            raise store_lost(first_line(error)) from None

    def elect(self, living: Callable[[], Collection[int]], *, lets_in: bool) -> None:
        """The next generation begins: wait until the members that live are here.

        Args:
            living: the names of those that do, as far as is known now.
            lets_in: whether those that wait are let in.

        Raises:
            PeerLost: the others have gone on without this one, or the store is gone.
        """
        try:
            record = self._elected(living, lets_in)
        except PeerLost:
            raise
        except RuntimeError as error:
            raise store_lost(first_line(error)) from None
        if self.name not in record["names"] or str(self.name) in record["let in"]:
            raise _lost(f"the others took rank {self.name} for lost, and have gone on without it")
        self._adopt(record)

    def wait(self, timeout: float) -> None:
        """Wait to be let in.

        Raises:
            PeerLost: the run has ended, or does not want this one.
        """
        self._hush()  # its own signs are none of the run's
        self.names = ()
        try:
            while self.is_waiting:
                self._knock(timeout)
        except PeerLost:
            raise
        except RuntimeError as error:
            raise store_lost(first_line(error)) from None
        self._begin()

    def gather(self, backend: str, device: torch.device, timeout: float, making: float) -> None:
        """Make torch's default group anew, of the members.

        Args:
            backend: of the group.
            device: of this worker.
            timeout: of its collectives, in seconds.
            making: seconds in which it must have been made.

        Raises:
            RuntimeError: one of them has gone meanwhile.
        """
        part = PrefixStore(self._place(self.generation), self._store)
        dist.init_process_group(
            backend,
            store=part,
            rank=self.rank,
            world_size=len(self.names),
            timeout=timedelta(seconds=making),
            device_id=device if device.type == "cuda" and "nccl" in backend else None,
        )
        set_timeout(timeout, dist.group.WORLD)

    def agree(self, made: bool, has_failed: Callable[[], bool]) -> bool:
        """Whether all members have made what they need; if not, none of them goes on with it.

        Args:
            made: whether this one has.
            has_failed: whether what it has made has failed meanwhile.

        Raises:
            PeerLost: the store is gone.
        """
        place = self._place(self.generation)
        try:
            if made:
                self._store.set(f"{place}/made {self.name}", "")
            while not self._store.check([f"{place}/outcome"]):
                if not made or has_failed():
                    self._settle(f"{place}/outcome", "given up")
                elif all(self._store.check([f"{place}/made {name}"]) for name in self.names):
                    self._settle(f"{place}/outcome", "made")
                else:
                    time.sleep(LOOK)
            return self._store.get(f"{place}/outcome") == b"made"
        except RuntimeError as error:
            raise store_lost(first_line(error)) from None

    def leave(self) -> None:
        """Nobody is let in by this one any more. Idempotent."""
        self._hush()

    # Inside

    def _hush(self) -> None:
        self._over.set()
        if self._beating is not None:
            self._beating.join(timeout=2.0)
            self._beating = None

    def _begin(self) -> None:
        self._over.clear()
        self._beating = threading.Thread(target=self._beat, name=f"presence of rank {self.name}", daemon=True)
        self._beating.start()

    def _beat(self) -> None:
        store = self._hosted.clone()  # of its own: a group that is being made keeps the other one waiting
        while not self._over.is_set():
            with suppress(RuntimeError):  # if the store is gone nobody can come any more
                store.add(f"{self._run}/signs", 1)
            self._over.wait(_BEAT)

    def _place(self, generation: int) -> str:
        return f"{self._run}/generation {generation}"

    def _settle(self, key: str, answer: str) -> str:
        return self._store.compare_set(key, "", answer).decode()

    def _elected(self, living: Callable[[], Collection[int]], lets_in: bool) -> dict[str, Any]:
        place = self._place(self.generation + 1)
        self._store.set(f"{place}/here {self.name}", "")
        here: set[int] = set()
        door = Door(self._store, self._run, self._let_in, opens=lets_in)
        while not self._store.check([f"{place}/members"]):
            expected = set(living()) | {self.name}
            here |= {name for name in expected - here if self._store.check([f"{place}/here {name}"])}
            if expected <= here and (arrivals := door.look()) is not None:
                self._settle(f"{place}/members", json.dumps(self._record(expected, *arrivals)))
            else:
                time.sleep(LOOK)
        return dict(json.loads(self._store.get(f"{place}/members")))

    def _record(self, names: Collection[int], last: int, waiting: dict[int, tuple[int, str]]) -> dict[str, Any]:
        let_in: dict[int, int] = {}
        for number, (name, fingerprint) in sorted(waiting.items(), reverse=True):
            if name in names:
                why = "there is one, and it lives"
            elif name in let_in:
                why = "another process has come for it"
            elif fingerprint != self.fingerprint:
                why = "its model or its options are others than those of the run"
            else:
                let_in[name] = number
                continue
            self._store.set(f"{self._run}/arrival {number} refused", why)
        together = sorted({*names, *let_in})
        new = [rank for rank, name in enumerate(together) if name in let_in]
        generation = self.generation + 1
        return {"generation": generation, "names": together, "newcomers": new, "let in": let_in, "arrivals": last}

    def _adopt(self, record: dict[str, Any]) -> None:
        self.generation, self.names = record["generation"], tuple(record["names"])
        self.newcomers, self._let_in = tuple(record["newcomers"]), record["arrivals"]
        self._store.set(f"{self._run}/last generation", str(self.generation))

    def _knock(self, timeout: float) -> None:
        """Wait for the answer to one arrival. It may be that somebody has taken this one for gone."""
        store, signs = self._store, Signs(self._store, self._run)
        number = store.add(f"{self._run}/arrivals", 1)
        store.set(f"{self._run}/arrival {number}", json.dumps([self.name, self.fingerprint]))
        generation = self._last_generation()
        while True:
            store.add(f"{self._run}/arrival {number} waits", 1)
            if store.check([f"{self._run}/arrival {number} refused"]):
                why = store.get(f"{self._run}/arrival {number} refused").decode()
                raise _lost(f"rank {self.name} cannot be taken in: {why}")
            if not signs.go_on(timeout):
                raise _lost(f"rank {self.name} waited to be taken in, and the run has ended")
            if store.check([f"{self._place(generation + 1)}/members"]):
                generation += 1
                record = json.loads(store.get(f"{self._place(generation)}/members"))
                if record["let in"].get(str(self.name)) == number:
                    return self._adopt(record)
                if record["arrivals"] >= number and not store.check([f"{self._run}/arrival {number} refused"]):
                    return None  # and knock once more
            time.sleep(LOOK)

    def _last_generation(self) -> int:
        key = f"{self._run}/last generation"
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _lost(reason: str) -> PeerLost:
    return PeerLost(reason, for_good=True)


def root_of(store: Store) -> Store:
    """The store behind all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
