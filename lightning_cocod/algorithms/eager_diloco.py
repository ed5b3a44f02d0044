"""Eager DiLoCo: the mean of a round is waited for one round later; until then a worker goes by what it has found itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.delay import Delay
from lightning_cocod.algorithms.diloco import nesterov
from lightning_cocod.algorithms.outer import OuterRounds
from lightning_cocod.algorithms.when import When


class EagerDiLoCo(OuterRounds):
    r"""DiLoCo with eager updates (Kale, Douillard, Donchev; 2025; arXiv 2502.12996).

    As DiLoCo, but the mean Δ̄ of a round travels while the next one computes. Where a round ends, a worker takes its own
    fresh part of the mean at once and the others' from the round before, in which Δ_j′ and Δ̄′ were found (0 in the first
    round). U is the inner optimizer's update, g the gradient of worker i's own batch, N the number of workers; β is the
    momentum and η the rate of the outer optimizer. x, θ, m, Δ and G have the shapes and the units of the parameters::

        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     Δ_i ← θ_i − x_i
                          G_i ← Δ_i / N + [Δ̄′ − Δ_i′ / N] ;  Δ̄ ← async Σ_j Δ_j / N
                          m ← β m + G_i
                          θ_i ← θ_i − η (G_i + β m) ;  x_i ← θ_i

    (N − 1)/N of G_i is late, and with the momentum that can be unstable: if near an optimum a round takes a worker the part
    h of the way there, the default η and β diverge from h = 0.6 on for 4 workers, 0.46 for 8 and 0.37 for many; for two
    never. With β = 0.5 it is from 0.93 on for 8 workers and 0.81 for many, and never for 4 (on a quadratic; our result).

    With weights w_j, which sum to 1, w_i stands for 1/N, and Σ_j w_j Δ_j for the mean. One worker alone is DiLoCo. The model
    to evaluate is the mean of the θ_i: it, and the model at the end, have no local steps since the last round's end, and of
    that round the fresh parts only. The metric ``algo/replica_distance`` is that between what the workers have moved in a
    round. Memory beyond the parameters: three copies of them, θ_i, m and the message, and two more while a round ends. Not
    for parameters in half precision (see ``OuterRounds``).

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters: the inner one.
        period: optimizer steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        outer_lr: η ≥ 0, a pure number.
        outer_momentum: 0 ≤ β < 1, a pure number.
        overlap: False waits for each mean where it is launched: the same trajectory bit for bit, nothing hidden.
        **shared: as for ``OuterRounds``: ``weights``, ``warmup_steps``, …

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"``.
    """

    name: ClassVar[str] = "eager_diloco"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 500,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        overlap: bool = True,
        **shared: Any,
    ) -> None:
        outer, delay = nesterov(outer_lr, outer_momentum), Delay(overlap=overlap)
        super().__init__(model, optimizer, period, outer=outer, delay=delay, **shared)
