"""No collective in a training step; what Lightning decides per batch is agreed as a step number instead."""

import os
import signal
from datetime import timedelta

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, flat, loader, trainer

from lightning_cocod import CommunicationMonitor

COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "scatter",
]


class CountWorldCollectives(Callback):
    """Counts the calls of the training thread on the world group between the first batch and the last."""

    def __init__(self, monkeypatch_on):
        self.calls, self.counting = [], False
        for name in COLLECTIVES:
            monkeypatch_on(name, self.counted(name, getattr(dist, name)))

    def counted(self, name, original):
        def call(*args, **kwargs):
            group = kwargs.get("group")
            if self.counting and group in (None, dist.group.WORLD):
                self.calls.append(name)
            return original(*args, **kwargs)

        return call

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.counting = True

    def on_train_epoch_end(self, trainer, module):
        self.counting = False


def collectives_in_batches(rank, world, strategy, folder):
    with pytest.MonkeyPatch.context() as patch:
        count = CountWorldCollectives(lambda name, value: patch.setattr(dist, name, value))
        save = ModelCheckpoint(folder, train_time_interval=timedelta(hours=1))
        options = {"max_time": "00:01:00:00", "max_epochs": 1, "enable_checkpointing": True}
        monitor = CommunicationMonitor(every_n_steps=1)
        trainer(strategy, world, callbacks=[count, save, monitor], **options).fit(Toy(), loader())
        return count.calls


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_world_collective_in_any_batch(strategy, tmp_path):
    assert run_ranks(collectives_in_batches, 2, strategy, tmp_path, init=False) == [[], []]


def test_ddp_has_several_in_every_batch(tmp_path):
    """The negative control: 6 batches, of which each broadcasts the stop flag, the time limit and the checkpoint's."""
    calls = run_ranks(collectives_in_batches, 2, "ddp", tmp_path, init=False)[0]
    assert len(calls) >= 12


class Stops(Callback):
    """One rank alone wants to stop, at its third batch."""

    def __init__(self, rank, how):
        self.rank, self.how, self.steps = rank, how, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(trainer.strategy.algorithm.t)
        if trainer.global_rank == self.rank and len(self.steps) == 3:
            self.how(trainer)


def stop_by_flag(trainer):
    trainer.should_stop = True


def stop_by_sigterm(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def stop_on_one_rank(rank, world, who, how, strategy):
    L.seed_everything(1, verbose=False)
    model, stops = Toy(), Stops(who, how)
    t = trainer(strategy, world, callbacks=[stops], max_epochs=100_000)
    try:
        t.fit(model, loader())
        ended = "stopped"
    except SIGTERMException:
        ended = "SIGTERM"
    return {"last": stops.steps[-1], "ended": ended, "end": flat(model)}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stop_on_one_rank_stops_all_after_the_same_step(who, strategy):
    first, second = run_ranks(stop_on_one_rank, 2, who, stop_by_flag, strategy, init=False)
    assert first["last"] == second["last"] > 3
    assert first["ended"] == second["ended"] == "stopped"
    assert torch.equal(first["end"], second["end"])


class ModuleStops(Toy):
    """Rank 1 alone wants to stop, in a hook of the module: one that comes after all callbacks."""

    def __init__(self, hook):
        super().__init__()
        self.steps = 0
        setattr(self, hook, self.stop)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def stop(self, *_):
        if self.trainer.global_rank == 1 and not self.trainer.sanity_checking:
            self.trainer.should_stop = True


def stop_in_module(rank, world, strategy, hook):
    model = ModuleStops(hook)
    trainer(strategy, world, max_epochs=1000).fit(model, loader(), loader(shuffle=False))
    return model.steps


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("hook", "expected"), [("on_train_batch_end", None), ("on_validation_end", 6), ("on_train_epoch_end", 6)]
)
def test_a_stop_in_any_hook_of_the_module_stops_all_ranks_together(strategy, hook, expected):
    first, second = run_ranks(stop_in_module, 2, strategy, hook, init=False)
    assert first == second
    assert expected in (None, first)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sigterm_at_one_rank_reaches_all_after_the_same_step(strategy, who):
    first, second = run_ranks(stop_on_one_rank, 2, who, stop_by_sigterm, strategy, init=False)
    assert first["last"] == second["last"] > 3
    assert first["ended"] == second["ended"] == "SIGTERM"


class Expired(Timer):
    """The clock of rank 1 runs out after its second batch; rank 0's never does."""

    def __init__(self, rank):
        super().__init__(duration=timedelta(hours=1), verbose=False)
        self.mine, self.batches = rank == 1, 0

    def time_elapsed(self, stage="train"):
        self.batches += 1
        return 1e9 if self.mine and self.batches > 2 else 0.0


def time_limit(rank, world, strategy):
    stops = Stops(None, None)
    trainer(strategy, world, callbacks=[Expired(rank), stops], max_epochs=100_000).fit(Toy(), loader())
    return stops.steps[-1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_time_limit_stops_all_ranks_after_the_same_step(strategy):
    first, second = run_ranks(time_limit, 2, strategy, init=False)
    assert first == second > 2


def checkpoint_by_time(rank, world, strategy, folder):
    save = ModelCheckpoint(folder, train_time_interval=timedelta(seconds=0.1), save_top_k=-1)
    seen = []

    class Saved(Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            seen.append(trainer.strategy.algorithm.t)
            if len(seen) == 2:
                trainer.should_stop = True

    options = {"max_epochs": 100_000, "enable_checkpointing": True}
    trainer(strategy, world, callbacks=[save, Saved()], **options).fit(Toy(), loader())
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_by_time_is_written_at_the_same_steps(strategy, tmp_path):
    first, second = run_ranks(checkpoint_by_time, 2, strategy, tmp_path, init=False)
    assert first == second
    assert first[0] < first[1]
    assert len(list(tmp_path.glob("*.ckpt"))) == len(set(first))


def early_stopping(rank, world, strategy):
    stop = EarlyStopping("val/loss", patience=1, min_delta=10.0)
    stops = Stops(None, None)
    t = trainer(strategy, world, callbacks=[stop, stops], max_epochs=50)
    t.fit(Toy(), loader(), loader(shuffle=False))
    return stops.steps[-1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_early_stopping_stops_where_it_says(strategy):
    assert run_ranks(early_stopping, 2, strategy, init=False) == [12, 12]  # two epochs of six steps


def put_back(rank, world, strategy):
    t = trainer(strategy, world, max_epochs=1, max_time="00:01:00:00")
    callbacks = list(t.callbacks)
    t.fit(Toy(), loader(), loader(shuffle=False))
    loop = t.fit_loop
    owners = [loop, loop.epoch_loop, loop.epoch_loop.val_loop, t._signal_connector, t._logger_connector, *t.callbacks]
    assert t.callbacks == callbacks
    for owner in owners:  # no instance has a method of its own
        assert not [name for name in vars(owner) if callable(getattr(type(owner), name, None))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_stays_replaced_after_the_fit(strategy):
    run_ranks(put_back, 2, strategy, init=False)
