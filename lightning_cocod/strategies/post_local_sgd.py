"""``Trainer(strategy="post_local_sgd")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cocod.algorithms import PostLocalSGD, When
from lightning_cocod.algorithms.options import no_codec, positive, whole
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.comm import Communicator
from lightning_cocod.strategies.base import AlgorithmStrategy


class PostLocalSGDStrategy(AlgorithmStrategy):
    """Post-local SGD under Lightning: synchronous steps first, then Local SGD (see ``PostLocalSGD``).

    Args:
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``When``). A step is an optimizer step,
            never a batch.
        warmup_steps: synchronous steps first, one at least.
        weights: of the ranks in every mean, in any scale. Equal by default.
        compression: codec for the messages. None is the only one so far.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = PostLocalSGD.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 4,
        *,
        warmup_steps: int = 500,
        weights: Sequence[float] | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        no_codec(compression)
        self._warmup_steps = whole("warmup_steps", warmup_steps, least=1)
        self._when = as_when(period)
        self._weights = positive(weights)

    @override
    def make_algorithm(
        self, model: torch.nn.Module, optimizers: list[Optimizer], communicator: Communicator
    ) -> PostLocalSGD:
        return PostLocalSGD(
            model,
            optimizers,
            self._when,
            warmup_steps=self._warmup_steps,
            weights=self._weights,
            on_nonfinite=self._on_nonfinite,
            communicator=communicator,
        )
