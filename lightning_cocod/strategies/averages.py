"""Callbacks that average weights over time: what they keep is the mean over the ranks wherever the model is.

Each rank averages its own replica over its own steps. The mean of the ranks' averages, which for averages that are linear in
the weights is the average of the consensus model's path, is what validation, checkpoints and the end of fit see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_cocod.algorithms import Algorithm

if TYPE_CHECKING:
    import lightning.pytorch as pl

_WEIGHT_AVERAGING: Any = getattr(lightning_callbacks, "WeightAveraging", ())  # Lightning has it since 2.6


class TimeAverages:
    """The averages that a trainer's callbacks keep, made part of an algorithm's consensus.

    Validation and the end of fit, where these callbacks put their average into the model, then need no more. What they
    write into checkpoints, and the moment at which ``StochasticWeightAveraging`` replaces the weights, are seen to here.

    Args:
        trainer: whose callbacks.
        algorithm: whose consensus.
        consensus: puts the consensus in place for a checkpoint.
    """

    def __init__(
        self, trainer: pl.Trainer, algorithm: Algorithm, consensus: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._trainer, self._algorithm, self._consensus = trainer, algorithm, consensus
        self._undo: list[tuple[object, str]] = []

    def install(self) -> None:
        """Replace methods on the instances of these callbacks."""
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]  # set by Trainer.__init__
            if isinstance(callback, StochasticWeightAveraging):
                self._replace(callback, "state_dict", self._with_consensus(callback.state_dict))
                self._replace(callback, "transfer_weights", self._rewriting(callback.transfer_weights))
            elif isinstance(callback, _WEIGHT_AVERAGING):
                self._begin_alike(callback._average_model)
                self._replace(callback, "on_save_checkpoint", self._with_consensus(callback.on_save_checkpoint))
            else:
                continue
            self._algorithm.beside.append(callback._average_model)

    def remove(self) -> None:
        """Put everything back."""
        for owner, name in reversed(self._undo):
            delattr(owner, name)  # the class's own method shows again
        self._undo = []

    def _replace(self, owner: object, name: str, value: Callable[..., Any]) -> None:
        setattr(owner, name, value)
        self._undo.append((owner, name))

    def _with_consensus(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """Called by all ranks. What is returned, or put into a checkpoint, is copied: the tensors themselves change back."""

        def written(*args: Any) -> Any:
            with self._consensus():
                result = write(*args)
                if result is not None:
                    return apply_to_collection(result, Tensor, _copy)
                checkpoint = args[-1]
                for part in ("state_dict", "averaging_state"):
                    checkpoint[part] = apply_to_collection(checkpoint[part], Tensor, _copy)
                return None

        return written

    def _rewriting(self, transfer: Callable[..., None]) -> Callable[..., None]:
        def transfer_everywhere(*modules: pl.LightningModule) -> None:
            with self._algorithm.rewriting():
                transfer(*modules)

        return transfer_everywhere

    @torch.no_grad()
    def _begin_alike(self, average: torch.optim.swa_utils.AveragedModel) -> None:
        """The average was made before the ranks had the weights of rank 0."""
        if self._trainer.ckpt_path is not None:  # the average has been restored
            return
        model = self._trainer.lightning_module
        ours, theirs = (chain(m.parameters(), m.buffers()) for m in (average.module, model))
        for mine, initial in zip(ours, theirs, strict=True):
            mine.copy_(initial)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
