"""What these strategies cannot do, said in one line that names the way out."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy

from lightning_cocod.algorithms import Algorithm

if TYPE_CHECKING:
    import lightning.pytorch as pl

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
_OF_OTHERS = {
    "compression": "it sends no codes; cocod, cd_sgd and dist_ef_sgd do",
    "period": "it has no rounds of local steps (ad_psgd has every=, sgp has delay=)",
    "warmup_steps": "it never goes over from synchronous steps to others",
    "weights": "it weighs all ranks alike",
}


def unknown_options(strategy: type, options: Iterable[str]) -> None:
    """Raises TypeError for an option that only DDP or another algorithm understands, or that nobody does."""
    for name in sorted(set(options) - _KNOWN):
        inits = [vars(cls)["__init__"] for cls in strategy.__mro__[: -len(DDPStrategy.__mro__)] if "__init__" in vars(cls)]
        known = {option for init in inits for option in inspect.signature(init).parameters} - {"self", "options"} | _KNOWN
        near = get_close_matches(name, known, 1)
        way_out = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
        if name in _DDP_ONLY | _OF_OTHERS:
            way_out = f"{(_DDP_ONLY | _OF_OTHERS)[name]}; leave it out"
        raise TypeError(f"{strategy.__name__} has no option {name}: {way_out}")


def lazy_parameters(model: torch.nn.Module) -> None:
    """Raises MisconfigurationException: ranks cannot begin with the same weights where there are none yet."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise MisconfigurationException(
            f"parameter {lazy[0]} has no shape yet, and ranks cannot begin with the same weights: run a batch through the "
            "model before trainer.fit or at the end of configure_model, or give the layer its sizes"
        )


def scaler(precision: pl.plugins.Precision, algorithm: Algorithm) -> None:
    """Raises MisconfigurationException where the next step needs several ranks: scalers decide alone."""
    if getattr(precision, "scaler", None) is not None and (together := algorithm.steps_together(algorithm.t)) is not None:
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
