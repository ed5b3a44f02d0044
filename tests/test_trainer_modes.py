"""Ways of running a Trainer: tuners, finetuning, profilers, short runs, compiled modules, modules made on the device."""

import copy
import logging

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, dataset, flat, loader, made, parameters, trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_cocod import CoCoDStrategy, LocalSGDStrategy, PeerLost

over_strategies = pytest.mark.parametrize("strategy", made(period=4), ids=STRATEGIES)


class Path(Callback):
    def __init__(self):
        self.path = []

    def on_train_batch_end(self, trainer, module, *_):
        self.path.append(parameters(module))


def nothing_is_replaced(t, callbacks):
    assert t.callbacks == callbacks
    loops = t.fit_loop, t.fit_loop.epoch_loop, t.fit_loop.epoch_loop.val_loop, t._signal_connector
    assert not {"run", "advance", "on_advance_end", "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"} & {
        name for owner in loops for name in vars(owner)
    }
    assert t.strategy._algorithm is None
    assert t.strategy._communicator is None


# --- the learning rate finder and the batch size scaler


class Rated(Toy):
    def __init__(self, rate=0.05, batch_size=8):
        super().__init__(dropout=0.0)  # a search moves Lightning's random state, under every strategy
        self.lr, self.batch_size = rate, batch_size

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(dataset(), batch_size=self.batch_size, shuffle=True)


SEARCH = {"min_lr": 1e-4, "max_lr": 1.0}


def finding(rank, world, strategy, folder):
    L.seed_everything(5, verbose=False)
    model = Rated()
    t = trainer(strategy, world, default_root_dir=folder, max_epochs=10)
    callbacks, before = list(t.callbacks), flat(model)
    finder = Tuner(t).lr_find(model, num_training=40, **SEARCH)
    nothing_is_replaced(t, callbacks)
    assert not list(folder.glob("*.ckpt"))
    return {
        "lr": model.lr,
        "suggestion": finder.suggestion(),
        "results": finder.results,
        "before": before,
        "after": flat(model),
    }


@pytest.mark.parametrize("strategy", [*made(period=4), CoCoDStrategy(warmup_steps=1000)], ids=[*STRATEGIES, "warm-up"])
def test_the_learning_rate_finder_finds_the_same_everywhere_and_leaves_the_model_as_it_was(strategy, tmp_path):
    first, second = run_ranks(finding, 2, strategy, tmp_path, init=False)
    assert first["lr"] == second["lr"] == first["suggestion"] != 0.05
    assert first["results"] == second["results"]
    for rank in (first, second):
        assert torch.equal(rank["before"], rank["after"])


def warmed_up_search(rank, world, folder):
    """Steps of the search are those of the algorithm: in a warm-up, all ranks have the same weights after each."""
    L.seed_everything(5, verbose=False)
    model, seen = Rated(), []
    model.on_train_batch_end = lambda *_: seen.append(parameters(model))
    t = trainer(CoCoDStrategy(warmup_steps=1000), world, default_root_dir=folder)
    Tuner(t).lr_find(model, num_training=4, **SEARCH)
    return torch.stack(seen)


def test_a_search_runs_the_algorithms_steps(tmp_path):
    first, second = run_ranks(warmed_up_search, 2, tmp_path, init=False)
    assert len(first) == 4
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)


def found_within_a_fit(rank, world, strategy, folder, rate):
    L.seed_everything(5, verbose=False)
    model, path = Rated(rate or 0.05), Path()
    finder = [] if rate else [LearningRateFinder(num_training_steps=40, **SEARCH)]
    t = trainer(strategy, world, default_root_dir=folder, callbacks=[path, *finder], max_epochs=8)
    callbacks = list(t.callbacks)
    t.fit(model)
    nothing_is_replaced(t, callbacks)
    return {"path": torch.stack(path.path), "lr": model.lr, "end": flat(model), "steps": t.global_step}


