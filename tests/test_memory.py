"""Memory beyond the parameters: CoCoD one copy of them, Local SGD a few buckets, an evaluation one copy more.

Two fresh processes train a 160 MB model whose gradients are allocated before the measurement and never change. Each case
runs in a fork of its own, so that none inherits memory that another has freed. What is measured is the largest resident size
while the case runs (VmHWM, reset just before) over the size before, in units of the parameters. Tensors that are freed go
back to the system at once, so that it is what is held, and not what the allocator keeps in holes between other tensors.
"""

import gc
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 900.0  # seconds; on two idle cores it takes about a tenth
pytestmark = pytest.mark.timeout(LIMIT + 100)
ROWS, COLUMNS, LAYERS = 1000, 1000, 40  # 40 tensors of 4 MB: a few MB for threads and connections weigh little
BUCKETS = 0.05
"""Two buckets at work, each an 80th of the parameters, as much again inside Gloo, or half of it round a ring, and the error
of VmRSS."""


def status(field):
    """A size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field}")


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.step()


def no_algorithm(model, optimizer):
    steps(model, optimizer, 5)


def cocod(model, optimizer):
    from lightning_cocod import CoCoD

    with CoCoD(model, optimizer, period=2):
        steps(model, optimizer, 5)


def local_sgd(model, optimizer):
    from lightning_cocod import LocalSGD

    with LocalSGD(model, optimizer, period=2):
        steps(model, optimizer, 5)


def other(name, codec=None):
    """A case of that name, or of both names."""

    def case(model, optimizer):
        import lightning_cocod

        algorithm = getattr(lightning_cocod, name)
        options = {"period": 2} if "period" in inspect.signature(algorithm).parameters else {}
        options |= {"warmup_steps": 2} if name == "PostLocalSGD" else {}  # so that both of its phases are in the five steps
        gradients = [p.grad for p in model]
        with algorithm(model, optimizer, compression=codec, **options) as algo:
            for _ in range(5):
                for p, g in zip(model, gradients, strict=True):
                    p.grad = g  # where it had to go in the step before, as a backward would make it
                algo.before_step()
                algo.step(optimizer.step)
                algo.after_step()

    case.__name__ = f"{name} {codec}" if codec else name
    return case


def cocod_in_consensus(model, optimizer):
    from lightning_cocod import CoCoD

    with CoCoD(model, optimizer, period=2) as algo:
        steps(model, optimizer, 3)
        with algo.consensus():
            pass
        steps(model, optimizer, 2)


OTHERS = {
    "DCS3GD": 1,
    "DPSGD": 1,
    "SGP": 1,
    "OverlapLocalSGD": 3,
    "PipeSGD": 1,
    "SlowMo": 3,
    "DiLoCo": 3,
    "EagerDiLoCo": 5,
    "CO2": 5,
    "StreamingDiLoCo": 2.5,
    "SSGD": 1,
    "SSDSGD": 4,
    "ODSGD": 4.1,  # the tenth: what its local update computes, a parameter at a time
    "CDSGD": 4,
    "DistEFSGD": 2,
    "CompSkipDSGD": 2,
    "FlexCompressSGD": 2,
    "PostLocalSGD": 0,
    "ADPSGD": 3,
    "APSGD": 2.5,
    "DCASGD": 4.5,
    "EAMSGD": 2,
}
"""Copies of the parameters that they promise, those for the time of a merge included; two of four fragments in flight."""
WITH_CODES = {"CoCoD": 2, "OverlapLocalSGD": 5, "PipeSGD": 2, "EagerDiLoCo": 6}
"""The same with int8."""
WITH_FACTORS = {"CoCoD": 2}
"""The same with PowerSGD."""
CASES = [
    *(no_algorithm, local_sgd, cocod, cocod_in_consensus),
    *(other(name) for name in OTHERS),
    *(other(name, "int8") for name in WITH_CODES),
    *(other(name, "powersgd") for name in WITH_FACTORS),
]


def model_of(layers):
    import torch
    from torch import nn

    model = nn.ParameterList([torch.ones(ROWS, COLUMNS) for _ in range(layers)])
    for p in model:
        p.grad = torch.ones_like(p)
    return model, torch.optim.SGD(model.parameters(), 1e-3, foreach=False)


def measure(case, number):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
    dist.init_process_group("gloo")
    case(*model_of(1))  # what a first use imports and starts
    gc.collect()
    model, optimizer = model_of(LAYERS)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    case(model, optimizer)
    peak = status("VmHWM") - before
    dist.destroy_process_group()
    return peak / (4 * ROWS * COLUMNS * LAYERS)


def main():
    """Every case in a fork; prints {case: copies of the parameters}."""
    import lightning_cocod  # noqa: F401

    found = {}
    for number, case in enumerate(CASES):
        read, write = os.pipe()
        if os.fork() == 0:
            code = 1
            try:
                os.write(write, json.dumps(measure(case, number)).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read) as pipe:
            found[case.__name__] = json.loads(pipe.read())
        os.wait()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def copies():
    """{case: copies of the parameters}, the larger of the two ranks."""
    from support.ranks import free_port, torchrun_env

    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the system does not reset VmHWM")
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **torchrun_env(rank, 2, port), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=LIMIT)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    larger = {case: max(f[case] for f in found) for case in found[0]}
    print("", *(f"{number:5.2f}  {case}" for case, number in larger.items()), sep="\n")  # with pytest -s
    return larger


def test_the_loop_itself_needs_nothing(copies):
    assert copies["no_algorithm"] < 0.01


def test_cocod_needs_one_copy_and_a_few_buckets(copies):
    assert 0.9 < copies["cocod"] < 1 + BUCKETS


def test_local_sgd_needs_a_few_buckets(copies):
    assert copies["local_sgd"] < BUCKETS


def test_an_evaluation_needs_one_copy_more(copies):  # and is seen to: so would be any copy that should not be there
    assert 1.9 < copies["cocod_in_consensus"] < 2 + BUCKETS


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_need_the_copies_that_they_promise(copies, name):
    encodes = name in ("DistEFSGD", "CompSkipDSGD", "FlexCompressSGD", "CDSGD")  # a bucket, in two more
    assert OTHERS[name] - 0.1 < copies[name] < OTHERS[name] + BUCKETS * (1 + encodes + OTHERS[name])


@pytest.mark.parametrize("name", WITH_CODES)
def test_codes_need_the_copies_that_they_promise(copies, name):
    most = WITH_CODES[name] + BUCKETS * (2 + WITH_CODES[name])  # what a bucket is decoded into comes with two of them
    assert WITH_CODES[name] - 0.1 < copies[f"{name} int8"] < most


@pytest.mark.parametrize("name", WITH_FACTORS)
def test_factors_need_the_copies_that_codes_need(copies, name):
    most = WITH_FACTORS[name] + BUCKETS * (3 + WITH_FACTORS[name])  # three buckets, and the factors
    assert WITH_FACTORS[name] - 0.1 < copies[f"{name} powersgd"] < most


if __name__ == "__main__":
    main()
