"""A rank that takes itself for a task of a SLURM job."""

import os


def become_a_task(rank, world, folder):
    """Commands in the folder stand for SLURM's; the pid is left there for them."""
    os.environ.update(
        SLURM_JOB_ID="17",
        SLURM_JOB_NAME="train",
        SLURM_NTASKS=str(world),
        SLURM_NTASKS_PER_NODE=str(world),
        SLURM_NNODES="1",
        SLURM_NODELIST="localhost",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
        PATH=f"{folder}:{os.environ['PATH']}",
    )
    (folder / f"{rank}.pid").write_text(str(os.getpid()) + "\n")
