"""SSD-SGD and what is made of it where a loop goes uphill, freezes layers, or meets a NaN."""

import copy
import functools
import math

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from lightning_cocod.algorithms import APSGD, CDSGD, DCASGD, ODSGD, SSDSGD, SSGD, DelayCompensation
from lightning_cocod.algorithms.elementwise import refusal

LIMIT = 120.0
UPDATES = ["glu", "sgd", "dc_asgd", "dc_asgd_a"]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def slopes(rank, n, maximize, update, period, weight_decay):
    """Where a server and a worker come to whose gradient is the same everywhere, up or down."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, maximize=maximize, weight_decay=weight_decay)
    path = []
    with SSDSGD(model, optimizer, period=period, local_update=update) as algo:
        for _ in range(6):
            ((1 if maximize else -1) * sum(p.sum() for p in model.parameters())).backward()
            algo.step()
            path.append(flat(model))
    return torch.stack([*path, flat(model)])


def all_slopes(rank, n, update):
    cases = [(period, weight_decay) for period in (1, 3, 100) for weight_decay in (0.0, 0.1)]
    return [[slopes(rank, n, maximize, update, *case) for maximize in (True, False)] for case in cases]


@pytest.mark.parametrize("update", UPDATES)
def test_going_up_a_slope_is_going_down_its_mirror_image(update):
    for cases in run_ranks(all_slopes, 2, update, timeout=LIMIT):
        for up, down in cases:
            assert torch.allclose(up, down, rtol=0, atol=1e-12)
            assert (up[-1] > 1).all()


def frozen(rank, n, cls, options, freezes):
    """How far the first layer of the model that is served, and of the worker's, moves after its third step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    draw = torch.Generator().manual_seed(rank)
    served, own = [], []
    with cls(model, optimizer, **options) as algo:
        for t in range(9):
            if t == 3:
                model[0].requires_grad_(not freezes)
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=draw, dtype=torch.float64)).square().mean().backward()
            algo.step()
            if t >= 2:
                own.append(model[0].weight.detach().clone())
                with algo.consensus():
                    served.append(model[0].weight.detach().clone())
    moved = [float((w - served[0]).abs().max()) for w in served]
    return moved, [float((x - served[0]).abs().max()) for x in own[4:]]  # by then what was pulled is what is served


def all_frozen(rank, n, freezes):
    cases = [(SSDSGD, {"period": 2, "local_update": update}) for update in UPDATES]
    cases += [(ODSGD, {}), (CDSGD, {"compression": "int8"})]
    return [frozen(rank, n, *case, freezes) for case in cases]


def test_what_is_frozen_rests_on_the_server_and_on_the_workers():
    for cases in run_ranks(all_frozen, 2, True, timeout=LIMIT):
        for served, own in cases:
            assert served == [0.0] * 7
            assert own == [0.0] * 3
    for cases in run_ranks(all_frozen, 2, False, timeout=LIMIT):  # the negative control
        assert all(min(served[1:]) > 0 and min(own) > 0 for served, own in cases)


