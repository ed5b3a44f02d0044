"""What is to be measured, and in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

CEILING, PLAIN = ALONE = "none", "plain"
"""Contenders that communicate with nobody."""
GIVING_BACK = PLAIN, "ddp_plain"
"""Whose freed memory goes back to the system, as it does without this package."""


@dataclass(frozen=True)
class Plan:
    """A run of the benchmark: the same on all ranks.

    Attributes:
        workload: name of what is trained.
        contenders: names; `none` is among them.
        period: steps of a round, for every contender: what has no period of its own is measured over as many steps.
        batch_size: samples of a rank in a step.
        warmup: rounds before measuring begins, at least 1.
        rounds: measured ones.
        repeats: how often every contender trains.
        seed: of the order, the weights and the data.
        threads: torch threads of a rank.
        limit: seconds after which a contender is ended.
        link_rate: Mbit/s of the link between the ranks, as told by whoever has shaped it; None is unknown or no limit.
    """

    workload: str
    contenders: tuple[str, ...]
    period: int
    batch_size: int
    warmup: int = 1
    rounds: int = 5
    repeats: int = 3
    seed: int = 0
    threads: int = 1
    limit: float = 600.0
    link_rate: float | None = None

    @property
    def steps(self) -> int:
        """Of one contender in one repeat."""
        return (self.warmup + self.rounds) * self.period


class Entry(NamedTuple):
    """A contender's turn."""

    repeat: int
    contender: str


def schedule(plan: Plan) -> list[Entry]:
    """Every contender once in each repeat, in an order that the seed decides and that differs from repeat to repeat.

    So what changes slowly on a machine touches all contenders alike, and none always follows the same other.
    """
    draw = random.Random(plan.seed)
    entries = []
    for repeat in range(plan.repeats):
        entries += [Entry(repeat, name) for name in draw.sample(plan.contenders, len(plan.contenders))]
    return entries
