"""Under Lightning: ranks of any speed share each epoch, and a configuration means what it means for ranks in step."""

import os
import re
import signal
from datetime import timedelta
from itertools import chain

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.apart import ApartStrategy
from support.faults import forked
from support.ranks import RankFailed, run_ranks
from support.slurm import become_a_task
from support.toys import Toy, trainer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_cocod import ADPSGDStrategy, LocalSGDStrategy
from lightning_cocod.strategies.work_sharing import WorkSharing


class Numbered(Dataset):
    """Samples that say which they are."""

    def __init__(self, n):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum().tanh()[None], index


class Recording(Toy):
    """Notes what it is trained on, what the learning rate was, and when it was evaluated."""

    def __init__(self):
        super().__init__(norm=False)
        self.seen, self.rates, self.evaluated = [], [], []

    def loss(self, batch):
        return super().loss(batch[:2])

    def on_train_epoch_start(self):
        self.seen.append([])

    def training_step(self, batch, batch_idx):
        if not self.seen:  # resumed in mid-epoch
            self.seen.append([])
        self.seen[-1].append(batch[2].tolist())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.evaluated.append((self.trainer.current_epoch, len(self.seen[-1]) if self.seen else 0))


class Straggler(Callback):
    """This rank waits in its first batch of an epoch until the others have none left."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        store, epoch = dist.distributed_c10d._get_default_store(), trainer.current_epoch
        if trainer.global_rank == self.rank and batch_idx == 0 and self.world > 1:
            store.wait([f"others are done {epoch}"])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        store, epoch = dist.distributed_c10d._get_default_store(), trainer.current_epoch
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if trainer.global_rank != self.rank and last and store.add(f"done {epoch}", 1) == self.world - 1:
            store.set(f"others are done {epoch}", "1")


def numbered(n, batch_size=4, num_workers=0, **options):
    return DataLoader(Numbered(n), batch_size=batch_size, num_workers=num_workers, **{"shuffle": True, **options})


def fit(
    rank,
    world,
    n=61,
    slow=0,
    num_workers=0,
    validation=False,
    loader=None,
    module=Recording,
    callbacks=(),
    path=None,
    strategy=None,
    **options,
):
    L.seed_everything(rank, verbose=False)
    model = module()
    extra = [Straggler(slow, world)] if slow is not None else []
    run = trainer(strategy or ApartStrategy(), world, callbacks=[*extra, *callbacks], **options)
    train = numbered(n, num_workers=num_workers) if loader is None else loader
    run.fit(model, train, numbered(16) if validation else None, ckpt_path=path)
    return model, run


def samples(seen):
    return sorted(sample for batches in seen for batch in batches for sample in batch)


def epochs(rank, world, num_workers):
    model, _ = fit(rank, world, num_workers=num_workers, validation=True)
    return model.seen, model.evaluated


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_sample_exactly_once_per_epoch_with_a_straggler(world, num_workers):
    results = run_ranks(epochs, world, num_workers, init=False, timeout=150)
    for epoch in range(2):
        assert samples([seen[epoch] for seen, _ in results]) == list(range(61))
        counts = [len(seen[epoch]) for seen, _ in results]
        assert sum(counts) == 16
        if world > 1:
            assert counts[0] <= 2 + 2 * num_workers
    for seen, evaluated in results:
        assert evaluated == [(epoch, len(seen[epoch])) for epoch in range(2)]  # at the end of each


def split_evenly(rank, world):
    model = Recording()
    run = trainer(LocalSGDStrategy(period=1000), world, callbacks=[Straggler(0, world)], max_epochs=1)
    run.fit(model, numbered(64))
    return len(model.seen[0])


def test_ranks_in_step_split_the_data_evenly():
    """The negative control: whoever is fast is idle."""
    assert run_ranks(split_evenly, 2, init=False) == [8, 8]


# What a configuration means


class Linear(Recording):
    """The learning rate falls to 0 in as many steps as Lightning says there will be."""

    frequency, interval = 1, "step"

    def __init__(self):
        super().__init__()
        self.last_rates = []

    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        how = {"frequency": self.frequency, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **how}}

    def on_train_epoch_end(self):
        self.trainer.lightning_module.last_rates = [
            *getattr(self, "last_rates", []),
            self.optimizers().param_groups[0]["lr"],
        ]


class EverySecond(Linear):
    frequency = 2


class ByEpoch(Linear):
    interval = "epoch"


def configured(rank, world, straggler, module, options):
    model, run = fit(rank, world, slow=straggler, module=module, validation=True, **options)
    return {"seen": model.seen, "rates": model.last_rates, "evaluated": model.evaluated, "steps": run.global_step}


def on_one_device(module=Linear, n=61, world=1, **options):
    """The learning rates at the ends of its epochs, with the batches that each of N equal ranks would have."""
    model = module()
    trainer("auto", 1, **options).fit(model, numbered(n, batch_size=4 * world), numbered(16))
    return model.last_rates, len(model.evaluated)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, [16, 16]),
        ({"accumulate_grad_batches": 3}, [16, 16]),
        ({"max_epochs": -1, "max_steps": 4}, None),
        ({"max_epochs": -1, "max_steps": 11}, None),
        ({"limit_train_batches": 2}, None),
        ({"limit_train_batches": 0.6}, None),
    ],
    ids=str,
)
def test_a_configuration_means_what_it_means_for_ranks_in_step(world, options, batches):
    results = run_ranks(configured, world, 1, Linear, options, init=False)
    rates, validations = on_one_device(world=world, **options)
    for result in results:
        assert result["rates"] == pytest.approx(rates)
        assert len(result["evaluated"]) == validations
        assert len(result["seen"]) == len(rates)
    for epoch, expected in enumerate(batches or []):
        assert sum(len(result["seen"][epoch]) for result in results) == expected
    if "max_steps" in options:
        steps = options["max_steps"]
        per_epoch = -(-16 // world)
        left = steps - (len(rates) - 1) * per_epoch
        assert sum(len(result["seen"][-1]) for result in results) == min(16, left * world)
    if "limit_train_batches" in options:
        each = 2 if options["limit_train_batches"] == 2 else int(0.6 * -(-16 // world))
        assert sum(len(result["seen"][0]) for result in results) == each * world
    trained = samples([batches for result in results for batches in result["seen"][:1]])
    assert len(trained) == len(set(trained))


def test_a_schedule_that_counts_a_ranks_own_steps_ends_elsewhere():
    """The negative control: the numbers of steps differ."""
    slow, fast = run_ranks(configured, 2, 0, Linear, {}, init=False)
    assert slow["steps"] < 16 < fast["steps"]
    assert slow["rates"] == fast["rates"]


@pytest.mark.parametrize("module", [EverySecond, ByEpoch])
@pytest.mark.parametrize("options", [{}, {"max_epochs": -1, "max_steps": 11}], ids=str)
def test_a_schedule_of_a_lower_frequency(module, options):
    results = run_ranks(configured, 2, 0, module, options, init=False)
    rates, _ = on_one_device(module, world=2, **options)
    assert [result["rates"] for result in results] == [pytest.approx(rates)] * 2


class Places(Recording):
    """Notes which batches it has had at each validation."""

    def __init__(self):
        super().__init__()
        self.places = []

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.places.append(list(self.trainer.strategy.algorithm.numbers))


def intervals(rank, world, options):
    return fit(rank, world, slow=None, module=Places, validation=True, n=66, **options)[0].places


@pytest.mark.parametrize(
    ("interval", "places"), [(0.25, [4, 8, 12, 16]), (3, [6, 12, 17]), (0.5, [8, 16]), (1, [2, 4, 6, 8, 10, 12, 14, 16, 17])]
)
def test_all_ranks_validate_at_the_same_places(interval, places):
    """Whatever lies before a place has been trained on, once, and nothing beyond it: 17 batches, the last of two samples."""
    results = run_ranks(intervals, 2, {"val_check_interval": interval}, init=False)
    assert [len(seen) for seen in results] == [2 * len(places)] * 2
    for number, place in enumerate([*places, *(17 + place for place in places)]):
        assert sorted(chain.from_iterable(seen[number] for seen in results)) == list(range(place))


# Stops


def stop_by_flag(trainer):
    trainer.should_stop = True


def stop_by_sigterm(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


class Stops(Callback):
    """One rank alone wants to stop, in its third batch."""

    def __init__(self, rank, how):
        self.rank, self.how, self.batches, self.validations, self.saved = rank, how, 0, 0, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches += 1
        if trainer.global_rank == self.rank and self.batches == 3:
            self.how(trainer)

    def on_validation_end(self, trainer, module):
        self.validations += 1


def stop_on_one_rank(rank, world, who, how, options):
    stops = Stops(who, how)
    try:
        fit(rank, world, slow=None, n=4000, callbacks=[stops], max_epochs=1000, **options)
        ended = "stopped"
    except SIGTERMException:
        ended = "SIGTERM"
    return ended, stops.batches, stops.validations


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"validation": True},
        {"validation": True, "val_check_interval": 1},
        {"validation": True, "check_val_every_n_epoch": 2, "accumulate_grad_batches": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("how", "expected"), [(stop_by_flag, "stopped"), (stop_by_sigterm, "SIGTERM")])
@pytest.mark.parametrize("who", [0, 1])
def test_a_stop_on_one_rank_reaches_all(who, how, expected, options):
    results = run_ranks(stop_on_one_rank, 2, who, how, options, init=False, timeout=40)
    assert [ended for ended, _, _ in results] == [expected] * 2
    assert len({validations for _, _, validations in results}) == 1
    assert results[who][1] >= 3


def stop_while_others_wait(rank, world, how):
    """Rank 0 is at a meeting, or on its way to one, when rank 1 stops in mid-epoch."""
    stops = Stops(1, how)

    class Late(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if rank == 1 and batch_idx == 2:
                dist.distributed_c10d._get_default_store().wait(["over"])

        def on_train_batch_end(self, trainer, module, *_):
            if rank == 0 and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                dist.distributed_c10d._get_default_store().set("over", "1")

    try:
        fit(rank, world, slow=None, callbacks=[Late(), stops], validation=True, max_epochs=1000)
        return "stopped"
    except SIGTERMException:
        return "SIGTERM"


@pytest.mark.parametrize(("how", "expected"), [(stop_by_flag, "stopped"), (stop_by_sigterm, "SIGTERM")])
def test_a_stop_while_another_rank_waits_for_this_one(how, expected):
    assert run_ranks(stop_while_others_wait, 2, how, init=False, timeout=40) == [expected] * 2


def early_stopping(rank, world):
    stop = EarlyStopping("val/loss", patience=1, min_delta=10.0)
    model, run = fit(rank, world, slow=1, callbacks=[stop], validation=True, max_epochs=50)
    return run.current_epoch, samples(model.seen)


class Terminated(Callback):
    """Rank 1 gets SIGTERM in a validation."""

    def on_validation_batch_start(self, trainer, *_):
        if trainer.global_rank == 1 and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(rank, world):
    strategy = ApartStrategy(process_group_timeout=15)
    options = {"n": 68, "slow": None, "validation": True, "val_check_interval": 8}  # the last of 17 batches is left
    with pytest.raises(SIGTERMException):
        fit(rank, world, strategy=strategy, callbacks=[Terminated()], **options)


def test_sigterm_in_a_validation_after_which_one_rank_has_no_batch_any_more():
    run_ranks(terminated, 2, init=False, timeout=40)


class Dies(Callback):
    def on_train_batch_start(self, trainer, module, batch, number):
        if trainer.global_rank == 0 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def loses_the_store(rank, world):
    fit(rank, world, n=40_000, slow=None, strategy=ADPSGDStrategy(timeout=20), callbacks=[Dies()])


def test_the_loss_of_rank_0_and_its_store_is_named_where_a_batch_is_claimed():
    _, (code, words) = run_ranks(forked, 2, loses_the_store, init=False, timeout=60)
    assert code == 1
    assert re.match(r"lightning_cocod\S*PeerLost: rank 0\D", words.strip().splitlines()[-1]), words


def test_early_stopping_stops_where_it_says():
    results = run_ranks(early_stopping, 2, init=False)
    assert [epoch for epoch, _ in results] == [2, 2]
    assert sorted(chain.from_iterable(seen for _, seen in results)) == sorted([*range(61), *range(61)])


class Expired(Timer):
    """The clock of rank 1 runs out after its second batch; rank 0's never does."""

    def __init__(self, rank):
        super().__init__(duration=timedelta(hours=1), verbose=False)
        self.mine, self.batches = rank == 1, 0

    def time_elapsed(self, stage="train"):
        self.batches += 1
        return 1e9 if self.mine and self.batches > 2 else 0.0


