"""``Trainer(strategy="streaming_diloco")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import StreamingDiLoCo, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class StreamingDiLoCoStrategy(AlgorithmStrategy):
    """Streaming DiLoCo under Lightning: fragments of the model take turns, their means travel behind a few steps (see
    ``StreamingDiLoCo``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        fragments: their number, at most one for each module with parameters of its own, or for each the names of its
            modules, as in the ``named_modules`` of the LightningModule.
        delay: 0 ≤ τ < k, the steps between the launch of a mean and its merge.
        keep: 0 ≤ α < 1, the part of its own parameters that a replica keeps in a merge.
        outer_lr: rate η of the outer optimizer.
        outer_momentum: its Nesterov momentum β.
        warmup_steps: synchronous steps first.
        overlap: False waits for each mean where it is launched: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range; where a fit begins, names that do not divide the model's parameters.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = StreamingDiLoCo.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 100,
        *,
        fragments: int | Sequence[Sequence[str]] = 4,
        delay: int = 1,
        keep: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            StreamingDiLoCo,
            period=period,
            fragments=fragments,
            delay=delay,
            keep=keep,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            overlap=overlap,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
