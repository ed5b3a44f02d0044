"""``Trainer(strategy="post_local_sgd")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import PostLocalSGD, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class PostLocalSGDStrategy(AlgorithmStrategy):
    """Post-local SGD under Lightning: synchronous steps first, then Local SGD (see ``PostLocalSGD``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        warmup_steps: synchronous steps first, one at least.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = PostLocalSGD.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 4,
        *,
        warmup_steps: int = 500,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            PostLocalSGD,
            period=period,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