def time_limit(rank, world):
    fit(rank, world, slow=None, callbacks=[Expired(rank)], max_epochs=100_000)


def test_a_time_limit_of_one_rank_stops_all():
    run_ranks(time_limit, 2, init=False, timeout=40)


class Skips(Recording):
    """Rank 0 leaves out what is left of an epoch after three of its batches."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.trainer.global_rank == 0 and batch_idx == 3 else None


def skipping(rank, world):
    model, _ = fit(rank, world, slow=None, module=Skips, validation=True)
    return [len(epoch) for epoch in model.seen]


def test_a_rank_that_skips_the_rest_of_an_epoch_leaves_it_to_the_others():
    first, second = run_ranks(skipping, 2, init=False, timeout=40)
    assert max(first) <= 3
    assert all(sum(pair) >= 14 for pair in zip(first, second, strict=True))  # without what it had in its hands


# Checkpoints


class Saves(Callback):
    """Saves in a hook, at one of the times, and notes which batches this rank has had. The first batches are in step."""

    def __init__(self, path, hook, time):
        self.path, self.time, self.times, self.had, self.left = path, time, 0, None, 0
        setattr(self, hook, self.save)

    def on_train_batch_start(self, trainer, *_):
        if trainer.strategy.algorithm.t < 2:
            dist.barrier()

    def save(self, trainer, *_):
        self.times += not trainer.sanity_checking
        if self.times == self.time and self.had is None:
            self.had = list(trainer.strategy.algorithm.numbers)
            trainer.save_checkpoint(self.path)


def saving(rank, world, path, hook, time, options):
    saves = Saves(path, hook, time)
    fit(rank, world, slow=None, validation=True, callbacks=[saves], module=Counts, **options)
    return saves.had


class Counts(Linear):
    """Notes the numbers of its batches."""

    def on_fit_start(self):
        self.numbers = self.trainer.strategy.algorithm.numbers


def resuming(rank, world, path, options, forgets=False):
    with pytest.MonkeyPatch.context() as patch:
        if forgets:
            patch.setattr(WorkSharing, "load_state_dict", lambda *_: None)
        model, run = fit(rank, world, slow=None, validation=True, module=Counts, path=path, **options)
    return {"numbers": model.numbers, "evaluated": len(model.evaluated), "epoch": run.current_epoch}


IN_BATCH, VALIDATED, EPOCH = "on_train_batch_end", "on_validation_end", "on_train_epoch_end"


@pytest.mark.parametrize(
    ("hook", "time", "validations"),
    [
        (IN_BATCH, 1, 8),
        (IN_BATCH, 2, 8),
        (VALIDATED, 1, 7),
        (VALIDATED, 3, 5),
        (VALIDATED, 4, 4),
        (EPOCH, 1, 4),
        (VALIDATED, 6, 2),
        (EPOCH, 2, 0),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_a_resumed_run_sees_the_rest_exactly_once(hook, time, validations, world, tmp_path):
    options = {"val_check_interval": 0.25, "num_sanity_val_steps": 0}
    path = str(tmp_path / "saved.ckpt")
    had = run_ranks(saving, 2, path, hook, time, options, init=False, timeout=40)
    results = run_ranks(resuming, world, path, options, init=False, timeout=40)
    assert sorted(chain(*had, *(result["numbers"] for result in results))) == list(range(32))
    assert {result["epoch"] for result in results} == {2}
    if world == 2:
        assert {result["evaluated"] for result in results} == {validations}


def alone(rank, world, path, options):
    model, run = fit(rank, world, slow=None, validation=True, path=path, **options)
    return samples(model.seen[:1]), run.current_epoch


@pytest.mark.parametrize(("hook", "time"), [(IN_BATCH, 2), (VALIDATED, 3)])
def test_one_rank_alone_begins_the_epoch_again(hook, time, tmp_path):
    path, options = str(tmp_path / "saved.ckpt"), {"val_check_interval": 0.25, "num_sanity_val_steps": 0}
    run_ranks(saving, 2, path, hook, time, options, init=False, timeout=40)
    (first, epoch), *_ = run_ranks(alone, 1, path, options, init=False, timeout=40)
    assert {*first} == {*range(61)}
    assert epoch == 2


def test_without_what_the_checkpoint_knows_batches_come_again(tmp_path):
    """The negative control."""
    path = str(tmp_path / "saved.ckpt")
    had = run_ranks(saving, 2, path, IN_BATCH, 2, {}, init=False, timeout=40)
    results = run_ranks(resuming, 2, path, {}, True, init=False, timeout=40)
    assert len([*chain(*had, *(result["numbers"] for result in results))]) == 32 + 4


class ReducesAnEpoch(Counts):
    """Ranks meet in a metric of the epoch. Notes which samples are trained on."""

    def on_fit_start(self):
        super().on_fit_start()
        self.samples = []

    def training_step(self, batch, batch_idx):
        self.samples += batch[2].tolist()
        loss = super().training_step(batch, batch_idx)
        self.log("epoch/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


def reducing(rank, world, path, hook, n):
    """The samples of this run's first epoch, until it is saved or from then on."""
    saves = Saves(path, hook, 2) if hook is not None else Saves(path, "on_fit_end", 2)
    strategy = ApartStrategy(process_group_timeout=15)
    model, run = fit(
        rank,
        world,
        n=n,
        slow=None,
        callbacks=[saves],
        module=ReducesAnEpoch,
        path=path if hook is None else None,
        strategy=strategy,
        max_epochs=1,
    )
    return {"had": saves.had, "samples": model.samples, "reduced": "epoch/loss" in run.callback_metrics}


