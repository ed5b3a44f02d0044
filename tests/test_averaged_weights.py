"""Averages over time: WeightAveraging, EMAWeightAveraging and StochasticWeightAveraging are means over the ranks as well."""

import shutil

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, loader, made, trainer

from lightning_cocod import PeerLost

over_strategies = pytest.mark.parametrize("strategy", made(period=4), ids=STRATEGIES)
TOL = {"rtol": 1e-5, "atol": 1e-6}

needs_weight_averaging = pytest.mark.skipif(
    not hasattr(callbacks, "WeightAveraging"), reason="Lightning before 2.6 has no such callback"
)


def everything(module):
    """Parameters and buffers, by name; bits preserved."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if tolerance:
            torch.testing.assert_close(value, other[name], msg=lambda text, n=name: f"{n}: {text}", **tolerance)
        else:
            assert torch.equal(value, other[name]), name


def mean_of(ranks):
    return {name: mean([rank[name] for rank in ranks]) for name in ranks[0]}


def mean(values):
    return torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]


class Watch(Callback):
    """The replica after every batch, and what validation sees."""

    def __init__(self):
        self.path, self.seen, self.losses = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.path.append(everything(module))

    def on_validation_batch_start(self, trainer, module, *_):
        self.seen.append(everything(module))

    def on_validation_end(self, trainer, module):
        self.losses.append(float(trainer.callback_metrics["val/loss"]))


def averaging(kind):
    """Made in the worker: Lightning 2.5 has no such classes."""
    if kind == "ema":
        return callbacks.EMAWeightAveraging(decay=0.8)
    if kind == "late":
        return callbacks.EMAWeightAveraging(decay=0.8, update_starting_at_step=4)
    return callbacks.WeightAveraging() if kind == "plain" else None


class Unseeded(Toy):
    """Begins elsewhere on each rank, so that an average made before the start is of other weights."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(40 + rank)
        torch.nn.init.normal_(self.net[0].weight)


def averaged(rank, world, strategy, kind, folder=None):
    L.seed_everything(5, verbose=False)
    model, watch, average = Unseeded(rank), Watch(), averaging(kind)
    model.start = everything(model)
    keep = [ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")] if folder else []
    added = [watch, *keep, *([average] if average else [])]
    evaluated = {"val_check_interval": 2} if kind else {"limit_val_batches": 0}
    t = trainer(strategy, world, callbacks=added, enable_checkpointing=bool(keep), num_sanity_val_steps=0, **evaluated)
    before = list(t.callbacks)
    t.fit(model, loader(), loader(shuffle=False))
    assert t.callbacks == before
    assert not average or "on_save_checkpoint" not in vars(average)
    validated = t.validate(model, loader(shuffle=False), verbose=False)
    return {"path": watch.path, "seen": watch.seen, "losses": watch.losses, "end": everything(model), "after": validated}


def ema(path, kind):
    """The average after each batch, by hand."""
    average, updates, result = None, 0, []
    for step, weights in enumerate(path):
        if kind != "late" or step >= 4:
            if updates == 0:
                average = weights
            elif kind == "plain":
                average = {n: a + (weights[n] - a) / (updates + 1) for n, a in average.items()}
            else:
                average = {n: 0.8 * a + 0.2 * weights[n] for n, a in average.items()}
            updates += 1
        result.append(average)
    return result


def floats(state):
    return {name: value for name, value in state.items() if value.is_floating_point()}


@needs_weight_averaging
@over_strategies
@pytest.mark.parametrize("kind", ["plain", "ema", "late"])
def test_the_mean_of_the_ranks_averages_is_evaluated_saved_and_left_in_the_model(strategy, kind, tmp_path):
    ranks = run_ranks(averaged, 2, strategy, kind, tmp_path, init=False)
    undisturbed = run_ranks(averaged, 2, strategy, None, init=False)
    for rank, alone in zip(ranks, undisturbed, strict=True):  # averaging, evaluating and saving change no bit of training
        for one, other in zip(rank["path"], alone["path"], strict=True):
            assert_same(one, other)
        assert_same(rank["end"], ranks[0]["end"])
        assert rank["losses"][:6] == ranks[0]["losses"][:6]
        assert rank["after"] == ranks[0]["after"]
    by_hand = [ema([floats(weights) for weights in rank["path"]], kind) for rank in ranks]
    expected = [mean_of(list(pair)) if pair[0] else None for pair in zip(*by_hand, strict=True)]
    for one, other in zip(ranks[0]["seen"], ranks[1]["seen"], strict=True):
        assert_same(one, other)
    batches = len(ranks[0]["seen"]) // 7  # 6 validations in the fit, and one after it
    for validation in range(6):
        step = 2 * validation + 1
        for seen in ranks[0]["seen"][batches * validation : batches * (validation + 1)]:
            if expected[step] is not None:
                assert_same(floats(seen), expected[step], **TOL)
    assert_same(floats(ranks[0]["end"]), expected[-1], **TOL)
    alone = by_hand[0][-1]["net.0.weight"]  # the negative control: one rank's average is another one
    assert not torch.allclose(alone, expected[-1]["net.0.weight"], rtol=1e-4, atol=1e-5)
    for step in (5, 10):
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert_same(floats(checkpoint["state_dict"]), expected[step - 1], **TOL)
        consensus = mean_of([floats(rank["path"][step - 1]) for rank in ranks])
        assert_same(floats(checkpoint["current_model_state"]), consensus, **TOL)


def resumed(rank, world, folder):
    average, model, seen = averaging("ema"), Toy(), Watch()
    start = []

    class Start(Callback):
        def on_train_batch_start(self, trainer, module, *_):
            start.append(everything(module))

    t = trainer("cocod", world, callbacks=[seen, Start(), average], num_sanity_val_steps=0)
    t.fit(model, loader(), loader(shuffle=False), ckpt_path=folder / "step=10.ckpt")
    return {"start": start[0], "path": seen.path, "seen": seen.seen, "end": everything(model)}


@needs_weight_averaging
def test_without_the_ranks_own_parts_a_resumed_run_has_the_mean_of_the_averages_back_on_every_rank(tmp_path):
    run_ranks(averaged, 2, "cocod", "ema", tmp_path, init=False)
    shutil.rmtree(tmp_path / ".ranks")
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=True)
    first, second = run_ranks(resumed, 2, tmp_path, init=False)
    for one, other in zip(first["seen"], second["seen"], strict=True):
        assert_same(one, other)
    for rank in (first, second):  # resumed at step 10: the replicas begin on the consensus model, not on the average
        assert_same(rank["start"], saved["current_model_state"])
    own = [
        ema([floats(saved["state_dict"]), *[floats(weights) for weights in rank["path"]]], "ema")[-1]
        for rank in (first, second)
    ]
    assert_same(floats(first["end"]), mean_of(own), **TOL)


