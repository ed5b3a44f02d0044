"""``Trainer(strategy="overlap_local_sgd")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import OverlapLocalSGD, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class OverlapLocalSGDStrategy(AlgorithmStrategy):
    """Overlap-Local-SGD under Lightning: a pull towards an anchor that moves behind a round (see ``OverlapLocalSGD``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        pull: α, how much of the way to the anchor a worker goes where a round ends.
        anchor_momentum: β.
        warmup_steps: synchronous steps first.
        overlap: False waits for each mean where it is launched: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = OverlapLocalSGD.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 2,
        *,
        pull: float = 0.6,
        anchor_momentum: float = 0.7,
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            OverlapLocalSGD,
            period=period,
            pull=pull,
            anchor_momentum=anchor_momentum,
            overlap=overlap,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
