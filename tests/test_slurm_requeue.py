"""SLURM's requeue signal: all ranks save at the same step, outside of the signal handler, and rank 0 requeues the job."""

import os
import signal
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.ranks import run_ranks
from support.slurm import become_a_task
from support.toys import STRATEGIES, Toy, flat, loader, trainer

SCONTROL = """#!/bin/sh
echo "$@" >> "$0.calls"
kill -TERM $(cat "${0%/*}"/*.pid)
"""
"""Notes what it is asked and does what SLURM does to the tasks of a job that it requeues."""


class Signalled(Callback):
    """Some ranks get the signal in their third batch. Notes where they save, and the replicas after every step."""

    def __init__(self, ranks):
        self.ranks, self.steps, self.saved, self.replicas = ranks, [], [], {}

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append(trainer.strategy.algorithm.t)
        self.replicas[self.steps[-1]] = flat(module)
        if trainer.global_rank in self.ranks and len(self.steps) == 3:
            os.kill(os.getpid(), signal.SIGUSR2)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        assert not in_signal_handler()
        self.saved.append(trainer.strategy.algorithm.t)


class Steps(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, *_):
        self.steps.append(trainer.strategy.algorithm.t)


def in_signal_handler():
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _HandlersCompose.__call__.__code__:
        frame = frame.f_back
    return frame is not None


def requeued(rank, world, strategy, signalled, folder):
    become_a_task(rank, world, folder)
    L.seed_everything(5, verbose=False)
    options = {"plugins": [SLURMEnvironment(requeue_signal=signal.SIGUSR2)], "default_root_dir": folder, "max_epochs": -1}
    options |= {"val_check_interval": 1, "limit_val_batches": 1}  # a validation follows on the batch in which they save
    seen, again = Signalled(signalled), Steps()
    data = loader(), loader(shuffle=False)
    with pytest.raises(SIGTERMException):
        trainer(strategy, world, callbacks=[seen], **options).fit(Toy(), *data)
    trainer(strategy, world, callbacks=[again], max_steps=seen.saved[0] + 2, **options).fit(Toy(), *data)
    return {"saved": seen.saved, "last": seen.steps[-1], "replica": seen.replicas[seen.saved[0]], "resumed": again.steps}


@pytest.mark.parametrize("signalled", [[0, 1], [1]], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_requeue_signal_saves_one_checkpoint_at_an_agreed_step_and_requeues(strategy, signalled, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    first, second = run_ranks(requeued, 2, strategy, signalled, tmp_path, init=False)
    assert first["saved"] == second["saved"]
    assert len(first["saved"]) == 1
    assert first["saved"][0] >= 3
    assert (tmp_path / "scontrol.calls").read_text() == "requeue 17\n"
    assert first["last"] == second["last"] >= first["saved"][0]  # SLURM's SIGTERM, agreed as well
    saved = Toy()
    saved.load_state_dict(torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["state_dict"])
    torch.testing.assert_close(flat(saved), (first["replica"] + second["replica"]) / 2, rtol=1e-6, atol=1e-7)
    steps = first["saved"][0]
    assert first["resumed"] == second["resumed"] == [steps, steps + 1]