@over_strategies
def test_after_a_search_within_a_fit_training_is_that_of_a_run_with_the_rate_found(strategy, tmp_path):
    """Diverging stops the search early; that stop must not be one of the training that follows."""
    searched = run_ranks(found_within_a_fit, 2, strategy, tmp_path, None, init=False)
    direct = run_ranks(found_within_a_fit, 2, strategy, tmp_path, searched[0]["lr"], init=False)
    for rank, alone in zip(searched, direct, strict=True):
        assert rank["lr"] == searched[0]["lr"]
        assert rank["steps"] == 48
        assert torch.equal(rank["path"], alone["path"])
        assert torch.equal(rank["end"], searched[0]["end"])


class Diverges(Rated):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            raise ValueError("my own bug in a search")
        return super().training_step(batch, batch_idx)


def failing_search(rank, world, folder):
    t = trainer("cocod", world, default_root_dir=folder)
    with pytest.raises((ValueError, PeerLost), match="my own bug"):  # the other one may be first
        Tuner(t).lr_find(Diverges(), num_training=20)
    assert [type(c).__name__ for c in t.callbacks] == ["_LRCallback"]  # Lightning's own, which it leaves there
    nothing_is_replaced(t, list(t.callbacks))


def test_a_search_that_fails_leaves_nothing_of_ours_on_the_trainer(tmp_path):
    run_ranks(failing_search, 2, tmp_path, init=False)


def scaling(rank, world, strategy):
    t = trainer(strategy, world)
    callbacks = list(t.callbacks)
    with pytest.raises(ValueError, match="Tuning the batch size is currently not supported with distributed strategies"):
        Tuner(t).scale_batch_size(Rated())
    nothing_is_replaced(t, callbacks)


def test_the_batch_size_scaler_is_refused_by_lightning_in_one_line():
    run_ranks(scaling, 2, "cocod", init=False)


# --- parameters that join later


class Backbone(Toy):
    def __init__(self):
        super().__init__(dropout=0.0, norm=False)
        self.backbone, self.head = nn.Sequential(*self.net[:1]), nn.Sequential(*self.net[3:])
        del self.net

    def loss(self, batch):
        x, y = batch
        return (self.head(self.backbone(x)) - y).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Joined(Callback):
    """Of the backbone: the weights after each batch, and what has moved them besides the optimizer's own step."""

    def __init__(self):
        self.backbone, self.besides, self.travelling = [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        own = [p.detach() - 0.05 * p.grad if p.grad is not None else p.detach() for p in module.backbone.parameters()]
        self.expected = torch.cat([p.reshape(-1) for p in own])

    def on_train_batch_end(self, trainer, module, *_):
        self.backbone.append(parameters(module.backbone))
        self.besides.append(self.backbone[-1] - self.expected)
        self.travelling.append(len(trainer.strategy.algorithm.x))


def finetuned(rank, world, strategy):
    L.seed_everything(5, verbose=False)
    model, joined = Backbone(), Joined()
    unfreeze = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, backbone_initial_lr=0.05, verbose=False
    )
    t = trainer(strategy, world, callbacks=[unfreeze, joined], max_epochs=3)
    t.fit(model, loader(), loader(shuffle=False))
    return {"backbone": joined.backbone, "besides": joined.besides, "travelling": joined.travelling, "end": flat(model)}


@over_strategies
def test_an_unfrozen_backbone_joins_the_average_when_it_joins_the_optimizer(strategy):
    """Six steps an epoch, rounds of four: unfrozen before step 7, it is in the message of step 8, folded by CoCoD at 12."""
    first, second = run_ranks(finetuned, 2, strategy, init=False)
    assert torch.equal(first["end"], second["end"])
    means = [(a + b) / 2 for a, b in zip(first["backbone"], second["backbone"], strict=True)]
    for rank in (first, second):
        assert rank["travelling"] == [2] * 7 + [4] * 11
        assert all(torch.equal(weights, rank["backbone"][0]) for weights in rank["backbone"][:6])
        folded = [step + 1 for step, moved in enumerate(rank["besides"]) if moved.abs().max() > 1e-5]
        if isinstance(strategy, LocalSGDStrategy):
            assert folded == [8, 12, 16]
        elif isinstance(strategy, CoCoDStrategy):
            assert folded == [12, 16]
            torch.testing.assert_close(rank["besides"][11], means[7] - rank["backbone"][7], rtol=1e-4, atol=1e-6)


