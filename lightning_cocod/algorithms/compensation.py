"""Delay compensation: a gradient is corrected, to the first order, for a move of the parameters that is still to come."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_cocod.algorithms.options import choice, nonnegative

FLOOR = 16
"""In units of ε ‖x‖: a D that is no larger is taken for rounding error."""


class Part(NamedTuple):
    """A run of elements of one tensor: where they are, where they will be moved, and their gradient."""

    tensor: int
    x: Tensor
    D: Tensor
    g: Tensor
    decay: float = 0.0
    """wd, if the correction is to be formed from g + wd·x."""


class Compensation:
    r"""g̃ = g + λ g ⊙ g ⊙ D with λ = min(λ_max, λ_0 ‖g‖ / ‖g ⊙ g ⊙ D‖).

    λ = 0 where ‖D‖ ≤ 16 ε ‖x‖, ε being the resolution of the dtype, or the denominator is 0.
    Nothing waits for the device. Products are taken in float32 at least, and norms accumulated in float64 over parts.

    Args:
        lambda_0: λ_0 ≥ 0.
        norm: over what the norms are taken: ``"model"``, all parts of a call, or each ``"tensor"`` for itself.
        lambda_max: λ_max ≥ 0; no limit by default.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self, lambda_0: float = 0.2, *, norm: Literal["model", "tensor"] = "model", lambda_max: float | None = None
    ) -> None:
        self.lambda_0 = nonnegative("lambda_0", lambda_0)
        self.lambda_max = math.inf if lambda_max is None else nonnegative("lambda_max", lambda_max)
        self.per_tensor = choice("norm", norm, ("model", "tensor")) == "tensor"

        self._memory: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    @torch.no_grad()
    def __call__(self, parts: Iterable[Part]) -> None:
        """g ← g̃ in place."""
        together: dict[int, list[Part]] = {}
        for part in parts:
            together.setdefault(part.tensor if self.per_tensor else 0, []).append(part)
        for those in together.values():
            λ = self._lambda(those)
            for part in those:
                part.g.add_(self._curvature(part)[1].mul_(λ))

    def _lambda(self, parts: list[Part]) -> Tensor:
        """λ, a number on the parts' device."""
        sums = []
        for part in parts:
            g, u = self._curvature(part)
            resolution = FLOOR * torch.finfo(part.x.dtype).eps
            floor = _square(part.x) * resolution**2
            sums.append(torch.stack([_scaled_square(g), _scaled_square(u), _square(part.D), floor]))
        g, u, D, floor = torch.stack(sums).sum(0).sqrt()
        nothing = (floor >= D) | (u <= g * torch.finfo(torch.float32).tiny)  # also where λ would be too large for float32
        λ = (self.lambda_0 * g / u).clamp(max=self.lambda_max)
        return torch.where(nothing | ~torch.isfinite(λ), 0.0, λ)  # a gradient that is not finite spoils no other

    def _curvature(self, part: Part) -> tuple[Tensor, Tensor]:
        """g, and g ⊙ g ⊙ D or 0 where that overflows: the diagonal of g gᵀ, in place of the Hessian, times the move.

        Both lie in memory that is used again: freed and made anew for every part, it would fall into pieces.
        """
        kind = torch.promote_types(part.g.dtype, torch.float32), part.g.device
        memory = self._memory.get(kind, [])
        if not memory or memory[0].numel() < part.g.numel():
            memory = self._memory[kind] = [torch.empty(part.g.numel(), dtype=kind[0], device=kind[1]) for _ in range(2)]
        g, u = (flat[: part.g.numel()].view(part.g.shape) for flat in memory)
        g.copy_(part.g)
        if part.decay:
            g.add_(part.x, alpha=part.decay)
        return g, torch.mul(g, g, out=u).mul_(part.D).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _square(t: Tensor) -> Tensor:
    """‖t‖² of one part, in float64, in which those of all parts are added up."""
    norm: Tensor = torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
    return norm.double().square()


def _scaled_square(t: Tensor) -> Tensor:
    """The same where squares may underflow. Leaves t / max |t|."""
    least, most = torch.aminmax(t)  # torch's norm of that name takes as long as all the rest, twice
    largest = torch.maximum(most, -least)
    largest = torch.where(largest > 0, largest, 1.0)
    return _square(t.div_(largest)) * largest.double().square()
