"""CO2: the mean of a round moves the model one round later, with a penalty for being late, momentum and a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.delay import Delay
from lightning_cocod.algorithms.options import below_one, nonnegative
from lightning_cocod.algorithms.outer import OuterRounds
from lightning_cocod.algorithms.when import When


class CO2(OuterRounds):
    r"""CO2 (Sun, Qin, Sun, Li, Li, Shen, Qiao, Zhong; ICLR 2024; arXiv 2401.16265).

    All workers begin a round with the same θ. Its mean Δ̄ travels while the next round computes; ′ is the round before. U is
    the user's optimizer's update, g the gradient of worker i's own batch, w_j the weight of worker j; all weights sum to 1.
    x, θ, v and Δ̄ have the shapes and the units of the parameters::

        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     wait(Δ̄′)
                          v ← β v + Δ̄′ / Λ ;  v ← v, each element cut off at ±φ
                          Δ̄ ← async Σ_j w_j (θ − x_j)
                          θ ← θ − η v ;  x_i ← θ

    so that what the workers have found in a round waits for the next one's end; the first round ends where it began. The θ
    of all workers are equal bit for bit. Λ = 1, β = 0, η = 1 and no φ is the plain mean of displacements, a round late.

    We know the abstract, what reviewers wrote, and the code that the authors refer to, not the paper's text. From the code
    are: Λ as a number (there 1; the paper measures it in every round, we do not know how), the cut element by element of
    the momentum itself (there off, with φ = 1; its result is dropped), β (there 0.5, in the examples 0.2), η = 1, k = 48.
    That a round's mean is taken with the θ that this round began with is our reading.

    The model to evaluate is θ: it, and the model at the end, have neither the local steps since the last round's end nor
    those of the round before that. Memory beyond the parameters: three copies of them, θ, v and the message, and two more
    while a round ends.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: optimizer steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        outer_lr: η ≥ 0, a pure number.
        outer_momentum: 0 ≤ β < 1, a pure number.
        gap_penalty: Λ ≥ 1, for the staleness of the mean, a pure number.
        clip: φ > 0, the most that an element of v may be, in the parameters' units; no limit by default.
        overlap: False waits for each mean where it is launched: the same trajectory bit for bit, nothing hidden.
        **shared: as for ``OuterRounds``: ``weights``, ``warmup_steps``, …

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"``.
    """

    name: ClassVar[str] = "co2"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 48,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.2,
        gap_penalty: float = 1.0,
        clip: float | None = None,
        overlap: bool = True,
        **shared: Any,
    ) -> None:
        outer = penalised(outer_lr, outer_momentum, gap_penalty, clip)
        super().__init__(model, optimizer, period, outer=outer, delay=Delay(own=0.0, overlap=overlap), **shared)


class Penalised(Optimizer):
    """The outer optimizer: v ← β v + G / Λ, each element cut off at ±φ ; θ ← θ − η v. In place: it needs no memory but v."""

    def __init__(self, params: Any, lr: float, momentum: float, penalty: float, clip: float | None) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "penalty": penalty, "clip": clip})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # there is nothing to close over
        """One step along the gradients."""
        for group in self.param_groups:
            θ = [p for p in group["params"] if p.grad is not None]
            if θ:
                η, β, Λ, φ = (group[name] for name in ("lr", "momentum", "penalty", "clip"))
                v = [self._momentum(p) for p in θ]
                torch._foreach_mul_(v, β)
                torch._foreach_add_(v, [p.grad for p in θ], alpha=1 / Λ)
                if φ is not None:
                    parts = [torch.view_as_real(t) if t.is_complex() else t for t in v]
                    torch._foreach_clamp_min_(parts, -φ)
                    torch._foreach_clamp_max_(parts, φ)
                torch._foreach_add_(θ, v, alpha=-η)

    def _momentum(self, p: Tensor) -> Tensor:
        if "v" not in self.state[p]:
            self.state[p]["v"] = torch.zeros_like(p)
        v: Tensor = self.state[p]["v"]
        return v


def penalised(lr: float, momentum: float, penalty: float, clip: float | None) -> partial[Penalised]:
    """Makes the outer optimizer.

    Raises:
        ValueError: a number out of range.
    """
    if nonnegative("gap_penalty", penalty) < 1:
        raise ValueError(f"gap_penalty must be at least 1, got {penalty!r}")
    if clip is not None and nonnegative("clip", clip) == 0:
        raise ValueError("clip must be greater than 0, or None for no limit, got 0")
    return partial(
        Penalised,
        lr=nonnegative("outer_lr", lr),
        momentum=below_one("outer_momentum", momentum),
        penalty=nonnegative("gap_penalty", penalty),
        clip=None if clip is None else nonnegative("clip", clip),
    )
