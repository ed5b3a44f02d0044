"""Whoever uses a parameter that is on its way waits for it, and for it alone; and nobody sees the old one."""

import copy
import os
import re
import threading
from unittest import mock

import lightning as L
import pytest
import torch
from support.ranks import run_ranks, run_ranks_raw
from support.toys import Toy, loader, trainer
from test_ssgd import small_buckets
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_cocod.algorithms import SSDSGD, SSGD
from lightning_cocod.algorithms.first_use import FirstUse
from lightning_cocod.comm.shards import Pull
from lightning_cocod.strategies import SSGDStrategy

LIMIT = 60.0


# Who waits


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, 3))
        self.b = nn.Parameter(torch.ones(3))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


USES = {
    "a function": lambda m, alias: functional.linear(torch.ones(1, 3), m.a),
    "by name": lambda m, alias: functional.linear(input=torch.ones(1, 3), weight=m.a),
    "a method": lambda m, alias: m.a.sum(),
    "an operator": lambda m, alias: 2 * m.a,
    "a list": lambda m, alias: torch.stack([torch.ones(3, 3), m.a]),
    "all at once": lambda m, alias: torch._foreach_mul([m.a.detach()], 2.0),
    "a registered operator": lambda m, alias: torch.ops.aten.mul.Tensor(m.a, 2.0),
    "a function of one's own": lambda m, alias: Twice.apply(m.a),
    "an index": lambda m, alias: m.a[0, 0].item(),
    "an alias made before": lambda m, alias: alias.sum(),
    "its data": lambda m, alias: m.a.data,
    "other data": lambda m, alias: setattr(m.a, "data", torch.zeros(3, 3)),
    "in place": lambda m, alias: m.a.detach().zero_(),
    "NumPy": lambda m, alias: m.a.detach().numpy(),
    "its address": lambda m, alias: m.a.data_ptr(),
    "a copy": lambda m, alias: copy.deepcopy(m.a),
    "its text": lambda m, alias: repr(m.a),
    "a comparison": lambda m, alias: torch.equal(m.a, torch.ones(3, 3)),
}
LOOKS = {
    "shape": lambda m: (m.a.shape, m.a.size(0), m.a.dim(), m.a.numel(), len(m.state_dict.__name__)),
    "kind": lambda m: (m.a.dtype, m.a.device, m.a.layout, m.a.is_leaf, m.a.is_floating_point()),
    "gradient": lambda m: (m.a.grad, setattr(m.a, "grad", None), m.zero_grad()),
    "whether there is one": lambda m: (m.a.requires_grad, m.a.requires_grad_(True), setattr(m.a, "requires_grad", True)),
    "walk": lambda m: [*m.named_parameters(), *m.modules()],
    "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1).zero_grad(),
    "others": lambda m: (torch.ones(3) + 1).sum(),
}


def waited(use):
    """The numbers of those that were waited for: 0 is a, 1 is b."""
    model, uses, numbers = Two(), FirstUse(), []
    alias = model.a.detach().view(-1)[3:]
    uses.watch([model.a, model.b], numbers.append)
    try:
        use(model, alias)
    finally:
        uses.leave()
    model.a.sum()
    return numbers


@pytest.mark.parametrize("use", USES)
def test_a_use_waits_for_what_is_used(use):
    assert waited(USES[use]) == [0]


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_what_it_is_does_not(look):
    assert waited(lambda model, _: LOOKS[look](model)) == []


def test_the_whole_state_waits_for_all_once():
    assert waited(lambda model, _: (model.state_dict(), model.state_dict(), model.a.sum())) == [0, 1]


def test_attention_waits_for_a_layer_whose_forward_it_never_calls():
    model, uses, numbers = nn.MultiheadAttention(4, 2), FirstUse(), []
    names = [name for name, _ in model.named_parameters()]
    uses.watch(list(model.parameters()), lambda number: numbers.append(names[number]))
    try:
        model(*[torch.ones(2, 1, 4)] * 3)
    finally:
        uses.leave()
    assert "out_proj.weight" in numbers


def test_other_threads_and_later_uses_do_not_wait():
    model, uses, numbers = Two(), FirstUse(), []
    uses.watch([model.a, model.b], numbers.append)
    other = threading.Thread(target=lambda: model.a.sum())
    other.start()
    other.join()
    assert numbers == []
    uses.leave()
    model.a.sum()
    assert numbers == []


class Counts(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_contexts_of_others_stay_as_they_are():
    model, uses, numbers = Two(), FirstUse(), []
    with Counts() as outside:
        uses.watch([model.a], numbers.append)
        with Counts() as inside:
            uses.leave()  # is not on top
            model.a.sum()
            assert inside.calls == 1
        uses.watch([model.b], numbers.append)
        model.b.sum()
        uses.leave()
        before = outside.calls
        model.a.sum()
        assert outside.calls == before + 1
    assert numbers == [0]
    assert torch.overrides._get_current_function_mode_stack() == []


# What they see


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())


