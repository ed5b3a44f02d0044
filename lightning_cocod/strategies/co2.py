"""``Trainer(strategy="co2")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import CO2, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class CO2Strategy(AlgorithmStrategy):
    """CO2 under Lightning: the mean of a round moves the model one round later, penalised and limited (see ``CO2``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        outer_lr: rate η of the outer optimizer.
        outer_momentum: its momentum β.
        gap_penalty: Λ, by which a mean is divided for being late.
        clip: φ, the most that an element of the outer momentum may be; no limit by default.
        warmup_steps: synchronous steps first.
        overlap: False waits for each mean where it is launched: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"``.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = CO2.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 48,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.2,
        gap_penalty: float = 1.0,
        clip: float | None = None,
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            CO2,
            period=period,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            gap_penalty=gap_penalty,
            clip=clip,
            overlap=overlap,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
