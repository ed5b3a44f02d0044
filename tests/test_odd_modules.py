"""Modules that are no plain stack of dense layers: every kind of parameter, buffer and gradient."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, dataset, having, loader, made, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cocod import PeerLost

over_strategies = pytest.mark.parametrize("strategy", made(period=4), ids=STRATEGIES)
TOL = {"rtol": 1e-5, "atol": 1e-6}


def everything(module):
    """Parameters and all buffers, those outside the state_dict included; bits preserved."""
    return {name: value.detach().clone() for name, value in [*module.named_parameters(), *module.named_buffers()]}


class Watch(Callback):
    def __init__(self):
        self.path, self.seen = [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.path.append(everything(module))

    def on_validation_batch_end(self, trainer, module, *_):
        self.seen.append(everything(module))


class Odd(Toy):
    """Everything at once. ``branch`` is used on rank 1 only, and there on every other batch; ``unused`` never."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight  # tied
        self.scale = nn.Parameter(torch.tensor(1.5))  # no dimension
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.branch, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(()), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen = 0

    def loss(self, batch):
        x, y = batch
        x = self.scale * self.decoder(torch.tanh(self.encoder(x))) + 0.1 * self.frozen(x)
        if self.training:
            self.seen += 1
            rank = self.trainer.global_rank
            self.kept += x.detach().mean() * (rank + 1)
            self.passing += rank + 1.0
            self.count += 1
            if rank == 1 and self.seen % 2:
                x = x + self.branch(x)
        return super().loss((x, y))


def odd(rank, world, strategy):
    L.seed_everything(5, verbose=False)
    model, watch = Odd(), Watch()
    frozen = everything(model.frozen)
    t = trainer(strategy, world, callbacks=[watch], num_sanity_val_steps=0, val_check_interval=3)
    t.fit(model, loader(), loader(shuffle=False))
    assert model.decoder.weight is model.encoder.weight
    assert all(torch.equal(value, frozen[name]) for name, value in everything(model.frozen).items())
    return {"path": watch.path, "seen": watch.seen, "end": everything(model), "names": list(model.state_dict())}


@over_strategies
def test_every_kind_of_parameter_and_buffer_is_in_the_consensus(strategy):
    first, second = run_ranks(odd, 2, strategy, init=False)
    assert {"decoder.weight", "encoder.weight"} <= set(first["names"])
    batches = len(first["seen"]) // 4
    for at, seen, peers in [
        (2, first["seen"][0], second["seen"][0]),
        (8, first["seen"][2 * batches], second["seen"][2 * batches]),
        (11, first["end"], second["end"]),
    ]:
        for name, value in seen.items():
            assert torch.equal(value, peers[name]), name
            one, other = first["path"][at][name], second["path"][at][name]
            mean = (one + other) / 2 if value.is_floating_point() else one
            torch.testing.assert_close(value, mean, msg=lambda text, n=name: f"{n}: {text}", **TOL)
    last = [rank["path"][10] for rank in (first, second)]
    for name in ("branch.weight", "scale", "encoder.weight", "kept", "passing"):
        assert not torch.equal(last[0][name], last[1][name]), name  # there was something to average
    assert torch.equal(first["end"]["unused.weight"], first["path"][0]["unused.weight"])
    assert int(first["end"]["count"]) == 12


@pytest.mark.parametrize("kind", having("warmup_steps"))
def test_in_a_warm_up_a_parameter_used_on_one_rank_moves_alike_on_both(kind):
    first, second = run_ranks(odd, 2, kind(warmup_steps=1000), init=False)
    for one, other in zip(first["path"], second["path"], strict=True):
        for name in ("branch.weight", "scale", "encoder.weight", "unused.weight"):
            torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-7)
    assert not torch.equal(first["path"][0]["branch.weight"], first["path"][-1]["branch.weight"])
    assert torch.equal(first["path"][0]["unused.weight"], first["path"][-1]["unused.weight"])  # decay does not move it


class Words(L.LightningModule):
    """An embedding with sparse gradients, of which each batch sees a few rows."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.optimizer = nn.Embedding(50, 4, sparse=True), optimizer

    def training_step(self, batch, batch_idx):
        return (self.words(batch[0]) - 1).pow(2).mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1)


def words():
    rows = torch.randint(50, (64, 3), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows), batch_size=4)


def sparse(rank, world, strategy, optimizer):
    model, watch = Words(optimizer), Watch()
    trainer(strategy, world, callbacks=[watch], max_epochs=1).fit(model, words())
    assert model.words.weight.grad is None or model.words.weight.grad.is_sparse
    return {"path": [state["words.weight"] for state in watch.path], "end": everything(model)["words.weight"]}


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
@over_strategies
def test_sparse_gradients_make_local_steps(strategy, optimizer):
    first, second = run_ranks(sparse, 2, strategy, optimizer, init=False)
    assert torch.equal(first["end"], second["end"])
    torch.testing.assert_close(first["end"], (first["path"][-1] + second["path"][-1]) / 2, **TOL)
    assert not torch.equal(first["path"][-2], second["path"][-2])  # with the last step a round of four ends


def sparse_warm_up(rank, world, kind):
    t = trainer(kind(warmup_steps=2), world, max_epochs=1)
    callbacks = list(t.callbacks)
    refusal = "sparse gradients cannot be averaged; use sparse=False, or warmup_steps=0"
    with pytest.raises((TypeError, PeerLost), match=refusal):  # the other one may be first
        t.fit(Words(torch.optim.SGD), words())
    assert t.callbacks == callbacks
    assert "run" not in vars(t.fit_loop)


@pytest.mark.parametrize("kind", having("warmup_steps"))
def test_a_warm_up_refuses_sparse_gradients(kind):
    run_ranks(sparse_warm_up, 2, kind, init=False)


class Lazy(Toy):
    def __init__(self, ready):
        super().__init__(dropout=0.0)
        self.net = nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(1))
        if ready:
            self.net(dataset(1)[0][0])


def lazy(rank, world, strategy):
    t = trainer(copy.deepcopy(strategy), world, max_epochs=1)
    callbacks = list(t.callbacks)
    with pytest.raises(Exception, match=r"parameter net\.0\.weight has no shape yet.*run a batch through the model"):
        t.fit(Lazy(ready=False), loader())
    assert t.callbacks == callbacks
    model = Lazy(ready=True)
    trainer(strategy, world, max_epochs=1).fit(model, loader())
    return everything(model)


@over_strategies
def test_lazy_parameters_are_refused_until_they_have_a_shape(strategy):
    first, second = run_ranks(lazy, 2, strategy, init=False)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
