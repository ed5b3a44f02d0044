"""When workers communicate, apart from what they say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from lightning_cocod.algorithms.options import whole


class When(ABC):
    """How many local steps a round has, and which steps are synchronous.

    All ranks must answer alike: the answers depend on the number of steps alone.
    """

    @abstractmethod
    def period(self, step: int) -> int:
        """Local steps k ≥ 1 of the round that begins at this step."""

    def shortest(self) -> int:
        """The smallest k there is; unless a rule knows better, the first one."""
        return self.period(0)

    def synchronous(self, step: int) -> bool:
        """Whether this step exchanges gradients, as synchronous SGD does, instead of belonging to a round."""
        return False


class Every(When):
    """Rounds of k steps.

    Raises:
        ValueError: k is not a whole number of at least 1.
    """

    def __init__(self, k: int) -> None:
        self.k = whole("period", k, least=1)

    def period(self, step: int) -> int:
        """k."""
        return self.k

    def __repr__(self) -> str:
        return f"Every({self.k})"


class Schedule(When):
    """Rounds whose length changes: ``Schedule({0: 1, 1000: 8})`` has rounds of 1 step, and of 8 from step 1000 on.

    A new length holds from the first round that begins at or after its step.

    Raises:
        ValueError: no length for step 0, or a length or step that is not a whole number.
    """

    def __init__(self, lengths: Mapping[int, int]) -> None:
        if 0 not in lengths:
            raise ValueError(f"period as a schedule needs a length from step 0 on, for example {{0: 1, 1000: 8}}: {lengths}")
        checked = {whole("a step of the period", step, least=0): whole("period", k, least=1) for step, k in lengths.items()}
        self.lengths = dict(sorted(checked.items()))

    def period(self, step: int) -> int:
        """The length for the last listed step that is not after this one."""
        return self.lengths[max(s for s in self.lengths if s <= step)]

    def shortest(self) -> int:
        """Of all that are listed."""
        return min(self.lengths.values())

    def __repr__(self) -> str:
        return f"Schedule({self.lengths})"


class WarmUp(When):
    """Synchronous steps first, then another rule. Its steps count from the beginning of training.

    Raises:
        ValueError: the number of steps is not a whole number of at least 0.
    """

    def __init__(self, steps: int, then: When) -> None:
        self.steps = whole("warmup_steps", steps, least=0)
        self.then = then

    def period(self, step: int) -> int:
        """That of the rule that follows."""
        return self.then.period(step)

    def shortest(self) -> int:
        """The same."""
        return self.then.shortest()

    def synchronous(self, step: int) -> bool:
        """True for the first steps."""
        return step < self.steps or self.then.synchronous(step)

    def __repr__(self) -> str:
        return f"WarmUp({self.steps}, {self.then})"


def as_when(period: int | Mapping[int, int] | When, warmup_steps: int = 0) -> When:
    """The rule that a user wrote: a number of steps, a schedule ``{step: period}`` or a rule, after a warm-up.

    Raises:
        ValueError: see the rules.
    """
    if isinstance(period, When):
        rule = period
    elif isinstance(period, Mapping):
        rule = Schedule(period)
    else:
        rule = Every(period)
    return rule if warmup_steps == 0 else WarmUp(warmup_steps, rule)


class Rounds:
    """Counts the rounds of one run. Its state is the current round: the step at which it ends, and its length."""

    def __init__(self, when: When) -> None:
        self.when = when
        self.ends: int | None = None
        self.length: int | None = None

    def due(self, step: int) -> bool:
        """Whether the forward of this step belongs to a new round."""
        return not self.when.synchronous(step) and (self.ends is None or step >= self.ends)

    def begin(self, step: int) -> bool:
        """Begin a round before the forward of this step if one is due. Returns whether it has begun."""
        if not self.due(step):
            return False
        self.length = self.when.period(step)
        self.ends = step + self.length
        return True
