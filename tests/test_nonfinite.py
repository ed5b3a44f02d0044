"""on_nonfinite="skip": a rank with NaN or infinity is left out of a mean, and repaired by it."""

import copy
import io
import logging
import math
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.ranks import run_ranks
from support.toys import CLASSES, STRATEGIES, Toy, loader, trainer
from torch import nn

from lightning_cocod import CoCoD, LocalSGD, NonFiniteMessage
from lightning_cocod.algorithms.repair import forget
from lightning_cocod.comm import channel
from lightning_cocod.strategies import CoCoDStrategy

LIMIT = 60.0
NAMES = STRATEGIES
ALGORITHMS = {"cocod": CoCoD, "local_sgd": LocalSGD}
NAN, INF = float("nan"), float("inf")


def flat(tensors):
    return torch.cat([t.detach().clone().reshape(-1).double() for t in tensors])


def momentum(optimizer):
    """What the optimizer remembers: None where it has forgotten."""
    state = [s["momentum_buffer"] for s in optimizer.state.values() if s.get("momentum_buffer") is not None]
    return flat(state) if state else None


# The rule, written down once more: all ranks in one process


def is_finite(tensors):
    return all(t.isfinite().all() for t in tensors)


def mean(parts, weights, left_out=()):
    """Over the ranks that are not left out, as if there were no others."""
    fit = [r for r in range(len(parts)) if r not in left_out]
    total = sum(weights[r] for r in fit)
    return [sum(weights[r] / total * parts[r][i] for r in fit) for i in range(len(parts[0]))]


class Serial:
    """The replicas of all ranks, trained one after the other on the batches that the ranks saw."""

    def __init__(self, name, ranks, weights, period, warmup, faults):
        self.name, self.weights, self.period, self.warmup, self.faults = name, weights, period, warmup, faults
        self.models = [Toy(dropout=0.0).double() for _ in range(ranks)]
        configured = [model.configure_optimizers() for model in self.models]
        self.optimizers = [c["optimizer"] for c in configured]
        self.schedules = [c["lr_scheduler"]["scheduler"] for c in configured]
        self.flight = None

    def x(self):
        return [[p.data for p in model.parameters()] for model in self.models]

    def unfit(self, parts):
        return [r for r, part in enumerate(parts) if not is_finite(part)]

    def repair(self, left_out, forgets=True):
        sound = min(set(range(len(self.models))) - set(left_out), default=0)
        for r in left_out:
            for mine, theirs in zip(self.models[r].buffers(), self.models[sound].buffers(), strict=True):
                mine.copy_(theirs)
            if forgets:
                self.optimizers[r].state.clear()

    @torch.no_grad()
    def boundary(self, t):
        if t < self.warmup or (t - self.warmup) % self.period:
            return
        x = self.x()
        if self.name == "local_sgd" and t > self.warmup:
            left_out = self.unfit(x)
            A = mean(x, self.weights, left_out)
            for own in x:
                torch._foreach_copy_(own, A)
            self.repair(left_out)
        if self.name == "cocod":
            if self.flight:
                S, A, left_out = self.flight
                for r, own in enumerate(x):
                    for p, a, s in zip(own, A, S[r], strict=True):
                        p.copy_(a if r in left_out else p + (a - s))
                self.repair(left_out)
            S = copy.deepcopy(x)
            left_out = self.unfit(S)
            self.flight = S, mean(S, self.weights, left_out), left_out

    def step(self, t, batches):
        for r, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            model.loss(batches[r]).backward()
            if (r, t) in self.faults:
                model.net[0].weight.grad[0, 0] = self.faults[r, t]
        if t < self.warmup:
            grads = [[p.grad for p in model.parameters()] for model in self.models]
            left_out = self.unfit(grads)
            g = mean(grads, self.weights, left_out)
            for own in grads:
                torch._foreach_copy_(own, g)
            self.repair(left_out, forgets=False)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.boundary(t + 1)

    @torch.no_grad()
    def finish(self):
        """The consensus: parameters, then floating-point buffers."""
        x, pending = self.x(), ()
        if self.name == "cocod":
            S, A, pending = self.flight
            for r, own in enumerate(x):
                torch._foreach_add_(own, [a - s for a, s in zip(A, S[r], strict=True)])
        left_out = sorted({*pending, *self.unfit(x)})
        buffers = [[b for b in model.buffers() if b.is_floating_point()] for model in self.models]
        return flat(mean(x, self.weights, left_out)), flat(mean(buffers, self.weights, left_out))


