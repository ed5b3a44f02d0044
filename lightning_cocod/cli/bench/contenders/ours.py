"""The strategies of this package, as a user runs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_cocod.strategies import AlgorithmStrategy

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job


def contender(strategy: type[AlgorithmStrategy], **chosen: Any) -> Callable[[Job], None]:
    """A strategy with its default options but those chosen, the period, where it has one, and the shortest warm-up that it
    allows.
    """

    def train(job: Job) -> None:
        known = inspect.signature(strategy).parameters
        options: dict[str, Any] = {"period": job.plan.period} if "period" in known else {}
        if "warmup_steps" in known and known["warmup_steps"].default > 0:
            options["warmup_steps"] = 1
        job.fit(strategy(**{**options, **chosen}))

    return train
