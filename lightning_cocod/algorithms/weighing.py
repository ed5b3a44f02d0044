"""What the workers weigh in a mean: what the user says, or the sizes of the batches that they have computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_cocod.algorithms.options import positive


class Weighing:
    """w of all workers, in the order of ranks; together they are 1. Every rank has the same.

    Weights that change belong to rounds: a report has those of the round that it reports.

    Args:
        weights: in any scale; equal by default.
        world_size: how many workers there are.

    Raises:
        ValueError: not one positive number for each worker.

    Attributes:
        in_flight: of the message in flight, and so of the next merge.
        of_round: of the round under way, as far as they are known.
        of_next: of the round that begins next, or of a synchronous step, which is a round of its own.
    """

    def __init__(self, weights: Sequence[float] | None, world_size: int) -> None:
        self._given = self.of_next = self.of_round = self.in_flight = _normalised(weights, world_size)
        self._step_sizes = [0] * world_size  # samples of each worker in the step under way, where that is told
        self._round_sizes = [0] * world_size

    @property
    def of_step(self) -> list[float]:
        """Of the step under way: the sizes of its batches, where they are told, else those of the round."""
        return self.of_next if any(self._step_sizes) else self.of_round

    def set(self, weights: Sequence[float]) -> None:
        """Of the rounds that begin from now on.

        Raises:
            ValueError: not one positive number for each worker.
        """
        self.of_next = _normalised(weights, len(self.of_next))

    def count(self, sizes: Sequence[int]) -> None:
        """A batch begins in which each worker has so many samples. Steps and rounds weigh what was computed in them.

        Raises:
            ValueError: not one positive number for each worker.
        """
        self._step_sizes = [sum(pair) for pair in zip(self._step_sizes, sizes, strict=True)]
        self._round_sizes = [sum(pair) for pair in zip(self._round_sizes, sizes, strict=True)]
        self.of_next = _normalised(self._step_sizes, len(sizes))
        self.of_round = _normalised(self._round_sizes, len(sizes))

    def end_step(self) -> None:
        """The next batch belongs to another step."""
        self._step_sizes = [0] * len(self.of_next)

    def begin_round(self) -> None:
        """What is sent now reports the round that has ended."""
        self.in_flight, self.of_round = self.of_round, self.of_next
        self._round_sizes = [0] * len(self.of_next)

    def report_round(self) -> None:
        """What is sent now reports the round under way."""
        self.in_flight = self.of_round

    def report_step(self) -> None:
        """What is sent now reports a step that is a round of its own."""
        self.in_flight = self.of_next

    def state_dict(self) -> dict[str, Any]:
        """To go on with, in the middle of a round."""
        return {
            "weights": [list(w) for w in (self.in_flight, self.of_round, self.of_next)],
            "given_weights": list(self._given),
            "sizes": [list(self._step_sizes), list(self._round_sizes)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on. Where this object has been made with other weights than that one, they are ``set``.

        Raises:
            ValueError: the state of another number of workers.
        """
        if (others := len(state["weights"][0])) != len(self._given):
            raise ValueError(
                f"this state is one of {others} workers, there are {len(self._given)}; "
                "continue from the consensus model instead"
            )
        self.in_flight, self.of_round, self.of_next = (list(w) for w in state["weights"])
        self._step_sizes, self._round_sizes = (list(sizes) for sizes in state["sizes"])
        if list(self._given) != state["given_weights"]:
            self.of_next = self._given


def _normalised(weights: Sequence[float] | None, world_size: int) -> list[float]:
    given = positive(weights, world_size) or [1.0] * world_size
    return [w / math.fsum(given) for w in given]
