"""What evaluation, checkpoints and the end of fit see: the consensus model, the same on every rank."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, dataset, flat, loader, parameters, trainer, variants


class Watch(Callback):
    """Remembers replicas before validation, what validation sees, and replicas after it."""

    def __init__(self):
        self.before, self.seen, self.after = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.before.append(flat(module))

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            self.seen.append(flat(module))

    def on_validation_batch_end(self, trainer, module, *_):
        if not trainer.sanity_checking:
            self.seen.append(flat(module))

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.seen.append(flat(module))

    def on_train_batch_start(self, trainer, module, *_):
        self.after.append(flat(module))


def watched(rank, world, strategy, interval):
    L.seed_everything(5, verbose=False)
    model, watch = Toy(), Watch()
    t = trainer(strategy, world, callbacks=[watch], val_check_interval=interval, max_epochs=1, limit_val_batches=2)
    t.fit(model, loader(), loader(shuffle=False))
    counters = {name: int(b) for name, b in model.named_buffers() if not b.is_floating_point()}
    return {"before": watch.before, "seen": watch.seen, "after": watch.after, "end": flat(model), "counters": counters}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validation_sees_the_mean_of_the_replicas_and_leaves_them_alone(strategy):
    ranks = run_ranks(watched, 2, strategy, 1, init=False)
    first, second = ranks
    for step in range(6):
        mean = (first["before"][step] + second["before"][step]) / 2
        for validation in range(4 * step, 4 * step + 4):  # its start, two batches, its end
            assert torch.equal(first["seen"][validation], second["seen"][validation])
            torch.testing.assert_close(first["seen"][validation], mean, rtol=1e-6, atol=1e-7)
    for rank in ranks:
        for step in range(5):
            assert torch.equal(rank["after"][step + 1], rank["before"][step])
    assert torch.equal(first["end"], second["end"])
    assert first["counters"] == second["counters"] == {"net.1.num_batches_tracked": 6}


@pytest.mark.parametrize("strategy", ["ddp"])
def test_under_ddp_the_running_statistics_differ(strategy):
    """The negative control: without a consensus each rank evaluates a model of its own."""
    first, second = run_ranks(watched, 2, strategy, 6, init=False)
    assert not torch.equal(first["seen"][0], second["seen"][0])


def saved(rank, world, strategy, folder, every):
    L.seed_everything(5, verbose=False)
    model = Toy()
    keep = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, filename="{step}", save_last=True)
    path = []

    class Path(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            path.append(flat(module))

    t = trainer(strategy, world, callbacks=[Path(), keep], enable_checkpointing=every > 0, max_epochs=1)
    t.fit(model, loader())
    return {"path": torch.stack(path), "end": flat(model)}


def unsaved(rank, world, strategy):
    L.seed_everything(5, verbose=False)
    model, path = Toy(), []

    class Path(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            path.append(flat(module))

    trainer(strategy, world, callbacks=[Path()], max_epochs=1).fit(model, loader())
    return {"path": torch.stack(path), "end": flat(model)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_holds_the_consensus_and_saving_changes_nothing(strategy, tmp_path):
    ranks = run_ranks(saved, 2, strategy, tmp_path, 1, init=False)
    undisturbed = run_ranks(unsaved, 2, strategy, init=False)
    for one, other in zip(ranks, undisturbed, strict=True):
        assert torch.equal(one["path"], other["path"])
        assert torch.equal(one["end"], other["end"])
    for step in range(1, 7):
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        module = Toy()
        module.load_state_dict(checkpoint["state_dict"])
        mean = (ranks[0]["path"][step - 1] + ranks[1]["path"][step - 1]) / 2
        torch.testing.assert_close(flat(module), mean, rtol=1e-6, atol=1e-7)
    assert torch.equal(flat(Toy.load_from_checkpoint(tmp_path / "last.ckpt")), flat(module))


class AsServed(Callback):
    """Remembers the worker's own parameters, what validation sees of the model, and whether that is the server's W."""

    def __init__(self):
        self.own, self.seen, self.is_W = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.own.append(parameters(module))

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            self.seen.append(parameters(module))
            (server,) = trainer.strategy.algorithm.servers.values()
            shown = server.layout.buffer()
            shown.copy_(server.x, keep=False)
            self.is_W.append(all(torch.equal(a, b) for a, b in zip(server.own(shown), server.W, strict=True)))


def served(rank, world, strategy, folder):
    L.seed_everything(5, verbose=False)
    watch, keep = AsServed(), ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options = {"val_check_interval": 1, "enable_checkpointing": True, "max_epochs": 1, "limit_val_batches": 1}
    trainer(strategy, world, callbacks=[watch, keep], **options).fit(Toy(), loader(), loader(shuffle=False))
    return watch.own, watch.seen, watch.is_W


@pytest.mark.parametrize("strategy", [v for v in variants() if v.id in ("ssd_sgd", "od_sgd", "cd_sgd")])
def test_what_is_validated_and_saved_is_the_servers_model_and_not_the_workers(strategy, tmp_path):
    (own, seen, is_W), (others, seen_too, is_W_too) = run_ranks(served, 2, strategy, tmp_path, init=False)
    assert is_W == is_W_too == [True] * 6
    for step in range(6):
        assert torch.equal(seen[step], seen_too[step])
        module = Toy()
        module.load_state_dict(torch.load(tmp_path / f"step={step + 1}.ckpt", weights_only=True)["state_dict"])
        assert torch.equal(parameters(module), seen[step])
    assert not any(torch.equal(x, W) for x, W in zip((*own, *others), (*seen, *seen), strict=True))


def own_collective(rank, world, strategy):
    """A user's all-reduce in the training thread while the strategy's is in flight (field report 4)."""

    class Average(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            total = torch.full((100_000,), float(trainer.global_rank))
            dist.all_reduce(total)
            assert torch.equal(total, torch.full_like(total, 1.0))

    model = Toy()
    trainer(strategy, world, callbacks=[Average()], max_epochs=4).fit(model, loader())
    return flat(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_users_own_collective_does_not_interfere(strategy):
    first, second = run_ranks(own_collective, 2, strategy, init=False)
    assert torch.equal(first, second)


def predicts(rank, world, strategy):
    class Predicts(Toy):
        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    model = Predicts()
    t = trainer(strategy, world, max_epochs=1)
    t.fit(model, loader())
    predicted = torch.cat(t.predict(model, loader(16, shuffle=False)))
    with torch.no_grad():
        expected = model.eval().net(dataset(16).tensors[0])[rank::world]
    return predicted, expected, flat(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_predict_after_fit_shares_the_samples_and_sees_the_consensus(strategy):
    first, second = run_ranks(predicts, 2, strategy, init=False)
    for predicted, expected, model in (first, second):
        torch.testing.assert_close(predicted, expected)
        assert torch.equal(model, first[2])
    assert not torch.equal(first[0], second[0])
