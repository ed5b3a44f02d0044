"""The strategies inside real fits: the Trainer equals the plain loop, and Lightning's own features keep their meaning."""

import copy
import logging
from contextlib import nullcontext
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from support.ranks import run_ranks
from support.toys import (
    STRATEGIES,
    VARIANTS,
    Toy,
    TwoOfSGD,
    TwoOptimizers,
    dataset,
    flat,
    having,
    loader,
    made,
    parameters,
    trainer,
    variants,
)
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cocod import (
    CDSGD,
    CO2,
    DCS3GD,
    DPSGD,
    ODSGD,
    SGP,
    SSDSGD,
    SSGD,
    CDSGDStrategy,
    CO2Strategy,
    CoCoD,
    CoCoDStrategy,
    CompSkipDSGD,
    CompSkipDSGDStrategy,
    DCS3GDStrategy,
    DiLoCo,
    DiLoCoStrategy,
    DistEFSGD,
    DistEFSGDStrategy,
    DPSGDStrategy,
    EagerDiLoCo,
    EagerDiLoCoStrategy,
    FlexCompressSGD,
    FlexCompressSGDStrategy,
    LocalSGD,
    LocalSGDStrategy,
    ODSGDStrategy,
    OverlapLocalSGD,
    OverlapLocalSGDStrategy,
    PipeSGD,
    PipeSGDStrategy,
    PostLocalSGD,
    PostLocalSGDStrategy,
    SGPStrategy,
    SlowMo,
    SlowMoStrategy,
    SSDSGDStrategy,
    SSGDStrategy,
    StreamingDiLoCo,
    StreamingDiLoCoStrategy,
    When,
)


class Trajectory(Callback):
    """Keeps the parameters after every batch, and the steps that the algorithm has counted."""

    def __init__(self):
        self.path, self.steps, self.rates = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.path.append(parameters(module))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if hasattr(trainer.strategy, "_algorithm") and trainer.strategy._algorithm is not None:
            self.steps.append(trainer.strategy.algorithm.t)


def fit(rank, world, strategy, options, validate=False, module=Toy):
    L.seed_everything(5, verbose=False)
    model, seen = module(), Trajectory()
    t = trainer(strategy, world, callbacks=[seen], **options)
    t.fit(model, loader(), loader(shuffle=False) if validate else None)
    return {"path": torch.stack(seen.path), "steps": seen.steps, "rates": seen.rates, "end": flat(model)}


def assert_consensus_at_end(ranks):
    for other in ranks[1:]:
        assert torch.equal(ranks[0]["end"], other["end"])


# --- the Trainer equals the plain loop


def plain(rank, world, algorithm, options):
    L.seed_everything(5, verbose=False)
    accumulate, clip, precision = (options.get(name) for name in ("accumulate", "clip", "precision"))
    accumulate = accumulate or 1
    model = Toy(dropout=0.0)
    batches = in_order(rank, world)
    configured = model.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    path = []
    model.log = lambda *_, **__: None
    with algorithm(model, optimizer) as running:
        for _ in range(2):
            for i, batch in enumerate(batches):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = model.loss(batch)
                stepping = (i + 1) % accumulate == 0 or i + 1 == len(batches)
                with nullcontext() if stepping else running.no_sync():
                    (loss / accumulate).backward()
                if stepping:
                    running.before_step()
                    if clip:
                        clip(running, optimizer)
                    running.step(optimizer.step)
                    running.after_step()
                    optimizer.zero_grad()
                    schedule.step()
                path.append(parameters(model))
    return {"path": torch.stack(path), "end": flat(model)}


def in_order(rank, world):
    sampler = DistributedSampler(dataset(), world, rank, shuffle=False)
    return DataLoader(dataset(), batch_size=8, sampler=sampler)


def unshuffled(rank, world, strategy, options, norm=True, module=None):
    L.seed_everything(5, verbose=False)
    model, seen = Toy(dropout=0.0, norm=norm) if module is None else module(), Trajectory()
    own = in_order(rank, world)  # the sampler that Lightning would put in shuffles
    trainer(strategy, world, callbacks=[seen], use_distributed_sampler=False, **options).fit(model, own)
    return {"path": torch.stack(seen.path), "end": flat(model), "steps": seen.steps}


def clip_norm(running, optimizer):
    running.clip_grad_norm_(optimizer, 0.1)


def clip_value(running, optimizer):
    running.clip_grad_value_(optimizer, 0.01)


