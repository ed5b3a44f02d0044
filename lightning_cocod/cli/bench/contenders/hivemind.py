"""hivemind's optimizer with local updates: a mean of the parameters in the background once a period."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job


def hivemind(job: Job) -> None:
    """To be written."""
    raise NotImplementedError
