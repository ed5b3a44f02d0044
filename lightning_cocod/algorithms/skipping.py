"""When a message is left out: its content is kept for later."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from lightning_cocod.algorithms.options import above_zero, share, whole
from lightning_cocod.comm.norms import norm

SERVER = -1
"""Who skips, where it is not a worker: the server, which draws as one although each worker has a shard of it. Where a rule
depends on values, each owner asks it about its own shard."""


class Skip(ABC):
    """A rule. One object belongs to one sender of one optimizer's messages."""

    foreseen: ClassVar[bool] = False
    """Whether all workers know what every other one does, so that nobody has to tell."""

    @abstractmethod
    def __call__(self, step: int, who: int, bucket: int, values: Tensor | None) -> bool:
        """Whether a bucket is kept.

        Args:
            step: of the optimizer, counted from 0.
            who: the rank, or ``SERVER``.
            bucket: number of the bucket.
            values: what would be sent; None where a rule that is ``foreseen`` is asked about others.
        """

    def state_dict(self) -> Any:
        """What the rule remembers."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027  # most remember nothing
        """Go on with that."""


class Never(Skip):
    """Everything is sent."""

    foreseen = True

    def __call__(self, step: int, who: int, bucket: int, values: Tensor | None) -> bool:
        """No."""
        return False


class EveryNth(Skip):
    """Only in steps n − 1, 2n − 1, … something is sent, by all.

    Raises:
        ValueError: n is not a whole number of at least 1.
    """

    foreseen = True

    def __init__(self, n: int) -> None:
        self.n = whole("the period of a skip", n, least=1)

    def __call__(self, step: int, who: int, bucket: int, values: Tensor | None) -> bool:
        """Whether the step is none of those."""
        return (step + 1) % self.n != 0

    def __repr__(self) -> str:
        return f"EveryNth({self.n})"


class Randomly(Skip):
    """A step is left out with a probability; by each worker on its own, and all know, as they have the same seed.

    Where it is 1 nothing is ever sent.

    Raises:
        ValueError: the probability is not greater than 0 and at most 1.
    """

    foreseen = True

    def __init__(self, probability: float, seed: int = 0) -> None:
        self.probability = share("the probability of a skip", probability)
        self.seed = whole("seed", seed, least=0)

    def __call__(self, step: int, who: int, bucket: int, values: Tensor | None) -> bool:
        """A draw that depends on the seed, the step and who it is."""
        return _draw(self.seed, step, who) < self.probability

    def __repr__(self) -> str:
        return f"Randomly({self.probability}, seed={self.seed})"


@lru_cache(maxsize=4096)
def _draw(seed: int, step: int, who: int) -> float:
    """A number from 0 to 1, the same on all workers; asked for every bucket."""
    return random.Random(f"{seed} {step} {who}").random()


class WhileSmall(Skip):
    """A bucket is left out while its norm is less than a fraction of that of the last one that was sent.

    What is kept adds up until it is large enough. Source: censored communication (Li, Wu, Xu, Ling: Communication-Censored
    Distributed Stochastic Gradient Descent, arXiv 1909.03631), whose threshold is a sequence; here it is relative.

    Raises:
        ValueError: the fraction is not a positive number.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = above_zero("the fraction of a norm", fraction)
        self._sent: dict[int, float] = {}

    def __call__(self, step: int, who: int, bucket: int, values: Tensor | None) -> bool:
        """Whether it is small."""
        assert values is not None  # not foreseen
        size = float(norm([values]))
        if size < self.fraction * self._sent.get(bucket, 0.0):
            return True
        self._sent[bucket] = size
        return False

    def state_dict(self) -> dict[int, float]:
        """The norms of what was sent last."""
        return dict(self._sent)

    def load_state_dict(self, state: dict[int, float]) -> None:
        """Go on with those."""
        self._sent = dict(state)

    def __repr__(self) -> str:
        return f"WhileSmall({self.fraction})"


class Asked(Skip):
    """What a function says about ``(step, bucket, values)``. It is called in the communication thread."""

    def __init__(self, function: Callable[[int, int, Tensor], bool]) -> None:
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> Asked:
        """The same function: a method is asked of its object, not of a copy."""
        return self

    def __call__(self, step: int, who: int, bucket: int, values: Tensor | None) -> bool:
        """That."""
        assert values is not None  # not foreseen
        return bool(self.function(step, bucket, values))


SkipRule = Skip | int | float | Callable[[int, int, Tensor], bool] | None


def as_skip(name: str, rule: SkipRule) -> Skip:
    """The rule that a user wrote: n to send in every n-th step, a probability below 1 of leaving a step out, a rule or a
    function of ``(step, bucket, values)``; None or 0 to send always.

    Raises:
        ValueError: something else, or out of range.
    """
    if rule is None:
        return Never()
    if isinstance(rule, Skip):
        return rule
    if isinstance(rule, int | float) and not isinstance(rule, bool):
        if rule == 0:  # with which a sweep over probabilities may begin
            return Never()
        if isinstance(rule, int):
            return EveryNth(whole(name, rule, least=1))
        if rule == 1:
            raise ValueError(f"{name}=1.0 is a probability, and nothing would be sent: 1 sends in every step")
        return Randomly(share(name, rule))
    if callable(rule):
        return Asked(rule)
    raise ValueError(
        f"{name} must be a period (an int), a probability (a float below 1), a rule such as WhileSmall(1.0), which goes by "
        f"norms, or a function of (step, bucket, values), got {rule!r}"
    )


class Sending:
    """Who sends which bucket in one direction (see ``comm.coded_shards.Senders``).

    Args:
        rule: this sender's.
        who: the rank of each sender, or ``SERVER`` where all are parts of that.
        rank: of this one.
    """

    def __init__(self, rule: Skip, who: list[int], rank: int) -> None:
        self.rule, self._who, self._rank = rule, who, rank
        self.step = 0
        self.silent: set[int] = set()
        """Buckets that nobody sends."""

    def known(self, bucket: int) -> list[bool] | None:
        """Where nothing is to be sent, or the rule is foreseen."""
        if bucket in self.silent:
            return [False] * len(self._who)
        if not self.rule.foreseen:
            return None
        return [not self.rule(self.step, who, bucket, None) for who in self._who]

    def sends(self, bucket: int, values: Tensor) -> bool:
        """What the rule says of them."""
        return not self.rule(self.step, self._who[self._rank], bucket, values)
