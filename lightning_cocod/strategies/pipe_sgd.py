"""``Trainer(strategy="pipe_sgd")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import PipeSGD
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class PipeSGDStrategy(AlgorithmStrategy):
    """Pipe-SGD under Lightning: the mean gradient of the step before, which has travelled behind this one (see ``PipeSGD``).

    All ranks hold the same weights. Gradients are averaged before they are clipped; the first step moves nothing.

    Args:
        overlap: False waits for each mean where it is launched: the same trajectory, nothing hidden.
        warmup_steps: synchronous steps first, without the delay.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the gradients, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
        MisconfigurationException: in a fit with ``precision="16-mixed"``.
    """

    registered_name: ClassVar[str] = PipeSGD.name

    def __init__(
        self,
        *,
        overlap: bool = True,
        warmup_steps: int = 0,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(PipeSGD, overlap=overlap, warmup_steps=warmup_steps, weights=weights, compression=compression)
