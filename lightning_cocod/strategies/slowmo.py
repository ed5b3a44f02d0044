"""``Trainer(strategy="slowmo")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cocod.algorithms import SlowMo, When
from lightning_cocod.algorithms.options import below_one, no_codec, nonnegative, positive
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.comm import Communicator
from lightning_cocod.strategies.base import AlgorithmStrategy


class SlowMoStrategy(AlgorithmStrategy):
    """SlowMo under Lightning: Local SGD with momentum over rounds (see ``SlowMo``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        slow_lr: α.
        slow_momentum: β.
        warmup_steps: synchronous steps first.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec for the messages. None is the only one so far.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = SlowMo.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 12,
        *,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.7,
        warmup_steps: int = 0,
        weights: Sequence[float] | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        no_codec(compression)
        self._when = as_when(period, warmup_steps)
        slow_lr, slow_momentum = nonnegative("slow_lr", slow_lr), below_one("slow_momentum", slow_momentum)
        self._make = partial(SlowMo, slow_lr=slow_lr, slow_momentum=slow_momentum)
        self._weights = positive(weights)

    @override
    def make_algorithm(self, model: torch.nn.Module, optimizers: list[Optimizer], communicator: Communicator) -> SlowMo:
        return self._make(
            model,
            optimizers,
            self._when,
            weights=self._weights,
            on_nonfinite=self._on_nonfinite,
            communicator=communicator,
        )
