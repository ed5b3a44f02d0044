"""Correctness under Lightning's Trainer. Ranks that share a device are nodes of one device each."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from gpu_checks.library import ALGORITHMS, must_warm_up, options, strategies, takes
from gpu_checks.rank import Rank, Skipped, check

STEPS = 6  # of an epoch


def _fit(rank: Rank, strategy: type, path: str | None = None, seed: int = 5, **more: Any) -> Any:
    """The module at the end of a run of two epochs."""
    import lightning as L

    from gpu_checks.modules import Net, loader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(5, verbose=False)  # the order of the data
    module = Net()
    module.seed = seed + rank.rank  # the rest
    backend = None if rank.world == 1 else rank.backend
    trainer = L.Trainer(
        accelerator="gpu" if rank.cuda else "cpu",
        devices=[rank.device.index] if rank.cuda else 1,
        num_nodes=rank.world,
        strategy=strategy(process_group_backend=backend, **options(strategy, {"period": 4})),
        max_epochs=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{"enable_checkpointing": False, **more},
    )
    trainer.fit(module, loader(STEPS * rank.world), loader(2 * rank.world, shuffle=False), ckpt_path=path)
    in_step = strategy.registered_name in ALGORITHMS  # or each makes its own part of the same number
    made = trainer.global_step if in_step else int(sum(rank.gather(torch.tensor(module.batches)))) / rank.world
    rank.expect(made == 2 * STEPS, f"{2 * STEPS} steps were made, not {made}")
    return module


def _end(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in module.state_dict().values()])


def _precisions(rank: Rank, *, asynchronous: bool = False) -> None:
    for name, strategy in strategies(asynchronous=asynchronous).items():
        in_step = not asynchronous
        scaled = rank.cuda and in_step and not must_warm_up(strategy) and ALGORITHMS[name].may_skip_steps  # others refuse it
        for precision in ("32-true", "bf16-mixed", "bf16-true", *(["16-mixed"] if scaled else [])):
            with rank.attempt(f"{name}, {precision}"):
                end = _end(_fit(rank, strategy, precision=precision))
                rank.expect(end.isfinite().all() and rank.same(end), f"{name}, {precision}: ends finite and equal")


@check(ranks=1, backend="nccl", lightning=True)
def trainer_alone(rank: Rank) -> None:
    """Every precision on one device."""
    _precisions(rank)


@check(lightning=True)
def trainer(rank: Rank) -> None:
    """Every precision on two ranks."""
    _precisions(rank)


@check(lightning=True, asynchronous=True)
def trainer_asynchrony(rank: Rank) -> None:
    """Every precision on two ranks that are not in step: they share each epoch."""
    _precisions(rank, asynchronous=True)


@check(lightning=True, limit=100.0)
def resume(rank: Rank) -> None:
    """A run interrupted in mid-epoch and resumed equals the run that was not, bit for bit: dropout on the device, Adam."""
    from gpu_checks.modules import Saver

    torch.use_deterministic_algorithms(True)

    def state(module: torch.nn.Module) -> torch.Tensor:
        generators = [torch.get_rng_state(), *([torch.cuda.get_rng_state(rank.device)] if rank.cuda else [])]
        return torch.cat([_end(module), module.path, *(g.double() for g in generators)])

    for name, strategy in strategies().items():
        with rank.attempt(name):
            saver = Saver(f"{rank.folder}/{name}", at=(3, 8))
            whole = state(_fit(rank, strategy, callbacks=[saver]))
            other = state(_fit(rank, strategy, seed=99))
            rank.expect(not torch.equal(whole, other), f"{name}: another seed gives another run (the control)")
            for step in saver.at:
                resumed = state(_fit(rank, strategy, path=saver.path(step), seed=99))
                rank.expect(torch.equal(whole, resumed), f"{name}: resumed at step {step}, the same bits")


@check(lightning=True, limit=100.0)
def trace(rank: Rank) -> None:
    """A trace in the device's time: in order on each stream, whole, and without a bit of difference to the run."""
    from lightning_cocod import CommunicationTrace

    for name, strategy in strategies().items():
        with rank.attempt(name):
            path = Path(rank.folder, f"{name}.json")
            rounds = 1 if takes(strategy, "period") else 4  # steps, some of whose messages are still under way in the end
            traced = _end(_fit(rank, strategy, callbacks=[CommunicationTrace(path, rounds=rounds, start_step=3)]))
            rank.expect(torch.equal(traced, _end(_fit(rank, strategy))), f"{name}: the same bits without a trace")
            content = json.loads(path.read_text())
            rank.expect(content["otherData"]["complete"], f"{name}: all of it was recorded")
            for row in [(pid, tid) for pid in range(rank.world) for tid in range(2)]:
                ends, here = [], [e for e in content["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == row]
                rank.expect(here, f"{name}: something is recorded in row {row}")
                for event in here:
                    while ends and ends[-1] <= event["ts"] + 1e-3:
                        ends.pop()
                    end = event["ts"] + event["dur"]
                    rank.expect(event["dur"] >= 0 and all(end <= e + 1e-3 for e in ends), f"{name}: {event} nests")
                    ends.append(end)


@check(lightning=True)
def moving_average(rank: Rank) -> None:
    """EMAWeightAveraging: what a fit leaves in the model is the mean over the ranks of each rank's average."""
    from lightning.pytorch import callbacks

    from gpu_checks.modules import Watch

    if not hasattr(callbacks, "EMAWeightAveraging"):
        raise Skipped("Lightning before 2.6 has no EMAWeightAveraging")
    for name, strategy in strategies().items():
        with rank.attempt(name):
            watch = Watch()
            averaging = callbacks.EMAWeightAveraging(decay=0.8)
            module = _fit(rank, strategy, callbacks=[watch, averaging])
            average = watch.path[0]
            for weights in watch.path[1:]:
                average = 0.8 * average + 0.2 * weights
            averages = rank.gather(average)
            mean, end = torch.stack(averages).mean(0), torch.cat([p.detach().reshape(-1) for p in module.parameters()]).cpu()
            rank.expect(rank.same(end), f"{name}: all ranks end on the same average")
            off = float((end - mean).abs().max())
            rank.expect(off < 1e-5, f"{name}: the mean of the ranks' averages (off by {off:.1e})")
            if ALGORITHMS[name].has_rounds:  # in which replicas differ
                rank.expect(float((averages[0] - mean).abs().max()) > 1e-4, f"{name}: one rank's is another (the control)")