def frozen_with_a_gradient(rank, n, cls, options):
    """A layer is frozen between its backward and the step, as discriminators are: it has a gradient, and steps."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with cls(model, optimizer, **options) as algo:
        before = model[0].weight.detach().clone()
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            model[0].requires_grad_(False)
            algo.step()
            model[0].requires_grad_(True)
        with algo.consensus():
            return float((model[0].weight - before).abs().max())


@pytest.mark.parametrize(("cls", "options"), [(SSDSGD, {"period": 2}), (ODSGD, {}), (CDSGD, {"compression": "int8"})])
def test_what_has_a_gradient_steps_frozen_or_not(cls, options):
    assert all(moved > 1e-3 for moved in run_ranks(frozen_with_a_gradient, 2, cls, options, timeout=LIMIT))


def normalised(rank, n, cls, elementwise):
    """With an optimizer that is refused when it is tried out: what becomes of it."""
    model = nn.Linear(4, 4)
    optimizer = Normalised(model.parameters(), {"lr": 0.1})
    try:
        with cls(model, optimizer, elementwise=elementwise, **({"local_update": "sgd"} if cls is SSDSGD else {})) as algo:
            before = model.weight.detach().clone()
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
                algo.step()
            with algo.consensus():
                return float((model.weight - before).abs().max()) > 0
    except TypeError as refused:
        return str(refused)


class Normalised(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-9), alpha=group["lr"])


class Around(torch.optim.SGD):
    """Steps another one."""

    def step(self):
        pass


@pytest.mark.parametrize("cls", [SSGD, SSDSGD, ODSGD, CDSGD, APSGD, DCASGD])
def test_who_says_that_an_optimizer_is_element_wise_is_believed(cls):
    (said, _), (moved, _) = (run_ranks(normalised, 2, cls, known, timeout=LIMIT) for known in (False, True))
    assert "needs whole tensors" in said
    assert "or elementwise=True if it is one" in said
    assert moved is True


def test_but_not_that_one_steps_which_does_not():
    optimizer = Around([nn.Parameter(torch.ones(3, 2))], 0.1)
    assert "moves nothing" in refusal(optimizer, elementwise=True)


def poisoned(rank, n, cls, options, *, stops=None, resume=None, looks=False, thaws=False):
    """Whether a worker's parameters, and its buffers, are finite after each step; rank 1 meets a NaN in the fourth.

    And the model's end, or at ``stops`` all that it takes to ``resume``.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    model[3].bias.requires_grad_(not thaws)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    sound = []
    with cls(model, optimizer, on_nonfinite="skip", **options) as algo:
        first = 0
        if resume is not None:
            (first, *states), sound = resume, []
            for part, state in zip((model, optimizer, algo), states, strict=True):
                part.load_state_dict(state)
        for t in range(first, 12):
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * t + rank), dtype=torch.float64)
            if rank == 1 and t == 3:
                x[0, 0] = math.nan
            if thaws and t == 4:
                model[3].bias.requires_grad_(True)
            model(x).square().mean().backward()
            algo.step()
            tensors = (model.parameters(), model.buffers())
            sound.append([all(tensor.isfinite().all() for tensor in kind) for kind in tensors])
            if looks:
                with algo.consensus():
                    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
            if t + 1 == stops:
                whole = [
                    model.state_dict(),
                    {**optimizer.state_dict(), **algo.optimizer_state(optimizer)},
                    algo.state_dict(),
                ]
                return t + 1, *copy.deepcopy(whole)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    return sound, flat(model), [b.clone() for b in model.buffers()]


POISONED = [(SSDSGD, {"period": k, "local_update": update}) for k in (1, 3, 100) for update in UPDATES]
POISONED += [(SSDSGD, {"period": 3, "overlap": False}), (SSDSGD, {"warmup_steps": 4}), (ODSGD, {})]
POISONED += [(SSDSGD, {"period": 100, "local_update": DelayCompensation(lambda_0=2.0, adaptive=True, m=0.9)})]


def all_poisoned(rank, n, **how):
    return [poisoned(rank, n, *case, **how) for case in POISONED]


def test_a_worker_that_meets_a_nan_goes_on_as_if_its_gradient_were_zero():
    first, second = run_ranks(all_poisoned, 2, timeout=LIMIT)
    for (sound, model, _), (suffered, same, _) in zip(first, second, strict=True):
        assert sound == [[True, True]] * 12
        assert suffered == [[True, True]] * 3 + [[True, False]] + [[True, True]] * 8
        assert torch.equal(model, same)


@pytest.mark.parametrize("how", [{"looks": True}, {"thaws": True}], ids=["looks", "thaws"])
def test_nothing_of_a_nan_is_evaluated_or_carried_over(how):
    for cases in run_ranks(functools.partial(all_poisoned, **how), 2, timeout=LIMIT):
        for sound, *_ in cases:
            assert all(parameters for parameters, _ in sound)
            assert all(buffers for _, buffers in sound[4:])


def resumed(rank, n, case, stops):
    return poisoned(rank, n, *case, resume=poisoned(rank, n, *case, stops=stops))


def all_resumed(rank, n, stops):
    return [resumed(rank, n, case, stops) for case in POISONED]


@pytest.mark.parametrize("stops", [4, 5])
def test_a_run_that_is_resumed_after_a_nan_is_the_one_that_was_not_interrupted(stops):
    for whole, again in zip(
        run_ranks(all_poisoned, 2, timeout=LIMIT), run_ranks(all_resumed, 2, stops, timeout=LIMIT), strict=True
    ):
        for (sound, model, buffers), (rest, same, as_well) in zip(whole, again, strict=True):
            assert sound[stops:] == rest
            assert torch.equal(model, same)
            assert all(map(torch.equal, buffers, as_well))