@pytest.mark.parametrize(("n", "left"), [(20, 4), (17, 1)])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_a_resumed_epoch_that_has_fewer_batches_left_than_there_are_ranks(n, left, world, tmp_path):
    """Five batches, four of which have been trained on. A rank without any would keep the others waiting for its metric."""
    path = str(tmp_path / "saved.ckpt")
    first = run_ranks(reducing, 2, path, IN_BATCH, n, init=False, timeout=40)
    assert sorted(chain(*(result["had"] for result in first))) == [0, 1, 2, 3]
    results = run_ranks(reducing, world, path, None, n, init=False, timeout=40)
    assert all(result["reduced"] and result["samples"] for result in results)
    assert {*chain(*(result["samples"] for result in results))}.isdisjoint(chain(*(r["samples"][:8] for r in first)))
    parts = [*chain(*(result["samples"] for result in results))]
    assert len({*parts}) == left
    assert len(parts) == max(left, world)  # each once, unless there are fewer samples than ranks


def test_other_data_is_refused(tmp_path):
    path = str(tmp_path / "saved.ckpt")
    run_ranks(saving, 2, path, IN_BATCH, 2, {}, init=False, timeout=40)
    with pytest.raises(RankFailed, match="was saved in an epoch of 16 batches, and there are 20"):
        run_ranks(resuming, 2, path, {"n": 80}, init=False, timeout=40)


