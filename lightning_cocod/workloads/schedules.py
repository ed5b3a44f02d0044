"""Learning-rate schedules over the optimizer steps of a run; positions are fractions of its length."""

import math
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_cocod.workloads.errors import InputError


def constant(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0) -> LambdaLR:
    """The optimizer's own learning rate, after a linear warm-up of `warmup_steps`."""
    _check_warmup(warmup_steps)
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def step_decay(
    optimizer: Optimizer,
    total_steps: int,
    milestones: Sequence[float] = (0.5, 0.75),
    factor: float = 0.1,
    warmup_steps: int = 0,
) -> LambdaLR:
    """Multiply the learning rate by `factor` at each milestone, a fraction of `total_steps` in (0, 1)."""
    _check_warmup(warmup_steps)
    if not all(0 < milestone < 1 for milestone in milestones):
        raise InputError(f"schedule.milestones are fractions of the run in (0, 1), got {list(milestones)}")
    passed = [milestone * total_steps for milestone in milestones]
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps) * factor ** sum(step >= at for at in passed))


def cosine(optimizer: Optimizer, total_steps: int, warmup_fraction: float = 0.05, final_fraction: float = 0.0) -> LambdaLR:
    """Linear warm-up over `warmup_fraction` of the run, then half a cosine down to `final_fraction` of the rate."""
    if not 0 <= warmup_fraction < 1:
        raise InputError(f"schedule.warmup_fraction is a fraction of the run in [0, 1), got {warmup_fraction}")
    if not 0 <= final_fraction <= 1:
        raise InputError(f"schedule.final_fraction is a fraction of the learning rate in [0, 1], got {final_fraction}")
    warmup_steps = round(warmup_fraction * total_steps)

    def rate(step: int) -> float:
        progress = min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))
        decay = final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2
        return _warmup(step, warmup_steps) * decay

    return LambdaLR(optimizer, rate)


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise InputError(f"schedule.warmup_steps must be 0 or more optimizer steps, got {warmup_steps}")
