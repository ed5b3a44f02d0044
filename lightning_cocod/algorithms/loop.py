"""Optimizer hooks for plain PyTorch loops: ``optimizer.step()`` stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


class StepHooks:
    """Calls ``taken`` after each step of the optimizer.

    Args:
        optimizers: those of the loop.
        taken: what to call.
        why_explicit: tells why ``optimizer.step()`` alone is not enough at this step, if so; then calling it raises
            instead of going wrong.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], taken: Callable[[], None], why_explicit: Callable[[], str | None]
    ) -> None:
        self._taken, self._why = taken, why_explicit
        self._paused = False
        self._handles = [opt.register_step_pre_hook(self._before) for opt in optimizers]
        self._handles += [opt.register_step_post_hook(self._after) for opt in optimizers]

    def remove(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the algorithm steps the optimizers itself."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _before(self, *_: Any) -> None:
        if not self._paused and (why := self._why()) is not None:
            raise RuntimeError(f"call step() of the algorithm instead of optimizer.step(): {why}")

    def _after(self, *_: Any) -> None:
        if not self._paused:
            self._taken()
