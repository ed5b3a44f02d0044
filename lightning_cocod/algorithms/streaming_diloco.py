"""Streaming DiLoCo: fragments of the model take turns, and each hides its mean behind a few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.delay import Lag
from lightning_cocod.algorithms.diloco import nesterov
from lightning_cocod.algorithms.fragmentation import Fragments
from lightning_cocod.algorithms.options import whole
from lightning_cocod.algorithms.outer import OuterRounds
from lightning_cocod.algorithms.when import When


class StreamingDiLoCo(OuterRounds):
    r"""Streaming DiLoCo (Douillard et al.; 2025; arXiv 2501.18512).

    As DiLoCo, but the parameters lie in P fragments of neighbouring layers, p = 1 … P, whose rounds of k steps end one after
    the other; what they have found is merged τ steps later, and a replica keeps the part α of its own. U is the inner
    optimizer's update, g the gradient of worker i's own batch, w_j the weight of worker j; all weights sum to 1. β is the
    momentum and η the rate of the outer optimizer. What has the index p has the shapes and the units of fragment p::

        every step:             x_i ← x_i + U(g(x_i))
        t = ⌈p k / P⌉ + n k:    Δ_i,p ← θ_p − x_i,p ;  Δ̄_p ← async Σ_j w_j Δ_j,p
        τ steps later:          m_p ← β m_p + Δ̄_p
                                θ_p ← θ_p − η (Δ̄_p + β m_p)
                                x_i,p ← α x_i,p + (1 − α) θ_p

    so that the link has a P-th to carry at a time, and τ steps for it. One fragment with τ = α = 0 is DiLoCo. (α = 1 would
    never take in what the others have found, and is refused.) The first round of fragment p is short, ⌈p k / P⌉ steps. The
    paper has four bits for a value, and every P-th layer in a fragment: name the layers for that.

    The model to evaluate is θ as it will be once what is in flight has been merged: it, and the model at the end, have of
    each fragment no local steps since the end of its last round; let there be n k steps in all. Memory beyond the
    parameters: two copies of them, θ and m, and one of each fragment in flight.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters: the inner one.
        period: optimizer steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        fragments: P, at most one for each module with parameters of its own, or for each fragment a list of names of modules
            (as in ``named_modules``; all in them belongs to it).
        delay: 0 ≤ τ < k, in optimizer steps.
        keep: 0 ≤ α < 1, a pure number.
        outer_lr: η ≥ 0, a pure number.
        outer_momentum: 0 ≤ β < 1, a pure number.
        overlap: False waits for each mean where it is launched: the same trajectory bit for bit, nothing hidden.
        **shared: as for ``OuterRounds``: ``weights``, ``warmup_steps``, ``on_nonfinite``, …

    Raises:
        ValueError: an option out of range; at ``start``, names that do not divide the model's parameters.
    """

    name: ClassVar[str] = "streaming_diloco"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 100,
        *,
        fragments: Fragments = 4,
        delay: int = 1,
        keep: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        overlap: bool = True,
        **shared: Any,
    ) -> None:
        outer, lag = nesterov(outer_lr, outer_momentum), Lag(whole("delay", delay, least=0), keep, overlap=overlap)
        super().__init__(model, optimizer, period, outer=outer, delay=lag, fragments=fragments, **shared)
        if delay >= (shortest := self.when.shortest()):
            raise ValueError(f"delay must be less than the period, {shortest}, got {delay}")
