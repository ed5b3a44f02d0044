"""``Trainer(strategy="eamsgd")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_cocod.algorithms.eamsgd import EAMSGD
from lightning_cocod.algorithms.when import When
from lightning_cocod.strategies.asynchronous import AsynchronousStrategy


class EAMSGDStrategy(AsynchronousStrategy):
    """EAMSGD under Lightning: ranks on elastic bands around a centre, of which each has a shard (see ``EAMSGD``).

    Ranks share each epoch, a fast one trains on more batches (docs/asynchrony.md). Evaluation, checkpoints and the end have
    the centre. The loss of a rank ends the run.

    Args:
        period: k, or a schedule ``{step: k}``: a rank and the centre pull at each other every k of the rank's steps.
        alpha: of the difference, what both move; by default 0.9/N for N ranks.
        overlap: False waits for the centre's answer in the step in which it is asked.
        max_staleness: the most exchanges by which a rank may be ahead of the slowest since all last met; None for any.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
        MisconfigurationException: in a fit, what ranks with different numbers of steps cannot do, or ``"16-mixed"``.
    """

    registered_name: ClassVar[str] = EAMSGD.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 10,
        *,
        alpha: float | None = None,
        overlap: bool = True,
        max_staleness: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(EAMSGD, period=period, alpha=alpha, overlap=overlap, max_staleness=max_staleness)
