"""Rounds whose mean displacement is the gradient of an outer optimizer: what DiLoCo and its kin share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.options import flag, nonnegative
from lightning_cocod.algorithms.when import When, as_when
from lightning_cocod.comm import Message
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.comm.norms import norm

_log = logging.getLogger(__name__)

NO_SKIP = 'on_nonfinite="skip" does not go together with a delayed outer optimizer: use "raise", or cocod'


class Delay:
    """The mean of a round is waited for one round later.

    Args:
        own: a ≥ 0, the weight of a worker's own, fresh term; the worker's weight in the mean by default.
        overlap: False waits for each mean where it is launched: the same trajectory bit for bit, nothing hidden.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(self, own: float | None = None, *, overlap: bool = True) -> None:
        self.own = None if own is None else nonnegative("own", own)
        self.overlap = flag("overlap", overlap)


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

    The consensus model is the mean of the θ_i. It has neither the local steps of the round under way nor a mean in flight,
    and so has the model at the end: let the number of steps be a multiple of k. Replacing all weights in mid-training
    (``rewriting``) begins anew, with an outer optimizer that has not stepped. Memory beyond the parameters: θ, what the
    outer optimizer keeps, with the delay a message; where a round ends, Δ, and with the delay G.

    With the delay only displacements travel. In half precision the θ_i drift apart by rounding unless a = 0, and nothing
    pulls them together: train float32 parameters, under autocast if need be.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        outer: makes the outer optimizer, given groups of tensors, one for each group of the user's.
        delay: see ``Delay``; blocking by default.
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
        delay: Delay | None = None,
        weights: Sequence[float] | None = None,
        warmup_steps: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, when=as_when(period, warmup_steps), weights=weights, **shared)
        self.make_outer, self.delay = outer, delay
        if delay is not None and self.skip_nonfinite:
            raise ValueError(NO_SKIP)
        self._forget()

    def _forget(self) -> None:
        self.θ: dict[nn.Parameter, Tensor] = {}
        self.outer: Optimizer | None = None
        self.D: Buffer | None = None
        self.A: Message | None = None
        self._sent = 0  # tensors in D
        self._staleness = 0
        self._ended = 0  # step at which the last round ended

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0, θ_i ← x_i."""
        super().start(broadcast=broadcast)
        self._forget()
        self.rounds.ends, self._ended = None, self.t
        self._at_boundary()

    def after_step(self) -> None:
        """Merge where a round ends."""
        super().after_step()
        if not self.θ:  # synchronous so far
            self._ended = self.t
        self._at_boundary()

    def finish(self) -> None:
        """Every replica becomes the mean of the θ_i."""
        warn_of_lost_steps(self, self._ended)
        super().finish()
        self._forget()

    def _at_boundary(self) -> None:
        begun = self.rounds.ends is not None
        if self.rounds.begin(self.t):
            self.begin_round()
            if self.θ:
                self._merge()
            self._ended = self.t
            self._take_in(apart=begun)

    @torch.no_grad()
    def _merge(self) -> None:
        """G ; θ ← θ + V(G) ; x ← θ."""
        x, θ = [p.detach() for p in self.θ], list(self.θ.values())
        Δ = list(torch._foreach_sub(θ, x))
        left_out: tuple[int, ...] = ()
        if self.delay is None:
            G, left_out = Δ, self._average(Δ, x)
        else:
            G = self._late(Δ, x, self.delay)
        self.outer_step(θ, G)
        torch._foreach_copy_(x, θ)
        self.repair(left_out)

    def _average(self, Δ: list[Tensor], x: list[Tensor]) -> tuple[int, ...]:
        """Δ ← Δ̄, waited for. Returns the ranks that it is a mean without."""
        if self.comm.world_size > 1:
            self._merged = self.comm.mean_(Δ, self.w, self.subject("round"), measured=True, relative_to=norm(x))
            self._merged.wait()
        self.weights = self._round_weights  # nothing is in flight
        return () if self._merged is None else self._merged.left_out

    def _late(self, Δ: list[Tensor], x: list[Tensor], delay: Delay) -> list[Tensor]:
        """a Δ_i + [Δ̄′ − a Δ_i′], and the launch of Δ̄."""
        a = self.w if delay.own is None else delay.own
        G = list(torch._foreach_mul(Δ, a))
        if self.D is not None:
            if self.A is not None:
                self.A.wait()
                self._merged, self._staleness = self.A, self.t - self.A.step
            self.D.add_to(G[: self._sent], keep=False)  # parameters that are new since then come last
        layout = self.comm.layout(Δ)
        if self.D is None or self.D.layout is not layout:
            self.D = layout.buffer()
        self.D.copy_(Δ, keep=False)
        self._sent = len(Δ)
        if self.comm.world_size == 1:  # Δ̄ = Δ
            torch._foreach_mul_(self.D.buckets, 1 - a)
            return G
        self.A = self.comm.correction_(self.D, self.w, self.subject("round"), own=a, relative_to=norm(x))
        if not delay.overlap:
            self.A.wait()
        return G

    def outer_step(self, θ: list[Tensor], G: list[Tensor]) -> None:
        """θ ← θ + V(G)."""
        assert self.outer is not None  # made with θ
        for θ_p, g in zip(θ, G, strict=True):
            θ_p.grad = g
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)

    def _take_in(self, *, apart: bool) -> None:
        """θ ← x for parameters that are new. Where the workers have moved them apart, θ, x ← Σ_j w_j x_j."""
        new = [p for p in self.x if p not in self.θ]
        if new and apart and self.comm.world_size > 1:
            mean = self.comm.mean_([p.detach() for p in new], self.w, self.subject("new parameters"))
            mean.wait()
            self.repair(mean.left_out)
        self._add(new)

    def _add(self, parameters: Sequence[nn.Parameter]) -> None:
        """θ ← x for these, in the outer optimizer's group that belongs to theirs."""
        new = {p: p.detach().clone(memory_format=torch.preserve_format) for p in parameters}
        self.θ.update(new)
        rest = dict(self.θ)  # a parameter of two optimizers counts once
        groups = [
            [rest.pop(p) for p in group["params"] if p in rest] for opt in self.optimizers for group in opt.param_groups
        ]
        if self.outer is None:
            self.outer = self.make_outer([{"params": group} for group in groups]) if self.θ else None
            return
        while len(self.outer.param_groups) < len(groups):
            self.outer.add_param_group({"params": []})
        for outer, group in zip(self.outer.param_groups, groups, strict=True):
            outer["params"] = group

    def _pending_correction(self) -> Callable[[], None] | None:
        θ = dict(self.θ)

        def fold() -> None:
            torch._foreach_copy_([p.detach() for p in θ], list(θ.values()))

        return fold if θ else None

    def state_dict(self) -> dict[str, Any]:
        """Adds θ, what the outer optimizer keeps of each, and the drained message in flight."""
        if self.A is not None:
            self.A.wait(counted=False)
        numbers = {p: number for number, p in enumerate(self._members())}
        kept = {} if self.outer is None else self.outer.state
        return {
            **super().state_dict(),
            "theta": {numbers[p]: θ_p.clone() for p, θ_p in self.θ.items()},
            "outer": {numbers[p]: _copy(kept[θ_p]) for p, θ_p in self.θ.items() if θ_p in kept},
            "message": None if self.D is None else [bucket.clone() for bucket in self.D.buckets],
            "sent": self._sent,
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with θ, the outer optimizer's state and the message that was in flight. Its options are this object's."""
        super().load_state_dict(state)
        members = self._members()
        self._forget()
        self._ended, self._sent = state["ended"], state["sent"]
        self._add([members[number] for number in state["theta"]])
        for number, value in state["theta"].items():
            self.θ[members[number]].copy_(value)
        if self.outer is not None:
            for number, kept in state["outer"].items():
                θ_p = self.θ[members[number]]
                self.outer.state[θ_p] = _copy(kept, θ_p.device)
        if state["message"] is not None:
            self.D = self.comm.layout(list(self.θ.values())[: self._sent]).buffer()
            for bucket, value in zip(self.D.buckets, state["message"], strict=True):
                bucket.copy_(value)

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """Adds the staleness of the last merge: steps between the end of its round and its merging."""
        return {**super().metrics(since), "algo/staleness_steps": float(self._staleness)}


def _copy(state: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """With copies of the tensors, on a device if one is given."""
    return {k: v.to(device or v.device, copy=True) if isinstance(v, Tensor) else v for k, v in state.items()}


def warn_of_lost_steps(algorithm: Algorithm, ended: int) -> None:
    """At the end, where the model is that of the step at which the last round ended."""
    if algorithm.started and algorithm.t > ended and algorithm.comm.rank == 0:
        _log.warning(
            "the last %d steps are not in the model of %s, which is that of the end of a round: train a multiple of the "
            "period's steps",
            algorithm.t - ended,
            algorithm.name,
        )
