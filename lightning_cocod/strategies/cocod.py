"""``Trainer(strategy="cocod")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import CoCoD, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class CoCoDStrategy(AlgorithmStrategy):
    """CoCoD-SGD under Lightning: k local steps while the mean of the previous round is in flight (see ``CoCoD``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        warmup_steps: synchronous steps first.
        overlap: False waits for each mean where it is launched: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale; their batch sizes in the paper. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.

    Example::

        import lightning as L
        import lightning_cocod

        L.Trainer(strategy="cocod", devices=2)
        L.Trainer(strategy=lightning_cocod.CoCoDStrategy(period=8, warmup_steps=500), devices=2)
    """

    registered_name: ClassVar[str] = CoCoD.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 4,
        *,
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            CoCoD,
            period=period,
            overlap=overlap,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
