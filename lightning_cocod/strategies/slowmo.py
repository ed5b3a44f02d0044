"""``Trainer(strategy="slowmo")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import SlowMo, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class SlowMoStrategy(AlgorithmStrategy):
    """SlowMo under Lightning: Local SGD with momentum over rounds (see ``SlowMo``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        slow_lr: α.
        slow_momentum: β.
        warmup_steps: synchronous steps first.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = SlowMo.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 12,
        *,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.7,
        warmup_steps: int = 0,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            SlowMo,
            period=period,
            slow_lr=slow_lr,
            slow_momentum=slow_momentum,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
