"""``Trainer(strategy="diloco")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cocod.algorithms import DiLoCo, When
from lightning_cocod.algorithms.diloco import nesterov
from lightning_cocod.algorithms.options import no_codec, positive
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.comm import Communicator
from lightning_cocod.strategies.base import AlgorithmStrategy


class DiLoCoStrategy(AlgorithmStrategy):
    """DiLoCo under Lightning: many local steps, then a step of an outer optimizer along their mean (see ``DiLoCo``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        outer_lr: rate η of the outer optimizer.
        outer_momentum: its Nesterov momentum β.
        warmup_steps: synchronous steps first.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec for the messages. None is the only one so far.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = DiLoCo.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 500,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        warmup_steps: int = 0,
        weights: Sequence[float] | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        no_codec(compression)
        nesterov(outer_lr, outer_momentum)  # looks at its options now, not at the first fit
        self._when = as_when(period, warmup_steps)
        self._make = partial(DiLoCo, outer_lr=outer_lr, outer_momentum=outer_momentum)
        self._weights = positive(weights)

    @override
    def make_algorithm(self, model: torch.nn.Module, optimizers: list[Optimizer], communicator: Communicator) -> DiLoCo:
        return self._make(
            model,
            optimizers,
            self._when,
            weights=self._weights,
            on_nonfinite=self._on_nonfinite,
            communicator=communicator,
        )
