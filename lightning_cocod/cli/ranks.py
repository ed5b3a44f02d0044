"""Who starts the ranks, and how many this machine can take."""

import os
from collections.abc import Mapping

import torch
from omegaconf import DictConfig

from lightning_cocod.workloads import InputError

RANKS_PER_CPU = 4


def started_by_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun or srun started this process as one rank of several, so that nothing is left to launch."""
    torchrun = "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys()
    srun = int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in environment
    return torchrun or srun


def global_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank if a launcher started it, 0 if not."""
    return int(environment.get("RANK", environment.get("SLURM_PROCID", 0))) if started_by_launcher(environment) else 0


def devices(cfg: DictConfig) -> int:
    """How many ranks this machine is to run; `-1` and `auto` mean all its GPUs.

    Raises:
        InputError: the number is none, or more than there are GPUs or than the CPUs can carry.
    """
    asked, accelerator = cfg.trainer.devices, cfg.trainer.accelerator
    if accelerator not in ("cpu", "gpu", "cuda"):
        raise InputError(f"trainer.accelerator={accelerator} is unknown: choose cpu or gpu")
    gpus = torch.cuda.device_count() if accelerator != "cpu" else 0
    if accelerator != "cpu" and gpus == 0:
        raise InputError(f"trainer.accelerator={accelerator} needs a GPU, and none was found: use trainer=cpu")
    if accelerator != "cpu" and asked in (-1, "-1", "auto"):
        return gpus
    if not isinstance(asked, int) or asked < 1:
        raise InputError(f"trainer.devices={asked} must be a number of ranks, 1 or more")
    if accelerator != "cpu":
        if asked > gpus:
            raise InputError(f"trainer.devices={asked} needs as many GPUs, and this machine has {gpus}")
        return asked
    cpus = len(os.sched_getaffinity(0))
    if asked > RANKS_PER_CPU * cpus:
        raise InputError(
            f"trainer.devices={asked} is too many for {cpus} CPU(s): use at most {RANKS_PER_CPU * cpus} on this machine"
        )
    return asked


def one_machine(cfg: DictConfig) -> None:
    """Refuse several machines when no launcher started the ranks.

    Raises:
        InputError: `trainer.num_nodes` is not 1.
    """
    nodes = cfg.trainer.num_nodes
    if nodes != 1:
        raise InputError(
            f"trainer.num_nodes={nodes} needs a launcher on every machine: torchrun --nnodes={nodes} "
            f"--nproc-per-node={cfg.trainer.devices} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 "
            f"-m lightning_cocod.cli.train trainer.num_nodes={nodes} trainer.devices={cfg.trainer.devices} ..."
        )
