"""Gradients of which a rank has the mean in shards only: how Lightning clips them, and who would look for them in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.strategies.replaced import Replaced
from lightning_cocod.strategies.stepper import users

if TYPE_CHECKING:
    import lightning.pytorch as pl

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_FREED = (
    "Gradients are in shards, and p.grad is None in {}: what is read from it or done to it there is lost. Clip with "
    "gradient_clip_val or self.clip_gradients; in on_before_optimizer_step the optimizer's param_groups have this rank's "
    "parts, with the mean."
)
_SENT = (
    "Gradients have been sent before {}: p.grad is this rank's own there, and what is done to it reaches this rank's local "
    "update only, not the server. Clip with gradient_clip_val or self.clip_gradients."
)


class ShardGradients:
    """When they become a mean: before the step or, in manual optimization, when the user clips them before that.

    Args:
        trainer: in a fit.
        precision: the plugin that clips.
        algorithm: in shards.
        replaced: takes what is replaced.
    """

    def __init__(self, trainer: pl.Trainer, precision: Any, algorithm: Algorithm, replaced: Replaced) -> None:
        self._algorithm, self._clip = algorithm, precision.clip_gradients
        self._clipped: set[Optimizer] = set()
        replaced.method(precision, "clip_grad_by_norm", self._clip_by_norm)
        replaced.method(precision, "clip_grad_by_value", self._clip_by_value)
        if not trainer.lightning_module.automatic_optimization:
            replaced.method(precision, "clip_gradients", self._clip_early)
        _warn_of_hooks(trainer, _FREED if algorithm.frees_gradients else _SENT)

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self._algorithm.clip_grad_norm_(users(optimizer), clip_val)

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        self._algorithm.clip_grad_value_(users(optimizer), clip_val)

    def _clip_early(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if users(optimizer) not in self._clipped:
            self._algorithm.before_step(users(optimizer))
            self._clipped.add(users(optimizer))
        self._clip(optimizer, *args, **kwargs)

    def before_step(self, optimizer: Optimizer) -> None:
        """They are a mean from now on."""
        if optimizer in self._clipped:
            self._clipped.remove(optimizer)
        else:
            self._algorithm.before_step(optimizer)

    def after_batch(self) -> None:
        """No clipped gradients are left over.

        Raises:
            RuntimeError: they are.
        """
        if self._clipped:
            raise RuntimeError(
                f"clip_gradients without a step of {type(self._clipped.pop()).__name__} in the same batch: "
                f"{self._algorithm.name} cannot accumulate clipped gradients; clip before optimizer.step() only"
            )


def clips(trainer: pl.Trainer) -> bool:
    """Whether Lightning, or the module in its place, clips gradients in automatic optimization."""
    return bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", trainer.lightning_module)


def _warn_of_hooks(trainer: pl.Trainer, what: str) -> None:
    """In automatic optimization the mean is there from the first of these hooks on, and under DDP in ``p.grad``."""
    if not trainer.lightning_module.automatic_optimization:
        return
    module = trainer.lightning_module
    names = [f"{type(module).__name__}.{hook}" for hook in _HOOKS if is_overridden(hook, module)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Trainer.__init__
        of_it = [hook for hook in _HOOKS[:2] if getattr(type(callback), hook) is not getattr(Callback, hook)]
        names += [f"{type(callback).__name__}.{hook}" for hook in of_it]
    if names:
        rank_zero_warn(what.format(", ".join(names)))
