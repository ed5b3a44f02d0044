"""Faults, in every strategy: a rank that is lost ends all others, which name it; nobody hangs, nothing is left."""

import re
import signal

import pytest
from support.faults import Faulty, forked
from support.ranks import run_ranks
from support.toys import loader, trainer

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning_cocod.strategies import STRATEGIES

NAMES = [strategy.registered_name for strategy in STRATEGIES]
CLASSES = dict(zip(NAMES, STRATEGIES, strict=True))
DEADLINE = 3.0
LIMIT = 60.0
"""Of the harness. Ranks that are lost must end far earlier, but no verdict depends on how much."""
KILLED = -signal.SIGKILL


def fit(rank, world, strategy, what, where, who=1, **options):
    model = Faulty(what, where, who)
    t = trainer(CLASSES[strategy](timeout=DEADLINE, period=2), world, **{"max_epochs": 1000, **options})
    t.fit(model, loader(), loader(shuffle=False))


def meets(strategy, what, where, who=1, **options):
    """How each of two ranks ends: its exit code and its words."""
    return run_ranks(forked, 2, fit, strategy, what, where, who, init=False, timeout=LIMIT, leftovers_ok=False)


def assert_names(text, rank, why=""):
    """The last line of a peer's words names the rank that was lost; the traceback is short, and nothing is left over."""
    lines = text.strip().splitlines()
    assert re.search(rf"PeerLost: rank {rank} {why}", lines[-1]), text
    return lines


@pytest.mark.parametrize(
    "where",
    ["before the first step", "between rounds", "while sending", "while reducing", "in validation"],
)
@pytest.mark.parametrize("strategy", NAMES)
def test_a_rank_that_is_killed_anywhere_ends_its_peer_which_names_it(strategy, where):
    (survivor, words), (victim, _) = meets(strategy, "is killed", where)
    assert (survivor, victim) == (1, KILLED)
    assert_names(words, 1, "is lost: ")