class Held:
    """Buckets in which these parameters lie, in the order of the server, do not set out before somebody says so."""

    def __init__(self, numbers):
        self.numbers, self.release, self._cargo = set(numbers), threading.Event(), Pull.cargo

    def __enter__(self):
        def cargo(pull, bucket, *rest):
            if self.numbers & set(pull.layout.numbers(bucket)):
                assert self.release.wait(LIMIT)
            return self._cargo(pull, bucket, *rest)

        self._patch = mock.patch.object(Pull, "cargo", cargo)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self.release.set()
        self._patch.stop()


def unseen(tensor):
    """Its value as it is, whoever should wait."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().clone()


def step_of(rank, model, ssgd, optimizer):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    ssgd.before_step()
    ssgd.step(optimizer.step)
    ssgd.after_step()


def layer_by_layer(rank, n):
    expected = Layers()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    with small_buckets(), SSGD(expected, optimizer) as ssgd:
        step_of(rank, expected, ssgd, optimizer)
    model = Layers()
    begun = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with small_buckets(), SSGD(model, optimizer, overlap_pull=True) as ssgd, Held({0, 1}) as held:
        step_of(rank, model, ssgd, optimizer)  # returns, although most of it is held
        assert torch.equal(unseen(model.last.weight), begun["last.weight"])  # the negative control: it is old still
        x = torch.ones(1, 16)
        assert torch.equal(model.first(x), expected.first(x))  # is there, and waits for nothing else
        assert not held.release.is_set()
        reads = threading.Event()
        helper = threading.Thread(target=lambda: reads.wait(LIMIT) and held.release.set())
        helper.start()
        reads.set()
        assert torch.equal(model.last.weight, expected.last.weight)
        helper.join()
        metrics = ssgd.metrics()
    assert metrics["comm/exposed_ms"] > 0
    return [torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_layers_are_used_as_they_come(n):
    assert run_ranks(layer_by_layer, n, timeout=LIMIT) == [[True] * 6] * n


def evaluated_at_once(rank, n):
    """Everything that reads the model right after a step, with nothing there yet."""
    results = []
    for overlap_pull in (False, True):
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with SSGD(model, optimizer, overlap_pull=overlap_pull) as ssgd, Held(range(6)) as held:
            held.release.set() if not overlap_pull else None
            for look in (ssgd.consensus, None):
                if overlap_pull:
                    held.release.clear()
                    threading.Timer(0.05, held.release.set).start()
                step_of(rank, model, ssgd, optimizer)
                if look is not None:
                    with look():
                        results.append(copy.deepcopy(model.state_dict()))
                else:
                    results.append((ssgd.optimizer_state(optimizer), ssgd.state_dict()))
                held.release.set()
        results.append(copy.deepcopy(model.state_dict()))
    half = len(results) // 2
    return [repr(a) == repr(b) for a, b in zip(results[:half], results[half:], strict=True)]


def test_evaluation_and_states_are_those_of_the_new_weights():
    assert run_ranks(evaluated_at_once, 2, timeout=LIMIT) == [[True] * 3] * 2


def dies(rank, n):
    """Rank 1 ends between its part of the pull and the rest of it."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with small_buckets(), SSGD(model, optimizer, overlap_pull=True, timeout=20.0) as ssgd:
        if rank == 1:
            cargo = Pull.cargo

            def some_cargo(pull, bucket, *rest):
                return cargo(pull, bucket, *rest) if bucket >= len(pull.layout) - 2 else os._exit(3)

            Pull.cargo = some_cargo
        step_of(rank, model, ssgd, optimizer)
        model(torch.ones(1, 16))


def test_a_peer_that_is_lost_meanwhile_is_named_where_a_parameter_is_used():
    survivor, lost = run_ranks_raw(dies, 2, timeout=LIMIT, grace=40)
    assert (survivor.status, lost.status) == ("error", "died")
    assert re.search(r"PeerLost: .*rank 1", survivor.traceback)
    assert "first_use" in survivor.traceback


# Under Lightning


class Reads(L.Callback):
    """The weights after every batch, as an average over time would."""

    def __init__(self):
        self.path = []

    def on_train_batch_end(self, trainer, module, *_):
        self.path.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))


def read_after_every_batch(rank, n, overlap_pull):
    L.seed_everything(5, verbose=False)
    reads = Reads()
    module = Toy()
    trainer(SSGDStrategy(overlap_pull=overlap_pull), n, callbacks=[reads]).fit(module, loader(), loader(shuffle=False))
    return torch.stack(reads.path)


def test_callbacks_see_the_new_weights():
    plain, behind = (run_ranks(read_after_every_batch, 2, overlap, init=False, timeout=LIMIT) for overlap in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, behind, strict=True))


class Compiled(Toy):
    def __init__(self):
        super().__init__()
        self.net.compile()


def compiled(rank, n):
    with pytest.raises(ValueError, match="overlap_pull"):
        trainer(SSGDStrategy(overlap_pull=True), n).fit(Compiled(), loader())
    with pytest.raises(ValueError, match="overlap_pull"):
        trainer(SSGDStrategy(overlap_pull=True), n).fit(torch.compile(Toy()), loader())


def test_compiled_models_are_refused():
    run_ranks(compiled, 1, init=False, timeout=LIMIT)


def test_ssd_sgd_has_no_use_for_it():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="leave overlap_pull out"):
        SSDSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), overlap_pull=True)