def resumed_rates(rank, world, path, options):
    model, _ = fit(rank, world, slow=None, validation=True, module=Linear, path=path, **options)
    return model.last_rates


def saving_rates(rank, world, path, time):
    fit(rank, world, slow=None, validation=True, module=Linear, callbacks=[Saves(path, IN_BATCH, time)])


@pytest.mark.parametrize("world", [2, 3])
def test_schedules_of_a_resumed_run_end_where_they_should(world, tmp_path):
    path = str(tmp_path / "saved.ckpt")
    run_ranks(saving_rates, 2, path, 2, init=False, timeout=40)
    rates = run_ranks(resumed_rates, world, path, {}, init=False, timeout=40)
    if world == 2:
        assert rates == [pytest.approx([0.005, 0.0])] * 2
    assert len({str(own) for own in rates}) == 1


def checkpoints(rank, world, folder, options):
    best = ModelCheckpoint(folder, "{epoch}-{step}", monitor="val/loss", save_top_k=-1, save_last=True)
    fit(rank, world, callbacks=[best], validation=True, n=64, enable_checkpointing=True, **options)
    return best.best_model_path, best.last_model_path, sorted(best.best_k_models)


@pytest.mark.parametrize(
    "options", [{"slow": 1}, {"slow": None, "val_check_interval": 0.5, "accumulate_grad_batches": 3}], ids=str
)
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_name_the_same_checkpoints(world, options, tmp_path):
    results = run_ranks(checkpoints, world, tmp_path, options, init=False, timeout=40)
    assert len({str(result) for result in results}) == 1
    best, last, every = results[0]
    assert {str(path) for path in tmp_path.glob("*.ckpt")} == {*every, last}
    assert best in every