CASES = {
    "plain": ({}, {}),
    "accumulation with a partial last window": ({"accumulate_grad_batches": 4}, {"accumulate": 4}),
    "clipping by norm": ({"gradient_clip_val": 0.1}, {"clip": clip_norm}),
    "clipping by value": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"clip": clip_value},
    ),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {"precision": "bf16-mixed"}),
}


def name(strategy):
    return getattr(strategy, "func", strategy).registered_name


LOOPS = {
    name(strategy): (partial(algorithm, period=3), partial(strategy, period=3))
    for algorithm, strategy in [
        (CO2, CO2Strategy),
        (CoCoD, CoCoDStrategy),
        (DCS3GD, DCS3GDStrategy),
        (DiLoCo, DiLoCoStrategy),
        (EagerDiLoCo, EagerDiLoCoStrategy),
        (LocalSGD, LocalSGDStrategy),
        (OverlapLocalSGD, OverlapLocalSGDStrategy),
        (partial(PostLocalSGD, warmup_steps=4), partial(PostLocalSGDStrategy, warmup_steps=4)),
        (SlowMo, SlowMoStrategy),
        (StreamingDiLoCo, StreamingDiLoCoStrategy),
        (partial(SSDSGD, local_update="dc_asgd"), partial(SSDSGDStrategy, local_update="dc_asgd")),
    ]
} | {
    name(PipeSGDStrategy): (PipeSGD, PipeSGDStrategy),
    name(DPSGDStrategy): (DPSGD, DPSGDStrategy),
    name(SGPStrategy): (partial(SGP, **VARIANTS["sgp"]), partial(SGPStrategy, **VARIANTS["sgp"])),
    name(SSGDStrategy): (SSGD, SSGDStrategy),
    name(ODSGDStrategy): (ODSGD, ODSGDStrategy),
    name(CDSGDStrategy): (CDSGD, CDSGDStrategy),
    name(DistEFSGDStrategy): (partial(DistEFSGD, overlap=False), DistEFSGDStrategy),  # so that it can clip
    name(FlexCompressSGDStrategy): (partial(FlexCompressSGD, overlap=False), FlexCompressSGDStrategy),
    name(CompSkipDSGDStrategy): (
        partial(CompSkipDSGD, worker_skip=0.3, overlap=False),
        partial(CompSkipDSGDStrategy, worker_skip=0.3),
    ),
}
TWO_WAY = DistEFSGDStrategy | FlexCompressSGDStrategy | CompSkipDSGDStrategy


def test_every_strategy_has_a_plain_loop_to_be_compared_with():
    assert LOOPS.keys() == {*STRATEGIES, *VARIANTS}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("algorithm", "strategy"), LOOPS.values(), ids=LOOPS)
def test_trainer_equals_the_plain_loop(name, algorithm, strategy):
    options, loop = CASES[name]
    with_trainer = run_ranks(unshuffled, 2, strategy(), options, init=False)
    by_hand = run_ranks(plain, 2, algorithm, loop)
    for rank in range(2):
        assert torch.equal(with_trainer[rank]["path"], by_hand[rank]["path"])
        assert torch.equal(with_trainer[rank]["end"], by_hand[rank]["end"])


def two_optimizers(rank, world, algorithm, module):
    L.seed_everything(5, verbose=False)
    model, path = module(), []
    optimizers = model.configure_optimizers()
    with algorithm(model, optimizers) as running:
        for _ in range(2):
            for i, batch in enumerate(in_order(rank, world)):
                for optimizer in optimizers if i % 2 else optimizers[:1]:
                    optimizer.zero_grad()
                    model.loss(batch).backward()
                    running.before_step(optimizer)
                    running.step(optimizer.step)
                running.after_step()
                path.append(parameters(model))
    return {"path": torch.stack(path), "end": flat(model)}


@pytest.mark.parametrize(("algorithm", "strategy"), LOOPS.values(), ids=LOOPS)
def test_manual_optimization_equals_the_plain_loop(algorithm, strategy):
    module = TwoOfSGD if isinstance(strategy(), TWO_WAY) else TwoOptimizers
    with_trainer = run_ranks(unshuffled, 2, strategy(), {}, True, module, init=False)
    by_hand = run_ranks(two_optimizers, 2, algorithm, module)
    for rank in range(2):
        assert torch.equal(with_trainer[rank]["path"], by_hand[rank]["path"])
        assert torch.equal(with_trainer[rank]["end"], by_hand[rank]["end"])


