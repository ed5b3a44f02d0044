"""The strategies of this package, as a user runs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_cocod.strategies import AlgorithmStrategy

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job


def contender(strategy: type[AlgorithmStrategy]) -> Callable[[Job], None]:
    """A strategy with its default options but the period, where it has one."""

    def train(job: Job) -> None:
        options: dict[str, Any] = {"period": job.plan.period}
        job.fit(strategy(**{name: options[name] for name in options if name in inspect.signature(strategy).parameters}))

    return train
