"""``Trainer(strategy="dc_s3gd")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lightning_cocod.algorithms import DCS3GD, When
from lightning_cocod.compression import Codec, PowerSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class DCS3GDStrategy(AlgorithmStrategy):
    """DC-S3GD under Lightning: a mean in flight at every step, and gradients corrected for it (see ``DCS3GD``).

    Gradients are corrected when they are complete and unscaled, before they are clipped.

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). 1 in the paper.
        lambda_0: size of the correction in units of the gradient's. 0 is CoCoD.
        norm: ``"model"`` or ``"tensor"``: over what norms are taken.
        lambda_max: the most that λ may be.
        weight_decay: ``"after"`` the correction, or ``"before"`` it (SGD only).
        warmup_steps: synchronous steps first.
        overlap: False waits for each mean where it is launched: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec of the rounds' messages, ``PowerSGD``, or a name; none by default (docs/compression.md).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = DCS3GD.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 1,
        *,
        lambda_0: float = 0.2,
        norm: Literal["model", "tensor"] = "model",
        lambda_max: float | None = None,
        weight_decay: Literal["after", "before"] = "after",
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        compression: str | Codec | PowerSGD | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            DCS3GD,
            period=period,
            lambda_0=lambda_0,
            norm=norm,
            lambda_max=lambda_max,
            weight_decay=weight_decay,
            overlap=overlap,
            warmup_steps=warmup_steps,
            weights=weights,
            compression=compression,
        )