@pytest.mark.parametrize("strategy", [*STRATEGIES, *variants()])
def test_a_step_is_an_optimizer_step_never_a_batch(strategy):
    """96 samples, 2 ranks, batch 8: 6 batches an epoch; windows of 4 make 2 steps an epoch, the second one partial."""
    for rank in run_ranks(fit, 2, strategy, {"accumulate_grad_batches": 4}, init=False):
        assert rank["steps"] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4]


# --- evaluation does not disturb training


@pytest.mark.parametrize("strategy", [*STRATEGIES, *variants()])
def test_validation_after_every_batch_leaves_the_trajectory_bitwise_alone(strategy):
    validated = run_ranks(fit, 2, strategy, {"val_check_interval": 1}, True, init=False)
    not_validated = run_ranks(fit, 2, strategy, {}, False, init=False)
    for rank in range(2):
        assert torch.equal(validated[rank]["path"], not_validated[rank]["path"])
        assert torch.equal(validated[rank]["end"], not_validated[rank]["end"])
    in_step = isinstance(strategy, PipeSGDStrategy | SSGDStrategy | TWO_WAY)  # what could be disturbed there is in flight
    assert torch.equal(validated[0]["path"], validated[1]["path"]) == in_step  # replicas differ: likewise


# --- parity with DDP


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(LocalSGDStrategy(period=1), id="local_sgd with period 1"),
        pytest.param(SSGDStrategy(), id="ssgd"),
        *[pytest.param(kind(warmup_steps=1000), id=f"{kind.registered_name} in warm-up") for kind in having("warmup_steps")],
    ],
)
def test_equals_ddp(strategy, world):
    ddp = run_ranks(unshuffled, world, "ddp", {}, False, init=False)
    ours = run_ranks(unshuffled, world, strategy, {}, False, init=False)
    for rank in range(world):  # the same sums in another order
        torch.testing.assert_close(ours[rank]["path"], ddp[rank]["path"], rtol=2e-5, atol=1e-6)


def test_cocod_with_period_1_does_not_equal_ddp():
    ddp = run_ranks(unshuffled, 2, "ddp", {}, False, init=False)
    ours = run_ranks(unshuffled, 2, CoCoDStrategy(period=1), {}, False, init=False)
    assert not torch.allclose(ours[0]["path"], ddp[0]["path"], rtol=1e-3, atol=1e-4)


# --- one device


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_device_is_plain_training(strategy):
    plain_run, ours = (run_ranks(unshuffled, 1, chosen, {}, init=False)[0] for chosen in ("auto", strategy))
    assert torch.equal(plain_run["path"], ours["path"])
    ddp, ours = (run_ranks(fit, 1, chosen, {}, init=False)[0] for chosen in ("ddp", strategy))  # the same shuffling
    assert torch.equal(ddp["path"], ours["path"])


# --- manual optimization, schedules, precision


@pytest.mark.parametrize("strategy", [*STRATEGIES, *variants()])
def test_manual_optimization_counts_batches_and_ends_on_the_consensus(strategy):
    module = TwoOfSGD if isinstance(strategy, TWO_WAY) else TwoOptimizers
    ranks = run_ranks(fit, 2, strategy, {}, False, module, init=False)
    assert_consensus_at_end(ranks)
    for rank in ranks:
        assert rank["steps"] == list(range(1, 13))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_schedules_are_identical_on_all_ranks_and_follow_steps(strategy):
    ranks = run_ranks(fit, 2, strategy, {"accumulate_grad_batches": 2}, init=False)
    assert ranks[0]["rates"] == ranks[1]["rates"]
    assert len(set(ranks[0]["rates"])) == 2  # 6 steps: one drop after the fifth


def accumulation_schedule(rank, world, strategy):
    L.seed_everything(5, verbose=False)
    model, seen = Toy(), Trajectory()
    schedule = GradientAccumulationScheduler({0: 1, 1: 3})
    trainer(strategy, world, callbacks=[seen, schedule]).fit(model, loader())
    return {"steps": seen.steps, "end": flat(model)}


@pytest.mark.parametrize("strategy", [*STRATEGIES, *variants()])
def test_accumulation_that_changes_with_the_epoch(strategy):
    ranks = run_ranks(accumulation_schedule, 2, strategy, init=False)
    assert_consensus_at_end(ranks)
    assert ranks[0]["steps"] == [1, 2, 3, 4, 5, 6, 6, 6, 7, 7, 7, 8]


class InfAtStep(Toy):
    """The gradient of rank 1 overflows in one step, so its scaler skips that step."""

    def on_after_backward(self):
        if self.trainer.global_rank == 1 and self.trainer.global_step == 2:
            self.net[0].weight.grad.fill_(float("inf"))