# The same under a Trainer


class Breaks(Toy):
    """Gradients that break at given (rank, step)."""

    def __init__(self, faults):
        super().__init__(dropout=0.0)
        self.faults, self.batches = faults, []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        at = self.trainer.global_rank, self.trainer.global_step
        if at in self.faults:
            self.net[0].weight.grad[0, 0] = self.faults[at]


class Watch(Callback):
    def __init__(self):
        self.path, self.momenta = [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.path.append(flat(module.parameters()))
        self.momenta.append(momentum(trainer.optimizers[0]))


class Lines(logging.Handler):
    """What is logged about repairs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("lightning_cocod").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("lightning_cocod").removeHandler(self)


STEPS, PERIOD, WARMUP = 13, 3, 2


def fitted(rank, world, strategy, faults, weights):
    model, watch = Breaks(faults), Watch()
    options = {"period": PERIOD, "warmup_steps": WARMUP, "weights": weights, "on_nonfinite": "skip"}
    with Lines() as lines:
        fit = trainer(strategy(**options), world, callbacks=[watch], max_epochs=1, precision="64-true")
        fit.fit(model, loader(8 * world * STEPS))
    floats = [b for b in model.buffers() if b.is_floating_point()]
    end = flat(model.parameters()), flat(floats), momentum(fit.optimizers[0])
    return {"batches": model.batches, "path": watch.path, "momenta": watch.momenta, "end": end, "lines": lines}


FAULTS = {
    # in the warm-up; in the middle of a round, so that a snapshot that was finite is in flight; before the last launch, so
    # that finish comes before the merge
    2: {(1, 1): NAN, (1, 3): NAN, (1, 10): INF},
    # two ranks in one round, rank 0 among them; one more in the last round, which finish is the first to see
    3: {(2, 0): INF, (0, 5): -INF, (1, 6): NAN, (2, 12): INF},
}
WEIGHTS = {2: None, 3: [3, 1, 2]}


@pytest.mark.parametrize("n", FAULTS)
@pytest.mark.parametrize("strategy", CLASSES)
def test_a_fit_goes_on_by_the_rule_when_gradients_break(strategy, n):
    faults, weights = FAULTS[n], WEIGHTS[n]
    ranks = run_ranks(fitted, n, strategy, faults, weights, init=False, timeout=LIMIT)
    serial = Serial(strategy.registered_name, n, weights or [1] * n, PERIOD, WARMUP, faults)
    serial.boundary(0)
    broken, forgotten = set(), set()
    for t in range(STEPS):
        serial.step(t, [rank["batches"][t] for rank in ranks])
        for r, rank in enumerate(ranks):
            x, v = rank["path"][t], rank["momenta"][t]
            torch.testing.assert_close(x, flat(serial.x()[r]), rtol=1e-10, atol=1e-12, equal_nan=True)
            expected = momentum(serial.optimizers[r])
            if expected is None:
                forgotten.add(r)
                assert v is None
            else:
                torch.testing.assert_close(v, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
            if not x.isfinite().all():
                broken.add(r)
    assert broken == {r for r, t in faults if t >= WARMUP}  # a warm-up's gradients break nobody's weights
    assert forgotten == {r for r, t in faults if WARMUP <= t < 12}
    parameters, buffers = serial.finish()
    for rank in ranks:
        torch.testing.assert_close(rank["end"][0], parameters, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(rank["end"][1], buffers, rtol=1e-10, atol=1e-12)
        assert torch.equal(rank["end"][0], ranks[0]["end"][0])
        assert torch.equal(rank["end"][1], ranks[0]["end"][1])
    reset = {3: [False, False, True], 2: [False, strategy is CoCoDStrategy]}[n]  # by finish
    assert [rank["end"][2] is None for rank in ranks] == reset
    assert all(not rank["lines"] for rank in ranks[1:])
    assert ranks[0]["lines"] == lines_of(strategy.registered_name, n)


def lines_of(name, n):
    """Rounds end at 5, 8, 11; CoCoD tells at the merge, a round after the mean."""
    repaired = "repaired from the others, optimizer state reset"
    late = PERIOD if name == "cocod" else 0
    if n == 2:
        gradients = "rank 1 was not finite at step 1: gradients left out of the mean"
        in_finish = "step 13: left out of the consensus" if late else "step 11: left out of the round"
        return [
            gradients,
            f"rank 1 was not finite at step {5 + late}: left out of the round, {repaired}",
            f"rank 1 was not finite at {in_finish}, {repaired}",
        ]
    return [
        "rank 2 was not finite at step 0: gradients left out of the mean",
        f"ranks 0, 1 were not finite at step {8 + late}: left out of the round, {repaired}",
        f"rank 2 was not finite at step 13: left out of the consensus, {repaired}",
    ]


# Any loop


def problem(rank, width=4):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():  # exact in every mean
        for p in model.parameters():
            p.copy_(torch.randint(-2, 3, p.shape) / 4)
    draw = torch.Generator().manual_seed(rank)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(20, 8, width, generator=draw)


def take_step(algo, model, optimizer, x, fault=None):
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    if fault is not None:
        model[0].weight.grad[0, 0] = fault
    algo.step()


def in_company(rank, n, name, steps=10, **options):
    """The last rank breaks at every step: first its gradients, then its weights.

    Returns the path with where it ends, and the distances that the metrics tell.
    """
    model, optimizer, data = problem(rank)
    path, distances = [], []
    with ALGORITHMS[name](model, optimizer, period=3, warmup_steps=2, on_nonfinite="skip", **options) as algo:
        for t in range(steps):
            if rank == n - 1 and t > 0:
                model[0].weight.data[0, 0] = INF
            take_step(algo, model, optimizer, data[t], -INF if rank == n - 1 else None)
            path.append(flat(model.parameters()))
            distances.append(algo.metrics().get("algo/replica_distance", 0.0))
    return torch.stack([*path, flat(model.parameters())]), distances


def without(rank, n, name):
    """As if the last rank did not exist."""
    model, optimizer, data = problem(rank)
    path = []
    with ALGORITHMS[name](model, optimizer, period=3, warmup_steps=2) as algo:
        for t in range(10):
            take_step(algo, model, optimizer, data[t])
            path.append(flat(model.parameters()))
    return torch.stack([*path, flat(model.parameters())])


@pytest.mark.parametrize("name", NAMES)
def test_the_others_go_on_as_if_the_broken_rank_did_not_exist_bit_for_bit(name):
    """Two of three, and one of two. In CoCoD until the mean that comes at step 8: at 5 the broken rank is repaired."""
    until = {"cocod": 7, "local_sgd": 11}[name]
    for n in (3, 2):
        together, distances = zip(*run_ranks(in_company, n, name, timeout=LIMIT), strict=True)
        alone = run_ranks(without, n - 1, name, timeout=LIMIT)
        for other, expected in zip(together[:-1], alone, strict=True):
            assert torch.equal(other[:until], expected[:until])
            assert other.isfinite().all()
        assert not together[-1].isfinite().all()
        assert torch.equal(together[-1][-1], together[0][-1])
        assert all(math.isfinite(d) for rank in distances for d in rank)


def with_and_without_overlap(rank, n):
    return [in_company(rank, n, "cocod", overlap=overlap)[0] for overlap in (True, False)]


def test_repairs_come_at_the_same_steps_without_overlap():
    for path, blocking in run_ranks(with_and_without_overlap, 3, timeout=LIMIT):
        torch.testing.assert_close(blocking, path, rtol=0, atol=0, equal_nan=True)


def poisoned(rank, n, name):
    """What the others would get if nobody was left out."""
    with mock.patch.object(channel, "unfit", return_value=()):
        return in_company(rank, n, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_rank_that_is_not_left_out_poisons_the_others(name):
    """The negative control: a message with NaN is not harmless by itself."""
    assert not run_ranks(poisoned, 2, name, timeout=LIMIT)[0][0].isfinite().all()


def sound(rank, n, name, on_nonfinite):
    model, optimizer, data = problem(rank)
    with ALGORITHMS[name](model, optimizer, period=3, warmup_steps=2, on_nonfinite=on_nonfinite) as algo:
        for t in range(9):
            take_step(algo, model, optimizer, data[t])
        with algo.consensus():
            pass
    return flat(model.parameters()), algo.comm.ledger.totals().messages, algo.comm.ledger.totals().sent


@pytest.mark.parametrize("name", NAMES)
def test_without_a_broken_rank_the_option_changes_no_bit_and_sends_nothing(name):
    for skip, refuse in zip(*(run_ranks(sound, 2, name, o, timeout=LIMIT) for o in ("skip", "raise")), strict=True):
        assert torch.equal(skip[0], refuse[0])
        assert skip[1:] == refuse[1:]


def nobody_left(rank, n, name):
    """All ranks break, to be seen in one message or another. Returns the texts of the errors."""
    texts = {}
    for kind in ("round", "gradients", "consensus"):
        model, optimizer, data = problem(rank)
        warmup = 3 if kind == "gradients" else 0

        def loop():
            with ALGORITHMS[name](model, optimizer, period=2, warmup_steps=warmup, on_nonfinite="skip") as algo:
                for t in range(1 if kind == "consensus" else 6):
                    take_step(algo, model, optimizer, data[t], (NAN, -INF)[rank])
                if kind == "consensus":
                    with algo.consensus():
                        pass

        with pytest.raises(NonFiniteMessage) as caught:
            loop()
        texts[kind] = str(caught.value)
    return texts


@pytest.mark.parametrize("name", NAMES)
def test_where_no_rank_is_finite_all_raise_and_name_all(name):
    for texts in run_ranks(nobody_left, 2, name, timeout=LIMIT):
        for kind, text in texts.items():
            assert f"{name}/{kind} at step" in text
            assert "NaN or infinity in the message of rank 0, 1;" in text


def mended_by_hand(rank, n):
    """Rank 1 is not finite where a round is launched; then its loop makes it finite. What evaluation and finish see."""
    ends = []
    for evaluated in (True, False):
        model, optimizer, data = problem(rank)
        with CoCoD(model, optimizer, period=3, on_nonfinite="skip") as algo:
            for t in range(4):
                take_step(algo, model, optimizer, data[t], INF if rank == 1 and t == 2 else None)
                for p in model.parameters():
                    if t > 2:
                        p.data.nan_to_num_(0.5, 0.5, 0.5)
            own = flat(model.parameters())
            if evaluated:
                with algo.consensus():
                    ends.append((own, flat(model.parameters())))
                for t in (4, 5):
                    take_step(algo, model, optimizer, data[t])
        ends.append((own, flat(model.parameters())))
    return ends


def test_a_replica_that_waits_for_its_repair_is_left_out_although_it_is_finite():
    (evaluated, repaired, finished), others = run_ranks(mended_by_hand, 2, timeout=LIMIT)
    for (own, end), (other, other_end) in zip((evaluated, finished), (others[0], others[2]), strict=True):
        assert other.isfinite().all()
        assert torch.equal(end, own)  # of one rank the mean is itself
        assert torch.equal(end, other_end)
    assert torch.equal(repaired[1], others[1][1])
    assert not torch.equal(repaired[1], repaired[0])


# What is not in the message


class Rich(nn.Module):
    """Running statistics, a mask, a teacher that no optimizer moves, and a branch that rank 1 alone goes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net, self.norm, self.branch = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

    def forward(self, x, branch):
        y = self.norm(self.net(x) - self.teacher(x) + self.mask.softmax(1)[:1].sum())
        return (self.branch(y) if branch else y).square().mean()

    @torch.no_grad()
    def teach(self):
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.net.parameters()), 0.1)


