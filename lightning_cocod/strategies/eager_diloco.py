"""``Trainer(strategy="eager_diloco")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cocod.algorithms import EagerDiLoCo, When
from lightning_cocod.algorithms.diloco import nesterov
from lightning_cocod.algorithms.options import flag, no_codec, positive
from lightning_cocod.algorithms.outer import NO_SKIP
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.comm import Communicator
from lightning_cocod.strategies.base import AlgorithmStrategy


class EagerDiLoCoStrategy(AlgorithmStrategy):
    """Eager DiLoCo under Lightning: DiLoCo whose mean travels behind the next round (see ``EagerDiLoCo``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        outer_lr: rate η of the outer optimizer.
        outer_momentum: its Nesterov momentum β.
        warmup_steps: synchronous steps first.
        overlap: False waits for each mean where it is launched: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec for the messages. None is the only one so far.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"``.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = EagerDiLoCo.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 500,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        no_codec(compression)
        if self._on_nonfinite == "skip":
            raise ValueError(NO_SKIP)
        nesterov(outer_lr, outer_momentum)  # looks at its options now, not at the first fit
        self._when = as_when(period, warmup_steps)
        overlap = flag("overlap", overlap)
        self._make = partial(EagerDiLoCo, outer_lr=outer_lr, outer_momentum=outer_momentum, overlap=overlap)
        self._weights = positive(weights)

    @override
    def make_algorithm(self, model: torch.nn.Module, optimizers: list[Optimizer], communicator: Communicator) -> EagerDiLoCo:
        return self._make(
            model,
            optimizers,
            self._when,
            weights=self._weights,
            on_nonfinite=self._on_nonfinite,
            communicator=communicator,
        )
