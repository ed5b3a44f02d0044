"""A tuner inside a fit: the learning rate finder runs the loop with callbacks of its own in place of the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback

from lightning_cocod.strategies.quiet import QuietLoop

if TYPE_CHECKING:
    import lightning.pytorch as pl


@contextmanager
def takes_part(verbs: Callback, trainer: pl.Trainer, quiet: QuietLoop) -> Iterator[None]:
    """The verbs are called whoever runs the loop. In a tuner's list they come last: it looks for its own callback first."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Trainer.__init__
    if verbs in callbacks:
        yield
        return
    callbacks.append(verbs)
    try:
        with quiet.tuning():
            yield
    finally:
        callbacks.remove(verbs)
