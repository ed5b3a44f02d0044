"""SlowMo: momentum over rounds, in units of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_cocod.algorithms.options import below_one, nonnegative
from lightning_cocod.algorithms.outer import OuterRounds
from lightning_cocod.algorithms.when import When


class SlowMo(OuterRounds):
    r"""Slow momentum (Wang, Tantia, Ballas, Rabbat; ICLR 2020; arXiv 1910.00643) over Local SGD.

    x_0 is the model with which a round begins, γ the learning rate of the user's optimizer in it. U is that optimizer's
    update, g the gradient of worker i's own batch, w_j the weight of worker j; all weights sum to 1. x, x_0 and u have the
    shapes of the parameters, and u their units over those of γ::

        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     x̄ ← Σ_j w_j x_j                    # blocking
                          u ← β u + (x_0 − x̄) / γ
                          x_i ← x_0 − α γ u

    α = 1 and β = 0 is Local SGD. The paper's γ is constant in a round; where a schedule changes it, we take the mean over
    the round's steps. Where that is 0, u only decays. The user's optimizer keeps its state, the paper's "maintain". The
    model to evaluate is x_0: it, and the model at the end, have no local steps since the last round's end. Memory beyond the
    parameters: two copies of them, x_0 and u, and one more while a round ends.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: optimizer steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        slow_lr: α ≥ 0, a pure number.
        slow_momentum: 0 ≤ β < 1, a pure number.
        **shared: as for ``OuterRounds``, but ``fragments`` and ``delay``: ``weights``, ``warmup_steps``, ``on_nonfinite``, …

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
        self.α, self.β = nonnegative("slow_lr", slow_lr), below_one("slow_momentum", slow_momentum)
        outer = partial(SGD, lr=self.α, momentum=self.β)
        super().__init__(model, optimizer, period, outer=outer, delay=None, fragments=1, **shared)
        self._rates: dict[tuple[int, int], list[float]] = {}  # of the round's steps: optimizer, group
        self._watching: list[Any] = []

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0."""
        self._rates = {}
        self._watching = self._watching or [opt.register_step_pre_hook(self._watch) for opt in self.optimizers]
        super().start(broadcast=broadcast)

    def _watch(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the rates of a step of a round, group by group."""
        number = next(n for n, opt in enumerate(self.optimizers) if opt is optimizer)
        if not self.when.synchronous(self.t):
            for group, options in enumerate(optimizer.param_groups):
                self._rates.setdefault((number, group), []).append(float(options["lr"]))

    def says(self, Δ: list[Tensor]) -> list[Tensor]:
        """Δ, and with it the workers' mean γ of every group: a scaler may have skipped steps on some."""
        γ = []
        for number, opt in enumerate(self.optimizers):
            for group, options in enumerate(opt.param_groups):
                rates = self._rates.get((number, group)) or [float(options["lr"])]
                γ.append(sum(rates) / len(rates))
        self._γ, self._rates = torch.tensor(γ, dtype=torch.float64, device=self.comm.device), {}
        return [*Δ, self._γ]

    def outer_step(self, θ: list[Tensor], G: list[Tensor]) -> None:
        """u ← β u + G / γ ; x_0 ← x_0 − α γ u: a step of SGD with the gradient G / γ and the rate α γ."""
        assert self.outer is not None  # made with x_0
        gradient = dict(zip(θ, G, strict=True))
        for γ, group in zip(self._γ.tolist(), self.outer.param_groups, strict=False):
            group["lr"] = self.α * γ
            if group["params"]:
                torch._foreach_div_([gradient[x_0] for x_0 in group["params"]], γ or torch.inf)
        super().outer_step(θ, G)

    def state_dict(self) -> dict[str, Any]:
        """Adds the rates of the round under way."""
        return {**super().state_dict(), "rates": [[*which, list(rates)] for which, rates in self._rates.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in mid-round."""
        super().load_state_dict(state)
        self._rates = {(number, group): list(rates) for number, group, rates in state["rates"]}

    def finish(self) -> None:
        """Every replica becomes x_0; the optimizers are no longer watched."""
        try:
            super().finish()
        finally:
            self._look_away()

    def close(self) -> None:
        """The same where there was no ``finish``."""
        try:
            super().close()
        finally:
            self._look_away()

    def _look_away(self) -> None:
        while self._watching:
            self._watching.pop().remove()
