"""Under Lightning: ranks that share their epochs go on without one that is lost."""

import os
from collections import Counter

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.ranks import run_ranks
from support.toys import flat, trainer
from test_work_sharing import Linear, numbered, samples

from lightning_cocod import ADPSGDStrategy

LIMIT = 120.0
N = 61


class Watching(Linear):
    """Notes what it is evaluated on as well, and what it is trained on where others can read it."""

    def __init__(self, file):
        super().__init__()
        self.looked_at, self.file = [], file

    def training_step(self, batch, batch_idx):
        with self.file.open("a") as file:
            file.write(f"{self.current_epoch} {' '.join(map(str, batch[2].tolist()))}\n")
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        super().on_validation_start()
        self.looked_at.append([])

    def validation_step(self, batch, batch_idx):
        self.looked_at[-1].append(batch[2].tolist())
        return super().validation_step(batch, batch_idx)


class Dies(Callback):
    """In the second batch of an epoch, once all ranks have begun it."""

    def __init__(self, victims):
        self.victims = victims
        self.name = None

    def on_train_start(self, trainer, module):
        self.name = trainer.global_rank

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        store, epoch, n = dist.distributed_c10d._get_default_store(), trainer.current_epoch, trainer.world_size
        if batch_idx == 0 and store.add(f"begun {epoch}", 1) == n:
            store.set(f"all have begun {epoch}", "")
        if self.victims.get(self.name) == epoch and batch_idx == 1:
            store.wait([f"all have begun {epoch}"])
            os._exit(3)


def losing(rank, world, victims, folder, options):
    L.seed_everything(1, verbose=False)
    model = Watching(folder / f"rank {rank}")
    keeps = ModelCheckpoint(dirpath=folder, filename="{epoch}-{step}", save_top_k=-1)
    options = {"callbacks": [Dies(victims), keeps], "enable_checkpointing": True, "num_sanity_val_steps": 0, **options}
    run = trainer(ADPSGDStrategy(timeout=20.0), world, max_epochs=4, **options)
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
