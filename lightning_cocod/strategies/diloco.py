"""``Trainer(strategy="diloco")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import DiLoCo, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class DiLoCoStrategy(AlgorithmStrategy):
    """DiLoCo under Lightning: many local steps, then a step of an outer optimizer along their mean (see ``DiLoCo``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        outer_lr: rate η of the outer optimizer.
        outer_momentum: its Nesterov momentum β.
        warmup_steps: synchronous steps first.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = DiLoCo.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 500,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        warmup_steps: int = 0,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            DiLoCo,
            period=period,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