SCONTROL = """#!/bin/sh
echo "$@" >> "$0.calls"
kill -TERM $(cat "${0%/*}"/*.pid)
"""
"""Notes what it is asked and does what SLURM does to the tasks of a job that it requeues."""


class Signalled(Callback):
    """Rank 1 gets the requeue signal in its second batch."""

    def __init__(self):
        self.had, self.batches = None, 0

    def on_train_batch_end(self, trainer, *_):
        self.batches += 1
        if trainer.global_rank == 1 and self.batches == 2:
            os.kill(os.getpid(), signal.SIGUSR2)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        numbers = trainer.strategy.algorithm.numbers
        self.had = numbers[: len(numbers) - (batches.ready - batches.processed)]


def requeued(rank, world, folder):
    become_a_task(rank, world, folder)
    options = {"plugins": [SLURMEnvironment(requeue_signal=signal.SIGUSR2)], "default_root_dir": folder}
    options |= {"validation": True, "slow": None, "n": 1200, "max_epochs": 2, "val_check_interval": 30}
    signalled = Signalled()
    with pytest.raises(SIGTERMException):
        fit(rank, world, module=Counts, callbacks=[signalled], **options)
    return signalled.had, fit(rank, world, module=Counts, **options)[0].numbers


def test_the_requeue_signal_saves_together(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    results = run_ranks(requeued, 2, tmp_path, init=False, timeout=60)
    assert (tmp_path / "scontrol.calls").read_text() == "requeue 17\n"
    assert sorted(chain(*(had + again for had, again in results))) == list(range(600))


# Loaders


def own_sampler(rank, world, use_distributed_sampler):
    generator = torch.Generator().manual_seed(rank)
    weights = [1.0] * 10 + [0.0] * 20 + [1.0] * 10
    sampler = WeightedRandomSampler(weights, 40, generator=generator)
    loader = numbered(40, shuffle=None, sampler=sampler)
    model, _ = fit(rank, world, loader=loader, use_distributed_sampler=use_distributed_sampler)
    return model.seen


@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_a_users_sampler_draws_one_order_for_all(use_distributed_sampler):
    results = run_ranks(own_sampler, 2, use_distributed_sampler, init=False, timeout=40)
    torch.manual_seed(0)
    for epoch in range(2):
        drawn = samples([seen[epoch] for seen in results])
        assert len(drawn) == 40
        assert not set(drawn) & set(range(10, 30))
        assert len(set(drawn)) < 20  # with replacement: with an order of its own on each rank there would be other counts
    assert samples([seen[0] for seen in results]) != samples([seen[1] for seen in results])


class LoadsAnew(Recording):
    def train_dataloader(self):
        return numbered(61)


def loading(rank, world, options, loader):
    module = LoadsAnew if options else Recording
    model = module()
    run = trainer(ApartStrategy(), world, callbacks=[Straggler(0, world)], max_epochs=3, **options)
    run.fit(model, None if options else numbered(61, **loader))
    return model.seen


@pytest.mark.parametrize(
    ("options", "loader", "kept"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, {}, 61),
        ({}, {"num_workers": 1, "persistent_workers": True}, 61),
        ({}, {"drop_last": True}, 60),
    ],
    ids=str,
)
def test_other_loaders(options, loader, kept):
    results = run_ranks(loading, 2, options, loader, init=False, timeout=60)
    for epoch in range(3):
        drawn = samples([seen[epoch] for seen in results])
        assert len(drawn) == len(set(drawn)) == kept


