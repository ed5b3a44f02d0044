"""A run that is interrupted anywhere and resumed equals the run that was not, bit for bit.

Exhaustive, under CoCoD: every step of two epochs of 6 batches, with period 4, so that each place in a round, in an epoch and
in an accumulation occurs, with everything that has a memory. What depends on Lightning alone (loaders, hooks, schedules) is
tried with one strategy, since all go through the same code; the others get the cases in which their own state matters.
Elsewhere every third checkpoint is resumed, which meets all places of a round, or every fifth, which meets an epoch's end
and all places of an accumulation over three batches.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from support.ranks import run_ranks
from support.resuming import BATCH, Adam, Augmented, Saver, fit, resume, same, shuffled
from support.toys import STRATEGIES, VARIANTS, Toy, TwoOptimizers, dataset
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from lightning_cocod import strategies
from lightning_cocod.compression import Int4, PowerSGD, TopK

BY_NAME = {strategy.registered_name: strategy for strategy in strategies.STRATEGIES}


class Stream(IterableDataset):
    """The same, without a length."""

    def __iter__(self):
        data = Augmented(24)
        return (data[i] for i in torch.randperm(len(data)).tolist())


class OnPlateau(Toy):
    """The learning rate falls when the loss on the validation data, the same on all ranks, does not."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss", "interval": "epoch"}}


class NeverZeroed(Adam):
    """Gradients are zeroed by the user, every third step."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


class Two(Adam):
    """A batch is a dictionary of two."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch["a"]) + self.loss(batch["b"])


class Thaws(Adam):
    """The first layer is frozen at first, and again in the end."""

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].requires_grad_(2 <= self.trainer.global_step < 7)


class Noisy(Adam):
    """Noise is drawn when an epoch starts, and kept where no checkpoint looks."""

    noise = 0.0

    def on_train_epoch_start(self):
        self.noise = torch.rand(()).item()

    def loss(self, batch):
        x, y = batch
        return super().loss((x + self.noise, y))


class Walk(Sampler):
    """Each index follows from the one before."""

    def __len__(self):
        return 24

    def __iter__(self):
        return accumulate((int(torch.randint(48, ())) for _ in range(24)), lambda here, step: (here + step) % 48)


def walking():
    return DataLoader(Augmented(), batch_size=4, sampler=Walk())


def own_generator():
    return DataLoader(
        Augmented(), batch_size=4, sampler=RandomSampler(Augmented(), generator=torch.Generator().manual_seed(4))
    )


def pair():
    return {"a": shuffled()(), "b": DataLoader(Augmented(16), batch_size=4, shuffle=True)}


class Overflows(Adam):
    """The gradient of rank 1 overflows in two steps, so its scaler skips them."""

    def on_after_backward(self):
        if self.trainer.global_rank == 1 and self.trainer.global_step in (2, 7):
            self.net[0].weight.grad.fill_(float("inf"))


class Draws(Adam):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Stateful(DataLoader):
    """A loader that knows where it is: left to Lightning."""

    def __init__(self):
        super().__init__(dataset(24), batch_size=4)
        self.next = 0

    def __iter__(self):
        for number in range(self.next, 6):
            self.next = (number + 1) % 6
            yield tuple(tensor[4 * number : 4 * number + 4] for tensor in self.dataset.tensors)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def mixed():
    return {"a": Stateful(), "b": shuffled()()}


class Counting(L.LightningDataModule):
    """Has a state: the strength of its noise grows with every batch."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def train_dataloader(self):
        return shuffled()()

    def val_dataloader(self):
        return DataLoader(dataset(16), batch_size=8)

    def on_after_batch_transfer(self, batch, _):
        self.batches += self.trainer.training
        x, y = batch
        return x + 0.01 * self.batches, y

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Grows(Adam):
    """Accumulates over three batches from the second epoch on."""

    def configure_callbacks(self):
        return [GradientAccumulationScheduler({0: 1, 1: 3})]


class Averaged(Adam):
    """Ends on the ranks' moving averages, which no rank has in common."""

    def configure_callbacks(self):
        return [callbacks.EMAWeightAveraging(decay=0.8)]


class StochasticallyAveraged(Adam):
    """Averages the weights with which each epoch begins. BatchNorm would get one epoch more."""

    def __init__(self):
        super().__init__()
        self.net[1] = torch.nn.Identity()

    def configure_callbacks(self):
        return [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=3)]


def scaled():
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3))]}


