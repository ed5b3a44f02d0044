"""S-SGD in loops that do things in between: nothing hangs, nothing is lost, and what cannot be done is said."""

from contextlib import nullcontext

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cocod.algorithms import SSGD
from lightning_cocod.algorithms.elementwise import refusal

optim = torch.optim


class Net(nn.Module):
    """With a layer that no forward comes by: no backward completes the gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def loss(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(8, 4, generator=generator)).square().mean()


def heavy(parameters):
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def end(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(rank, wrap=False, freeze=False, made=lambda model: [heavy(model.parameters())], **between):
    """Four steps, with what is done at moments ``between`` them: after_backward, before_update, after_step."""
    model = Net()
    model.a.requires_grad_(not freeze)
    optimizers = made(model)
    with nullcontext() if wrap else SSGD(model, optimizers) as ssgd:

        def do(what, step):
            if what in between:
                between[what](ssgd, model, optimizers, step)

        for step in range(4):
            wrapped = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(wrapped, rank, step).backward()
            do("after_backward", step)
            for optimizer in optimizers:
                if not wrap:
                    ssgd.before_step(optimizer)
                do("before_update", step)
                optimizer.step() if wrap else ssgd.step(optimizer.step)
            if not wrap:
                ssgd.after_step()
            do("after_step", step)
    return end(model), [optimizer.state_dict() for optimizer in optimizers]


def same(left, right):
    assert torch.equal(left[0], right[0])
    for one, other in zip(left[1], right[1], strict=True):
        assert one["state"].keys() == other["state"].keys()
        for number, values in one["state"].items():
            assert torch.equal(values["momentum_buffer"], other["state"][number]["momentum_buffer"])


def alone(rank, n):
    model = Net()
    with SSGD(model, heavy(model.parameters())) as ssgd:
        loss(model, rank, 0).backward()
        ssgd.step()
    return end(model)


def test_a_single_worker_steps_too():
    before = end(Net())
    assert not torch.equal(run_ranks(alone, 1)[0], before)


def looked_at(rank, n):
    def save(ssgd, model, optimizers, step):
        for optimizer in optimizers:
            ssgd.optimizer_state(optimizer)
        ssgd.state_dict()
        with ssgd.consensus():
            pass

    def look(ssgd, model, optimizers, step):
        assert optimizers[0].state[model.a.weight] == {}  # which makes an entry

    plain = run(rank)
    same(run(rank, after_backward=save), plain)
    same(run(rank, before_update=save), plain)
    same(run(rank, after_step=save), plain)
    same(run(rank, after_step=look), plain)


def test_states_can_be_asked_for_at_any_time():
    run_ranks(looked_at, 2, timeout=20)


def thawed(rank, n):
    def thaw(ssgd, model, optimizers, step):
        if step == 1:
            model.a.requires_grad_(True)

    same(run(rank, freeze=True, after_backward=thaw), run(rank, wrap=True, freeze=True, after_backward=thaw))


def test_a_layer_that_thaws_between_backward_and_step():
    run_ranks(thawed, 2, timeout=20)


def joined(rank, n):
    def join(ssgd, model, optimizers, step):
        optimizers[0].add_param_group({"params": list(model.a.parameters())})

    with pytest.raises(RuntimeError, match="let them join before backward"):
        run(rank, made=lambda model: [heavy(model.b.parameters())], after_backward=join)


def test_parameters_that_join_between_backward_and_step_are_refused():
    run_ranks(joined, 2, timeout=20)


def left_out(rank, n, wrap):
    """A step that is not made, and a layer that thaws then."""
    model = Net()
    model.a.requires_grad_(False)
    optimizer = heavy(model.parameters())
    with nullcontext() if wrap else SSGD(model, optimizer) as ssgd:
        for step in range(3):
            wrapped = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
            optimizer.zero_grad()
            loss(wrapped, rank, step).backward()
            if not wrap:
                ssgd.before_step()
            if step == 1:
                model.a.requires_grad_(True)
            elif wrap:
                optimizer.step()
            else:
                ssgd.step(optimizer.step)
                ssgd.after_step()
    return end(model), [optimizer.state_dict()]


def test_a_step_that_is_left_out_loses_no_state():
    for own, ddp in zip(run_ranks(left_out, 2, False, timeout=20), run_ranks(left_out, 2, True, timeout=20), strict=True):
        same(own, ddp)


def reset(rank, n):
    def forget(ssgd, model, optimizers, step):
        if step == 1:
            optimizers[0].load_state_dict(heavy(model.parameters()).state_dict())

    forgetful = run(rank, after_step=forget)
    same(forgetful, run(rank, wrap=True, after_step=forget))
    assert not torch.equal(forgetful[0], run(rank)[0])  # there was something to forget


def test_loading_an_empty_state_forgets():
    run_ranks(reset, 2, timeout=20)


def shared(rank, n):
    def two(model):
        return [heavy(model.parameters()), heavy(model.b.parameters())]

    same(run(rank, made=two), run(rank, wrap=True, made=two))
    with pytest.raises(ValueError, match="one after the other"):
        run(rank, made=two, after_backward=lambda ssgd, *_: ssgd.before_step())


def test_optimizers_that_share_parameters():
    run_ranks(shared, 2, timeout=20)


def early(rank, n):
    def clip(ssgd, model, optimizers, step):
        ssgd.clip_grad_norm_(optimizers[0], 0.1)

    with pytest.raises(RuntimeError, match="after before_step"):
        run(rank, after_backward=clip)


def test_clipping_before_there_is_a_mean_is_refused():
    run_ranks(early, 2, timeout=20)


def evaluated(rank, n):
    def attack(ssgd, model, optimizers, step):
        """Gradients of an evaluation are not those of a step."""
        with ssgd.consensus() if ssgd else nullcontext():
            loss(model, rank, 99).backward()

    same(run(rank, after_step=attack), run(rank))


def test_a_backward_in_an_evaluation_is_not_pushed():
    run_ranks(evaluated, 2, timeout=20)


def sparse(rank, n):
    embedding = nn.Embedding(5, 3, sparse=True)
    with (
        pytest.raises(TypeError, match="use sparse=False"),
        SSGD(embedding, optim.SGD(embedding.parameters(), lr=0.1)),
    ):
        embedding(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused():
    run_ranks(sparse, 2, timeout=20)


# Optimizers that cannot be cut


class Mine(optim.Optimizer):
    """The base of the following."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.update(group, [p for p in group["params"] if p.grad is not None])


