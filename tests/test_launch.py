"""Every way to start ranks, and the ways in which starting fails, as a user's script meets them."""

import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from functools import partial

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from support.ranks import free_port, run_ranks, run_ranks_raw
from support.toys import STRATEGIES, Toy, flat, has, loader, trainer
from support.warm import Warm

import lightning_cocod
from lightning_cocod import CoCoDStrategy

TRAIN = """
    import os, sys
    sys.path.insert(0, {tests!r})
    import torch
    import lightning as L
    from support.toys import Toy, flat, loader, trainer

    class Keeps(L.Callback):
        def on_fit_end(self, trainer, module):
            torch.save(flat(module), f"replica{{trainer.global_rank}}.pt")

    if __name__ == "__main__":
        L.seed_everything(1, verbose=False)
        model = Toy()
        t = trainer(sys.argv[1], int(sys.argv[2]), max_epochs=1, callbacks=[Keeps()])
        t.fit(model, loader(), loader(shuffle=False))
        assert t.world_size == 2
        torch.save(flat(model), f"rank{{t.global_rank}}.pt")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN.format(tests=os.path.dirname(__file__))))
    return path


def environment(**variables):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    return {**inherited, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in variables.items()}}


def start(command, folder, spares=None, **variables):
    """In a new interpreter or, with a number of `spares`, in a warm one."""
    popen = subprocess.Popen if spares is None else partial(Warm, spares=spares)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    variables = {"MASTER_PORT": free_port(), **variables}  # Lightning's choice may be somebody else's by the time it listens
    return popen(command, cwd=folder, env=environment(**variables), **pipes)


def finish(*processes, limit=240):
    """The limit is far above what is needed. A launcher that has not ended by then is asked to take its ranks along."""
    try:
        return [(p.communicate(timeout=limit)[0], p.returncode) for p in processes]
    finally:
        for process in processes:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def assert_trained(results, folder, ranks=(0, 1)):
    for output, code in results:
        assert code == 0, output
    replicas = [torch.load(folder / f"replica{r}.pt") for r in range(2)]
    returned = [torch.load(folder / f"rank{r}.pt") for r in ranks]
    assert all(torch.equal(replicas[0], other) for other in [*replicas, *returned])


# New interpreters take seconds, and nothing in a launch depends on the algorithm: each launcher meets one strategy.


def test_lightnings_own_launcher(script, tmp_path):
    assert_trained(finish(start([sys.executable, script, "cocod", "2"], tmp_path)), tmp_path)


@pytest.mark.parametrize("strategy", ["local_sgd_spawn", "cocod_fork"])
def test_spawn_and_fork_return_the_consensus_to_the_script(strategy, script, tmp_path):
    """The script's own process is not a rank here: what it saves is what the launcher brought back."""
    results = finish(start([sys.executable, script, strategy, "2"], tmp_path))
    assert_trained(results, tmp_path, ranks=[0])


def test_torchrun(script, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert_trained(finish(start([*torchrun, script, "local_sgd", "2"], tmp_path)), tmp_path)


def started(variables):
    """A process with these variables instead of those of the launcher that has started it."""
    os.environ.clear()
    os.environ.update(environment(**variables))


def task(rank, world, port):
    """One of two tasks of a job, as srun starts them."""
    slurm = {
        "JOB_ID": 1,
        "JOB_NAME": "train",
        "NTASKS": world,
        "NTASKS_PER_NODE": world,
        "NNODES": 1,
        "NODELIST": "localhost",
    }
    own = {"PROCID": rank, "LOCALID": rank, "NODEID": 0}
    variables = {f"SLURM_{name}": value for name, value in {**slurm, **own}.items()}
    started({**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    model, run = Toy(), trainer("cocod", world, max_epochs=1)
    run.fit(model, loader(), loader(shuffle=False))
    return type(run.strategy.cluster_environment), run.global_rank, flat(model)


def test_slurm():
    first, second = run_ranks(task, 2, free_port(), init=False)
    assert first[:2] == (SLURMEnvironment, 0)
    assert second[:2] == (SLURMEnvironment, 1)
    assert torch.equal(first[2], second[2])


def node_of_two(rank, world, node, address, port):
    started({"NODE_RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port})
    trainer(CoCoDStrategy(connect_timeout=1), 1, num_nodes=2).fit(Toy(), loader())


@pytest.mark.parametrize(
    ("node", "address", "message"),
    [
        (1, "127.0.0.1", "rank 1 cannot reach the master at 127.0.0.1:"),
        (1, "no-such-host.invalid", "rank 1 cannot reach the master at no-such-host.invalid:"),
        (0, "no-such-host.invalid", "the master address no-such-host.invalid is not one of this machine's"),
    ],
)
def test_an_unreachable_master_is_named(node, address, message):
    (outcome,) = run_ranks_raw(node_of_two, 1, node, address, free_port(), init=False)
    assert outcome.status == "error"
    last = outcome.traceback.strip().splitlines()[-1]
    assert message in last, outcome.traceback
    assert "MASTER_ADDR" in last


def test_names_are_registered_once():
    from lightning.pytorch.strategies import StrategyRegistry

    lightning_cocod.register()  # a second time
    for name in STRATEGIES:
        for suffix in ("", "_spawn", "_fork", "_notebook"):
            assert f"{name}{suffix}" in StrategyRegistry
    assert StrategyRegistry.get("local_sgd_spawn")._start_method == "spawn"


@pytest.mark.parametrize("strategy", lightning_cocod.strategies.STRATEGIES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_parameters": True}, "has no option find_unused_parameters: parameters without a gradient"),
        ({"static_graph": True}, "has no option static_graph"),
        ({"ddp_comm_hook": print}, "has no option ddp_comm_hook"),
        ({"gradient_as_bucket_view": True}, "has no option gradient_as_bucket_view"),
        ({"model_averaging_period": 4}, "that is what period= is for"),
        ({"perod": 4}, "has no option perod: "),
        ({"timeot": 4}, r"has no option timeot: did you mean timeout\?"),
        ({"foo": 4}, "has no option foo: it has .*on_nonfinite"),
    ],
)
def test_options_of_ddp_are_refused_with_a_reason(strategy, options, message):
    with pytest.raises(TypeError, match=message):
        strategy(**options)


OUT_OF_RANGE = [
    {"period": 0},
    {"period": -1},
    {"period": 2.5},
    {"period": True},
    {"period": {10: 4}},
    {"warmup_steps": -1},
    {"weights": [1.0, 0.0]},
    {"weights": [1.0, float("nan")]},
    {"timeout": 0},
    {"process_group_timeout": -1.0},
    {"connect_timeout": 0},
    {"compression": "int9"},
    {"on_nonfinite": "ignore"},
]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (strategy, options)
        for strategy in lightning_cocod.strategies.STRATEGIES
        for options in OUT_OF_RANGE
        if has(strategy, *options)
    ],
)
def test_options_out_of_range_are_refused_in_one_line(strategy, options):
    with pytest.raises(ValueError, match=next(iter(options))) as error:
        strategy(**options)
    assert "\n" not in str(error.value)


def test_options_of_lightning_pass_through():
    strategy = CoCoDStrategy(process_group_backend="gloo", start_method="spawn", process_group_timeout=7)
    assert strategy.process_group_backend == "gloo"
    assert strategy._start_method == "spawn"
    assert strategy._timeout.total_seconds() == 7