@dataclass
class Case:
    """What is trained, where it saves, and what of it is tried.

    Attributes:
        made: Trainer options that are made anew for each run.
        every: resume from each checkpoint, or from every third or fifth; never from each under other strategies.
        needs: a callback that not every Lightning has.
        inexact: checkpoints from which a run does not go on as it should; the documentation says so. Most are those that a
            callback's batch hook has saved at an epoch's last batch: Lightning leaves out the validation that follows, and
            with it what a plateau is judged by; without a length it does not see that the epoch is over.
    """

    module: type[L.LightningModule] = Adam
    loader: Any = field(default_factory=shuffled)
    hook: str = BATCH
    options: dict[str, Any] = field(default_factory=dict)
    made: Any = dict
    strategy: dict[str, Any] = field(default_factory=dict)
    strategies: tuple[str, ...] = ("cocod",)
    world: int = 2
    every: int = 1
    needs: str = "Callback"
    inexact: tuple[int, ...] = ()


ALL = tuple(STRATEGIES)
KINDS = (
    "cocod",
    "overlap_local_sgd",
    "eager_diloco",
    "streaming_diloco",
    "pipe_sgd",
    "ssgd",
    "ssd_sgd",
    "dist_ef_sgd",
    "sgp",
)
"""One of each kind of machinery; "every step" has them all."""
CODED = [name for name in (*KINDS, "local_sgd", "cd_sgd") if name not in ("ssgd", "ssd_sgd", "sgp")]
WARM = ("cocod", "dc_s3gd", "overlap_local_sgd", "streaming_diloco", "ssd_sgd")
VALIDATION, EPOCH, START, EPOCH_START = (
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_epoch_start",
)
CASES = {
    "every step": Case(strategies=(*ALL, *VARIANTS)),
    "one device": Case(world=1, every=3),
    "four ranks": Case(loader=shuffled(96), options={"max_epochs": 1}, world=4, every=3),
    "nodes of two ranks": Case(
        loader=shuffled(96),
        options={"max_epochs": 1},
        strategy={"intra_node": 2, "ranks_per_node": 2, "period": 4},
        strategies=("cocod", "overlap_local_sgd", "eager_diloco"),
        world=4,
        every=3,
    ),
    "within the warm-up": Case(strategy={"warmup_steps": 5}, strategies=WARM, every=3),
    "periods that change": Case(strategy={"period": {0: 1, 3: 2, 6: 5}}, strategies=ALL, every=3),
    "unequal weights": Case(strategy={"weights": [2, 1]}, strategies=ALL, every=3),
    "within an accumulation": Case(options={"accumulate_grad_batches": 4}, strategies=ALL),
    "an accumulation that grows": Case(Grows, every=3),
    "manual optimization": Case(TwoOptimizers, strategies=ALL, every=5),
    "parameters that freeze and thaw": Case(Thaws, strategies=KINDS, every=3),
    "with a codec": Case(strategy={"compression": Int4(block=8)}, strategies=CODED, every=3),
    "parameters that freeze and thaw, with a codec": Case(
        Thaws, strategy={"compression": TopK(ratio=0.25)}, strategies=("cocod", "diloco", "eager_diloco"), every=3
    ),
    "with factors": Case(
        Thaws,
        strategy={"compression": PowerSGD(rank=1)},
        strategies=("cocod", "pipe_sgd", "overlap_local_sgd", "streaming_diloco"),
        every=3,
    ),
    "gradients that the user zeroes": Case(NeverZeroed, every=5),
    "clipping": Case(options={"gradient_clip_val": 0.1}, strategies=("cocod", "ssgd", "ssd_sgd", "compskip_dsgd"), every=5),
    "a scaler that skips steps": Case(Overflows, made=scaled, every=5),
    "a moving average": Case(Averaged, hook=START, strategies=ALL, every=5, needs="EMAWeightAveraging"),
    "a moving average that is yet to be moved": Case(Averaged, every=5, needs="EMAWeightAveraging", inexact=(0, 5, 10)),
    "a stochastic average": Case(StochasticallyAveraged, every=5, inexact=(0, 5, 10)),
    "a stochastic average, after an epoch": Case(
        StochasticallyAveraged, hook=EPOCH, options={"max_epochs": 3}, inexact=(2,)
    ),
    "bf16-mixed": Case(options={"precision": "bf16-mixed"}, every=5),
    "workers": Case(loader=shuffled(num_workers=2), options={"limit_train_batches": 4}, every=3),
    "after a validation": Case(hook=VALIDATION, options={"val_check_interval": 2}),
    "after the last validation": Case(OnPlateau, hook=VALIDATION, options={"max_epochs": 4}),
    "after an epoch": Case(OnPlateau, hook=EPOCH, options={"max_epochs": 4}),
    "before an epoch": Case(OnPlateau, hook=EPOCH_START, options={"max_epochs": 4}),
    "before a batch": Case(hook=START, options={"accumulate_grad_batches": 3}, every=5),
    "a plateau in mid-epoch": Case(OnPlateau, options={"limit_train_batches": 3}, inexact=(2,)),
    "a limit on steps": Case(options={"max_epochs": -1, "max_steps": 9}, every=3),
    "a limit on batches": Case(options={"limit_train_batches": 4}, every=3),
    "no length": Case(loader=lambda: DataLoader(Stream(), batch_size=4), every=5, inexact=(5,)),
    "no length, before a batch": Case(loader=lambda: DataLoader(Stream(), batch_size=4), hook=START, every=5),
    "no length, after an epoch": Case(
        loader=lambda: DataLoader(Stream(), batch_size=4), hook=EPOCH, options={"max_epochs": 3}
    ),
    "no length, before an epoch": Case(
        loader=lambda: DataLoader(Stream(), batch_size=4), hook=EPOCH_START, options={"max_epochs": 3}
    ),
    "no length, workers": Case(
        loader=lambda: DataLoader(Stream(), batch_size=4, num_workers=1), options={"max_epochs": 1}, every=3
    ),
    "a generator of its own": Case(
        loader=own_generator, options={"use_distributed_sampler": False, "limit_train_batches": 6}, every=5
    ),
    "two loaders": Case(Two, pair, every=5),
    "loaders made anew": Case(options={"reload_dataloaders_every_n_epochs": 1}, every=5),
    "a loader with a state of its own": Case(loader=Stateful, options={"use_distributed_sampler": False}, every=5),
    "one such loader and one without": Case(Two, mixed, options={"use_distributed_sampler": False}, every=5),
    "a data module with a state": Case(options={"data": Counting}, every=5),
    "a sampler that remembers": Case(loader=walking, options={"use_distributed_sampler": False}, every=5, inexact=(10,)),
    "noise of an epoch": Case(Noisy, every=5, inexact=(0, 5, 10)),
    "within a batch": Case(hook="on_after_backward", options={"accumulate_grad_batches": 3}, every=5, inexact=(0, 5, 10)),
    "batches that the module draws": Case(Draws, every=5),
    "before the module draws a batch": Case(Draws, hook=START, every=5),
}


