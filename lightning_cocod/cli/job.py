"""One rank of one job: build, train, test, summarise."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from omegaconf import OmegaConf

from lightning_cocod.cli.build import Run, build
from lightning_cocod.cli.failure import RecordFailure
from lightning_cocod.cli.progress import progress
from lightning_cocod.cli.quiet import quiet
from lightning_cocod.cli.summary import summarise
from lightning_cocod.strategies import AlgorithmStrategy
from lightning_cocod.strategies.rendezvous import check_master
from lightning_cocod.workloads import InputError

Config = dict[str, Any]  # the resolved configuration, as plain containers


def fresh_rank(config: Config, failures: str) -> dict[str, Any] | None:
    """Train as a process launched for this job; an exception goes into the folder `failures`, not to stderr."""
    multiprocessing.set_start_method(None, force=True)  # a spawned process would spawn its loaders' too, in seconds each
    recorder = RecordFailure(Path(failures), int(os.environ["RANK"]))
    try:
        return train(config, [recorder])
    except Exception as error:
        recorder.record(error)
        raise SystemExit(1) from None


def train(config: Config, callbacks: list[L.Callback] | None = None) -> dict[str, Any] | None:
    """Train, and test the consensus model, as one of the ranks that a launcher's environment variables describe.

    Returns:
        The summary on rank 0, None elsewhere.

    Raises:
        InputError: an option, a file or the number of ranks is wrong.
    """
    quiet()
    cfg = OmegaConf.create(config)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    share_cpus(cfg.trainer.devices)
    run = build(cfg, [*progress(cfg.progress), *(callbacks or [])])
    asked = cfg.trainer.devices * cfg.trainer.num_nodes
    if run.trainer.world_size != asked:
        raise RuntimeError(f"{asked} ranks were asked for, {run.trainer.world_size} are running")
    reach_master(run.trainer.strategy)
    start_loggers(run, config)
    if run.trainer.is_global_zero:
        print(headline(cfg, run), flush=True)
    try:
        started = time.monotonic()
        run.trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=cfg.ckpt_path)
        seconds = time.monotonic() - started
        metrics = {key: float(value) for key, value in run.trainer.callback_metrics.items()}
        if cfg.test:
            metrics.update(run.trainer.test(run.module, datamodule=run.datamodule, verbose=False)[0])
        return summarise(cfg, run, metrics, seconds) if run.trainer.is_global_zero else None
    finally:
        close_wandb(run)


def reach_master(strategy: Strategy, timeout: float = 300.0) -> None:
    """Make sure that the ranks can meet. Our strategies see to it themselves; DDP would wait half an hour in silence.

    Raises:
        ConnectionError: the master cannot be reached within `timeout` seconds.
    """
    if isinstance(strategy, AlgorithmStrategy) or not isinstance(strategy, DDPStrategy) or strategy.world_size == 1:
        return
    strategy.set_world_ranks()
    environment = strategy.cluster_environment
    assert environment is not None  # Lightning has chosen one
    check_master(environment.main_address, environment.main_port, strategy.global_rank, timeout)


def start_loggers(run: Run, config: Config) -> None:
    """Write the configuration to every logger, which makes it begin.

    Raises:
        InputError: W&B refuses, for want of an account or a connection.
    """
    for logger in run.trainer.loggers:
        try:
            logger.log_hyperparams(config)
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"W&B does not start ({reason}): run `wandb login` once, or use logger=wandb_offline"
            ) from error


def share_cpus(ranks: int) -> None:
    """Give each rank its share of the CPUs for computing, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def headline(cfg: Any, run: Run) -> str:
    """What is about to run, in one line."""
    trainer, data = run.trainer, run.datamodule
    parameters = sum(parameter.numel() for parameter in run.module.parameters())
    return (
        f"{cfg.name}: {parameters / 1e6:.2f} M parameters, {trainer.world_size} rank(s) on {cfg.trainer.accelerator}, "
        f"{data.batch_size} images per rank and step, into {cfg.output_dir}"
    )


def close_wandb(run: Run) -> None:
    """End the W&B run, so that its file is complete and the next job gets its own."""
    for logger in run.trainer.loggers:
        if isinstance(logger, WandbLogger) and run.trainer.is_global_zero:
            logger.experiment.finish()
