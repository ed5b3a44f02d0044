"""Rounds whose mean displacement is the gradient of an outer optimizer: what DiLoCo and its kin share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.delay import Delay, Lag
from lightning_cocod.algorithms.fragment import Fragment
from lightning_cocod.algorithms.fragmentation import Fragments, assign, checked
from lightning_cocod.algorithms.lost_steps import warn_of_lost_steps
from lightning_cocod.algorithms.residuals import Residuals
from lightning_cocod.algorithms.when import When, as_when
from lightning_cocod.comm import Message
from lightning_cocod.comm.ledger import Reading

NO_SKIP = 'on_nonfinite="skip" does not go together with a delayed outer optimizer: use "raise", or cocod'


class OuterRounds(Algorithm):
    r"""Rounds of k local steps, after which an outer optimizer moves the model by what they have found.

    Worker i begins a round with its outer parameters θ_i and makes k local steps. Δ_i = θ_i − x_i is its pseudo-gradient,
    Δ̄ = Σ_j w_j Δ_j the mean of all, U the user's optimizer's update, and V that of the outer optimizer::

        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     Δ_i ← θ_i − x_i
                          G ← Δ̄                                      # blocking, or
                          G ← a Δ_i + [Δ̄′ − a Δ_i′] ;  Δ̄ async       # Delay: ′ is the round before
                          θ_i ← θ_i + V(G) ;  x_i ← θ_i

    The parts compose: the outer optimizer, the delay, and the weight a of the worker's own, fresh term. CoCoD is the member
    with V(G) = −G, the delay, and a = 1. Where nothing is delayed all θ_i are equal, and a plays no part. With a ``Lag`` the
    same happens τ steps after the launch, and x_i ← α x_i + (1 − α) θ. (Blocking is τ = α = 0; Overlap-Local-SGD has a τ of
    a whole round.)

    Each fragment of the parameters has rounds of its own, of the same length: of P, number p = 1 … P ends its rounds
    ⌈p k / P⌉ steps after those that the period counts begin, so its first one is that short, and the last fragment keeps the
    period's time.

    The consensus model is the mean of the θ_i, with a ``Lag`` as it will be once what is in flight has arrived; with a
    ``Delay`` without it. It has no local steps of the round under way, nor has the model at the end: let the number of steps
    be a multiple of k.
    Replacing all weights in mid-training (``rewriting``) begins anew, with an outer optimizer that has not stepped. Memory
    beyond the parameters: θ, what the outer optimizer keeps, with the delay a message; where a round of a fragment ends, Δ,
    and with the delay G.

    With ``compression`` the workers send codes of their Δ_i. What a codec drops stays in θ_i − x_i, and so in the next Δ_i,
    or with a ``Delay`` in ``Residuals``: one more copy, and another two while a round ends.

    With the delay only displacements travel. In half precision the θ_i drift apart by rounding unless a = 0, and nothing
    pulls them together: train float32 parameters, under autocast if need be.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        outer: makes the outer optimizer, given groups of tensors, one for each group of the user's.
        delay: see ``Delay`` and ``Lag``; blocking by default.
        fragments: how many (see ``assign``), or for each the names of its modules.
        weights: of the workers in every mean, in any scale. Equal by default.
        warmup_steps: synchronous steps first, whose gradients are averaged before the optimizer's step.
        **shared: ``compression``, ``on_nonfinite``, ``communicator``, … (see ``Algorithm``).

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"`` with a ``Delay``: nothing replaces a worker's own
            term.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When,
        *,
        outer: Callable[[list[dict[str, Any]]], Optimizer],
        delay: Delay | Lag | None = None,
        fragments: Fragments = 1,
        weights: Sequence[float] | None = None,
        warmup_steps: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, when=as_when(period, warmup_steps), weights=weights, **shared)
        self.make_outer, self.delay, self.cut = outer, delay or Lag(), checked(fragments)
        if isinstance(delay, Delay) and self.skip_nonfinite:
            raise ValueError(NO_SKIP)
        late = isinstance(delay, Delay) and self.compression is not None
        self.residuals = Residuals(self.comm, self.compression) if late and self.compression is not None else None
        self.fragments: list[Fragment] = []
        self._forget()

    @property
    def θ(self) -> dict[nn.Parameter, Tensor]:
        """The outer parameters."""
        return {p: θ_p for fragment in self.fragments for p, θ_p in fragment.θ.items()}

    @property
    def A(self) -> Message | None:  # noqa: N802  # the papers' name
        """A message that may be in flight."""
        return next((fragment.A for fragment in self.fragments if fragment.A is not None), None)

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0, θ_i ← x_i."""
        super().start(broadcast=broadcast)
        self._forget()
        self._divide(assign(self.model, self._parameters(), self.cut))
        self.rounds.ends = None
        self._at_boundary()

    def after_step(self) -> None:
        """Merge what is due, and end the rounds that end."""
        super().after_step()
        for fragment in self.fragments:
            if not fragment.θ:  # synchronous so far
                fragment.ended = self.t
        self._at_boundary()

    def finish(self) -> None:
        """Every replica becomes the mean of the θ_i."""
        warn_of_lost_steps(self, *(fragment.ended for fragment in self.fragments))
        super().finish()
        self._forget()

    def _forget(self) -> None:
        self._divide({})
        if self.residuals is not None:
            self.residuals.forget()
        self.outer: Optimizer | None = None
        self._staleness = 0

    def _divide(self, of: dict[nn.Parameter, int]) -> None:
        self._of = of
        self.fragments = [Fragment(self.t) for _ in range(1 + max(of.values(), default=0))]

    # Rounds

    def _at_boundary(self) -> None:
        """Fragment by fragment, on all ranks alike: what arrives is merged, then what has been found is sent."""
        self._merge(self.fragments)
        if self.when.synchronous(self.t):
            return
        ending = [fragment for fragment in self.fragments if fragment.ends is not None and self.t >= fragment.ends]
        first = self.rounds.ends is None
        if not (first or ending):
            return
        if begins := self.rounds.begin(self.t):
            self.begin_round()
        elif ending:
            self.x = self._parameters()
            self.weighing.report_round()
        joined = self.fragments if first else ending  # by parameters that are new
        self.x = [p for p in self.x if (fragment := self._fragment_of(p)) in joined or p in fragment.θ]
        for fragment in ending:
            fragment.ends = None
            if fragment.θ:
                self.delay.end(self, fragment)
        if ending and isinstance(self.delay, Lag):
            self.weighing.report_round()  # nothing is remembered of the round before
        self._merge(ending)
        for fragment in joined:
            self._take_in(fragment, apart=not first)
        if begins and self.rounds.length is not None:
            for p, fragment in enumerate(self.fragments, start=1):
                fragment.ends = self.t - (-p * self.rounds.length // len(self.fragments))

    def _merge(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            if isinstance(self.delay, Lag) and self.delay.is_due(fragment, self.t):
                self.delay.merge(self, fragment)

    def merged(self, fragment: Fragment, *, of: int) -> None:
        """What a fragment has waited for is that of the round which ended at this step."""
        self._merged, self._staleness = fragment.A or self._merged, self.t - of

    def says(self, Δ: list[Tensor]) -> list[Tensor]:
        """What travels with a ``Lag``: Δ, and what an algorithm adds. Every part becomes its mean in place."""
        return Δ

    def outer_step(self, θ: list[Tensor], G: list[Tensor]) -> None:
        """θ ← θ + V(G)."""
        assert self.outer is not None  # made with θ
        for θ_p, g in zip(θ, G, strict=True):
            θ_p.grad = g
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)

    # Parameters

    def _fragment_of(self, p: nn.Parameter) -> Fragment:
        """The last one, if the optimizers have it and the model has not."""
        return self.fragments[self._of.get(p, -1)]

    def _take_in(self, fragment: Fragment, *, apart: bool) -> None:
        """θ ← x for parameters that are new. Where the workers have moved them apart, θ, x ← Σ_j w_j x_j."""
        new = [p for p in self.x if self._fragment_of(p) is fragment and p not in fragment.θ]
        if new and apart and self.comm.world_size > 1:
            mean = self.comm.mean_([p.detach() for p in new], self.w, self.subject("new parameters"))
            mean.wait()
            self.repair(mean.left_out)
        self._add(fragment, new)

    def _add(self, fragment: Fragment, parameters: Sequence[nn.Parameter]) -> None:
        """θ ← x for these, in the outer optimizer's group that belongs to theirs."""
        fragment.θ.update({p: p.detach().clone(memory_format=torch.preserve_format) for p in parameters})
        rest = self.θ  # a parameter of two optimizers counts once
        if not rest:
            return
        groups = [
            [rest.pop(p) for p in group["params"] if p in rest] for opt in self.optimizers for group in opt.param_groups
        ]
        if self.outer is None:
            self.outer = self.make_outer([{"params": group} for group in groups])
            return
        while len(self.outer.param_groups) < len(groups):
            self.outer.add_param_group({"params": []})
        for outer, group in zip(self.outer.param_groups, groups, strict=True):
            outer["params"] = group

    def _pending_correction(self) -> Callable[[], None] | None:
        for fragment in self.fragments:
            fragment.drain(counted=False)
        return self._arrive if self.θ else None

    @torch.no_grad()
    def fold(self) -> None:
        """x ← θ, all of them."""
        for fragment in self.fragments:
            fragment.fold()

    @torch.no_grad()
    def _arrive(self) -> None:
        """x ← θ as it will be once what is in flight has been merged. Nothing else changes."""
        self.fold()
        groups = [] if self.outer is None else self.outer.param_groups
        group_of = {θ_p: group for group in groups for θ_p in group["params"]}
        for fragment in self.fragments:
            if fragment.launched is not None:
                for x_p, θ_p, Δ_p in zip(fragment.x, fragment.about(), fragment.arrived(), strict=False):
                    x_p.copy_(self._ahead(θ_p, Δ_p, group_of[θ_p]))  # one by one: memory

    def _ahead(self, θ_p: Tensor, Δ_p: Tensor, group: dict[str, Any]) -> Tensor:
        """θ + V(Δ̄) of one parameter: a twin of the outer optimizer makes the step on copies."""
        assert self.outer is not None  # made with θ
        ahead = θ_p.clone()
        twin = self.make_outer([{"params": [ahead]}])
        twin.param_groups[0].update({name: option for name, option in group.items() if name != "params"})
        twin.state[ahead] = copy.deepcopy(self.outer.state.get(θ_p, {}))
        ahead.grad = Δ_p.clone()
        twin.step()
        return ahead

    def state_dict(self) -> dict[str, Any]:
        """Adds what the fragments hold, with the drained messages in flight, and what the outer optimizer keeps."""
        for fragment in self.fragments:
            fragment.drain(counted=False)
        numbers = {p: number for number, p in enumerate(self._members())}
        kept = {} if self.outer is None else self.outer.state
        return {
            **super().state_dict(),
            "cut": self.cut,
            "fragment_of": [self._of.get(p, 0) for p in self.model.parameters()],
            "fragments": [fragment.state_dict(numbers) for fragment in self.fragments],
            "residuals": None if self.residuals is None else self.residuals.state_dict(numbers),
            "outer": {numbers[p]: _copy(kept[θ_p]) for p, θ_p in self.θ.items() if θ_p in kept},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with θ, the outer optimizer's state and what was in flight. Its options are this object's.

        Raises:
            ValueError: the state of another number of workers, or with other fragments.
        """
        super().load_state_dict(state)
        if state["cut"] != self.cut:
            raise ValueError(
                f"this state has fragments={state['cut']}, not {self.cut}: set that, or continue from the consensus model"
            )
        members = self._members()
        self._forget()
        self._divide(dict(zip(self.model.parameters(), state["fragment_of"], strict=True)))
        for fragment, its in zip(self.fragments, state["fragments"], strict=True):
            self._add(fragment, [members[number] for number in its["theta"]])
            about = list(fragment.θ.values())[: its["sent"]]
            buffered = isinstance(self.delay, Delay) or its["dropped"] is not None
            fragment.load_state_dict(its, self.comm.layout(about).buffer() if buffered else None)
        if self.residuals is not None:
            self.residuals.load_state_dict(state["residuals"], members)
        if self.outer is not None:
            θ = self.θ
            for number, kept in state["outer"].items():
                θ_p = θ[members[number]]
                self.outer.state[θ_p] = _copy(kept, θ_p.device)

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """Adds the staleness of the last merge: steps between the end of its round and its merging."""
        return {**super().metrics(since), "algo/staleness_steps": float(self._staleness)}


def _copy(state: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """With copies of the tensors, on a device if one is given."""
    return {k: v.to(device or v.device, copy=True) if isinstance(v, Tensor) else v for k, v in state.items()}
