"""Rounds whose mean displacement is the gradient of an outer optimizer: what DiLoCo and its kin share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.options import flag
from lightning_cocod.algorithms.when import When, as_when
from lightning_cocod.comm import Message
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.comm.norms import norm

NO_SKIP = 'on_nonfinite="skip" does not go together with a delayed outer optimizer: use "raise", or cocod'


class OuterRounds(Algorithm):
    r"""Rounds of k local steps, after which an outer optimizer moves the model by what they have found.

    Worker i begins a round with its outer parameters θ_i and makes k local steps. Δ_i = θ_i − x_i is its pseudo-gradient,
    Δ̄ = Σ_j w_j Δ_j the mean of all, U the user's optimizer's update, and V that of the outer optimizer::

        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     Δ_i ← θ_i − x_i
                          G ← Δ̄                                      # blocking, or
                          G ← a Δ_i + [Δ̄′ − a Δ_i′] ;  Δ̄ async       # delayed: ′ is the round before
                          θ_i ← θ_i + V(G) ;  x_i ← θ_i

    The parts compose: the outer optimizer, the delay, and the weight a of the worker's own, fresh term. CoCoD is the member
    with V(G) = −G, the delay, and a = 1. Where nothing is delayed all θ_i are equal, and a plays no part.

    The consensus model is the mean of the θ_i: local steps that no round has ended with are not in it, nor in the model at
    the end. Memory beyond the parameters: θ, what the outer optimizer keeps, with the delay a message, and for the time of
    a merge two more.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        outer: makes the outer optimizer, given groups of tensors, one for each group of the user's.
        delayed: whether the mean of a round is waited for one round later.
        own: a ≥ 0; this worker's weight by default.
        overlap: False waits for a delayed mean where it is launched: the same trajectory bit for bit, nothing hidden.
        weights: of the workers in every mean, in any scale. Equal by default.
        warmup_steps: synchronous steps first, whose gradients are averaged before the optimizer's step.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"`` with the delay: nothing replaces a worker's own term.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When,
        *,
        outer: Callable[[list[dict[str, Any]]], Optimizer],
        delayed: bool = False,
        own: float | None = None,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        warmup_steps: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, when=as_when(period, warmup_steps), weights=weights, **shared)
        self.delayed, self.overlap, self.own = flag("delayed", delayed), flag("overlap", overlap), own
        if self.delayed and self.skip_nonfinite:
            raise ValueError(NO_SKIP)
        self.θ: dict[nn.Parameter, Tensor] = {}
        self.outer: Optimizer | None = None
        self.make_outer = outer
        self.D: Buffer | None = None
        self.A: Message | None = None
        self._sent = 0  # tensors in D
        self._staleness = 0

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0, θ_i ← x_i."""
        super().start(broadcast=broadcast)
        self.θ, self.outer, self.D, self.A, self.left_out, self.rounds.ends = {}, None, None, None, (), None
        self._at_boundary()

    def after_step(self) -> None:
        """Merge where a round ends."""
        super().after_step()
        self._at_boundary()

    def finish(self) -> None:
        """Every replica becomes the mean of the θ_i."""
        super().finish()
        self.θ, self.outer, self.D, self.A, self.left_out = {}, None, None, None, ()

    def _at_boundary(self) -> None:
        if self.rounds.begin(self.t):
            self.begin_round()
            if self.θ:
                self._merge()
            self._begin_with(self.x)

    @torch.no_grad()
    def _merge(self) -> None:
        """G ; θ ← θ + V(G) ; x ← θ."""
        x, θ = [p.detach() for p in self.θ], list(self.θ.values())
        Δ = list(torch._foreach_sub(θ, x))
        G = self._delayed(Δ, norm(x)) if self.delayed else self._mean(Δ, norm(x))
        self.outer_step(θ, G)
        torch._foreach_copy_(x, θ)
        self.repair(self.left_out)

    def _mean(self, Δ: list[Tensor], size: Tensor) -> list[Tensor]:
        """Δ̄, waited for."""
        if self.comm.world_size > 1:
            self._merged = self.comm.mean_(Δ, self.w, self.subject("round"), measured=True, relative_to=size)
            self._merged.wait()
            self.left_out = self._merged.left_out
        self.weights = self._round_weights  # nothing is in flight
        return Δ

    def _delayed(self, Δ: list[Tensor], size: Tensor) -> list[Tensor]:
        """a Δ_i + [Δ̄′ − a Δ_i′], and the launch of Δ̄."""
        if self.comm.world_size == 1:  # Δ̄′ − Δ_i′ = 0
            return list(torch._foreach_mul(Δ, 1.0))
        a = self.w if self.own is None else self.own
        G = list(torch._foreach_mul(Δ, a))
        if self.D is not None:
            if self.A is not None:
                self.A.wait()
                self._merged, self._staleness = self.A, self.t - self.A.step
            self.D.add_to(G[: self._sent])  # parameters that are new since then come last
        layout = self.comm.layout(Δ)
        if self.D is None or self.D.layout is not layout:
            self.D = layout.buffer()
        self.D.copy_(Δ)
        self._sent = len(Δ)
        self.A = self.comm.correction_(self.D, self.w, self.subject("round"), own=a, relative_to=size)
        if not self.overlap:
            self.A.wait()
        return G

    def outer_step(self, θ: list[Tensor], G: list[Tensor]) -> None:
        """θ ← θ + V(G)."""
        assert self.outer is not None  # made with θ
        for θ_p, g in zip(θ, G, strict=True):
            θ_p.grad = g
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)

    def _begin_with(self, x: Sequence[nn.Parameter]) -> None:
        """θ ← x for parameters that are new; in mid-training the workers have moved them apart: θ, x ← Σ_j w_j x_j."""
        new = [p.detach() for p in x if p not in self.θ]
        if new and self.θ and self.comm.world_size > 1:
            self.comm.mean_(new, self.w, self.subject("new parameters")).wait()
        for p in x:
            if p not in self.θ:
                self.θ[p] = p.detach().clone(memory_format=torch.preserve_format)
        known = {θ_p for group in self.outer.param_groups for θ_p in group["params"]} if self.outer else set()
        groups = [group["params"] for opt in self.optimizers for group in opt.param_groups]
        fresh = [[self.θ[p] for p in group if p in self.θ and self.θ[p] not in known] for group in groups]
        new_groups = [{"params": group} for group in fresh if group]
        if self.outer is None:
            self.outer = self.make_outer(new_groups) if new_groups else None
        else:
            for group in new_groups:
                self.outer.add_param_group(group)

    def _pending_correction(self) -> Callable[[], None] | None:
        if not self.θ:
            return None
        θ = dict(self.θ)

        def fold() -> None:
            torch._foreach_copy_([p.detach() for p in θ], list(θ.values()))

        return fold

    def state_dict(self) -> dict[str, Any]:
        """Adds θ, the outer optimizer, and the drained message in flight."""
        if self.A is not None:
            self.A.wait(counted=False)
        numbers = {p: number for number, p in enumerate(self._members())}
        return {
            **super().state_dict(),
            "theta": {numbers[p]: θ_p.clone() for p, θ_p in self.θ.items()},
            "outer": None if self.outer is None else copy.deepcopy(self.outer.state_dict()),
            "message": None if self.D is None else [bucket.clone() for bucket in self.D.buckets],
            "sent": self._sent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the outer parameters, the outer optimizer and the message that was in flight."""
        super().load_state_dict(state)
        members = self._members()
        self.θ, self.outer, self.D, self.A = {}, None, None, None
        self._begin_with([members[number] for number in state["theta"]])
        for number, value in state["theta"].items():
            self.θ[members[number]].copy_(value)
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        if state["message"] is not None:
            self._sent = state["sent"]
            self.D = self.comm.layout(list(self.θ.values())[: self._sent]).buffer()
            for bucket, value in zip(self.D.buckets, state["message"], strict=True):
                bucket.copy_(value)

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """Adds the staleness of the last merge: steps between the end of its round and its merging."""
        return {**super().metrics(since), "algo/staleness_steps": float(self._staleness)}
