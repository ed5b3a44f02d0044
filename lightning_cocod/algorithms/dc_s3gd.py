"""DC-S3GD: CoCoD whose gradients are corrected towards the mean model that is about to be merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.cocod import CoCoD
from lightning_cocod.algorithms.compensation import Compensation, Part
from lightning_cocod.algorithms.options import choice, is_sgd
from lightning_cocod.algorithms.when import When
from lightning_cocod.comm.buckets import Buffer, in_the_order_of


class DCS3GD(CoCoD):
    r"""Delay-compensated stale-synchronous SGD (Rigazzi; 2019; arXiv 1911.02516).

    Worker i of N holds x_i, and has the mean of the models in flight. U is the user's optimizer's update::

        every step:       g = ∇ℓ(x_i)                       # overlaps the transfer
                          wait(A) ;  D_i = A − S_i          # the mean model, seen from here
                          λ_i = λ_0 ‖g‖ / ‖g ⊙ g ⊙ D_i‖
                          g̃ = g + λ_i g ⊙ g ⊙ D_i          # from g(x_i) towards g(x̄), to the first order
                          x_i ← x_i + U(g̃) + D_i
                          S_i ← x_i ;  A ← async Σ_j w_j S_j

    ``g ⊙ g`` stands for the diagonal of the Hessian. λ_i = 0 where ‖D_i‖ ≤ 16 ε ‖x_i‖, ε being the resolution of the dtype:
    the size of the correction is λ_0 ‖g‖ however small D_i is, so that rounding errors would become a fifth of the gradient.

    The paper sends Δ_i = U(g̃) and has D_i = Σ_j Δ_j / N − Δ_i; we send the parameters, which gives the same D_i to rounding,
    for one copy of them in place of two. From the paper's text as others report it: we have read no full text, and the
    norms over the whole model are our reading of it. With ``lambda_0=0`` it is CoCoD with a period of one step. Longer
    periods are ours: then only the gradient of the step before a merge is corrected.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``). 1 in the paper.
        lambda_0: λ_0 ≥ 0, the size of the correction in units of the gradient's.
        norm: over what the norms of λ and of its floor are taken: ``"model"``, all gradients of a call, or ``"tensor"``.
        lambda_max: the most that λ may be; no limit by default.
        weight_decay: ``"after"`` the correction, as torch's optimizers add it, or ``"before"``: the correction is computed
            from g + wd·x, which torch then adds (SGD only).
        **shared: as for ``CoCoD``: ``weights``, ``warmup_steps``, ``overlap``, ``on_nonfinite``, …

    Raises:
        ValueError: an option out of range, weight decay before the correction with an optimizer other than SGD, or an
            optimizer that maximizes.

    In a plain loop call ``dc_s3gd.step()`` after ``backward()``: the gradients are corrected before the optimizer steps.
    """

    name: ClassVar[str] = "dc_s3gd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 1,
        *,
        lambda_0: float = 0.2,
        norm: Literal["model", "tensor"] = "model",
        lambda_max: float | None = None,
        weight_decay: Literal["after", "before"] = "after",
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, period, **shared)
        self.compensate = Compensation(lambda_0, norm=norm, lambda_max=lambda_max)
        self.decay_before = choice("weight_decay", weight_decay, ("after", "before")) == "before"
        if self.decay_before and not all(is_sgd(opt) for opt in self.optimizers):
            raise ValueError('weight_decay="before" is for torch.optim.SGD: other optimizers do not add it to the gradient')
        if any(group.get("maximize") for opt in self.optimizers for group in opt.param_groups):
            raise ValueError("maximize=True turns the gradient round and with it the correction: minimize the negative")

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """g ← g̃ in the step before a merge."""
        super().before_step(optimizer)
        if self.S is None or not self.compensate.lambda_0 or not self.rounds.due(self.t + 1):
            return
        if self.A is not None:
            self.A.wait()
        self.compensate(self._parts(self.S, self.optimizers if optimizer is None else [optimizer]))

    def _parts(self, D: Buffer, optimizers: Sequence[Optimizer]) -> Iterator[Part]:
        """Pieces of the parameters that these optimizers are about to move, with D and the gradients."""
        groups = [group for opt in optimizers for group in opt.param_groups]
        decay = {p: group.get("weight_decay", 0.0) for group in groups for p in group["params"]}
        gradients: dict[int, Tensor] = {}
        for number, p in enumerate(self.x):
            if p in decay and p.grad is not None:
                if p.grad.is_sparse:
                    raise TypeError("sparse gradients cannot be corrected; use sparse=False")
                gradients[number] = p.grad = in_the_order_of(p, p.grad)
        for number, pieces in D.beside(self.x, [gradients.get(number, p) for number, p in enumerate(self.x)]):
            if number in gradients:
                d, x, g = (torch.view_as_real(t) if t.is_complex() else t for t in pieces)
                yield Part(number, x, d, g, decay[self.x[number]] if self.decay_before else 0.0)

    def _why_explicit(self) -> str | None:
        return super()._why_explicit() or "gradients are corrected before you clip them and the optimizer steps"
