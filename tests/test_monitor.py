"""What the user sees of the communication."""

import csv
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from support.ranks import run_ranks
from support.toys import Toy, dataset, loader, trainer

from lightning_cocod import CoCoDStrategy, CommunicationMonitor

VOCABULARY = {
    "comm/exposed_ms",
    "comm/busy_ms",
    "comm/skew_ms",
    "comm/hidden_fraction",
    "comm/sent_bytes",
    "comm/received_bytes",
    "comm/compression_ratio",
    "algo/period",
    "algo/staleness_steps",
    "algo/replica_distance",
    "throughput/step_ms",
    "throughput/samples_per_sec",
}


def monitored(rank, world, strategy, folder, **options):
    L.seed_everything(1, verbose=False)
    monitor = CommunicationMonitor(every_n_steps=4)
    logger = CSVLogger(folder, name="", version="")
    t = trainer(strategy, world, callbacks=[monitor], logger=logger, **{"max_epochs": 4, **options})
    t.fit(Toy(), loader(), loader(shuffle=False))
    return {"summary": monitor.summary, "metrics": None if rank else monitor.summary}


def rows(folder):
    with open(folder / "metrics.csv") as file:
        return [
            {k: float(v) for k, v in row.items() if v and k.startswith(("comm/", "algo/", "throughput/"))}
            | {"step": row["step"]}
            for row in csv.DictReader(file)
            if any(v for k, v in row.items() if k.startswith("throughput/"))
        ]


@pytest.mark.parametrize(("strategy", "staleness"), [("cocod", 4), ("local_sgd", 0)])
def test_the_whole_vocabulary_is_logged_every_n_steps(strategy, staleness, tmp_path):
    ranks = run_ranks(monitored, 2, strategy, tmp_path, init=False)
    logged = rows(tmp_path)
    assert [row["step"] for row in logged] == ["3", "7", "11", "15", "19", "23"]  # 24 steps
    hidden = "comm/hidden_fraction"  # is missing where no message has ended between two lines
    assert all({*row, hidden} == VOCABULARY | {"step"} for row in logged[1:])
    assert all(math.isfinite(v) for row in logged for k, v in row.items() if k != "step")
    last = logged[-1]
    assert last["algo/period"] == 4
    assert last["algo/staleness_steps"] == staleness
    assert last["algo/replica_distance"] > 0  # data and dropout differ
    fractions = [row[hidden] for row in logged if hidden in row]
    assert fractions
    assert all(0 <= fraction <= 1 for fraction in fractions)
    sent = [row["comm/sent_bytes"] for row in logged]
    assert sent == sorted(sent)
    assert sent[0] < sent[-1]
    for rank in ranks:
        assert set(rank["summary"]) == VOCABULARY
    # 4 epochs of 96 samples, counted over both ranks and exact at the end
    summary = ranks[0]["summary"]
    samples = summary["throughput/samples_per_sec"] * summary["throughput/step_ms"] / 1e3 * 24
    assert samples == pytest.approx(4 * 96)


def test_under_ddp_only_the_throughput_is_known(tmp_path):
    run_ranks(monitored, 2, "ddp", tmp_path, init=False)
    assert set(rows(tmp_path)[-1]) == {"throughput/step_ms", "throughput/samples_per_sec", "step"}


def test_one_device_has_nothing_to_hide(tmp_path):
    (alone,) = run_ranks(monitored, 1, "cocod", tmp_path, init=False)
    assert set(alone["summary"]) == VOCABULARY - {"comm/hidden_fraction", "algo/replica_distance"}
    assert alone["summary"]["comm/sent_bytes"] == 0


def test_a_step_is_an_optimizer_step(tmp_path):
    options = {"accumulate_grad_batches": 3, "max_epochs": 4}
    run_ranks(with_options, 2, tmp_path, options, init=False)
    assert [row["step"] for row in rows(tmp_path)] == ["3", "7"]  # 2 steps an epoch


def with_options(rank, world, folder, options):
    monitored(rank, world, "cocod", folder, **options)


def warm_up(rank, world):
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append(trainer.strategy.metrics()["algo/period"])

    strategy = CoCoDStrategy(period={0: 2, 6: 4}, warmup_steps=3)
    trainer(strategy, world, callbacks=[Look()], max_epochs=2).fit(Toy(), loader())
    return seen


def test_the_period_is_the_one_in_force():
    assert run_ranks(warm_up, 2, init=False)[0] == [1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4]


def no_synchronisation(rank, world, folder):
    def refuse(*_):
        raise AssertionError("the monitor synchronises the device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", refuse)
        monitored(rank, world, "cocod", folder)


def test_the_monitor_never_synchronises_a_device(tmp_path):
    run_ranks(no_synchronisation, 2, tmp_path, init=False)


class Opaque:
    def __init__(self, items):
        self.x, self.y = (torch.stack(column) for column in zip(*items, strict=True))


class TakesOpaque(Toy):
    def loss(self, batch):
        return super().loss((batch.x, batch.y))

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def opaque(rank, world):
    monitor = CommunicationMonitor(every_n_steps=2)
    batches = torch.utils.data.DataLoader(dataset(), batch_size=8, collate_fn=Opaque)
    trainer("cocod", world, callbacks=[monitor], max_epochs=1).fit(TakesOpaque(), batches)
    return monitor.summary


def test_batches_that_cannot_be_measured_do_not_stop_training():
    for summary in run_ranks(opaque, 2, init=False):
        assert set(summary) == VOCABULARY - {"throughput/samples_per_sec"}


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_a_bad_interval_is_refused(every):
    with pytest.raises(ValueError, match="every_n_steps must be a whole number of at least 1"):
        CommunicationMonitor(every_n_steps=every)


def test_the_library_imports_neither_hydra_nor_wandb_nor_numba():
    import subprocess
    import sys

    code = "import lightning_cocod, sys; assert not {'hydra', 'wandb', 'omegaconf', 'numba'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