# What is refused


class Endless(IterableDataset):
    def __iter__(self):
        return iter(Numbered(40))


class DrawsItself(Recording):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class ReducesInStep(Recording):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss


class GathersInStep(Recording):
    def training_step(self, batch, batch_idx):
        return self.all_gather(self.loss(batch)).mean()


class PlateauByStep(Recording):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "train/loss"}}


def batch_sampler():
    class Mine(BatchSampler):
        pass

    return DataLoader(Numbered(40), batch_sampler=Mine(SequentialSampler(range(40)), 4, False))


REFUSED = {
    "ModelCheckpoint(every_n_train_steps)": lambda: {"callbacks": [ModelCheckpoint(every_n_train_steps=2)]},
    "ModelCheckpoint(train_time_interval)": lambda: {"callbacks": [ModelCheckpoint(train_time_interval=timedelta(hours=1))]},
    "check_val_every_n_epoch=None": lambda: {"check_val_every_n_epoch": None, "val_check_interval": 2},
    "a val_check_interval of time": lambda: {"val_check_interval": "00:01:00:00"},
    "min_steps": lambda: {"min_steps": 3},
    "sync_batchnorm=True": lambda: {"sync_batchnorm": True},
    "LearningRateFinder": lambda: {"callbacks": [LearningRateFinder()]},
    "GradientAccumulationScheduler": lambda: {"callbacks": [GradientAccumulationScheduler({1: 2})], "max_steps": 5},
    "interval='step'": lambda: {"module": PlateauByStep},
    "an iterable data set": lambda: {"loader": DataLoader(Endless(), batch_size=4)},
    "several loaders": lambda: {"loader": [numbered(40), numbered(40)]},
    "through a DataLoader of torch, not through list": lambda: {"loader": [[1], [2]]},
    "a batch sampler of your own": lambda: {"loader": batch_sampler(), "use_distributed_sampler": False},
    "in_order=False": lambda: {"loader": numbered(40, num_workers=1, in_order=False)},
    "a DistributedSampler of your own": lambda: {
        "loader": numbered(40, shuffle=None, sampler=DistributedSampler(Numbered(40), 2, 0))
    },
    "1 batches are too few for 2 ranks": lambda: {"n": 3},
    r"training_step\(dataloader_iter\) draws": lambda: {"module": DrawsItself},
    "training_step reduces over all ranks": lambda: {"module": ReducesInStep},
    "training_step gathers from all ranks": lambda: {"module": GathersInStep},
}