def scaled(rank, world, strategy):
    from lightning.pytorch.plugins import MixedPrecision

    L.seed_everything(5, verbose=False)
    model, seen = InfAtStep(dropout=0.0), Trajectory()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer(strategy, world, callbacks=[seen], plugins=[plugin]).fit(model, loader())
    path = torch.stack(seen.path)
    return {"steps": seen.steps, "rates": seen.rates, "end": flat(model), "scale": scaler.get_scale(), "path": path}


LOCAL_STEPS = [CO2Strategy, DCS3GDStrategy, DiLoCoStrategy, EagerDiLoCoStrategy, OverlapLocalSGDStrategy, SlowMoStrategy]
ROUNDS_OF_4 = [*made(period=4), *(kind(period=4) for kind in LOCAL_STEPS), StreamingDiLoCoStrategy(period=4, fragments=1)]


@pytest.mark.parametrize("strategy", ROUNDS_OF_4, ids=lambda strategy: strategy.registered_name)
def test_a_step_that_one_ranks_scaler_skips_counts_on_both(strategy):  # field report 5
    ranks = run_ranks(scaled, 2, strategy, init=False)
    assert_consensus_at_end(ranks)
    assert ranks[0]["steps"] == ranks[1]["steps"] == list(range(1, 13))
    assert ranks[0]["rates"] == ranks[1]["rates"]
    assert ranks[0]["scale"] > ranks[1]["scale"]  # rank 1 did skip
    assert torch.equal(ranks[1]["path"][1], ranks[1]["path"][2])


def scaled_warm_up(rank, world, strategy):
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(Exception, match=r"synchronous steps \(warmup_steps\) and precision='16-mixed' do not go together"):
        trainer(strategy(warmup_steps=2), world, plugins=[plugin]).fit(Toy(), loader())


@pytest.mark.parametrize("strategy", having("warmup_steps"))
def test_warm_up_under_a_scaler_is_refused(strategy):
    run_ranks(scaled_warm_up, 2, strategy, init=False)


class SynchronousAtTheEnd(When):
    def period(self, step):
        return 2

    def synchronous(self, step):
        return step >= 4


def scaled_later(rank, world):
    from lightning.pytorch.plugins import MixedPrecision

    plugin, seen = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")), Trajectory()
    with pytest.raises(Exception, match=r"synchronous steps \(warmup_steps\) and precision='16-mixed' do not go together"):
        trainer(LocalSGDStrategy(period=SynchronousAtTheEnd()), world, callbacks=[seen], plugins=[plugin]).fit(
            Toy(), loader()
        )
    return seen.steps


def test_synchronous_steps_under_a_scaler_are_refused_when_they_come():
    assert run_ranks(scaled_later, 2, init=False) == [[1, 2, 3, 4]] * 2


def left_behind(rank, world):
    """As if the fit before had ended between an optimizer's step and the end of its batch."""
    strategy, seen = LocalSGDStrategy(period=3), Trajectory()
    strategy._stepped = True
    trainer(strategy, world, callbacks=[seen], max_steps=2, accumulate_grad_batches=2).fit(Toy(), loader())
    return seen.steps


def test_a_fit_counts_no_step_of_the_one_before():
    assert run_ranks(left_behind, 1, init=False) == [[0, 1, 1, 2]]


