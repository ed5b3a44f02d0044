"""S-SGD under Lightning against DDP, where users reach into the step: clipping by hand, hooks, saving, evaluation."""

import copy
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from support.ranks import run_ranks
from support.toys import Toy, loader, trainer
from torch import nn

from lightning_cocod import PeerLost
from lightning_cocod.strategies import ODSGDStrategy, SSGDStrategy

DDP = "ddp_find_unused_parameters_true"


class Plain(Toy):
    """Bit for bit the same in two strategies."""

    def __init__(self):
        super().__init__(dropout=0.0, norm=False)


class Manual(Plain):
    """Two optimizers take turns, and gradients add up over two batches; clipped by norm."""

    clip = 0.02, "norm"

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                self.clip_gradients(optimizer, *self.clip)
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        layers = list(self.net.children())
        return torch.optim.SGD(layers[0].parameters(), lr=0.5), torch.optim.Adam(layers[4].parameters(), lr=0.01)


class ByValue(Manual):
    clip = 0.01, "value"


class Scheduled(Plain):
    """AdamW with two groups, and a rate that changes in every step."""

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() > 1]
        rest = [{"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW([{"params": matrices}, *rest], lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.04], total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Saves(Plain):
    """In the middle of a step."""

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 3:
            self.trainer.save_checkpoint(self.path)


class Attacks(Plain):
    """Computes gradients in evaluation."""

    def validation_step(self, batch, batch_idx):
        with torch.inference_mode(False), torch.enable_grad():
            self.loss([t.clone() for t in batch]).backward()


class LeavesOut(Plain):
    """Steps only with every other batch, as Lightning's documentation has it for GANs."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def fit(module, strategy, devices, folder, **options):
    module.path = f"{folder}/{type(strategy).__name__}.ckpt"
    running = trainer(strategy, devices, num_sanity_val_steps=0, inference_mode=False, **options)
    running.fit(module, loader(shuffle=False), loader(shuffle=False))
    return copy.deepcopy(dict(module.named_parameters())), [copy.deepcopy(o.state_dict()) for o in running.optimizers]


CASES = {
    "clipped by hand, by norm": (Manual, {}),
    "clipped by hand, by value": (ByValue, {}),
    "groups, schedule, clipping, accumulation": (Scheduled, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
    "saved within a step": (Saves, {}),
    "gradients in evaluation": (Attacks, {"val_check_interval": 2}),
    "steps left out, after backward": (LeavesOut, {}),
}


def both(rank, n, name, overlap_pull, folder):
    make, options = CASES[name]
    own = SSGDStrategy(overlap="left out" not in name, overlap_pull=overlap_pull)
    found = fit(make(), DDP, n, folder, **options), fit(make(), own, n, folder, **options)
    if name == "saved within a step":
        (held,), model = torch.load(f"{folder}/SSGDStrategy.ckpt", weights_only=False)["optimizer_states"], make()
        optimizer = model.configure_optimizers()["optimizer"]
        optimizer.load_state_dict(held)
        assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in model.parameters())
    return found


@pytest.mark.parametrize("overlap_pull", [False, True], ids=["", "pulled behind"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_ddp(name, overlap_pull, tmp_path):
    for (x, states), (own_x, own_states) in run_ranks(both, 2, name, overlap_pull, str(tmp_path), timeout=200):
        for key, value in x.items():
            torch.testing.assert_close(own_x[key], value, rtol=1e-6, atol=1e-7)
        for state, own in zip(states, own_states, strict=True):
            assert state["state"].keys() == own["state"].keys()
            for number, values in state["state"].items():
                for key, value in values.items():
                    torch.testing.assert_close(own["state"][number][key], value, rtol=1e-5, atol=1e-7)


# What cannot be done is said


class ClipsTooOften(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[0]
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, *self.clip)
        if batch_idx % 2:
            optimizer.step()


class LeavesOutTheLast(LeavesOut):
    """The epoch ends with gradients on their way."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, int(batch_idx == 5), optimizer, optimizer_closure)


def refused(rank, n):
    with pytest.raises(RuntimeError, match="cannot accumulate clipped gradients"):
        fit(ClipsTooOften(), SSGDStrategy(), n, "")


def refused_too(rank, n):
    with pytest.raises(RuntimeError, match="use overlap=False"):
        fit(LeavesOutTheLast(), SSGDStrategy(), n, "")


@pytest.mark.parametrize("what", [refused, refused_too])
def test_steps_that_are_left_out_are_refused_where_gradients_are_on_their_way(what):
    run_ranks(what, 2, timeout=30)


class Looks(Plain):
    def on_before_optimizer_step(self, optimizer):
        assert all(p.grad is None for p in self.parameters())


class Halves(Plain):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.div_(2)


def warned(rank, n):
    said = []
    for module, strategy in ((Looks(), SSGDStrategy()), (Plain(), SSGDStrategy()), (Halves(), ODSGDStrategy())):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fit(module, strategy, n, "", max_steps=1)
        said.append([str(w.message) for w in found if str(w.message).startswith("Gradients ")])
    return said


def test_who_looks_for_gradients_in_hooks_is_warned():
    (looking, plain, halving), (on_other_rank, *_) = run_ranks(warned, 2, timeout=30)
    assert "p.grad is None in Looks.on_before_optimizer_step" in looking[0]
    assert "have been sent before Halves.on_before_optimizer_step" in halving[0]
    assert plain == on_other_rank == []


class OneRank(ClipsTooOften):
    """Where there is one rank all gradients are where they always are."""

    def on_before_optimizer_step(self, optimizer):
        assert self.net[0].weight.grad is not None


def alone(rank, n):
    fit(OneRank(), SSGDStrategy(), n, "", max_steps=2)


def test_a_single_rank_may_do_as_ever():
    run_ranks(alone, 1, timeout=30)


# A rank that fails while the optimizer has its parts


class Fails(Plain):
    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 3:
            raise ValueError("boom")


def rescued(rank, n, folder):
    options = {"callbacks": [OnExceptionCheckpoint(folder)], "enable_checkpointing": True, "default_root_dir": folder}
    with pytest.raises((ValueError, PeerLost), match="boom"):  # the other one may be first
        fit(Fails(), SSGDStrategy(), n, folder, **options)


def test_a_checkpoint_of_a_failure_has_no_parts_of_states(tmp_path):
    run_ranks(rescued, 2, str(tmp_path), timeout=30)
    (path,) = tmp_path.glob("*.ckpt")  # only now: rank 0 writes it, and nobody waits for it
    (state,) = torch.load(path, weights_only=False)["optimizer_states"]
    assert state["state"] == {}
    assert state["param_groups"][0]["params"] == [0, 1, 2, 3]
