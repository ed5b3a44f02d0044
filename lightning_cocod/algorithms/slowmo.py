"""SlowMo: momentum over rounds, in units of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_cocod.algorithms.options import nonnegative
from lightning_cocod.algorithms.outer import OuterRounds
from lightning_cocod.algorithms.when import When


class SlowMo(OuterRounds):
    r"""Slow momentum (Wang, Tantia, Ballas, Rabbat; ICLR 2020; arXiv 1910.00643) over Local SGD.

    x_0 is the model with which a round begins, γ the learning rate of the user's optimizer where it ends::

        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     x̄ ← Σ_j w_j x_j                    # blocking
                          u ← β u + (x_0 − x̄) / γ
                          x_i ← x_0 − α γ u

    α = 1 and β = 0 is Local SGD. Where γ is 0 the round has moved nothing: u only decays. The model to evaluate is x_0.
    Memory beyond the parameters: two copies of them, x_0 and u, and one more while a round ends.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        slow_lr: α ≥ 0.
        slow_momentum: 0 ≤ β.
        **shared: as for ``OuterRounds``: ``weights``, ``warmup_steps``, ``on_nonfinite``, …

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "slowmo"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 12,
        *,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.7,
        **shared: Any,
    ) -> None:
        self.α, self.β = nonnegative("slow_lr", slow_lr), nonnegative("slow_momentum", slow_momentum)
        super().__init__(model, optimizer, period, outer=lambda θ: SGD(θ, lr=self.α, momentum=self.β), **shared)

    def outer_step(self, x_0: list[Tensor], G: list[Tensor]) -> None:
        """u ← β u + G / γ ; x_0 ← x_0 − α γ u. That is SGD's step with the gradient G / γ and the rate α γ."""
        assert self.outer is not None  # made with x_0
        rate = {p: float(group["lr"]) for opt in self.optimizers for group in opt.param_groups for p in group["params"]}
        γ = {θ_p: rate[p] for p, θ_p in self.θ.items()}
        for group in self.outer.param_groups:
            group["lr"] = self.α * γ[group["params"][0]]
        super().outer_step(x_0, [g / γ[x] if γ[x] else torch.zeros_like(g) for x, g in zip(x_0, G, strict=True)])
