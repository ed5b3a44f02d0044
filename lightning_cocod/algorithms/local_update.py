"""What a worker of SSD-SGD makes of its own gradient while the server's parameters are on their way."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_cocod.algorithms.options import below_one, choice, flag, nonnegative


class Scales(NamedTuple):
    """Of a local update.

    Attributes:
        lr: ℓ, the local learning rate.
        s: factor of the gradient.
        wd: weight decay.
        k: steps of W that the base has been pulled after; between pulls, those of the round.
    """

    lr: float
    s: float
    wd: float
    k: int


class LocalUpdate(ABC):
    """x ← b − ℓ d, a step from the base b, which is what has been pulled or x. Subclasses say what d is."""

    needs_sgd = False
    """Whether it reads the server's gradient off the movement of W, so that the server has to run SGD."""

    def __init__(self) -> None:
        self.before: dict[nn.Parameter, Tensor] = {}
        """An earlier base of each parameter."""
        self.moved: set[nn.Parameter] = set()
        """Those whose base has been pulled since ``begin``."""

    @torch.no_grad()
    def begin(self, x: Sequence[nn.Parameter]) -> None:
        """x, which is one optimizer's of several perhaps, is W."""
        if self.keeps(pulled=True):
            self.before.update({p: p.detach().clone() for p in x})
        self.moved.difference_update(x)

    @torch.no_grad()
    def step(self, p: nn.Parameter, b: Tensor, g: Tensor, scales: Scales, *, pulled: bool) -> None:
        """p ← b − ℓ d.

        Args:
            p: the parameter; b may be it.
            b: the base.
            g: the worker's gradient; it is overwritten.
            scales: of the parameter's group.
            pulled: whether the base has just been pulled.
        """
        if pulled:
            self.moved.add(p)
        base = b.clone() if self.keeps(pulled) else None
        if scales.lr:
            torch.add(b, self.direction(p, b, g, scales), alpha=-scales.lr, out=p.detach())
        else:  # nothing can be read off a movement
            p.copy_(b)
        if base is not None:
            self.before[p] = base

    @abstractmethod
    def direction(self, p: nn.Parameter, b: Tensor, g: Tensor, scales: Scales) -> Tensor:
        """d; in g, if that is convenient."""

    def keeps(self, pulled: bool) -> bool:
        """Whether the base of this step is to be known later."""
        return False

    def state_dict(self, numbers: Mapping[nn.Parameter, int]) -> dict[str, Any]:
        """To continue with."""
        before = {numbers[p]: t.clone() for p, t in self.before.items() if p in numbers}
        return {"before": before, "moved": sorted(numbers[p] for p in self.moved if p in numbers)}

    def load_state_dict(self, state: Mapping[str, Any], members: Sequence[nn.Parameter]) -> None:
        """Continue."""
        self.before = {members[number]: t.to(members[number].device, copy=True) for number, t in state["before"].items()}
        self.moved = {members[number] for number in state["moved"]}


@dataclass
class GLU(LocalUpdate):
    """d = α s g + wd b + β ĝ with ĝ = ((1 − ℓ wd) pre − b)/(k ℓ), the recent global gradient as W has moved by it.

    pre is the base of the pull before, at first W as the delay begins; k is the number of steps in between, whatever the
    period is by now. Until a pull is consumed ĝ = 0. The authors' code has α = 2 in one place and 1 in another, both with
    β = 0.5; the divisor k ℓ is inferred from its 8.0 = 5 · 1.6.

    Args:
        alpha: α, of the worker's own gradient.
        beta: β, of the global one.
        every_step: pre is the base of the step before, as in another place of the authors' code.

    Raises:
        ValueError: a factor below 0.
    """

    alpha: float = 2.0
    beta: float = 0.5
    every_step: bool = False
    needs_sgd = True

    def __post_init__(self) -> None:
        super().__init__()
        nonnegative("alpha", self.alpha)
        nonnegative("beta", self.beta)
        flag("every_step", self.every_step)

    def direction(self, p: nn.Parameter, b: Tensor, g: Tensor, scales: Scales) -> Tensor:
        """As above."""
        α, β, (lr, s, wd, k) = self.alpha, self.beta, scales
        d = g.mul_(α * s).add_(b, alpha=wd)
        if β and p in self.moved:
            ĝ = (self.before[p] * (1 - lr * wd)).sub_(b).div_(k * lr)
            d.add_(ĝ, alpha=β)
        return d

    def keeps(self, pulled: bool) -> bool:
        """Where it has been pulled."""
        return pulled or self.every_step


