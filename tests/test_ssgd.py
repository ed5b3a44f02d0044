"""S-SGD equals DDP: bit for bit with two workers, to rounding with more; with everything a training loop does."""

import copy
import functools
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR

from lightning_cocod import NonFiniteMessage
from lightning_cocod.algorithms import SSGD
from lightning_cocod.algorithms.elementwise import refusal
from lightning_cocod.comm import buckets

STEPS = 7
optim = torch.optim


class Net(nn.Module):
    """Everything a model can have: layers that some ranks or all leave out, a number, a frozen one, one in another order."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Linear(7, 13)
        self.sometimes = nn.Linear(13, 13)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(13), requires_grad=False)
        self.convolution = nn.Conv2d(1, 3, (1, 2)).to(memory_format=torch.channels_last)
        self.head = nn.Linear(3 * 12, 5)

    def forward(self, x, all_of_it):
        h = torch.tanh(self.first(x)) * self.frozen * self.scale
        if all_of_it:
            h = h + self.sometimes(h)
        return self.head(self.convolution(h[:, None, None]).flatten(1))


def made():
    torch.manual_seed(0)
    return Net()


def batch(rank, step, part=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randn(6, 7, generator=generator), torch.randn(6, 5, generator=generator)


@dataclass
class Case:
    """Attributes: ``optimizer`` of a model; passes of a step; what is done to gradients; when a layer is left out."""

    optimizer: Any
    passes: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    warm_up: bool = False
    left_out: Any = lambda rank, step: False
    options: dict[str, Any] = field(default_factory=dict)


def everything(cls, **options):
    return lambda model: cls([p for p in model.parameters() if p.requires_grad], **options)


def groups(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    return optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.003}], lr=0.01, weight_decay=0.0)


HEAVY = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
CASES = {
    "plain": Case(everything(optim.SGD, lr=0.1)),
    "momentum and decay": Case(everything(optim.SGD, **HEAVY, nesterov=True)),
    "groups": Case(groups, warm_up=True),
    "adam": Case(everything(optim.Adam, lr=0.01, amsgrad=True)),
    "rmsprop": Case(everything(optim.RMSprop, lr=0.01, momentum=0.5)),
    "adagrad": Case(everything(optim.Adagrad, lr=0.05)),
    "accumulated": Case(everything(optim.SGD, **HEAVY), passes=3),
    "clipped values": Case(everything(optim.SGD, **HEAVY), clip_value=0.01),
    "clipped": Case(groups, clip_norm=0.05),
    "left out on one rank": Case(everything(optim.SGD, **HEAVY), left_out=lambda rank, step: rank == step % 2),
    "left out on all": Case(everything(optim.Adam, lr=0.01), left_out=lambda rank, step: step in (0, 3)),
    "after backward": Case(groups, options={"overlap": False}),
    "pulled behind": Case(groups, clip_norm=0.05, options={"overlap_pull": True}),
    "accumulated, pulled behind": Case(everything(optim.SGD, **HEAVY), passes=3, options={"overlap_pull": True}),
}


def gradients_of(case, model, rank, step, sync):
    for part in range(case.passes):
        x, y = batch(rank, step, part)
        with nullcontext() if part == case.passes - 1 else sync():
            loss = (model(x, not case.left_out(rank, step)) - y).square().mean() / case.passes
            loss.backward()


def with_ddp(rank, case, steps=range(STEPS), model=None, state=None):
    model = model or made()
    wrapped, optimizer = DistributedDataParallel(model, find_unused_parameters=True), case.optimizer(model)
    if state is not None:
        optimizer.load_state_dict(state)
    schedule = LinearLR(optimizer, 0.1, total_iters=4) if case.warm_up else None
    for step in steps:
        optimizer.zero_grad()
        gradients_of(case, wrapped, rank, step, wrapped.no_sync)
        if case.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        if case.clip_value:
            nn.utils.clip_grad_value_(model.parameters(), case.clip_value)
        optimizer.step()
        if schedule:
            schedule.step()
    return copy.deepcopy(model.state_dict()), optimizer.state_dict()


def with_ssgd(rank, case, steps=range(STEPS), model=None, state=None, watch=lambda ssgd, optimizer: None):
    model = model or made()
    optimizer = case.optimizer(model)
    if state is not None:
        optimizer.load_state_dict(state)
    schedule = LinearLR(optimizer, 0.1, total_iters=4) if case.warm_up else None
    mine = optimizer.param_groups[0]["params"]
    with SSGD(model, optimizer, **case.options) as ssgd:
        for step in steps:
            optimizer.zero_grad()
            gradients_of(case, model, rank, step, ssgd.no_sync)
            ssgd.before_step()
            if case.clip_norm:
                ssgd.clip_grad_norm_(optimizer, case.clip_norm)
            if case.clip_value:
                nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], case.clip_value)
            ssgd.step(optimizer.step)
            ssgd.after_step()
            if schedule:
                schedule.step()
            assert optimizer.param_groups[0]["params"] is mine
            watch(ssgd, optimizer)
    return copy.deepcopy(model.state_dict()), optimizer.state_dict()


def small_buckets():
    return mock.patch.object(buckets, "BUCKET_BYTES", 256)


def both(rank, n):
    with small_buckets():
        return {name: (with_ddp(rank, case), with_ssgd(rank, case)) for name, case in CASES.items()}


@functools.cache
def compared(n):
    return run_ranks(both, n, timeout=120)


def distance(left, right):
    """The largest difference between two states, whatever they are made of."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        return (left.double() - right.double()).abs().max().item() if left.numel() else 0.0
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        return max([distance(left[key], right[key]) for key in left], default=0.0)
    if isinstance(left, list | tuple):
        assert len(left) == len(right)
        return max([distance(*pair) for pair in zip(left, right, strict=True)], default=0.0)
    assert left == right
    return 0.0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_weights_and_optimizer_are_those_of_ddp(n, name):
    for rank in compared(n):
        (x, state), (own_x, own_state) = rank[name]
        rounding = 0.0 if n <= 2 and not CASES[name].clip_norm else 1e-5
        assert distance(x, own_x) <= rounding
        if n <= 2 and CASES[name].clip_norm:
            assert distance(x, own_x) < 1e-6
        if not CASES[name].clip_norm and n <= 2:
            assert distance(state, own_state) == 0.0
        else:
            assert distance(state, own_state) < 1e-4