class Breaks(Toy):
    def validation_step(self, batch, batch_idx):
        raise ValueError("my own bug in validation")


def broken(rank, world, kind):
    watch = Watch()
    average = StochasticWeightAveraging(1e-2, swa_epoch_start=1) if kind == "swa" else averaging(kind)
    model = Breaks()
    t = trainer("cocod", world, callbacks=[watch, average], num_sanity_val_steps=0)
    before = list(t.callbacks)
    with pytest.raises((ValueError, PeerLost), match="my own bug"):  # the other one may be first
        t.fit(model, loader(), loader(shuffle=False))
    assert t.callbacks == before
    assert not {"state_dict", "transfer_weights", "on_save_checkpoint"} & set(vars(average))
    assert "run" not in vars(t.fit_loop)
    assert "run" not in vars(t.fit_loop.epoch_loop.val_loop)
    assert_same(everything(model), watch.path[-1])  # neither the average nor the consensus was left in the model
    if kind == "ema":
        replica = ema([floats(weights) for weights in watch.path], "ema")[-1]
        assert_same(floats(everything(average._average_model.module)), replica, **TOL)


@pytest.mark.parametrize("kind", [pytest.param("ema", marks=needs_weight_averaging), "swa"])
def test_an_exception_in_validation_leaves_replica_average_and_trainer_as_they_were(kind):
    run_ranks(broken, 2, kind, init=False)


# --- StochasticWeightAveraging


class Ends(Callback):
    """The replica at the start of each epoch, before and after StochasticWeightAveraging has looked at it."""

    def __init__(self):
        self.starts = []

    def on_train_epoch_start(self, trainer, module):
        self.starts.append(everything(module))


def stochastic(rank, world, strategy, norm, folder=None):
    L.seed_everything(5, verbose=False)
    model, before, after, watch = Toy(norm=norm), Ends(), Ends(), Watch()
    average = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2, annealing_epochs=1)
    keep = [ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")] if folder else []
    added = [before, average, after, watch, *keep]
    t = trainer(strategy, world, callbacks=added, enable_checkpointing=bool(keep), max_epochs=4, num_sanity_val_steps=0)
    t.fit(model, loader(), loader(shuffle=False))
    assert t.fit_loop.max_epochs == 4
    assert "transfer_weights" not in vars(average)
    assert "state_dict" not in vars(average)
    return {
        "before": before.starts,
        "after": after.starts,
        "path": watch.path,
        "seen": watch.seen,
        "losses": watch.losses,
        "end": everything(model),
        "momentum": [m.momentum for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)],
    }


@over_strategies
@pytest.mark.parametrize("norm", [False, True], ids=["without BatchNorm", "with BatchNorm"])
def test_stochastic_weight_averaging_ends_on_the_mean_of_the_ranks_averages(strategy, norm, tmp_path):
    ranks = run_ranks(stochastic, 2, strategy, norm, tmp_path, init=False)
    trained = [name for name in ranks[0]["end"] if "running" not in name and "num_batches" not in name]
    # An average takes in the weights with which an epoch begins, from the second one on.
    own = [{n: torch.stack([start[n] for start in rank["before"][1:4]]).mean(0) for n in trained} for rank in ranks]
    for rank in ranks:
        assert_same(rank["end"], ranks[0]["end"])
        assert rank["losses"] == ranks[0]["losses"]
        assert_same({n: rank["end"][n] for n in trained}, mean_of(own), **TOL)
        assert rank["momentum"] == [0.1] * norm
    assert not torch.allclose(own[0]["net.0.weight"], mean_of(own)["net.0.weight"], rtol=1e-4, atol=1e-5)
    if norm:  # the epoch that collects statistics: with the mean already, on every rank over its own data
        for rank in ranks:
            assert len(rank["after"]) == 5
            assert_same({n: rank["after"][4][n] for n in trained}, {n: rank["end"][n] for n in trained}, rtol=0, atol=1e-7)
            assert not rank["after"][4]["net.1.running_mean"].any()
        statistics = mean_of([{n: rank["path"][-1][n] for n in rank["end"] if n not in trained} for rank in ranks])
        assert_same({n: ranks[0]["end"][n] for n in statistics}, statistics, **TOL)
        assert not torch.equal(ranks[0]["path"][-1]["net.1.running_mean"], ranks[1]["path"][-1]["net.1.running_mean"])
    last = torch.load(tmp_path / f"epoch={3 + norm}.ckpt", weights_only=True)
    (saved,) = (state for name, state in last["callbacks"].items() if "StochasticWeightAveraging" in name)
    assert_same({n: saved["average_model_state"][n] for n in trained}, mean_of(own), **TOL)