BAD = 2


def rich(rank, n, name, warmup, broken):
    """Rank 1 gets a batch with NaN at step BAD. Returns everything after each step, what evaluation saw, the end.

    And whether the branch was left without a gradient.
    """
    model = Rich()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(rank)
    path, seen, untouched = [], [], []
    options = {"period": 2, "warmup_steps": warmup, "on_nonfinite": "skip"}
    with ALGORITHMS[name](model, optimizer, **options) as algo:
        for t in range(7):
            x = torch.randn(8, 4, generator=draw)
            if (rank, t) == (1, BAD) and broken:
                x[0, 0] = NAN
            optimizer.zero_grad()
            model(x, branch=rank == 1 and t == BAD).backward()
            algo.before_step()
            untouched.append(model.branch.weight.grad is None)
            algo.step(optimizer.step)
            model.teach()
            algo.after_step()
            path.append({k: v.clone() for k, v in model.state_dict().items()})
            with algo.consensus():
                seen.append({k: v.clone() for k, v in model.state_dict().items()})
            for k, v in model.state_dict().items():  # evaluation repairs nothing
                torch.testing.assert_close(v, path[-1][k], rtol=0, atol=0, equal_nan=True)
    return path, [*seen, model.state_dict()], untouched


def rich_runs(rank, n, name):
    return {options: rich(rank, n, name, *options) for options in ((0, True), (5, True), (5, False))}


