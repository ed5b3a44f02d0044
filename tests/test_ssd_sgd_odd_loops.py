"""SSD-SGD and what is made of it where a loop goes uphill, freezes layers, or meets a NaN."""

import math

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from lightning_cocod.algorithms import CDSGD, ODSGD, SSDSGD

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


def poisoned(rank, n, cls, options):
    """Whether a worker and its buffers are finite after each step; rank 1 meets a NaN in the fourth. And the model's end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(rank)
    sound = []
    with cls(model, optimizer, on_nonfinite="skip", **options) as algo:
        for t in range(12):
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
            if rank == 1 and t == 3:
                x[0, 0] = math.nan
            model(x).square().mean().backward()
            algo.step()
            sound.append(all(tensor.isfinite().all() for tensor in model.state_dict().values()))
    return sound, flat(model)


def all_poisoned(rank, n):
    cases = [(SSDSGD, {"period": k, "local_update": update}) for k in (1, 3, 100) for update in UPDATES]
    cases += [(SSDSGD, {"period": 3, "overlap": False}), (SSDSGD, {"warmup_steps": 4}), (ODSGD, {})]
    return [poisoned(rank, n, *case) for case in cases]


def test_a_worker_that_met_a_nan_has_what_is_served_soon_after():
    first, second = run_ranks(all_poisoned, 2, timeout=LIMIT)
    for (sound, model), (suffered, same) in zip(first, second, strict=True):
        assert sound == [True] * 12
        assert suffered[:3] == [True] * 3
        assert suffered[6:] == [True] * 6
        assert model.isfinite().all()
        assert torch.equal(model, same)
    assert any(not all(suffered) for suffered, _ in second)  # the negative control: there was something to mend