def every_checkpoint(rank, world, folder, strategy, name):
    """Whether saving changes nothing, and from which checkpoints a resumed run ends where the uninterrupted one does."""
    case = CASES[name]

    def run(do, path=None, callbacks=()):
        chosen = BY_NAME[strategy](**{**VARIANTS.get(strategy, {}), **case.strategy})
        return do(rank, world, chosen, case.module, case.loader, path, callbacks, **case.options, **case.made())

    saver = Saver(folder, case.hook)
    expected = run(fit, callbacks=[saver])
    undisturbed = same(expected, run(fit))
    resumed = {}
    for number, path in enumerate(saver.saved):
        if number % (case.every if strategy == "cocod" else max(3, case.every)) == 0:
            to_train = torch.load(path, weights_only=True)["global_step"] < expected[1]
            resumed[number] = same(expected, run(resume, path), to_train=to_train)
    return undisturbed, resumed


@pytest.mark.parametrize(
    ("strategy", "case"), [(strategy, name) for name, case in CASES.items() for strategy in case.strategies]
)
def test_resumed_equals_uninterrupted(strategy, case, tmp_path):
    if not hasattr(callbacks, CASES[case].needs):
        pytest.skip(f"this Lightning has no {CASES[case].needs}")
    world = CASES[case].world
    for undisturbed, resumed in run_ranks(every_checkpoint, world, str(tmp_path), strategy, case, init=False, timeout=200):
        assert undisturbed
        assert len(resumed) >= 2
        assert tuple(number for number, equal in resumed.items() if not equal) == CASES[case].inexact


class AveragedWithBatchNorm(StochasticallyAveraged):
    """Ends with an epoch for the statistics of BatchNorm alone."""

    def __init__(self):
        super().__init__()
        self.net[1] = torch.nn.BatchNorm1d(12)


def within_the_last_epoch(rank, world, folder):
    saver = Saver(folder)
    fit(rank, world, "cocod", AveragedWithBatchNorm, callbacks=[saver])
    with pytest.raises(AttributeError, match="_accumulate_grad_batches"):
        resume(rank, world, "cocod", AveragedWithBatchNorm, path=saver.saved[-2])


def test_the_epoch_that_stochastic_averaging_adds_cannot_be_resumed_in_lightning(tmp_path):
    run_ranks(within_the_last_epoch, 2, str(tmp_path), init=False, leftovers_ok=True)
