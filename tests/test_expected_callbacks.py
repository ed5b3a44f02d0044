"""Checkpoints, limits and stops mean what they mean under Lightning's own strategies, on all ranks alike."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, flat, loader, trainer

SCORES = [3.0, 1.0, 2.0, 0.5, 0.75, 5.0]


class Scored(Toy):
    """Its score is known; the ranks see it differently until it is synchronised."""

    def validation_step(self, batch, batch_idx):
        mine = SCORES[self.current_epoch] + (-1) ** self.trainer.global_rank
        self.log("val/score", mine, sync_dist=True)
        self.log("val/own", -self.current_epoch * float(self.trainer.global_rank == 0))  # rank 1's never improves

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch), sync_dist=True)


class Steps(Callback):
    """The step, the learning rate and the training batch of every training step."""

    def __init__(self):
        self.steps, self.rates, self.tested = [], [], None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.steps.append(trainer.strategy.algorithm.t)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_test_start(self, trainer, module):
        self.tested = flat(module)


def kept(rank, world, strategy, folder):
    L.seed_everything(5, verbose=False)
    names = {"monitor": "val/score", "save_top_k": 2, "save_last": True, "filename": "{epoch}"}
    save, seen = ModelCheckpoint(folder, **names), Steps()
    options = {"callbacks": [save, seen], "enable_checkpointing": True, "num_sanity_val_steps": 0}
    t = trainer(strategy, world, max_epochs=5, **options)
    model = Scored()
    t.fit(model, loader(), loader(shuffle=False))
    files = sorted(path.name for path in folder.glob("*.ckpt")), len(list((folder / ".ranks").iterdir()))
    end, tested = flat(model), {}
    for which in ("best", "last"):
        t.test(model, loader(shuffle=False), ckpt_path=which, verbose=False)
        tested[which] = seen.tested

    again = Steps()
    options["callbacks"] = [ModelCheckpoint(folder, **names), again]
    resumed = trainer(strategy, world, max_epochs=6, **options)
    resumed.fit(model, loader(), loader(shuffle=False), ckpt_path="last")
    return {
        "files": files,
        "best": save.best_model_path,
        "best score": float(save.best_model_score),
        "tested": tested,
        "end": end,
        "resumed": again,
        "end of all": flat(model),
        "rates": seen.rates,
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_best_checkpoints_are_kept_and_found_again(strategy, tmp_path):
    first, second = run_ranks(kept, 2, strategy, tmp_path, init=False)
    for rank in (first, second):
        assert rank["files"] == (["epoch=3.ckpt", "epoch=4.ckpt", "last.ckpt"], 3)
        assert rank["best"] == str(tmp_path / "epoch=3.ckpt")
        assert rank["best score"] == 0.5
        best = Toy.load_from_checkpoint(tmp_path / "epoch=3.ckpt", map_location="cpu")
        assert torch.equal(rank["tested"]["best"], flat(best))
        assert torch.equal(rank["tested"]["last"], rank["end"])
        assert not torch.equal(rank["tested"]["best"], rank["tested"]["last"])
        assert rank["resumed"].steps == list(range(30, 36))
        drops = [0.05 * 0.7 ** (step // 5) for step in range(36)]
        assert rank["rates"] + rank["resumed"].rates == pytest.approx(drops)  # field report 9
    assert first["resumed"].rates == second["resumed"].rates
    assert torch.equal(first["end of all"], second["end of all"])


def stopped_early(rank, world, strategy, monitor):
    seen = Steps()
    options = {"max_epochs": 5, "limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    t = trainer(strategy, world, callbacks=[EarlyStopping(monitor, patience=1), seen], **options)
    t.fit(Scored(), loader(), loader(shuffle=False))
    return seen.steps


@pytest.mark.parametrize(("monitor", "epochs"), [("val/score", 3), ("val/own", 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_early_stopping_stops_all_ranks_together_also_when_one_alone_sees_no_progress(strategy, monitor, epochs):
    steps = list(range(2 * epochs))
    assert run_ranks(stopped_early, 2, strategy, monitor, init=False) == [steps, steps]


class Counts(Toy):
    """How many batches of each kind there were."""

    def __init__(self):
        super().__init__()
        self.batches = dict.fromkeys(("train", "val", "test", "predict"), 0)

    def training_step(self, batch, batch_idx):
        self.batches["train"] += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.batches["val"] += 1

    def test_step(self, batch, batch_idx):
        self.batches["test"] += 1

    def predict_step(self, batch, batch_idx):
        self.batches["predict"] += 1
        return self.net(batch[0])


def limited(rank, world, strategy, options):
    model = Counts()
    limits = {"limit_val_batches": 2, "limit_test_batches": 3, "limit_predict_batches": 0.5, "num_sanity_val_steps": 0}
    t = trainer(strategy, world, **{"max_epochs": -1, **limits, **options})
    t.fit(model, loader(), loader(shuffle=False))
    t.test(model, loader(shuffle=False), verbose=False)
    t.predict(model, loader(shuffle=False))
    return model.batches


@pytest.mark.parametrize(
    ("options", "trained", "validated"),
    [
        ({"max_steps": 7}, 7, 2),
        ({"max_steps": 7, "limit_train_batches": 3}, 7, 4),
        ({"max_steps": 3, "limit_train_batches": 0.5, "accumulate_grad_batches": 2}, 5, 2),
        ({"max_epochs": 3, "limit_train_batches": 2, "check_val_every_n_epoch": 2}, 6, 2),
    ],
    ids=["max_steps", "max_steps in epochs cut short", "max_steps and accumulation", "max_epochs"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_limits_stop_all_ranks_after_the_same_batch(strategy, options, trained, validated):
    expected = {"train": trained, "val": validated, "test": 3, "predict": 3}
    assert run_ranks(limited, 2, strategy, options, init=False) == [expected, expected]
