"""The optimizer as the precision plugin sees it: its step is the algorithm's step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from lightning_cocod.algorithms import Algorithm


class Stepper:
    """Stands in for an optimizer while it steps.

    ``step(closure)`` runs the closure (forward, backward, clipping) and then hands the optimizer's own step to the
    algorithm, so an algorithm that replaces or serialises the step holds nothing during forward and backward. Everything
    else is the optimizer's; ``isinstance`` says so too.
    """

    def __init__(self, optimizer: Optimizer, algorithm: Algorithm) -> None:
        self.__dict__.update(wrapped=optimizer, _algorithm=algorithm)
        object.__setattr__(self, "__class__", type(type(optimizer).__name__, (type(self), type(optimizer)), {}))

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The closure, then the algorithm's step. Returns the closure's result."""
        result = None if closure is None else closure()
        self._algorithm.step(partial(self.wrapped.step, **kwargs))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)  # a gradient scaler leaves its scale on fused optimizers

    def __delattr__(self, name: str) -> None:
        delattr(self.wrapped, name)


def users(optimizer: Any) -> Any:
    """The user's optimizer behind Lightning's stand-in or ours."""
    while isinstance(optimizer, LightningOptimizer | Stepper):
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer.wrapped
    return optimizer
