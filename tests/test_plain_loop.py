"""Any PyTorch loop: the context manager, what it refuses, and how it ends when something goes wrong."""

import inspect
import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from support.ranks import run_ranks, run_ranks_raw
from torch import nn

from lightning_cocod import ADPSGD, DPSGD, CoCoD, LocalSGD, MessageMismatch, NonFiniteMessage, PeerLost, algorithms
from lightning_cocod.comm import Communicator

LIMIT = 30.0
NAMES = {"cocod": CoCoD, "local_sgd": LocalSGD}


def setup(rank, width=4, **sgd):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **sgd})


def batches(rank, count, width=4):
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(8, width, generator=draw) for _ in range(count)]


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(model, optimizer, data, step=None):
    for x in data:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        (step or optimizer.step)()


def failure(error, loop):
    """The text of the error with which the loop ends."""
    with pytest.raises(error) as caught:
        loop()
    return str(caught.value)


# The two forms


def both_forms(rank, n, name):
    ends, counts = [], []
    for explicit in (False, True):
        model, optimizer = setup(rank)
        with NAMES[name](model, optimizer, period=4) as algo:
            train(model, optimizer, batches(rank, 10), algo.step if explicit else None)
            ends.append(weights_of(model))
            counts.append(algo.t)
        ends.append(weights_of(model))
        train(model, optimizer, batches(rank, 1))  # the hooks are gone: nobody counts, nobody waits
        counts.append(algo.t)
    return ends, counts


@pytest.mark.parametrize("name", NAMES)
def test_hooks_and_the_explicit_form_are_the_same_bit_for_bit(name):
    for (hooks, hooks_end, explicit, explicit_end), counts in run_ranks(both_forms, 2, name, timeout=LIMIT):
        assert torch.equal(hooks, explicit)
        assert torch.equal(hooks_end, explicit_end)
        assert not torch.equal(hooks, hooks_end)
        assert counts == [10] * 4


def entered_twice(rank, n):
    model, optimizer = setup(rank)
    algo = CoCoD(model, optimizer, period=4)
    ends = []
    for _ in range(2):
        with algo:
            train(model, optimizer, batches(rank, 6))
        ends.append(weights_of(model))
    algo.close()  # idempotent
    return algo.t, ends


def test_training_can_go_on_in_a_second_block():
    (t, ends), (t_1, ends_1) = run_ranks(entered_twice, 2, timeout=LIMIT)
    assert t == t_1 == 12
    assert all(torch.equal(a, b) for a, b in zip(ends, ends_1, strict=True))
    assert not torch.equal(*ends)


# Gradient scaling: a step that is skipped counts


def scaled(rank, n, overflow):
    """Overflows are {rank: step} at which the gradient is infinite. Returns counts, skipped steps, weights, the scale."""
    model, optimizer = setup(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    taken = []
    with CoCoD(model, optimizer, period=3) as algo:
        optimizer.register_step_post_hook(lambda *_: taken.append(algo.t))
        for t, x in enumerate(batches(rank, 10)):
            optimizer.zero_grad()
            scaler.scale((model(x) - x.sum(1, keepdim=True)).square().mean()).backward()
            if overflow.get(rank) == t:
                model[0].weight.grad[0, 0] = torch.inf
            algo.step(scaler=scaler)
        skipped = sorted(set(range(10)) - set(taken))
    return algo.t, skipped, weights_of(model), scaler.get_scale()


def test_a_step_skipped_on_one_rank_only_keeps_the_rounds_together():  # field report 5
    (t, skipped, end, scale), (t_1, skipped_1, end_1, scale_1) = run_ranks(scaled, 2, {1: 4}, timeout=LIMIT)
    assert t == t_1 == 10
    assert (skipped, skipped_1) == ([], [4])
    assert (scale, scale_1) == (256, 128)
    assert torch.equal(end, end_1)
    assert end.isfinite().all()


def scaled_warm_up(rank, n):
    """What happens with a scaler in a synchronous step, with one that is off, and once the warm-up is over."""
    off = torch.amp.GradScaler("cpu", enabled=False)
    model, optimizer = setup(rank)
    with CoCoD(model, optimizer, period=3, warmup_steps=2) as algo:
        train(model, optimizer, batches(rank, 2), lambda: algo.step(scaler=off))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        optimizer.zero_grad()
        scaler.scale(model(batches(rank, 1)[0]).square().mean()).backward()
        algo.step(scaler=scaler)
        counted = algo.t

    model, optimizer = setup(rank)
    before = weights_of(model)

    def loop():
        with CoCoD(model, optimizer, period=3, warmup_steps=2) as algo:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
            scaler.scale(model(batches(rank, 1)[0]).square().mean()).backward()
            algo.step(scaler=scaler)

    text = failure(ValueError, loop)
    return counted, text, torch.equal(before, weights_of(model))


def test_a_scaler_is_refused_in_synchronous_steps_only():
    for counted, text, untouched in run_ranks(scaled_warm_up, 2, timeout=LIMIT):
        assert counted == 3
        assert "gradient scaler" in text
        assert "warmup_steps" in text
        assert "\n" not in text
        assert untouched


# What is refused


def two_optimizers(rank, n):
    model, _ = setup(rank)
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters())]
    with CoCoD(model, optimizers, period=3) as algo:
        for x in batches(rank, 7):
            model(x).square().mean().backward()
            algo.step()

    def by_hooks():
        with CoCoD(model, optimizers, period=3):
            optimizers[0].step()

    return failure(RuntimeError, by_hooks)