class Around(Mine):
    """Has the steps made by another optimizer."""

    def __init__(self, params):
        super().__init__(params)
        self.inner = optim.SGD(self.param_groups[0]["params"], lr=0.1)

    def update(self, group, params):
        self.inner.step()


class Remembers(Mine):
    """Adds up the last gradients."""

    def update(self, group, params):
        for p in params:
            last = self.state[p].setdefault("last", [])
            last.append(p.grad.clone())
            p.sub_(sum(last[-2:]), alpha=group["lr"])


class Counts(Mine):
    """Keeps something that belongs to no parameter."""

    def update(self, group, params):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for p in params:
            p.sub_(p.grad, alpha=group["lr"])


class Together(Mine):
    """Steps as long as all gradients together say."""

    def update(self, group, params):
        size = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / size, alpha=group["lr"])


class Slows(Mine):
    """Counts steps in a vector of one element."""

    def update(self, group, params):
        for p in params:
            n = self.state[p].setdefault("n", torch.zeros(1))
            n += 1
            p.sub_(p.grad, alpha=group["lr"] / n.item())


def counted(rank, n):
    """The first worker has a part of one element, the second the rest."""
    model = nn.ParameterList([torch.ones(4), torch.ones(3)])
    optimizer = Slows(model.parameters())
    with SSGD(model, optimizer) as ssgd:
        for _ in range(3):
            sum(p.square().sum() for p in model).backward()
            ssgd.step()
    return [optimizer.state[p]["n"] for p in model]


def test_what_is_as_large_as_a_part_by_chance_is_not_cut():
    for counts in run_ranks(counted, 2, timeout=20):
        assert counts == [torch.tensor([3.0])] * 2


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Around, "moves nothing"),
        (Remembers, "keeps a list as 'last'"),
        (Counts, "keeps 'all' in its state"),
        (Together, "needs whole tensors"),
        (optim.SparseAdam, "SparseAdam does not support dense gradients"),
    ],
)
def test_why_an_optimizer_is_refused(cls, why):
    assert why in refusal(cls([nn.Parameter(torch.ones(3, 2))]))
