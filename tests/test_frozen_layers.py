"""Residuals and shards that are loaded are given by parameter, whichever parameters the optimizer moves by then."""

import copy
import functools
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from lightning_cocod.algorithms import ADPSGD, APSGD, CDSGD, EAMSGD, SSDSGD, SSGD, DistEFSGD
from lightning_cocod.algorithms.coded_server import CodedServer
from lightning_cocod.algorithms.pushing import Pushing
from lightning_cocod.comm import PeerLost, buckets
from lightning_cocod.compression import TopK

LIMIT = 120.0
ALGORITHMS = {
    "dist_ef_sgd": (DistEFSGD, {"compression": TopK(ratio=0.2)}),
    "cd_sgd": (CDSGD, {"compression": TopK(ratio=0.2), "compress_steps": 1000}),
    "ssd_sgd": (SSDSGD, {"period": 1, "local_update": "sgd"}),
}
ASYNCHRONOUS = {"ad_psgd": (ADPSGD, {}), "a_psgd": (APSGD, {}), "eamsgd": (EAMSGD, {"period": 1})}
PHASES = {  # which layers are trained in each, three steps long; the run is interrupted after the first one
    "the other one": [(0,), (1,), (1,)],
    "one more": [(0,), (0, 1), (0, 1)],
    "one less": [(0, 1), (0,), (0, 1)],
    "the same": [(1,), (1,), (0, 1)],
}


def only(model, layers):
    """These are trained."""
    for layer, part in enumerate(model):
        part.requires_grad_(layer in layers)


