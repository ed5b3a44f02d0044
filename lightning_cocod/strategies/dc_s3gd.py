"""``Trainer(strategy="dc_s3gd")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cocod.algorithms import DCS3GD, When
from lightning_cocod.algorithms.compensation import Compensation
from lightning_cocod.algorithms.options import choice, flag, no_codec, positive
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.comm import Communicator
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
        compression: codec for the messages. None is the only one so far.
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
        compression: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        no_codec(compression)
        self._when = as_when(period, warmup_steps)
        Compensation(lambda_0, norm=norm, lambda_max=lambda_max)  # looks at its options now, not at the first fit
        choice("weight_decay", weight_decay, ("after", "before"))
        self._make = partial(DCS3GD, lambda_0=lambda_0, norm=norm, lambda_max=lambda_max, weight_decay=weight_decay)
        self._overlap = flag("overlap", overlap)
        self._weights = positive(weights)

    @override
    def make_algorithm(self, model: torch.nn.Module, optimizers: list[Optimizer], communicator: Communicator) -> DCS3GD:
        return self._make(
            model,
            optimizers,
            self._when,
            overlap=self._overlap,
            weights=self._weights,
            on_nonfinite=self._on_nonfinite,
            communicator=communicator,
        )
