"""How far the training is: a bar in a terminal, one line an epoch in a pipe or file."""

import os
import sys
import time

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_cocod.workloads import InputError


def progress(choice: str) -> list[L.Callback]:
    """The callback for `choice`: "bar", "lines", "none", or "auto" for a bar if stdout is a terminal and lines if not.

    Raises:
        InputError: `choice` is unknown.
    """
    if choice == "auto":
        choice = "bar" if sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns else "lines"
    if choice == "bar":
        return [TQDMProgressBar(leave=True)]
    if choice == "lines":
        return [EpochLines()]
    if choice == "none":
        return []
    raise InputError(f"progress={choice} is unknown: choose auto, bar, lines or none")


class EpochLines(L.Callback):
    """One line an epoch on stderr, from rank 0."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the epoch's clock."""
        self.started = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print what the epoch reached."""
        metrics = trainer.callback_metrics  # reduces over all ranks, so all must read it
        if trainer.is_global_zero:
            epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "…"
            values = "  ".join(
                f"{k} {v:.4f}"
                for k in ("train/loss", "train/acc", "val/loss", "val/acc")
                if (v := metrics.get(k)) is not None
            )
            print(
                f"epoch {trainer.current_epoch + 1}/{epochs}  {values}  {time.monotonic() - self.started:.1f} s",
                file=sys.stderr,
                flush=True,
            )
