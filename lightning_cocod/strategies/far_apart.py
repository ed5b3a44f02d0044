"""Replicas that are far apart: a mean of them is no good model, and the user is told so once."""

from __future__ import annotations

import warnings

from lightning_cocod.algorithms import Algorithm

FAR = 0.25
"""From this ``algo/replica_distance`` on a replica is far from the mean; see docs/metrics.md for what it was chosen by."""
IN_A_ROW = 2
"""Messages that must say so one after the other: a first round may, and a single one."""


class FarApart:
    """Reads the distance of this rank's replica in every message, and warns at most once.

    On every rank: one whose data is unlike all others' may be the only one that is far from the mean.
    """

    def __init__(self) -> None:
        self._step: int | None = None  # at which the last message that was looked at has been launched
        self._in_a_row = 0
        self._told = False

    def after_step(self, algorithm: Algorithm) -> None:
        """Look, if there is something new. Never blocks."""
        if not self._told and (measured := algorithm.measured()) is not None:
            step, distance = measured
            if self.is_far(step, distance):
                self._told = True
                warnings.warn(_text(algorithm, step, distance), stacklevel=2)

    def is_far(self, step: int, distance: float) -> bool:
        """Whether the replica is far from the mean, given its distance in the message that was launched at a step."""
        if step != self._step:
            self._step = step
            self._in_a_row = self._in_a_row + 1 if distance > FAR else 0
        return self._in_a_row >= IN_A_ROW


def _text(algorithm: Algorithm, step: int, distance: float) -> str:
    far = (
        f"The replicas are far apart: at step {step} that of rank {algorithm.comm.rank} was {distance:.0%} of its norm from "
        f"the mean, and more than {FAR:.0%} in the message before. Either the ranks see different data (shuffle it before "
        "it is split), or "
    )
    rounds = f"rounds of {algorithm.rounds.length} steps are too long for the learning rate"
    why = rounds if algorithm.has_rounds else "the learning rate is too high"
    return f"{far}{why}; the number does not tell which. {algorithm.brings_closer}."