def made_beside_a_group(rank, world):
    """While a process group of an earlier run is there, strategies are made for another job, whose size nobody knows yet."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lightning_cocod").addHandler(handler)
    CoCoDStrategy(intra_node=2, ranks_per_node=1)
    CoCoDStrategy(intra_node=2, ranks_per_node=[2, 3])
    DPSGDStrategy(graph=[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
    return said


def test_options_are_looked_at_for_one_rank_whatever_group_there_is():
    assert run_ranks(made_beside_a_group, 2) == [[]] * 2


def test_after_a_failure_lightnings_collectives_give_back_what_this_rank_has():
    strategy = CoCoDStrategy()
    strategy._alone = True
    x = torch.arange(3.0)
    assert torch.equal(strategy.all_gather(x), x.unsqueeze(0))
    assert strategy.reduce(x) is x
    assert strategy.broadcast("mine") == "mine"
    strategy.barrier()


class Lbfgs(Toy):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def lbfgs(rank, world, strategy):
    with pytest.raises(TypeError, match="LBFGS evaluates its closure several times"):
        trainer(strategy, world).fit(Lbfgs(), loader())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lbfgs_is_refused(strategy):
    run_ranks(lbfgs, 2, strategy, init=False)


class Fused(Toy):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, fused=True)


def fused(rank, world, strategy):
    from lightning.pytorch.plugins import MixedPrecision

    model = Fused(dropout=0.0)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**14))
    options = {"max_steps": 3, "use_distributed_sampler": False}
    trainer(strategy, world, plugins=[plugin], **options).fit(model, loader(shuffle=False))
    return parameters(model)


def test_a_fused_optimizer_sees_the_scale_of_its_gradients():
    ((ours,), (ddp,)) = (run_ranks(fused, 1, strategy, init=False) for strategy in ("cocod", "ddp"))
    assert torch.equal(ours, ddp)


class Teacher(Toy):
    """A second network that no optimizer moves: it follows the first one."""

    def __init__(self):
        super().__init__()
        self.teacher = torch.nn.Linear(6, 12).requires_grad_(False)

    def on_train_batch_end(self, *_):
        for theirs, mine in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
            theirs.data.lerp_(mine.data, 0.5)


@pytest.mark.parametrize("strategy", [*STRATEGIES, *variants()])
def test_parameters_that_no_optimizer_moves_are_part_of_the_consensus(strategy):
    assert_consensus_at_end(run_ranks(fit, 2, strategy, {}, False, Teacher, init=False))


def resumed(rank, world, strategy, folder):
    steps = []

    class Steps(Callback):
        def on_train_batch_start(self, trainer, *_):
            steps.append(trainer.strategy.algorithm.t)

    first = trainer(copy.deepcopy(strategy), world, max_epochs=1)
    first.fit(Toy(), loader())
    first.save_checkpoint(folder / "end.ckpt")
    again = trainer(strategy, world, max_epochs=2, callbacks=[Steps()])
    again.fit(Toy(), loader(), ckpt_path=folder / "end.ckpt")
    return steps


@pytest.mark.parametrize("strategy", made(warmup_steps=5), ids=STRATEGIES)
def test_a_resumed_run_goes_on_counting_steps(strategy, tmp_path):
    assert run_ranks(resumed, 2, strategy, tmp_path, init=False)[0] == [6, 7, 8, 9, 10, 11]


class OwnWeights(Toy):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        torch.nn.init.normal_(self.net[0].weight)
        torch.nn.init.normal_(self.net[1].running_mean)


def different_starts(rank, world, strategy):
    model = OwnWeights(seed=rank)
    seen = []

    class Start(Callback):
        def on_train_batch_start(self, trainer, module, *_):
            if not seen:
                seen.append(flat(module))

    trainer(strategy, world, callbacks=[Start()], max_steps=1).fit(model, loader())
    return seen[0]


@pytest.mark.parametrize("strategy", [*STRATEGIES, *variants()])
def test_initial_weights_and_buffers_are_those_of_rank_0(strategy):
    first, second = run_ranks(different_starts, 2, strategy, init=False)
    assert torch.equal(first, second)


def again_and_again(rank, world, strategy):
    """Fit, validate, test, fit again with the same trainer, evaluate, and all of it with a second trainer and model."""
    results = []
    for _ in range(2):
        L.seed_everything(5, verbose=False)
        model = Toy()
        t = trainer(copy.deepcopy(strategy), world, max_epochs=1)
        for epochs in (1, 2):
            t.fit_loop.max_epochs = epochs
            t.fit(model, loader(), loader(shuffle=False))
            end = flat(model)
            validated = t.validate(model, loader(shuffle=False), verbose=False)
            tested = t.test(model, loader(shuffle=False), verbose=False)
            assert torch.equal(flat(model), end)
            model.eval()
            with torch.no_grad():
                loss = model.loss(dataset().tensors).item()
            model.train()
            results.append({"end": end, "loss": loss, "validated": validated, "tested": tested})
    return results


@pytest.mark.parametrize("strategy", [*STRATEGIES, *variants()])
def test_fit_validate_test_and_fit_again_with_two_trainers_in_one_process(strategy):
    first, second = run_ranks(again_and_again, 2, strategy, init=False)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine["end"], theirs["end"])
        assert mine["validated"] == theirs["validated"]
        assert mine["tested"] == theirs["tested"]
        assert mine["validated"][0]["val/loss"] == pytest.approx(mine["loss"], rel=1e-5)  # the consensus model's
        assert mine["tested"][0]["test/loss"] == pytest.approx(mine["loss"], rel=1e-5)
    assert not torch.equal(first[0]["end"], first[1]["end"])  # the second fit went on
    assert torch.equal(first[0]["end"], first[2]["end"])  # the second trainer did the same as the first
    assert torch.equal(first[1]["end"], first[3]["end"])
