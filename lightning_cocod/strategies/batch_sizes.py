"""Where in Lightning's calendar the sizes of the ranks' batches have a say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.strategies.continuing import Position
from lightning_cocod.strategies.replaced import Replaced


class BatchSizes:
    """Equal on all ranks, as ever: nothing to do at any of these places. ``Proportional`` has other sizes."""

    def cut(self, loader: Any, position: Position | None, same: Callable[[Any], Any]) -> None:
        """Lightning has prepared the loader of training, which continues at a position; ``same`` gives rank 0's value."""

    def sampler_kwargs(self) -> dict[str, Any]:
        """Of the sampler that Lightning inserts into that loader."""
        return {}

    def install(self, algorithm: Algorithm, replaced: Replaced) -> None:
        """A fit is set up."""

    def on_train_start(self) -> None:
        """Before the first batch."""

    def on_batch_start(self, algorithm: Algorithm, batch_idx: int) -> None:
        """A batch begins."""

    def before_verb(self) -> None:
        """A step has been made, and the algorithm is about to hear of it."""

    def after_step(self) -> None:
        """It has."""

    def apart(self) -> AbstractContextManager[None]:
        """Around what training waits for other ranks in."""
        return nullcontext()

    def interrupt(self) -> None:
        """Something else than training begins."""

    def reduce(self, tensor: Any, group: Any, reduce_op: Any, reduction: Callable[..., Any]) -> Any:
        """A reduction that Lightning is asked for."""
        return reduction(tensor, group, reduce_op)

    def metrics(self) -> dict[str, float]:
        """What they add to the metrics."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """What a resumed run continues with, if anything."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Before the loader is cut. None where the run that is resumed had none."""
