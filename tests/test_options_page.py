"""docs/options.md says which strategy takes what; here it is asked."""

import inspect
import os
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

import lightning_cocod
from lightning_cocod import algorithms
from lightning_cocod.algorithms import Algorithm
from lightning_cocod.strategies import STRATEGIES

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
ROWS = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.read_text().splitlines() if line[:1] == "|"]
TABLE = {row[0].strip("`"): dict(zip(ROWS[0], row, strict=True)) for row in ROWS[2:]}
CLASSES = [kind for kind in vars(algorithms).values() if inspect.isclass(kind) and issubclass(kind, Algorithm)]
ALGORITHMS = {kind.name: kind for kind in CLASSES if hasattr(kind, "name")}
BY_NAME = {strategy.registered_name: strategy for strategy in STRATEGIES}


def test_the_page_has_every_strategy():
    assert set(TABLE) == set(BY_NAME)


def works(make, *args, **options):
    try:
        return make(*args, **options)
    except (ValueError, TypeError):
        return None


def made(name, kind=torch.optim.SGD, **options):
    model = nn.Linear(2, 2)
    return works(ALGORITHMS[name], model, kind(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_row_is_what_the_code_says(name):
    strategy, row = BY_NAME[name], TABLE[name]
    takes = inspect.signature(strategy).parameters
    default = takes["period"].default if "period" in takes else ""
    algorithm = made(name)
    assert algorithm is not None
    assert row["`period`"] == str(default)
    said = {
        "`warmup_steps`": works(strategy, warmup_steps=3) is not None,
        "`weights`": works(strategy, weights=[1.0, 2.0]) is not None,
        '`on_nonfinite="skip"`': works(strategy, on_nonfinite="skip") is not None,
        "`intra_node`": works(strategy, intra_node=2, ranks_per_node=2) is not None,
        "`16-mixed`": algorithm.steps_together(0) is None,
    }
    assert {column: row[column] for column in said} == {column: "yes" if says else "no" for column, says in said.items()}
    assert (works(strategy, batch_sizes="proportional") is not None) == (row["`weights`"] == "yes")
    codec, factors = (works(strategy, compression=how) is not None for how in ("int8", "powersgd"))
    assert row["`compression`"] == {(True, True): "yes", (True, False): "codec", (False, False): "no"}[codec, factors]
    assert row["plain loop"] == ("`optimizer.step()`" if algorithm._why_explicit() is None else "`step()`")


@pytest.mark.parametrize("name", BY_NAME)
def test_the_optimizer_of_a_row(name):
    """Element-wise is what a server tries out when a run with several ranks begins: those that do have a say in it."""
    other_than_sgd = made(name, torch.optim.AdamW) is not None
    tried_out = "elementwise" in inspect.signature(BY_NAME[name]).parameters
    assert TABLE[name]["optimizer"] == ("SGD" if not other_than_sgd else "element-wise" if tried_out else "any")


@pytest.mark.parametrize("name", BY_NAME)
def test_defaults_are_the_same_for_strategy_and_algorithm(name):
    strategy, algorithm = (inspect.signature(kind).parameters for kind in (BY_NAME[name], ALGORITHMS[name]))
    both = set(strategy) & set(algorithm) - {"options", "shared"}
    assert {o: strategy[o].default for o in both} == {o: algorithm[o].default for o in both}


def loop_of_the_page(rank, world, folder, parts):
    """The plain loop of the page, with so many batches in each of its runs: where it ends."""
    block = PAGE.read_text().split("```python\n")[1].split("```")[0]
    draw = torch.Generator().manual_seed(rank)
    data = [(torch.randn(16, 4, generator=draw), torch.randn(16, 1, generator=draw)) for _ in range(sum(parts))]
    given = {"lightning_cocod": lightning_cocod, "os": os, "torch": torch, "loss": nn.functional.mse_loss}
    for part in parts:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches, data = data[:part], data[part:]
        path = f"{folder}/{parts}, rank {rank}.pt"
        exec(block, {**given, "model": model, "optimizer": optimizer, "batches": batches, "path": path})
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_loop_of_the_page_goes_on_where_it_was(tmp_path):
    whole, parts = (run_ranks(loop_of_the_page, 2, tmp_path, parts) for parts in ([11], [6, 5]))
    assert torch.equal(whole[0], whole[1])
    assert all(torch.equal(whole[0], end) for end in parts)
    assert not torch.equal(whole[0], run_ranks(loop_of_the_page, 2, tmp_path, [10])[0])