def refused(rank, world, what):
    try:
        fit(rank, world, **{"slow": None, "enable_checkpointing": True, **REFUSED[what]()})
    except MisconfigurationException as error:
        return str(error)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for message in run_ranks(refused, 2, what, init=False, timeout=40):
        assert re.search(what if "\\" in what else re.escape(what), message)
        assert "\n" not in message


def test_proportional_batches_are_refused():
    with pytest.raises(ValueError, match="batch_sizes='proportional' is for ranks in step"):
        ADPSGDStrategy(batch_sizes="proportional")


def put_back(rank, world):
    model = Recording()
    t = trainer(ApartStrategy(), world, max_epochs=1, max_time="00:01:00:00", callbacks=[Straggler(0, world)])
    callbacks = list(t.callbacks)
    t.fit(model, numbered(61), numbered(16))
    loop = t.fit_loop
    owners = [loop, loop.epoch_loop, loop.epoch_loop.val_loop, t._signal_connector, t._logger_connector, *t.callbacks]
    assert t.callbacks == callbacks
    for owner in owners:  # no instance has a method of its own
        assert not [name for name in vars(owner) if callable(getattr(type(owner), name, None))]
    t = trainer(ApartStrategy(), world, max_epochs=-1, max_steps=3, callbacks=[Straggler(0, world)])
    t.fit(model, numbered(61))
    assert (t.max_epochs, t.max_steps) == (-1, 3)


def test_nothing_stays_replaced_after_the_fit():
    run_ranks(put_back, 2, init=False)


# AD-PSGD


def gossip(rank, world, options):
    model, run = fit(rank, world, n=121, strategy=ADPSGDStrategy(), validation=True, **options)
    return model.seen, torch.cat([p.detach().flatten() for p in model.parameters()]), run.callback_metrics["val/loss"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ad_psgd_shares_its_epochs_and_ends_on_one_model(world):
    results = run_ranks(gossip, world, {}, init=False, timeout=60)
    for epoch in range(2):
        assert samples([seen[epoch] for seen, _, _ in results]) == list(range(121))
        if world > 1:
            assert len(results[0][0][epoch]) <= 2 < max(len(seen[epoch]) for seen, _, _ in results[1:])
    for _, weights, loss in results:
        assert torch.equal(weights, results[0][1])
        assert torch.equal(loss, results[0][2])
