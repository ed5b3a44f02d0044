"""Under Lightning: ranks that share their epochs go on without one that is lost."""

import os
from collections import Counter

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from support.ranks import free_port, run_ranks
from support.toys import flat, trainer
from test_launch import started
from test_members import eventually
from test_work_sharing import Linear, numbered, samples

from lightning_cocod import ADPSGDStrategy

LIMIT = 120.0
N = 61


class Watching(Linear):
    """Notes what it is evaluated on as well, and what it is trained on where others can read it."""

    def __init__(self, file):
        super().__init__()
        self.looked_at, self.file = [], file
        file.touch()

    def training_step(self, batch, batch_idx):
        with self.file.open("a") as file:
            file.write(f"{self.current_epoch} {' '.join(map(str, batch[2].tolist()))}\n")
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        super().on_validation_start()
        self.looked_at.append([])

    def validation_step(self, batch, batch_idx):
        self.looked_at[-1].append(batch[2].tolist())
        self.log("val", self.loss(batch), sync_dist=True)


class Dies(Callback):
    """In the first batch of an epoch, once all ranks have begun it."""

    def __init__(self, victims, folder):
        self.victims, self.folder = victims, folder
        self.name = None

    def on_train_start(self, trainer, module):
        self.name = trainer.global_rank

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        store, epoch, n = dist.distributed_c10d._get_default_store(), trainer.current_epoch, trainer.world_size
        if batch_idx == 0 and store.add(f"begun {epoch}", 1) == n:
            store.set(f"all have begun {epoch}", "")
        if batch_idx == 0 and self.victims.get(self.name) == epoch:
            store.wait([f"all have begun {epoch}"])
            (self.folder / "dies").touch()
            os._exit(3)


def losing(rank, world, victims, folder, options):
    L.seed_everything(1, verbose=False)
    model = Watching(folder / f"rank {rank}")
    keeps = ModelCheckpoint(dirpath=folder, filename="{epoch}-{step}", save_top_k=-1)
    options = {
        "callbacks": [Dies(victims, folder), keeps],
        "enable_checkpointing": True,
        **options,
    }
    run = trainer(ADPSGDStrategy(timeout=20.0), world, max_epochs=4, num_sanity_val_steps=0, **options)
    run.fit(model, numbered(N), numbered(16, shuffle=False))
    rate = run.optimizers[0].param_groups[0]["lr"]
    return model.looked_at, rate, flat(model), run.global_rank, run.world_size


@pytest.mark.parametrize(("world", "victims"), [(2, {1: 0}), (3, {1: 1}), (4, {3: 0, 1: 2})])
def test_the_others_train_on_and_share_what_is_left(world, victims, tmp_path):
    results = run_ranks(
        losing, world, victims, tmp_path, {}, init=False, timeout=LIMIT, expect=dict.fromkeys(victims, "died")
    )
    living = [result for result in results if result is not None]
    for number, (_, rate, model, rank, size) in enumerate(living):
        assert (rank, size) == (number, world - len(victims))
        assert torch.equal(model, living[0][2])
        assert rate == living[0][1]
    lines = [line.split() for rank in range(world) for line in (tmp_path / f"rank {rank}").read_text().splitlines()]
    for epoch in range(4):
        seen = Counter(sample for number, *batch in lines for sample in batch if int(number) == epoch)
        assert set(seen.values()) == {1}
        lost = N - len(seen)  # what a rank that died had claimed, but for what it had begun
        assert 0 < lost <= 8 if epoch in victims.values() else lost == 0
        looked_at = samples([looked_at[epoch] for looked_at, *_ in living])
        if all(died <= epoch for died in victims.values()):
            assert looked_at == list(range(16))


class Waits(Callback):
    """In an epoch, until somebody waits to be let in, or has been already."""

    def __init__(self, epoch, world):
        self.epoch, self.world = epoch, world

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == self.epoch and batch_idx == 0 and trainer.world_size < self.world:
            assert eventually(trainer.strategy.algorithm.comm.members.somebody_waits)


def coming_back(worker, n, rank, epoch, folder, port, resumes):
    """n − 1 machines of a rank each, one of which dies; the last worker is its second life."""
    second_life = worker == n - 1
    if second_life:
        assert eventually((folder / "dies").exists)
    node = rank if second_life else worker
    started({"NODE_RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": n - 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    L.seed_everything(worker, verbose=False)
    model = Watching(folder / f"rank {worker}")
    kept = ModelCheckpoint(dirpath=None if second_life else folder / "kept", monitor="val", save_top_k=-1)
    stop = EarlyStopping("val", patience=100)
    callbacks = [Waits(epoch + 1, n - 1), kept, stop, *([] if second_life else [Dies({rank: epoch}, folder)])]
    options = {"enable_checkpointing": True, "default_root_dir": folder / f"root {worker}"}
    options["num_sanity_val_steps"] = 1 if second_life else 0
    run = trainer(ADPSGDStrategy(timeout=20.0), 1, num_nodes=n - 1, max_epochs=5, callbacks=callbacks, **options)
    path = None
    if second_life and resumes:
        assert eventually(lambda: any((folder / "kept").glob("epoch=0*")))
        (path,) = (folder / "kept").glob("epoch=0*")
    if second_life:
        run.validate(model, numbered(16, shuffle=False), verbose=False)  # by itself: the run is not joined yet
        model.looked_at.clear()
    run.fit(model, numbered(N), numbered(16, shuffle=False), ckpt_path=path)
    if second_life:
        model.looked_at.pop(0)  # the sanity check
    places = run.current_epoch, run.optimizers[0].param_groups[0]["lr"], stop.best_score.item(), kept.best_model_path
    return flat(model), places, run.global_rank, run.world_size, model.looked_at


@pytest.mark.parametrize(("world", "resumes"), [(2, False), (3, True)])
def test_a_rank_that_comes_back_is_let_in_where_an_epoch_begins(world, resumes, tmp_path):
    epoch, rank = 0, 1
    arguments = rank, epoch, tmp_path, free_port(), resumes
    results = run_ranks(coming_back, world + 1, *arguments, init=False, timeout=LIMIT, expect={rank: "died"})
    living = [result for result in results if result is not None]
    for result in living:
        assert torch.equal(result[0], living[0][0])
        assert result[1] == living[0][1]
        assert result[3] == world
    assert sorted(result[2] for result in living) == list(range(world))
    assert living[-1][2] == rank
    lines = [line.split() for w in range(world + 1) for line in (tmp_path / f"rank {w}").read_text().splitlines()]
    for number in range(5):
        seen = Counter(sample for e, *batch in lines for sample in batch if int(e) == number)
        assert set(seen.values()) == {1}
        assert (len(seen) < N) == (number == epoch)
    epochs = [int(line.split()[0]) for line in (tmp_path / f"rank {world}").read_text().splitlines()]
    first = min(epochs)  # the next one, if it was there by then
    assert set(epochs) == set(range(first, 5)) <= {1, 2, 3, 4}
    assert first <= 2
    for number in range(first, 5):
        looked_at = [result[4][number] for result in living[:-1]] + [living[-1][4][number - first]]
        assert set(samples(looked_at)) == set(range(16))