# --- short runs, profilers, bare bones


MODES = {
    "simple profiler": {"profiler": "simple"},
    "pytorch profiler": {"profiler": "pytorch", "limit_train_batches": 2, "limit_val_batches": 1},
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2},
    "barebones": {"barebones": True},
    "anomalies detected": {"detect_anomaly": True},
}


def in_modes(rank, world, strategy, folder):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {}
    for name, options in MODES.items():
        L.seed_everything(5, verbose=False)
        model = Toy()
        quiet = {} if name == "barebones" else {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        t = L.Trainer(
            accelerator="cpu", devices=world, strategy=strategy, max_epochs=2, default_root_dir=folder, **quiet, **options
        )
        if name == "barebones":
            model.log = lambda *_, **__: None
        callbacks = list(t.callbacks)
        t.fit(model, loader(), loader(shuffle=False))
        nothing_is_replaced(t, callbacks)
        found[name] = {"end": flat(model), "steps": t.global_step, "kept": t.strategy.__class__.__name__}
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_every_mode_of_the_trainer_all_ranks_end_on_the_consensus(strategy, tmp_path):
    first, second = run_ranks(in_modes, 2, strategy, tmp_path, init=False)
    steps = {"pytorch profiler": 4, "fast_dev_run": 2, "overfit_batches": 4}
    for name in MODES:
        assert torch.equal(first[name]["end"], second[name]["end"]), name
        assert first[name]["steps"] == second[name]["steps"] == steps.get(name, 12), name


# --- compiled modules, modules made by the trainer

# Compiled with Dynamo alone: what inductor makes of a module is not shown here, since it needs a compiler.


class CompiledInside(Toy):
    def __init__(self):
        super().__init__(dropout=0.0)
        self.net = torch.compile(self.net, backend="eager")


class MadeLate(Toy):
    def __init__(self):
        L.LightningModule.__init__(self)
        self.net, self.optimizer = None, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}

    def configure_model(self):
        if self.net is None:
            self.net = Toy(dropout=0.0).net


WAYS = ["plain", "compiled", "compiled inside", "init_module", "configure_model"]


def made_in_all_ways(rank, world, strategy):
    return {how: made(world, copy.deepcopy(strategy), how) for how in WAYS}


def made(world, strategy, how):
    L.seed_everything(5, verbose=False)
    path = Path()
    t = trainer(strategy, world, callbacks=[path], max_epochs=1, num_sanity_val_steps=0)
    callbacks = list(t.callbacks)
    if how == "init_module":
        with t.init_module():
            model = Toy(dropout=0.0)
    else:
        model = {"compiled inside": CompiledInside, "configure_model": MadeLate}.get(how, lambda: Toy(dropout=0.0))()
    given = torch.compile(model, backend="eager") if how == "compiled" else model
    L.seed_everything(7, verbose=False)
    t.fit(given, loader(), loader(shuffle=False))
    nothing_is_replaced(t, callbacks)
    return {"path": torch.stack(path.path), "end": flat(model), "names": list(model.state_dict())}


def saved_compiled(rank, world, folder):
    model = Toy(dropout=0.0)
    t = trainer("cocod", world, max_epochs=1)
    t.fit(torch.compile(model, backend="eager"), loader())
    t.save_checkpoint(folder / "compiled.ckpt")
    return flat(model)


@over_strategies
def test_compiled_and_late_made_modules_train_as_plain_ones_do(strategy):
    for rank in run_ranks(made_in_all_ways, 2, strategy, init=False):
        plain = rank["plain"]
        for how in WAYS[1:]:
            assert torch.equal(rank[how]["path"], plain["path"]), how
            assert torch.equal(rank[how]["end"], plain["end"]), how
            inside = [name.replace("net.", "net._orig_mod.") for name in plain["names"]]
            assert rank[how]["names"] == (inside if how == "compiled inside" else plain["names"])


def test_a_compiled_modules_checkpoint_has_the_plain_names(tmp_path):
    end = run_ranks(saved_compiled, 2, tmp_path, init=False)[0]
    assert torch.equal(flat(Toy.load_from_checkpoint(tmp_path / "compiled.ckpt")), end)