@pytest.mark.parametrize("name", NAMES)
def test_buffers_and_parameters_outside_optimizers_are_left_out_and_repaired_with_the_rest(name):
    first, second, third = run_ranks(rich_runs, 3, name, timeout=LIMIT)
    mask = torch.full((4, 4), -math.inf).triu(1)

    def is_sound(state):
        return all(torch.equal(v, mask) if k == "mask" else v.isfinite().all() for k, v in state.items())

    for options in first:
        for rank in (first, second, third):
            path, seen, _ = rank[options]
            assert all(map(is_sound, seen))
            assert all(
                torch.equal(v, other[k]) for one, other in zip(seen, first[options][1], strict=True) for k, v in one.items()
            )
            if rank is not second:
                assert all(map(is_sound, path))

    in_round, in_warmup = (0, True), (5, True)
    repaired = BAD + (4 if name == "cocod" else 2) - 1  # after this step: at the merge, or at the blocking mean
    path = second[in_round][0]
    assert [is_sound(state) for state in path] == [not BAD <= t < repaired for t in range(7)]
    for k in ("norm.running_mean", "norm.running_var", "teacher.weight", "teacher.bias"):
        assert torch.equal(path[repaired][k], first[in_round][0][repaired][k])
        assert not path[repaired - 1][k].isfinite().all()

    # In the warm-up the batch has broken rank 1's statistics only, and they are rank 0's in the same step.
    for k in ("norm.running_mean", "norm.running_var"):
        assert torch.equal(second[in_warmup][0][BAD][k], first[in_warmup][0][BAD][k])
        assert not torch.equal(second[5, False][0][BAD][k], first[5, False][0][BAD][k])
    # Nobody else had that gradient: rank 1 is left without one like its peers, or its optimizer would go its own way.
    assert [rank[in_warmup][2][BAD] for rank in (first, second, third)] == [True] * 3
    assert [rank[5, False][2][BAD] for rank in (first, second, third)] == [False] * 3


