"""DiLoCo: many local steps of the inner optimizer, then one step of an outer one, Nesterov's, along their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.options import below_one, nonnegative
from lightning_cocod.algorithms.outer import OuterRounds
from lightning_cocod.algorithms.when import When


class DiLoCo(OuterRounds):
    r"""DiLoCo (Douillard et al.; 2023; arXiv 2311.08105).

    All workers begin a round with the same θ and make k steps of the inner optimizer, the user's. U is its update, g the
    gradient of worker i's own batch, w_j the weight of worker j; all weights sum to 1. β is the momentum and η the rate of
    the outer optimizer. x, θ, m and Δ̄ have the shapes and the units of the parameters::

        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     Δ̄ ← Σ_j w_j (θ − x_j)            # blocking
                          m ← β m + Δ̄
                          θ ← θ − η (Δ̄ + β m) ;  x_i ← θ

    The inner optimizer's state stays local and is kept. The paper has AdamW inside, η = 0.7, β = 0.9 and k = 500. The model
    to evaluate is θ: it, and the model at the end, have no local steps since the last round's end. Memory beyond the
    parameters: two copies of them, θ and m, and one more while a round ends.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters: the inner one.
        period: optimizer steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        outer_lr: η ≥ 0, a pure number.
        outer_momentum: 0 ≤ β < 1, a pure number; 0 is an outer gradient descent.
        **shared: as for ``OuterRounds``: ``weights``, ``warmup_steps``, ``on_nonfinite``, …

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "diloco"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 500,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, period, outer=nesterov(outer_lr, outer_momentum), **shared)


class Nesterov(Optimizer):
    """The outer optimizer: m ← β m + G ; θ ← θ − η (G + β m). As torch's SGD, but all in place: it needs no memory but m."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # there is nothing to close over
        """One step along the gradients."""
        for group in self.param_groups:
            θ = [p for p in group["params"] if p.grad is not None]
            if θ:
                η, β, G = group["lr"], group["momentum"], [p.grad for p in θ]
                m = [self._momentum(p) for p in θ]
                torch._foreach_mul_(m, β)
                torch._foreach_add_(m, G)
                torch._foreach_add_(θ, G, alpha=-η)
                torch._foreach_add_(θ, m, alpha=-η * β)

    def _momentum(self, p: Tensor) -> Tensor:
        if "m" not in self.state[p]:
            self.state[p]["m"] = torch.zeros_like(p)
        m: Tensor = self.state[p]["m"]
        return m


def nesterov(lr: float, momentum: float) -> partial[Nesterov]:
    """Makes the outer optimizer.

    Raises:
        ValueError: a number out of range.
    """
    return partial(Nesterov, lr=nonnegative("outer_lr", lr), momentum=below_one("outer_momentum", momentum))
