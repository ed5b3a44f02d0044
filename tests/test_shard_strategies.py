"""A-PSGD, DC-ASGD and EAMSGD under Lightning: ranks share epochs, end on one model, stop, resume and fail together."""

import os
import signal

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.ranks import run_ranks, run_ranks_raw
from test_work_sharing import Recording, fit, samples

from lightning_cocod import APSGDStrategy, DCASGDStrategy, EAMSGDStrategy

LIMIT = 150
STRATEGIES = [(APSGDStrategy, {}), (DCASGDStrategy, {"adaptive": True}), (EAMSGDStrategy, {"period": 2})]


class Watch(Callback):
    """Metrics before the fit ends."""

    def on_train_epoch_end(self, trainer, module):
        self.metrics = trainer.strategy.metrics()


def shared(rank, world, strategy, how, folder):
    watch = Watch()
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options = {"validation": True, "callbacks": [watch, saving], "enable_checkpointing": True, "gradient_clip_val": 1.0}
    model, run = fit(rank, world, n=121, strategy=strategy(**how), **options)
    end = torch.cat([p.detach().flatten() for p in model.parameters()])
    L.seed_everything(0, verbose=False)
    begun = torch.cat([p.detach().flatten() for p in Recording().parameters()])  # rank 0's
    return model.seen, end, run.callback_metrics["val/loss"], watch.metrics, bool((end != begun).any())


@pytest.mark.parametrize(("strategy", "how"), STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_share_epochs_and_end_on_one_model(world, strategy, how, tmp_path):
    results = run_ranks(shared, world, strategy, how, str(tmp_path), init=False, timeout=LIMIT)
    for epoch in range(2):
        assert samples([seen[epoch] for seen, *_ in results]) == list(range(121))
        if world > 1:  # rank 0 is slow
            assert len(results[0][0][epoch]) < len(results[1][0][epoch])
    for _, weights, loss, metrics, moved in results:
        assert torch.equal(weights, results[0][1])
        assert torch.equal(loss, results[0][2])
        assert moved
        if world > 1:
            assert metrics["algo/staleness_max"] > 0
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    flat = torch.cat([saved["state_dict"][name].flatten() for name, _ in Recording().named_parameters()])
    assert torch.equal(flat, results[0][1])  # the checkpoint has the server's parameters


def resumed(rank, world, strategy, how, folder):
    options = {"slow": None, "validation": True, "enable_checkpointing": True}
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    fit(rank, world, strategy=strategy(**how), callbacks=[saving], **options)
    path = os.path.join(folder, "epoch=0.ckpt")
    model, run = fit(rank, world, strategy=strategy(**how), path=path, **options)
    return model.seen, run.current_epoch, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("strategy", "how"), STRATEGIES)
def test_a_checkpoint_is_continued(strategy, how, tmp_path):
    results = run_ranks(resumed, 2, strategy, how, str(tmp_path), init=False, timeout=LIMIT)
    assert [epoch for _, epoch, _ in results] == [2, 2]
    assert samples([batches for seen, *_ in results for batches in seen]) == list(range(61))
    assert torch.equal(results[0][2], results[1][2])


class Dies(Callback):
    def on_train_batch_start(self, trainer, module, batch, number):
        if trainer.global_rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(rank, world, strategy, how):
    fit(rank, world, n=400, slow=None, strategy=strategy(**how, timeout=10.0), callbacks=[Dies()])


@pytest.mark.parametrize(("strategy", "how"), STRATEGIES[::2])
def test_the_loss_of_a_rank_ends_all(strategy, how):
    outcomes = run_ranks_raw(killed, 2, strategy, how, init=False, timeout=LIMIT, grace=30.0)
    assert [o.status for o in outcomes] == ["error", "died"]
    assert "PeerLost: rank 1 " in outcomes[0].traceback


class SkipsTheRest(Recording):
    """Rank 1 is done with an epoch after a batch, and the others train on without it."""

    def on_train_batch_start(self, batch, number):
        return -1 if self.global_rank == 1 and number == 1 else None


def bounded(rank, world, strategy, how):
    model, _ = fit(rank, world, slow=None, module=SkipsTheRest, strategy=strategy(max_staleness=1, **how))
    return [len(epoch) for epoch in model.seen]


@pytest.mark.parametrize(("strategy", "how"), [(APSGDStrategy, {}), (EAMSGDStrategy, {"period": 1})])
def test_nobody_waits_for_a_rank_that_has_come_to_the_end_of_an_epoch(strategy, how):
    fast, slow = run_ranks(bounded, 2, strategy, how, init=False, timeout=LIMIT)
    assert all(few == 1 and many > 4 for few, many in zip(slow, fast, strict=True))
