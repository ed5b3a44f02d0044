"""What ranks with different numbers of steps cannot do, said in one line that names the reason and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    import lightning.pytorch as pl


def refuse_run(trainer: pl.Trainer, *, synchronous_batch_norm: bool) -> None:
    """Raises MisconfigurationException for what the trainer has been asked to do."""
    if trainer.check_val_every_n_epoch is None:
        raise _refusal("check_val_every_n_epoch=None counts batches over epochs, and ranks meet in epochs; use a number")
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise _refusal("a val_check_interval of time is over at another batch on each rank; use a number of batches")
    if trainer.fit_loop.min_steps:
        raise _refusal("min_steps is reached at another time on each rank; use min_epochs")
    if synchronous_batch_norm:
        raise _refusal("sync_batchnorm=True is a collective in every forward; leave it out: evaluation averages anyway")
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by Trainer.__init__
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            _refuse_checkpoint(callback)
        elif isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise _refusal(f"{type(callback).__name__} runs the same steps on all ranks; use it on one device")
        elif isinstance(callback, GradientAccumulationScheduler) and trainer.max_steps > 0:
            raise _refusal(
                "max_steps is turned into epochs, which differ under GradientAccumulationScheduler; use max_epochs"
            )


def _refuse_checkpoint(callback: ModelCheckpoint) -> None:
    """It saves between two batches, and all ranks have to save together."""
    if callback._every_n_train_steps >= 1:
        raise _refusal(
            "ModelCheckpoint(every_n_train_steps) saves at a number of steps that each rank reaches at another time, or "
            "never; use every_n_epochs, or val_check_interval and it saves after each validation"
        )
    if callback._train_time_interval is not None:
        raise _refusal(
            "ModelCheckpoint(train_time_interval) asks all ranks after each batch, which puts them in step; "
            "use every_n_epochs, or val_check_interval and it saves after each validation"
        )


def refuse_schedules(trainer: pl.Trainer) -> None:
    """Raises MisconfigurationException for a schedule that all ranks would have to step together."""
    if any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise _refusal("ReduceLROnPlateau with interval='step' compares ranks in each step; use interval='epoch'")


def refuse_loader(loader: Any, ranks: int) -> None:
    """Raises MisconfigurationException for a loader whose batches cannot be claimed."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
        raise _refusal(f"batches are claimed through a DataLoader of torch, not through {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise _refusal("an iterable data set has no batches with numbers that could be claimed; use one with a length")
    if type(loader.batch_sampler) is not BatchSampler:
        raise _refusal("a batch sampler of your own makes its batches itself; give the loader a batch_size and a sampler")
    if not getattr(loader, "in_order", True):
        raise _refusal("with in_order=False nobody knows which batch a loader gives out; use in_order=True")
    if isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas != 1:
        raise _refusal("a DistributedSampler of your own splits the data evenly in advance; leave it out")
    if len(loader.batch_sampler) < ranks:
        raise _refusal(f"{len(loader.batch_sampler)} batches are too few for {ranks} ranks: each needs one in every epoch")


def refuse_loaders(trainer: pl.Trainer) -> None:
    """Raises MisconfigurationException unless there is one loader, and Lightning draws its batches."""
    loop = trainer.fit_loop
    if loop._combined_loader is None or len(loop._combined_loader.flattened) != 1:
        raise _refusal("several loaders of training end at different times; use one")
    if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
        raise _refusal("training_step(dataloader_iter) draws its batches itself; take a batch instead")


def refuse_in_step(what: str) -> None:
    """Raises MisconfigurationException."""
    raise _refusal(f"training_step {what}, and ranks have different numbers of steps; use on_step=False, on_epoch=True")


def _refusal(why: str) -> MisconfigurationException:
    return MisconfigurationException(f"Ranks that share their epochs have different numbers of steps: {why}.")