# A checkpoint between the launch and the merge


def interrupted(rank, n, stop):
    """Saved after each step from the launch to the merge, and continued by new objects."""
    model, optimizer, data = problem(rank)
    options = {"period": 4, "on_nonfinite": "skip"}
    algo = CoCoD(model, optimizer, **options)
    algo.start()
    for t in range(12):
        take_step(algo, model, optimizer, data[t], INF if rank == 0 and t == 2 else None)
        if t + 1 == stop:
            file = io.BytesIO()
            torch.save([algo.state_dict(), model.state_dict(), optimizer.state_dict()], file)
            algo.close()
            file.seek(0)
            model, optimizer, _ = problem(rank)
            state, weights, moments = torch.load(file, weights_only=True)
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            algo = CoCoD(model, optimizer, **options)
            algo.start(broadcast=False)
            algo.load_state_dict(state)
    algo.finish()
    algo.close()
    return flat(model.parameters()), flat(s["momentum_buffer"] for s in optimizer.state.values()), state["left_out"]


def every_interruption(rank, n):
    return [interrupted(rank, n, stop) for stop in (4, 6, 7, 12)]


def test_a_run_resumed_between_a_launch_without_a_rank_and_its_merge_repairs_it_all_the_same():
    for *ends, late in run_ranks(every_interruption, 3, timeout=LIMIT):
        assert [left_out for *_, left_out in (*ends, late)] == [[0], [0], [0], []]
        for parameters, moments, _ in ends:
            assert parameters.isfinite().all()
            assert torch.equal(parameters, late[0])
            assert torch.equal(moments, late[1])


# The optimizer's state

OPTIMIZERS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_forgets_is_one_that_has_never_stepped(name):
    special = {"SGD": {"momentum": 0.9}, "Adagrad": {"initial_accumulator_value": 0.1}}.get(name, {})

    def made():
        torch.manual_seed(2)
        model = nn.Linear(3, 2)
        return model, getattr(torch.optim, name)(model.parameters(), **special)

    def steps(model, optimizer, value):
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, value)
            optimizer.step()
        return flat(model.parameters())

    fresh, (model, optimizer) = steps(*made(), 0.5), made()
    optimizer.param_groups[0]["lr"] = lr = 2 * optimizer.param_groups[0]["lr"]
    steps(model, optimizer, NAN)
    model.load_state_dict(made()[0].state_dict())
    forget([optimizer])
    assert optimizer.param_groups[0]["lr"] == lr  # the schedule's
    optimizer.param_groups[0]["lr"] = lr / 2
    assert torch.equal(steps(model, optimizer, 0.5), fresh)
