"""Agreeing on a step: all workers do something after the same optimizer step, without a collective in any step.

A rank asks (``request``). Rank 0 proposes a step that lies ahead of everybody. Each rank accepts if it has not passed that
step yet, and from then on stops there until the verdict; if one has passed it, rank 0 proposes a later one. When all
have accepted, the proposal stands. The notes of heartbeat.py carry all of it, so a rank takes part even while its training
thread is inside a long batch, a validation or a checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Note = dict[str, Any]


class Agreement:
    """One rank's side of the protocol.

    Args:
        rank: this rank; rank 0 makes the proposals.
        world_size: number of ranks.
        check: called while waiting for a verdict; raises if the peers are gone.
    """

    def __init__(self, rank: int, world_size: int, *, check: Callable[[], None]) -> None:
        self.rank, self.world_size = rank, world_size
        self._check = check
        self._changed = threading.Condition()
        self._step = -1  # not known before the first step: a resumed run begins anywhere
        self._wanted: list[str] = []
        self._proposal: tuple[int, str, int] | None = None  # number, what, step: the last one this rank has seen
        self._accepted = False
        self._standing = False
        self._carried_out = 0  # number of the last proposal that has been carried out
        self._furthest = -1  # step of the fastest rank, as of the last beat
        self._pace = 0  # its steps in one beat while nothing was being agreed
        self._tries = 0

    def request(self, what: str) -> None:
        """Ask that ``what`` happens after some later step, the same on all ranks. Asking again changes nothing.

        Callable from a signal handler, so it takes no lock: the next beat picks the wish up.
        """
        if what not in self._wanted:
            self._wanted.append(what)

    @property
    def wishes(self) -> tuple[str, ...]:
        """What this rank has asked for and not got yet."""
        return tuple(self._wanted)

    def reached(self, step: int) -> str | None:
        """The training thread has done ``step`` steps. Returns what all ranks have agreed to do now, if anything.

        Blocks only where a proposal for exactly this step still awaits its verdict, for a few beats.
        """
        if self.world_size == 1:
            return self._wanted.pop(0) if self._wanted else None
        with self._changed:
            self._step = step
            while self._pending_at(step) and not self._standing:
                self._changed.wait(0.05)
                self._check()
            if not self._pending_at(step):
                return None
            assert self._proposal is not None
            number, what, _ = self._proposal
            self._carried_out = number
            if what in self._wanted:
                self._wanted.remove(what)
            return what

    def note(self) -> Note:
        """This rank's part of its heartbeat note."""
        with self._changed:
            return {
                "step": self._step,
                "wanted": self._wanted[:1],
                "proposal": self._proposal if self.rank == 0 else None,
                "standing": self._standing,
                "answered": self._proposal[0] if self._proposal else 0,
                "accepted": self._accepted,
                "carried_out": self._carried_out,
            }

    def receive(self, notes: dict[int, Note]) -> bool:
        """Take in the ranks' notes. Returns whether an agreement is being made, so that beats should follow quickly."""
        with self._changed:
            if self.rank == 0:
                self._lead(notes)
            elif 0 in notes and notes[0]["proposal"] is not None:
                number, what, step = notes[0]["proposal"]
                if self._proposal is None or self._proposal[0] != number:
                    self._consider((number, what, step))
                self._standing = notes[0]["standing"] and self._accepted
            self._changed.notify_all()
            return bool(self._wanted) or (self._proposal is not None and self._carried_out < self._proposal[0])

    def _pending_at(self, step: int) -> bool:
        if self._proposal is None or not self._accepted:
            return False
        number, _, at = self._proposal
        return number > self._carried_out and at == step

    def _consider(self, proposal: tuple[int, str, int]) -> None:
        self._proposal = proposal
        self._accepted = self._step < proposal[2]
        self._standing = False

    def _lead(self, notes: dict[int, Note]) -> None:
        if len(notes) < self.world_size or self._step < 0 or any(note["step"] < 0 for note in notes.values()):
            return
        number = self._proposal[0] if self._proposal else 0
        before, self._furthest = self._furthest, max(self._step, *(note["step"] for note in notes.values()))
        current = [note for note in notes.values() if note["answered"] == number]
        if number > self._carried_out:  # a proposal is out
            if self._standing or len(current) < self.world_size:
                return
            if self._accepted and all(note["accepted"] for note in current):
                self._standing = True
            else:
                assert self._proposal is not None
                self._tries += 1  # somebody had passed it: aim further
                self._propose(self._proposal[1])
        elif all(note["carried_out"] >= number for note in notes.values()):  # the last one has been carried out by all
            wanted = [what for note in notes.values() for what in note["wanted"]]
            self._tries, self._pace = 0, self._furthest - before if before >= 0 else 0
            if wanted:
                self._propose(wanted[0])

    def _propose(self, what: str) -> None:
        number = self._proposal[0] + 1 if self._proposal else 1
        ahead = 2 * (1 + self._pace) * 2**self._tries  # what the others do before they hear of it
        self._consider((number, what, self._furthest + ahead))