def test_all_workers_have_the_same_bits():
    for name in CASES:
        for rank in compared(4):
            assert distance(rank[name][1], compared(4)[0][name][1]) == 0.0


def test_it_is_not_what_each_worker_would_do_alone():
    """The negative control."""
    alone = compared(1)[0]["plain"][1][0]
    assert distance(compared(2)[0]["plain"][1][0], alone) > 1e-2


# States


def handed_over(rank, n):
    """Three steps, and the rest with another, to whom weights and optimizer are handed over."""
    found = {}
    with small_buckets():
        for name, case in CASES.items():
            if case.warm_up or case.clip_norm:
                continue
            first, rest, midway = range(3), range(3, STEPS), []
            whole = with_ddp(rank, case)
            model = made()
            _, state = with_ddp(rank, case, first, model)
            from_ddp = with_ssgd(rank, case, rest, model, state)
            model = made()

            def watch(ssgd, optimizer, midway=midway):
                assert not optimizer.state
                midway.append(copy.deepcopy(ssgd.optimizer_state(optimizer)))

            _, state = with_ssgd(rank, case, first, model, watch=watch)
            kept = copy.deepcopy(state)
            to_ddp = with_ddp(rank, case, rest, model, state)
            found[name] = whole, from_ddp, to_ddp, kept, midway[-1]
    return found


def test_runs_are_handed_over_from_and_to_ddp_bit_for_bit():
    for rank in run_ranks(handed_over, 2, timeout=120):
        assert len(rank) > 5
        for name, (whole, from_ddp, to_ddp, state, midway) in rank.items():
            assert distance(whole, from_ddp) == 0.0, name
            assert distance(whole, to_ddp) == 0.0, name
            assert distance(state, midway) == 0.0, name


def sizes_of_state(rank, n):
    held = []

    def watch(ssgd, optimizer):
        (server,) = ssgd.servers.values()
        held.append(sum(t.numel() for values in server.state.values() for t in values.values()))

    case = CASES["momentum and decay"]
    model = made()
    with_ssgd(rank, case, model=model, watch=watch)
    return held[-1], sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("n", [2, 4])
def test_each_worker_has_its_part_of_the_state(n):
    held = run_ranks(sizes_of_state, n)
    never = 3 * 3 + 3  # has no gradient, and so no momentum
    assert sum(part for part, _ in held) == held[0][1] - never
    assert max(part for part, _ in held) <= held[0][1] / n + n


# The optimizer