def fresh(name, layers=(0, 1), shape=(5, 5)):
    """Two layers that are alike, so that nothing but its number tells a parameter from another."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(*shape, bias=False) for _ in range(2)]).double()
    only(model, layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    algorithm, options = {**ALGORITHMS, **ASYNCHRONOUS}[name]
    return model, optimizer, algorithm(model, optimizer, **options)


def train(made, rank, phases, first):
    model, optimizer, algo = made
    for number, layers in enumerate(phases, first):
        only(model, layers)
        for t in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + 10 * number + t), dtype=torch.float64)
            model[1](torch.tanh(model[0](x)) + x).square().mean().backward()
            algo.step()


def end(made):
    """x of both layers, once what is in flight has arrived."""
    model, _, algo = made
    with algo.consensus():
        return torch.cat([p.detach().flatten() for p in model.parameters()])


def interrupted(rank, name, phases, *, by_parameter=True):
    made = fresh(name, phases[0])
    with made[2]:
        train(made, rank, phases[:1], 0)
        saved = copy.deepcopy([part.state_dict() for part in made])
    made = fresh(name, phases[1])
    genuine = Pushing.serve_as
    if not by_parameter:
        Pushing.serve_as = lambda self, served: None
    try:
        with made[2]:
            for part, state in zip(made, saved, strict=True):
                part.load_state_dict(state)
            train(made, rank, phases[1:], 1)
            return end(made)
    finally:
        Pushing.serve_as = genuine


def continued(rank, n, name):
    found = {}
    for what, phases in PHASES.items():
        made = fresh(name, phases[0])
        with made[2]:
            train(made, rank, phases, 0)
            found[what] = end(made), interrupted(rank, name, phases)
    phases = PHASES["the other one"]
    found["control"] = found["the other one"][0], interrupted(rank, name, phases, by_parameter=False)
    return found


@functools.cache
def runs(name):
    return run_ranks(continued, 2, name, timeout=LIMIT)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("what", PHASES)
def test_a_restart_with_other_layers_frozen_is_the_run_in_which_they_freeze_and_thaw(name, what):
    for rank in runs(name):
        assert torch.equal(*rank[what])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_by_place_in_the_buckets_a_layer_would_get_what_is_another_ones(name):
    """The negative control: shapes alone tell nothing."""
    for rank in runs(name):
        uninterrupted, by_place = rank["control"]
        assert (uninterrupted - by_place).abs().max() > 1e-4


def refused(rank, n, name):
    made = fresh(name)
    with made[2]:
        state = copy.deepcopy(made[2].state_dict())
    made = fresh(name, shape=(5, 4))
    with made[2], pytest.raises(ValueError, match="continue with the same model and the same parameter groups") as error:
        made[2].load_state_dict(state)
    return str(error.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_parameters_that_are_not_those_of_the_state_are_refused_by_number_in_one_line(name):
    for message in run_ranks(refused, 2, name, timeout=LIMIT):
        assert "parameter 0 of the optimizers has shape (4, 5), strides (5, 1)" in message
        assert "in the state shape (5, 5)" in message
        assert "\n" not in message


def cut_otherwise(rank, n, name):
    made = fresh(name)
    with made[2]:
        state = copy.deepcopy(made[2].state_dict())
    made = fresh(name)
    otherwise = pytest.raises(ValueError, match="a state's buckets are cut otherwise than here")
    with mock.patch.object(buckets, "BUCKET_BYTES", 64), made[2], otherwise:
        made[2].load_state_dict(state)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_buckets_of_another_size_are_refused(name):
    run_ranks(cut_otherwise, 2, name, timeout=LIMIT)


def loaded_elsewhere(rank, n, name, layer):
    """A state of the first layer, where this one is trained."""
    made = fresh(name, [0])
    with made[2]:
        state = copy.deepcopy(made[2].state_dict())
    made = fresh(name, [layer])
    with made[2]:
        made[2].load_state_dict(state)


def another_layer(rank, n, name):
    loaded_elsewhere(rank, n, name, 0)  # the control
    # Whoever is later may hear it from the other one first.
    with pytest.raises((ValueError, PeerLost), match=r"of parameters \[0\] .* and parameters \[1\] are exchanged now"):
        loaded_elsewhere(rank, n, name, 1)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_workers_out_of_step_refuse_the_state_of_another_layer(name):
    run_ranks(another_layer, 2, name, timeout=LIMIT)


SERVED = {
    "ssgd": (SSGD, {}),
    "ssd_sgd": (SSDSGD, {"period": 1, "local_update": "sgd"}),
    "a_psgd": (APSGD, {}),
}


def frozen_at_a_restart(rank, n, name):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 5, bias=False) for _ in range(2)]).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    algorithm, options = SERVED[name]
    made = model, optimizer, algorithm(model, optimizer, **options)
    frozen = model[1].weight
    with made[2]:
        train(made, rank, [(0, 1)], 0)
    before = copy.deepcopy(optimizer.state[frozen])
    assert before["exp_avg"].any()

    def same(state):
        return state.keys() == before.keys() and all(torch.equal(state[key], value) for key, value in before.items())

    only(model, [0])
    with made[2]:
        train(made, rank, [(0,)], 1)
        shown = made[2].optimizer_state(optimizer)["state"]
        assert same(shown[1])
        assert shown[0]["step"] == 2 * before["step"]  # the control: the other layer's goes on
        saved = copy.deepcopy(made[2].optimizer_state(optimizer))
        saved["state"][1]["exp_avg"].zero_()
        optimizer.load_state_dict(saved)
        assert not made[2].optimizer_state(optimizer)["state"][1]["exp_avg"].any()
        optimizer.load_state_dict({**saved, "state": shown})
        train(made, rank, [(0,)], 2)
    assert same(optimizer.state[frozen])


@pytest.mark.parametrize("name", SERVED)
def test_what_an_optimizer_knows_of_a_layer_that_is_frozen_at_a_restart_is_kept(name):
    run_ranks(frozen_at_a_restart, 2, name, timeout=LIMIT)


FROZEN = range(4, 9)  # steps; with c = 3 those of t = 5 and 8 push gradients whole


def frozen_for_a_while(rank, n, *, resume_at=None):
    """Of CD-SGD: W of the first layer after every step, and of both W − W(0) + Σ η (g − e), which is 0 on average."""

    def fresh():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(5, 5, bias=False) for _ in range(2)]).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, optimizer, CDSGD(model, optimizer, compression=TopK(ratio=0.2), compress_steps=3)

    def flat(tensors):
        return torch.cat([t.detach().flatten() for t in tensors])

    def run(made, steps):
        model, optimizer, algo = made
        for t in steps:
            only(model, (1,) if t in FROZEN else (0, 1))
            optimizer.zero_grad()
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + t), dtype=torch.float64)
            model[1](torch.tanh(model[0](x)) + x).square().mean().backward()
            told.append(0.1 * flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()))
            algo.step()
            with algo.consensus():
                first.append(flat([model[0].weight]))

    told, first, made = [], [], fresh()
    initial = flat(made[0].parameters())
    if resume_at is not None:
        with made[2]:
            run(made, range(resume_at))
            model, optimizer, algo = made
            saved = copy.deepcopy((model.state_dict(), algo.optimizer_state(optimizer), algo.state_dict()))
        made = fresh()
    model, _, algo = made
    with algo:
        if resume_at is not None:
            for part, state in zip(made, saved, strict=True):
                part.load_state_dict(state)
        run(made, range(resume_at or 0, 12))
        with algo.consensus():
            (server,) = algo.servers.values()
            e = server.residuals()
            kept = 0.1 * flat(e[p] for p in model.parameters())
            return torch.stack(first), flat(model.parameters()) - initial + sum(told) - kept


def forgetting(rank, n):
    """The negative control: what a layer has kept when it freezes is forgotten."""

    def forget(self, number):
        for place in (self.into[cut.bucket][cut.piece] for cut in self.cuts[number]):
            place.zero_()

    with mock.patch.object(CodedServer, "_put_aside", forget):
        return frozen_for_a_while(rank, n)


def for_a_while(rank, n):
    return frozen_for_a_while(rank, n), forgetting(rank, n), frozen_for_a_while(rank, n, resume_at=6)


def test_a_layer_keeps_its_residual_of_cd_sgd_while_it_is_frozen():
    kept, forgotten, resumed = zip(*run_ranks(for_a_while, 2, timeout=LIMIT), strict=True)
    for first, _ in kept:
        assert (first[FROZEN.start : FROZEN.stop] == first[FROZEN.start - 1]).all()
        assert (first[1:] != first[:-1]).any(1).sum() == 11 - len(FROZEN)
    assert (kept[0][1] + kept[1][1]).abs().max() < 1e-12
    assert (forgotten[0][1] + forgotten[1][1]).abs().max() > 1e-4
    for (whole, lost), (interrupted, also) in zip(kept, resumed, strict=True):
        assert torch.equal(whole, interrupted)
        assert torch.equal(lost, also)
