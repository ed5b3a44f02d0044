"""Small Lightning modules and data for the tests of strategies."""

import inspect

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cocod import strategies  # importing it registers the names
from lightning_cocod.strategies import AlgorithmStrategy

VARIANTS = {
    "cd_sgd": {"compress_steps": 3},
    "co2": {"period": 3, "gap_penalty": 1.5, "clip": 0.05},
    "compskip_dsgd": {"worker_skip": 0.3, "server_skip": 3},
    "d_psgd": {},
    "dc_s3gd": {"period": 3},
    "diloco": {"period": 3},
    "dist_ef_sgd": {},
    "eager_diloco": {"period": 3},
    "flex_compress_sgd": {},
    "overlap_local_sgd": {"period": 3},
    "pipe_sgd": {},
    "post_local_sgd": {"period": 3, "warmup_steps": 4},
    "sgp": {"graph": [[0.8, 0.5], [0.2, 0.5]], "delay": 2},
    "slowmo": {"period": 3},
    "od_sgd": {},
    "ssd_sgd": {"period": 3, "local_update": "dc_asgd"},
    "ssgd": {},
    "streaming_diloco": {"period": 3},
}
"""Strategies that are looked at in test_strategy, test_resume and tests of their own, with options for short runs."""
ASYNCHRONOUS = ["ad_psgd", "a_psgd", "dc_asgd", "eamsgd"]
"""Strategies under which no two runs are equal and ranks are not in step: see test_work_sharing."""
CLASSES = [strategy for strategy in strategies.STRATEGIES if strategy.registered_name not in (*VARIANTS, *ASYNCHRONOUS)]
STRATEGIES = [strategy.registered_name for strategy in CLASSES]
"""The names of the others, `cocod` and `local_sgd`: what a user expects of any strategy is tested with these two."""
BY_NAME = {strategy.registered_name: strategy for strategy in strategies.STRATEGIES}


def has(strategy, *options):
    """Whether a class of strategies has all of these options."""
    return {*inspect.signature(AlgorithmStrategy).parameters, *inspect.signature(strategy).parameters}.issuperset(options)


def variants():
    """One of each of the variants, for a short run."""
    return [pytest.param(BY_NAME[name](**options), id=name) for name, options in VARIANTS.items()]


def having(*options):
    """Those of the two classes that have these options."""
    return [strategy for strategy in CLASSES if has(strategy, *options)]


def made(**options):
    """One of each of the two, with those of these options that it has."""
    return [strategy(**{k: v for k, v in options.items() if has(strategy, k)}) for strategy in CLASSES]


def dataset(n=96, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def loader(n=96, batch_size=8, shuffle=True):
    return DataLoader(dataset(n), batch_size=batch_size, shuffle=shuffle)


class Toy(L.LightningModule):
    """A regression net with everything that replicas may disagree about: BatchNorm, dropout, momentum, a schedule."""

    def __init__(self, dropout=0.2, norm=True, **optimizer):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12) if norm else nn.Identity(), nn.Dropout(dropout), nn.Tanh(), nn.Linear(12, 1)
        )
        self.optimizer = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, **optimizer}

    def loss(self, batch):
        x, y = batch
        return (self.net(x) - y).pow(2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), **self.optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoOptimizers(Toy):
    """Manual optimization: the second optimizer steps on every other batch only."""

    second = torch.optim.Adam

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 else (first,):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        layers = list(self.net.children())
        return torch.optim.SGD(layers[0].parameters(), lr=0.05), self.second(layers[4].parameters(), lr=0.01)


class TwoOfSGD(TwoOptimizers):
    """The same for strategies that are for SGD only."""

    second = torch.optim.SGD


def trainer(strategy, devices=2, **options):
    """A quiet trainer on CPU ranks."""
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **options}
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )


def flat(module):
    """All floating-point state of a module as one vector."""
    values = [v.detach().double().reshape(-1) for v in module.state_dict().values() if v.is_floating_point()]
    return torch.cat(values)


def parameters(module):
    """All parameters as one vector, bits preserved."""
    return torch.cat([p.detach().clone().reshape(-1) for p in module.parameters()])
