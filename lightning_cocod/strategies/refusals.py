"""What these strategies cannot do, said in one line that names the way out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy

from lightning_cocod.algorithms import Algorithm

if TYPE_CHECKING:
    import lightning.pytorch as pl

_START_METHODS = ("popen", "spawn", "fork", "forkserver")
_KNOWN = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
_DDP_ONLY = {
    "find_unused_parameters": "parameters without a gradient are allowed anyway",
    "static_graph": "there is no DDP reducer whose graph could be static",
    "gradient_as_bucket_view": "gradients are not exchanged in DDP's buckets",
    "bucket_cap_mb": "gradients are not exchanged in DDP's buckets",
    "broadcast_buffers": "buffers stay local in training and are averaged for evaluation",
    "model_averaging_period": "that is what period= is for",
    "ddp_comm_state": "there is no DDP reducer to hook into",
    "ddp_comm_hook": "there is no DDP reducer to hook into",
    "ddp_comm_wrapper": "there is no DDP reducer to hook into",
}


def unknown_options(strategy: str, options: Iterable[str]) -> None:
    """Raises TypeError for an option that only DDP understands, or that nobody does."""
    for name in options:
        if name in _DDP_ONLY:
            raise TypeError(f"{strategy} has no option {name}: {_DDP_ONLY[name]}; leave it out")
    if unknown := sorted(set(options) - _KNOWN):
        raise TypeError(f"{strategy} has no option {', '.join(unknown)}")


def start_method(name: str) -> None:
    """Raises ValueError unless ranks can be started that way."""
    if name not in _START_METHODS:
        raise ValueError(f"start_method must be one of {', '.join(_START_METHODS)}, got {name!r}")


def lazy_parameters(model: torch.nn.Module) -> None:
    """Raises MisconfigurationException: ranks cannot begin with the same weights where there are none yet."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise MisconfigurationException(
            f"parameter {lazy[0]} has no shape yet, and ranks cannot begin with the same weights: run a batch through the "
            "model before trainer.fit or at the end of configure_model, or give the layer its sizes"
        )


def scaler(precision: pl.plugins.Precision, algorithm: Algorithm) -> None:
    """Raises MisconfigurationException where a step needs several ranks: scalers decide alone."""
    if getattr(precision, "scaler", None) is not None and (together := algorithm.steps_together(0)) is not None:
        what, otherwise = together
        raise MisconfigurationException(
            f"{what} and precision='16-mixed' do not go together: each rank's gradient scaler decides on its own "
            f"whether to skip a step; use precision='bf16-mixed'{otherwise}"
        )


def warn_of_synchronous_batch_norm() -> None:
    """It works, and hides nothing."""
    rank_zero_warn(
        "sync_batchnorm=True is a collective in every forward pass: it puts the ranks in step, and communication "
        "cannot be hidden behind it. Evaluation averages the running statistics without it."
    )
