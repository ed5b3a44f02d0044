"""From a configuration to the objects of a run."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from lightning.pytorch.loggers import WandbLogger
from omegaconf import DictConfig, OmegaConf

from lightning_cocod.cli.progress import progress
from lightning_cocod.workloads import ImageClassifier, ImageDataModule, InputError
from lightning_cocod.workloads.datamodule import at_least, fraction


class Run(NamedTuple):
    """What a rank needs to train."""

    trainer: L.Trainer
    module: ImageClassifier
    datamodule: ImageDataModule


def build(cfg: DictConfig, callbacks: list[L.Callback]) -> Run:
    """Make everything that `cfg` names; `callbacks` come in addition to the configured ones.

    Raises:
        InputError: an option has a value that its object refuses.
    """
    datamodule = make(cfg, "data")
    model = make(cfg, "model", num_classes=datamodule.num_classes, in_channels=datamodule.in_channels)
    module = ImageClassifier(
        model, datamodule.num_classes, make(cfg, "optimizer"), make(cfg, "schedule"), cfg.label_smoothing
    )
    loggers = list(make(cfg, "logger").values())
    callbacks = [*make(cfg, "callbacks").values(), *callbacks]
    if not loggers:  # it insists on one
        callbacks = [callback for callback in callbacks if not isinstance(callback, LearningRateMonitor)]
    trainer = make(
        cfg,
        "trainer",
        strategy=make(cfg, "strategy"),
        logger=loggers,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),  # no uninvited default
        enable_model_summary=False,  # `cocod-train` prints a line instead
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
    )
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger._wandb_init.pop("anonymous", None)  # Lightning passes it always, W&B has dropped it and warns
    return Run(trainer, module, datamodule)


def check(cfg: DictConfig) -> None:
    """Build the run without its weights and send one empty batch through it, so that a wrong option fails before the launch.

    Raises:
        InputError: an option has a value that its object refuses, the model cannot take the data's images, or there is no
            place for results.
    """
    if cfg.ckpt_path is not None and not Path(cfg.ckpt_path).is_file():
        raise InputError(f"ckpt_path={cfg.ckpt_path} does not exist: name a .ckpt file, e.g. from a job's checkpoints/")
    folder = Path(cfg.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output_dir={folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"output_dir={folder} cannot be written to")
    for name in ("max_epochs", "max_steps"):  # of others the Trainer itself says so
        if not isinstance(value := cfg.trainer.get(name), int | None):
            raise InputError(f"trainer.{name} must be a whole number, got {value}")
    progress(cfg.progress)
    at_least(0, "seed", cfg.seed)
    fraction("label_smoothing", cfg.label_smoothing)
    with torch.device("meta"):  # shapes only
        run = build(cfg, [])
        data = run.datamodule
        images = torch.zeros(2, data.in_channels, data.image_size, data.image_size)
        try:
            run.module(images)
        except (RuntimeError, ValueError) as error:
            shape = f"{data.in_channels}×{data.image_size}×{data.image_size}"
            raise InputError(f"the model cannot take the data's images of {shape}: {_line(error)}") from error
        optimizer = _called("optimizer", make(cfg, "optimizer"), run.module.parameters())
        _called("schedule", make(cfg, "schedule"), optimizer, 1000)


def make(cfg: DictConfig, key: str, **kwargs: Any) -> Any:
    """Instantiate one node of the configuration.

    Raises:
        InputError: its class refuses a value.
    """
    try:
        return instantiate(cfg[key], _convert_="all", **kwargs)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise cause from error
        if isinstance(cause, ValueError | TypeError | ImportError | MisconfigurationException):
            raise InputError(_about(cfg, key, _line(cause))) from error
        raise


def _about(cfg: DictConfig, key: str, complaint: str) -> str:
    """A complaint that begins with an option's name: as that is written on the command line; any other: with the node's."""
    word, node = complaint.partition(" ")[0], OmegaConf.to_container(cfg[key], resolve=False)
    for name, value in node.items() if isinstance(node, dict) else ():
        source = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
        if source and name == word:
            return source[1] + complaint.removeprefix(word)
        if source and isinstance(of := OmegaConf.select(cfg, source[1]), DictConfig) and word in of:
            return f"{source[1]}.{complaint}"
    return f"{key}: {complaint}"


def _called(key: str, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except (ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        given = ", ".join(f"{name}={value}" for name, value in getattr(function, "keywords", {}).items())
        raise InputError(f"{key}: {_line(error)} (given {given or 'nothing'})") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
