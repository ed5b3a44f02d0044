"""``Trainer(strategy="local_sgd")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import LocalSGD, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class LocalSGDStrategy(AlgorithmStrategy):
    """Local SGD under Lightning: k local steps, then a blocking mean of the parameters (see ``LocalSGD``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        warmup_steps: synchronous steps first.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = LocalSGD.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 4,
        *,
        warmup_steps: int = 0,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            LocalSGD,
            period=period,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