@pytest.mark.parametrize("n", [1, 2])
def test_several_optimizers_need_the_explicit_form(n):
    for text in run_ranks(two_optimizers, n, timeout=LIMIT):
        assert text == "call step() of the algorithm instead of optimizer.step(): there are several optimizers"


def warm_up_by_hooks(rank, n):
    model, optimizer = setup(rank)

    def by_hooks():
        with CoCoD(model, optimizer, warmup_steps=3):
            train(model, optimizer, batches(rank, 1))

    return failure(RuntimeError, by_hooks)


@pytest.mark.parametrize("n", [1, 2])
def test_a_warm_up_needs_the_explicit_form(n):
    for text in run_ranks(warm_up_by_hooks, n, timeout=LIMIT):
        assert text.startswith("call step() of the algorithm instead of optimizer.step(): synchronous warm-up")


@pytest.mark.parametrize("algorithm", [CoCoD, LocalSGD])
def test_lbfgs_is_refused(algorithm, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model, _ = setup(0)
    with pytest.raises(TypeError, match="LBFGS") as error:
        algorithm(model, torch.optim.LBFGS(model.parameters()))
    assert "\n" not in str(error.value)


BAD_OPTIONS = [
    *({"period": bad} for bad in (0, -1, 2.5, True, None, "sometimes", {3: 2})),
    *({"weights": bad} for bad in ([], [1.0, 1.0], [0.0], [-1.0], [float("nan")], [float("inf")])),
    *({"warmup_steps": bad} for bad in (-1, 1.5)),
    *({"on_nonfinite": bad} for bad in ("ignore", None, True)),
    *({"timeout": bad} for bad in (0, -1.0, float("nan"))),
    {"process_group_timeout": 0},
]
CASES = [(algorithm, options) for algorithm in (CoCoD, LocalSGD) for options in BAD_OPTIONS]
CASES += [(CoCoD, {"overlap": bad}) for bad in ("no", 1, 0, None)]


@pytest.mark.parametrize(("algorithm", "options"), CASES, ids=str)
def test_a_bad_option_is_a_value_error_of_one_line_that_names_it(algorithm, options, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (name,) = options
    with pytest.raises(ValueError, match=rf"\b{name}\b") as error:
        algorithm(*setup(0), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["timeout", "process_group_timeout", "connect_timeout"])
def test_a_time_beside_a_communicator_is_refused(name, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=f"{name} is the communicator's"):
        CoCoD(*setup(0), communicator=Communicator(), **{name: 5.0})
    assert getattr(CoCoD(*setup(0), **{name: 5.0}).comm, name) == 5.0


@pytest.mark.parametrize("algorithm", [ADPSGD, DPSGD])
def test_batches_are_not_weighed_where_all_workers_weigh_alike(algorithm, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    made = algorithm(*setup(0))
    for weigh in (made.weigh_batch, made.set_weights):
        with pytest.raises(ValueError, match=f"{made.name} weighs all workers alike"):
            weigh([1])


def test_several_processes_without_a_process_group_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 2 .*init_process_group"):
        CoCoD(*setup(0))


# Faults: every rank ends with a cause, in the time of a heartbeat and not of a time-out


def raises_inside(rank, n, message_in_flight):
    model, optimizer = setup(rank)

    def loop():
        with CoCoD(model, optimizer, period=4, overlap=message_in_flight):
            for t, x in enumerate(batches(rank, 1000)):
                if rank == 1 and t == 6:
                    raise ZeroDivisionError("the disk is full")
                train(model, optimizer, [x])

    return failure(PeerLost if rank == 0 else ZeroDivisionError, loop)


@pytest.mark.parametrize("message_in_flight", [False, True])
def test_an_exception_in_the_block_aborts_and_the_peer_names_the_cause(message_in_flight):  # field report 12
    lost, own = run_ranks(raises_inside, 2, message_in_flight, timeout=LIMIT)
    assert own == "the disk is full"
    assert lost == "rank 1 failed: ZeroDivisionError: the disk is full"


def killed_inside(rank, n):
    model, optimizer = setup(rank)

    def loop():
        with CoCoD(model, optimizer, period=4):
            for t, x in enumerate(batches(rank, 1000)):
                if rank == 1 and t == 6:
                    os.kill(os.getpid(), signal.SIGKILL)
                train(model, optimizer, [x])

    return failure(PeerLost, loop)


def test_a_killed_peer_is_named():  # field report 12
    survivor, killed = run_ranks_raw(killed_inside, 2, timeout=60, grace=40)
    assert killed.status == "died"
    assert survivor.status == "ok", survivor.traceback
    assert survivor.value.startswith("rank 1 is lost: ")
    assert "\n" not in survivor.value


def differ(rank, n, what):
    """Rank 1 differs from rank 0 in one thing. Returns the error."""
    odd = rank == 1
    model, optimizer = setup(rank, width=5 if odd and what == "model" else 4)
    if odd and what == "frozen":
        model[0].weight.requires_grad_(False)
    algorithm = LocalSGD if odd and what == "algorithm" else CoCoD
    period = 5 if odd and what == "period" else 4
    count = {"one batch more": 11, "two batches more": 12}.get(what, 10) if odd else 10

    def loop():
        with algorithm(model, optimizer, period=period):
            train(model, optimizer, batches(rank, count, width=model[0].in_features))

    return failure(MessageMismatch, loop)


@pytest.mark.parametrize("what", ["frozen", "algorithm", "period", "one batch more", "two batches more"])
def test_ranks_out_of_step_both_name_both_sides(what):  # field report 11: 10 batches against 11, a message in flight
    for rank, text in enumerate(run_ranks(differ, 2, what, timeout=LIMIT)):
        assert f"rank {rank} sends {'local_sgd' if rank == 1 and what == 'algorithm' else 'cocod'}/" in text
        assert f"rank {1 - rank} sends " in text
        assert "\n" not in text


def test_different_models_are_named_at_the_start_and_leave_nothing_behind():
    for rank, text in enumerate(run_ranks(differ, 2, "model", timeout=LIMIT)):
        assert f"rank {rank} sends cocod/initial weights at step 0" in text
        assert f"rank {1 - rank} sends cocod/initial weights at step 0" in text


def not_finite(rank, n, name, value):
    """Rank 1's weights break after step 5. Returns the error, and the weights before and after."""
    model, optimizer = setup(rank)
    before = []
    optimizer.register_step_post_hook(lambda *_: before.append(weights_of(model)))

    def loop():
        with NAMES[name](model, optimizer, period=4):
            for t, x in enumerate(batches(rank, 40)):
                train(model, optimizer, [x])
                if rank == 1 and t == 5:
                    model[0].bias.data[3] = value

    return failure(NonFiniteMessage, loop), before[-1], weights_of(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_finite_are_named_and_touch_nobody_else(name, value):
    (text, before, after), (text_1, _, _) = run_ranks(not_finite, 2, name, value, timeout=LIMIT)
    assert text == text_1
    assert "of rank 1;" in text
    assert torch.equal(before, after)
    assert after.isfinite().all()


def not_finite_at_the_end(rank, n, evaluate):
    """Rank 1's weights break in the last round, so that evaluation or finish is the first to see them."""
    model, optimizer = setup(rank)
    before = []

    def loop():
        with CoCoD(model, optimizer, period=4) as algo:
            train(model, optimizer, batches(rank, 10))
            if rank == 1:
                model[0].bias.data[3] = torch.nan
            before.append(weights_of(model))
            if evaluate:
                with algo.consensus():
                    pass

    return failure(NonFiniteMessage, loop), before[0], weights_of(model)


@pytest.mark.parametrize("evaluate", [True, False], ids=["consensus", "finish"])
def test_weights_that_break_in_the_last_round_touch_nobody_else(evaluate):
    (text, before, after), (text_1, _, _) = run_ranks(not_finite_at_the_end, 2, evaluate, timeout=LIMIT)
    assert text == text_1
    assert "of rank 1;" in text
    assert after.isfinite().all()
    if evaluate:  # finish has folded the correction that it drained, which came from finite messages
        assert torch.equal(before, after)


# Really launched


SCRIPT = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from lightning_cocod import CoCoD

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with CoCoD(model, optimizer, period=4) as cocod:
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        with cocod.consensus():
            evaluated = model.weight.detach().clone()
        assert not torch.equal(evaluated, model.weight)
    gathered = [torch.empty_like(model.weight) for _ in range(2)]
    dist.all_gather(gathered, model.weight.detach())
    assert torch.equal(*gathered)
    with open(f"end{dist.get_rank()}", "w") as file:
        file.write("ended well")
    dist.destroy_process_group()
"""


def environment():
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    return {**{k: v for k, v in os.environ.items() if k not in launched}, "OMP_NUM_THREADS": "1"}


def test_torchrun_trains_and_exits_with_zero(tmp_path):  # field report 18
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    done = subprocess.run(launch, cwd=tmp_path, env=environment(), timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"end{rank}").read_text() for rank in range(2)] == ["ended well"] * 2


def by_hand(rank, world):
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with CoCoD(net, optimizer, period=2, warmup_steps=2) as cocod:
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(4, 3)).pow(2).mean().backward()
            cocod.before_step()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            cocod.step(optimizer.step)
            cocod.after_step()
        return cocod.t


def test_the_verbs_by_hand_count_each_step_once():
    assert run_ranks(by_hand, 2) == [5, 5]


def disagreeing_weights(rank, world):
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with CoCoD(net, optimizer, period=2, weights=[[3, 1], [1, 3]][rank]):
        for _ in range(6):
            optimizer.step()


def test_ranks_that_weigh_differently_are_out_of_step():
    for rank in run_ranks_raw(disagreeing_weights, 2):
        assert rank.status == "error"
        assert "workers are out of step" in rank.traceback


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("seen", torch.zeros(1))


def masked(rank, world):
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CoCoD(model, optimizer, period=2) as cocod:
        for _ in range(5):
            model.net(torch.randn(4, 3)).pow(2).mean().backward()
            optimizer.step()
        mask, seen = model.mask, model.seen
        with cocod.consensus():
            model.seen = torch.cat([model.seen, torch.ones(2)])  # evaluation keeps something in a buffer that grows
            with pytest.raises(RuntimeError, match="no optimizer step inside consensus"):
                optimizer.step()
        assert model.seen is seen
    assert torch.equal(model.mask, mask)
    return model.mask, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_infinite_and_growing_buffers_survive_the_consensus():
    (mask, first), (_, second) = run_ranks(masked, 2)
    assert torch.equal(mask, torch.full((4, 4), -math.inf).triu(1))
    assert torch.equal(first, second)


def entered_inside_itself(rank, world):
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with CoCoD(net, optimizer) as cocod, pytest.raises(RuntimeError, match="already in use"):
        cocod.__enter__()


def test_a_block_is_entered_once():
    run_ranks(entered_inside_itself, 2)


ALL = [
    kind
    for _, kind in inspect.getmembers(algorithms, inspect.isclass)
    if issubclass(kind, algorithms.Algorithm)
    and not inspect.isabstract(kind)
    and kind not in (algorithms.Algorithm, algorithms.Asynchronous)
]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_the_state_of_another_model_is_refused_in_one_line(kind):
    """That of one with as many numbers would otherwise be taken, each of them for another one."""

    def made(*shapes):
        model = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        warm = {"warmup_steps": 1} if kind.__name__ == "PostLocalSGD" else {}
        own = {"local_update": "sgd"} if "local_update" in inspect.signature(kind).parameters else {}
        return kind(model, torch.optim.SGD(model.parameters(), 0.1), **warm, **own)

    with made((4, 6), 4) as algorithm:
        state = algorithm.state_dict()
    for others, words in [
        ([(6, 4), 4], r"shape \(6, 4\), .* shape \(4, 6\)"),
        ([(4, 6)], "of 2 parameters, .* 1: |of parameters .0, 1. of"),
    ]:
        with made(*others) as algorithm, pytest.raises(ValueError, match=words) as said:
            algorithm.load_state_dict(state)
        assert "\n" not in str(said.value)
    with made((4, 6), 4) as algorithm:
        algorithm.load_state_dict(state)
