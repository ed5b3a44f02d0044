"""Post-local SGD: synchronous SGD while training is unstable, then Local SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.local_sgd import LocalSGD
from lightning_cocod.algorithms.options import whole
from lightning_cocod.algorithms.when import When


class PostLocalSGD(LocalSGD):
    r"""Post-local SGD (Lin, Stich, Patel, Jaggi; ICLR 2020; arXiv 1808.07217).

    U is the user's optimizer's update, w_j the workers' weights::

        t < T:                    g ← Σ_j w_j g_j ;  x ← x + U(g)     # synchronous
        t ≥ T:                    x_i ← x_i + U(g(x_i))
        t = T + k, T + 2k, …:     x_i ← Σ_j w_j x_j                   # blocking

    It is Local SGD with a warm-up that must not be forgotten. The paper ends it with the first drop of the learning rate.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        warmup_steps: T ≥ 1.
        **shared: as for ``LocalSGD``.

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "post_local_sgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 4,
        *,
        warmup_steps: int = 500,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, period, warmup_steps=whole("warmup_steps", warmup_steps, least=1), **shared)