class Normalised(optim.Optimizer):
    """Steps of a tensor's own length, as LARS has them."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


ELEMENTWISE = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_element_wise_optimizers_are_known_as_such(name):
    optimizer = getattr(optim, name)([nn.Parameter(torch.ones(3, 2))], lr=0.0)  # a warm-up's beginning
    before = copy.deepcopy(optimizer.state_dict())
    assert refusal(optimizer) is None
    assert distance(before, optimizer.state_dict()) == 0.0


def test_others_are_too():
    x = [nn.Parameter(torch.ones(3, 2))]
    assert "needs whole tensors" in refusal(Normalised(x))
    assert "needs whole tensors" in refusal(optim.Adafactor(x))
    if hasattr(optim, "Muon"):
        assert "needs whole tensors" in refusal(optim.Muon(x))


def refused(rank, n):
    model = made()
    with pytest.raises(TypeError, match="Normalised needs whole tensors"), SSGD(model, Normalised(model.parameters())):
        pass
    with SSGD(model, Normalised(model.parameters()), elementwise=True):  # whoever says so is believed
        pass
    gapped = nn.ParameterList([nn.Parameter(torch.ones(4, 4)[:, :2])])
    with pytest.raises(TypeError, match="gaps in its memory"), SSGD(gapped, optim.SGD(gapped.parameters())):
        pass
    with pytest.raises(ValueError, match="leave compression out"):
        SSGD(model, optim.SGD(model.parameters()), compression="int8")


def test_what_cannot_be_served_is_refused():
    run_ranks(refused, 2)


# Backward


def launched(rank, n):
    """Which buckets have set out when backward has come to the first layer."""
    model, out = made(), []
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with small_buckets(), SSGD(model, optimizer) as ssgd:
        (server,) = ssgd.servers.values()

        def look(_):
            if server.gate is not None:
                out.append([server.gate.is_open(bucket) for bucket in range(len(server.layout))])

        model.first.weight.register_hook(look)
        for step in range(2):
            x, y = batch(rank, step)
            (model(x, True) - y).square().mean().backward()
            assert model.head.weight.grad is None  # on its way
            ssgd.step()
    return out


def test_gradients_set_out_while_backward_runs():
    for out in run_ranks(launched, 2):
        for is_open in out:
            assert 2 < sum(is_open) < len(is_open)


def lent(rank, n, overlap):
    """How many gradients are alive after backward, before the optimizer steps, and whether there is a copy of them."""
    model, gradients, out = made(), [], []
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for p in model.parameters():
        if p.requires_grad:  # before ours, which takes them away
            p.register_post_accumulate_grad_hook(lambda p: gradients.append(StorageWeakRef(p.grad.untyped_storage())))
    with SSGD(model, optimizer, overlap=overlap) as ssgd:
        for step in range(3):
            gradients.clear()
            x, y = batch(rank, step)
            (model(x, True) - y).square().mean().backward()
            before = sum(not gradient.expired() for gradient in gradients)
            ssgd.before_step()
            out.append((before, sum(not gradient.expired() for gradient in gradients)))
            ssgd.step(optimizer.step)
        (server,) = ssgd.servers.values()
        return out, len(gradients), "g" in vars(server)


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_lent_to_the_push_and_free_before_the_step(overlap):
    for steps, gradients, is_copied in run_ranks(lent, 2, overlap):
        assert steps == [(gradients, 0)] * 3
        assert gradients > 3
        assert not is_copied


def odd_loops(rank, n):
    """Loops that do not follow the book, against one that does."""

    def run(between=lambda ssgd, optimizer: None, after=lambda ssgd, optimizer: None, **options):
        model = made()
        optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], **HEAVY)
        with SSGD(model, optimizer, **options) as ssgd:
            for step in range(STEPS):
                x, y = batch(rank, step)
                (model(x, True) - y).square().mean().backward()
                between(ssgd, optimizer)
                ssgd.step()
                after(ssgd, optimizer)
        return copy.deepcopy(model.state_dict()), optimizer.state_dict()

    def evaluate(ssgd, optimizer):
        with ssgd.consensus():
            pass

    def save_and_load(ssgd, optimizer):
        optimizer.load_state_dict(ssgd.optimizer_state(optimizer))
        ssgd.load_state_dict(ssgd.state_dict())

    def clamp(ssgd, optimizer):
        with torch.no_grad():
            ssgd.model.head.weight.clamp_(-0.1, 0.1)

    expected, kept = run(), run(after=clamp)
    assert kept[0]["head.weight"].abs().max() <= 0.1  # what the user does to weights stays
    for options in ({}, {"overlap_pull": True}):
        assert distance(run(**options), expected) == 0.0
        assert distance(run(evaluate, **options), expected) == 0.0
        assert distance(run(after=evaluate, **options), expected) == 0.0
        assert distance(run(after=save_and_load, **options), expected) == 0.0
        assert distance(run(after=clamp, **options), kept) == 0.0

    model = made()
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x, y = batch(rank, 0)

    def backward_twice():
        with SSGD(model, optimizer):
            for _ in range(2):
                (model(x, True) - y).square().mean().backward()

    with pytest.raises(RuntimeError, match="under no_sync"):
        backward_twice()
    model.zero_grad()
    (model(x, True) - y).square().mean().backward()
    assert model.head.weight.grad is not None  # let go of
    return expected


def test_loops_that_do_not_follow_the_book():
    run_ranks(odd_loops, 2)


def several(rank, n, wrap):
    """Two optimizers, of which the second steps every other time."""
    model = made()
    one = optim.SGD([*model.first.parameters(), model.scale], **HEAVY)
    two = optim.Adam([*model.head.parameters(), *model.convolution.parameters()], lr=0.01)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
    with nullcontext() if wrap else SSGD(model, [one, two]) as ssgd:
        for step in range(STEPS):
            x, y = batch(rank, step)
            for opt in (one, two):
                opt.zero_grad()
            (wrapped(x, False) - y).square().mean().backward()
            for opt in (one, two)[: 1 + step % 2]:
                if not wrap:
                    ssgd.before_step(opt)
                if wrap:
                    opt.step()
                else:
                    ssgd.step(opt.step)
            if not wrap:
                ssgd.after_step()
    return copy.deepcopy(model.state_dict()), one.state_dict(), two.state_dict()


def test_several_optimizers_that_do_not_always_step():
    for ddp, own in zip(run_ranks(several, 2, True), run_ranks(several, 2, False), strict=True):
        assert distance(ddp, own) == 0.0


def thaws(rank, n, wrap):
    """A layer joins in the fourth step; another group comes in the fifth."""
    model = made()
    model.first.requires_grad_(False)
    optimizer = optim.SGD([*model.first.parameters(), *model.head.parameters()], **HEAVY)
    with nullcontext() if wrap else SSGD(model, optimizer) as ssgd:
        for step in range(STEPS):
            if step == 3:
                model.first.requires_grad_(True)
            if step == 4:
                optimizer.add_param_group({"params": list(model.convolution.parameters()), "lr": 0.01})
            optimizer.zero_grad()
            x, y = batch(rank, step)
            wrapped = DistributedDataParallel(model, find_unused_parameters=True) if wrap else model
            (wrapped(x, False) - y).square().mean().backward()
            optimizer.step() if wrap else ssgd.step()
    return copy.deepcopy(model.state_dict()), optimizer.state_dict()


def test_parameters_that_join_later_are_served_too():
    for ddp, own in zip(run_ranks(thaws, 2, True), run_ranks(thaws, 2, False), strict=True):
        assert distance(ddp, own) == 0.0


# Gradients that are not finite


def broken(rank, n, on_nonfinite):
    model = made()
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], **HEAVY)
    seen, before = [], None
    try:
        with SSGD(model, optimizer, on_nonfinite=on_nonfinite) as ssgd:
            for step in range(3):
                x, y = batch(rank, step)
                if rank == 1 and step == 1:
                    x[0, 0] = float("nan")
                (model(x, True) - y).square().mean().backward()
                before = copy.deepcopy(model.state_dict())
                ssgd.step()
                seen.append(copy.deepcopy(model.state_dict()))
    except NonFiniteMessage as error:
        assert distance(before, model.state_dict()) == 0.0
        return str(error)
    return seen


def test_nan_ends_the_run_before_any_weight_moves():
    for said in run_ranks(broken, 2, "raise"):
        assert "ssgd/gradients at step 1: NaN or infinity in the message of rank 1" in said


def test_or_the_step_is_that_of_the_others():
    ranks = run_ranks(broken, 3, "skip")
    for seen in ranks:
        assert len(seen) == 3
        assert distance(seen, ranks[0]) == 0.0
        assert all(t.isfinite().all() for t in seen[-1].values())


class Explodes(optim.SGD):
    """When it is told."""

    now = False

    def step(self, closure=None):
        super().step()
        if self.now:
            self.param_groups[0]["params"][0].data.view(-1)[0] = float("nan")


def explodes(rank, n, options):
    model, before = made(), None
    optimizer = Explodes([p for p in model.parameters() if p.requires_grad], **HEAVY)
    try:
        with SSGD(model, optimizer, **options) as ssgd:
            for step in range(3):
                x, y = batch(rank, step)
                (model(x, True) - y).square().mean().backward()
                before = copy.deepcopy(model.state_dict())
                optimizer.now = rank == 1 and step == 1
                ssgd.step()
    except NonFiniteMessage as error:
        assert distance(before, model.state_dict()) == 0.0
        return str(error)
    return None


@pytest.mark.parametrize("options", [{"on_nonfinite": "raise"}, {"on_nonfinite": "skip"}, {"overlap_pull": True}], ids=str)
def test_a_shard_that_is_not_finite_reaches_nobody(options):
    for said in run_ranks(explodes, 2, options):
        assert "ssgd/parameters at step 1: NaN or infinity in the message of rank 1" in said
