"""Options that algorithms and strategies validate alike: in one line, when they are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import unwrap

from torch.optim import SGD, Optimizer

from lightning_cocod.options import above_zero, below_one, choice, flag, nonnegative, share, whole

__all__ = [
    "above_zero",
    "below_one",
    "choice",
    "flag",
    "is_sgd",
    "nonfinite",
    "nonnegative",
    "nothing_in_common",
    "positive",
    "share",
    "whole",
]


def nonfinite(value: object) -> bool:
    """What ``on_nonfinite`` says about ranks that are not finite: whether to go on without them.

    Raises:
        ValueError: neither "raise" nor "skip".
    """
    return choice("on_nonfinite", value, ("raise", "skip")) == "skip"


def is_sgd(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps as torch's SGD does."""
    return isinstance(optimizer, SGD) and unwrap(type(optimizer).step) is unwrap(SGD.step)  # torch wraps it when one is made


def nothing_in_common(name: str, optimizers: Sequence[Optimizer], why: str) -> None:
    """See that no parameter is in two places.

    Raises:
        ValueError: one is.
    """
    members = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    if len(set(members)) < len(members):
        raise ValueError(f"{name} needs optimizers without a parameter in common: {why}")


def positive(weights: Sequence[float] | None, world_size: int | None = None) -> list[float] | None:
    """Weights of the ranks, in any scale; None stays None. Their number is checked once the world is known.

    Raises:
        ValueError: a weight that is not a positive, finite number, or not one for each rank.
    """
    if weights is None:
        return None
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise ValueError(f"weights must be positive numbers, one for each rank, got {weights!r}")
    wrong_number = world_size is not None and len(weights) != world_size
    if wrong_number or not all(_is_positive(w) for w in weights):
        count = "" if world_size is None else f"{world_size} "
        raise ValueError(f"weights must be {count}positive numbers, one for each rank, got {list(weights)}")
    return list(weights)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
