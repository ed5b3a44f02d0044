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
from lightning_cocod.strategies.replaced import Replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl

_WEIGHT_AVERAGING: Any = getattr(lightning_callbacks, "WeightAveraging", ())  # Lightning has it since 2.6


def keep_consensus(
    trainer: pl.Trainer, algorithm: Algorithm, consensus: Callable[[], AbstractContextManager[None]], replaced: Replaced
) -> None:
    """Make the averages that a trainer's callbacks keep part of an algorithm's consensus.

    Validation and the end of fit, where these callbacks put their average into the model, then need no more. What they
    write into checkpoints, and the moment at which ``StochasticWeightAveraging`` replaces the weights, are seen to here.

    Args:
        trainer: whose callbacks.
        algorithm: whose consensus.
        consensus: puts the consensus in place for a checkpoint.
        replaced: takes what is replaced on these callbacks.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Trainer.__init__
        if isinstance(callback, StochasticWeightAveraging):
            replaced.method(callback, "state_dict", _written_in(consensus, callback.state_dict))
            replaced.method(callback, "transfer_weights", _rewriting(algorithm, callback.transfer_weights))
        elif isinstance(callback, _WEIGHT_AVERAGING):
            if trainer.ckpt_path is None:  # else the average has been restored
                _begin_alike(callback._average_model, trainer.lightning_module)
            replaced.method(callback, "on_save_checkpoint", _written_in(consensus, callback.on_save_checkpoint))
        else:
            continue
        algorithm.replica.beside.append(callback._average_model)


def _written_in(consensus: Callable[[], AbstractContextManager[None]], write: Callable[..., Any]) -> Callable[..., Any]:
    """Called by all ranks. What is returned, or put into a checkpoint, is copied: the tensors themselves change back."""

    def written(*args: Any) -> Any:
        with consensus():
            result = write(*args)
            if result is not None:
                return apply_to_collection(result, Tensor, _copy)
            checkpoint = args[-1]
            for part in ("state_dict", "averaging_state"):
                checkpoint[part] = apply_to_collection(checkpoint[part], Tensor, _copy)
            return None

    return written


def _rewriting(algorithm: Algorithm, transfer: Callable[..., None]) -> Callable[..., None]:
    def transfer_everywhere(*modules: pl.LightningModule) -> None:
        with algorithm.rewriting():
            transfer(*modules)

    return transfer_everywhere


@torch.no_grad()
def _begin_alike(average: torch.optim.swa_utils.AveragedModel, model: torch.nn.Module) -> None:
    """The average was made before the ranks had the weights of rank 0."""
    ours, theirs = (chain(m.parameters(), m.buffers()) for m in (average.module, model))
    for mine, initial in zip(ours, theirs, strict=True):
        mine.copy_(initial)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