class SGD(LocalUpdate):
    """d = s g + wd b."""

    def direction(self, p: nn.Parameter, b: Tensor, g: Tensor, scales: Scales) -> Tensor:
        """As above."""
        return g.mul_(scales.s).add_(b, alpha=scales.wd)


@dataclass
class DelayCompensation(LocalUpdate):
    """d = s (g + λ g ⊙ g ⊙ (b − b₋)) + wd b, b₋ being the base of the step before (DC-ASGD; Zheng et al., ICML 2017).

    Args:
        lambda_0: λ, of the correction.
        adaptive: λ/√MS in place of λ, with MS ← m MS + (1 − m) g ⊙ g + 10⁻⁷.
        m: momentum of MS.

    Raises:
        ValueError: an option out of range.
    """

    lambda_0: float = 0.04
    adaptive: bool = False
    m: float = 0.0
    MS: dict[nn.Parameter, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__init__()
        nonnegative("lambda_0", self.lambda_0)
        flag("adaptive", self.adaptive)
        below_one("m", self.m)

    def begin(self, x: Sequence[nn.Parameter]) -> None:
        """MS begins anew as well."""
        super().begin(x)
        for p in x:
            self.MS.pop(p, None)

    def direction(self, p: nn.Parameter, b: Tensor, g: Tensor, scales: Scales) -> Tensor:
        """As above."""
        d = g
        if p in self.before:
            square = g * g
            λ: float | Tensor = self.lambda_0
            if self.adaptive:
                MS = square * (1 - self.m) + 1e-7 + (self.MS[p] * self.m if p in self.MS else 0.0)
                λ = self.lambda_0 / MS.sqrt()
                if self.m:
                    self.MS[p] = MS
            d = g + λ * square * (b - self.before[p])
        return d.mul_(scales.s).add_(b, alpha=scales.wd)

    def keeps(self, pulled: bool) -> bool:
        """Always."""
        return True

    def state_dict(self, numbers: Mapping[nn.Parameter, int]) -> dict[str, Any]:
        """MS as well."""
        MS = {numbers[p]: t.clone() for p, t in self.MS.items() if p in numbers}
        return {**super().state_dict(numbers), "MS": MS}

    def load_state_dict(self, state: Mapping[str, Any], members: Sequence[nn.Parameter]) -> None:
        """MS as well."""
        super().load_state_dict(state, members)
        self.MS = {members[number]: t.to(members[number].device, copy=True) for number, t in state["MS"].items()}


def as_local_update(value: str | LocalUpdate) -> LocalUpdate:
    """One by its name, with the authors' constants: "glu", "sgd", "dc_asgd" or "dc_asgd_a"; or a copy of an object.

    Raises:
        ValueError: nobody has that name.
    """
    if isinstance(value, LocalUpdate):
        return copy.deepcopy(value)  # it has a memory, and the user may give it to two
    made: dict[str, Callable[[], LocalUpdate]] = {
        "glu": GLU,
        "sgd": SGD,
        "dc_asgd": DelayCompensation,
        "dc_asgd_a": lambda: DelayCompensation(lambda_0=2.0, adaptive=True),
    }
    return made[choice("local_update", value, tuple(made))]()
