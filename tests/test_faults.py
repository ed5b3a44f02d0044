"""Faults: a rank that is lost ends all others, which name it; nobody hangs, and nothing is left.

The ranks are children of warm workers (`forked`); what launchers make of their ends is the matter of test_fault_launches.py.
"""

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from support.faults import Faulty, Relay, continued_after, forked, nothing
from support.ranks import run_ranks
from support.toys import BY_NAME, STRATEGIES, VARIANTS, Toy, dataset, having, loader, made, parameters, trainer
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Subset

from lightning_cocod import CoCoDStrategy
from lightning_cocod.strategies.rendezvous import fresh_part

DEADLINE = 3.0
KILLED, TERMINATED, FAILED = -signal.SIGKILL, 128 + signal.SIGTERM, 1

SHORT = {name: {"period": 2} for name in STRATEGIES} | VARIANTS
"""Options for short rounds."""
ELSEWHERE = ("ad_psgd", "a_psgd", "eamsgd")
"""Strategies a rank of which is killed in test_losing_ranks, where the others train on, and in test_shard_strategies."""
with_and_without_delay = pytest.mark.parametrize("strategy", STRATEGIES)


def make(strategy, world, **options):
    """A trainer of a fit that goes on for ever, in short rounds."""
    chosen = BY_NAME[strategy](timeout=DEADLINE, **SHORT.get(strategy, {}))
    return trainer(chosen, world, **{"max_epochs": 100_000, **options})


def fit(rank, world, strategy, fault, **options):
    make(strategy, world, **options).fit(Faulty(*fault), loader(), loader(shuffle=False))


def ends(fn, *args):
    """How each of two ranks ends: exit code and words. The limits are the harness's, far above what is needed."""
    return run_ranks(forked, 2, fn, *args, init=False)


def assert_lost(end, rank, why):
    """A peer's end: it failed, its last line names the rank, its traceback is short, and it has left nothing behind."""
    code, words = end
    lines = words.strip().splitlines()
    assert code == FAILED, words
    assert re.match(rf"lightning_cocod\S*PeerLost: rank {rank}{why}", lines[-1]), words
    assert sum(line.startswith("  File ") for line in lines) < 10, words


# A rank is lost


@pytest.mark.parametrize(
    "where",
    [
        "before the first collective",
        "before the first step",
        "between rounds",
        "while announcing",
        "while sending",
        "while reducing",
        "in validation",
    ],
)
@with_and_without_delay
def test_a_rank_that_is_killed_anywhere_ends_its_peer_which_names_it(strategy, where):
    survivor, victim = ends(fit, strategy, ("is killed", where))
    assert victim[0] == KILLED
    assert_lost(survivor, 1, " is lost: ")


@pytest.mark.parametrize("strategy", [name for name in BY_NAME if name not in (*STRATEGIES, *ELSEWHERE)])
def test_a_rank_that_is_killed_ends_its_peer_which_names_it_under_all_other_strategies(strategy):
    survivor, victim = ends(fit, strategy, ("is killed", "between rounds"))
    assert victim[0] == KILLED
    assert_lost(survivor, 1, " is lost: ")


@pytest.mark.parametrize(
    ("what", "why", "code"),
    [
        ("raises", " failed: ValueError: my own bug", FAILED),
        ("exits", " failed: SystemExit: 0", FAILED),
        ("leaves", " is lost: ", 0),
        ("is interrupted", " failed: KeyboardInterrupt", FAILED),
        ("is stopped", " is lost: no heartbeat for 3 s; its process [0-9]+ on this host was ended", KILLED),
    ],
)
@with_and_without_delay
def test_a_rank_that_ends_in_any_other_way_ends_its_peer_which_names_it(strategy, what, why, code):
    survivor, victim = ends(fit, strategy, (what, "between rounds"))
    assert victim[0] == code
    assert "left over" not in victim[1]
    assert_lost(survivor, 1, why)


@pytest.mark.parametrize("strategy", ["ssgd", "compskip_dsgd"])
@pytest.mark.parametrize(
    ("what", "why"), [("raises", " failed: ValueError: my own bug"), ("is stopped", " is lost: no heart")]
)
def test_the_same_holds_where_pushes_and_pulls_are_under_way(strategy, what, why):
    survivor, victim = ends(fit, strategy, (what, "between rounds"))
    assert victim[0] == (FAILED if what == "raises" else KILLED)
    assert_lost(survivor, 1, why)


def test_rank_0_that_is_stopped_is_ended_by_its_peer_although_it_hosts_the_store():
    victim, survivor = ends(fit, "cocod", ("is stopped", "between rounds", 0))
    assert victim[0] == KILLED
    assert_lost(survivor, 0, ", or the launcher that hosts the store, is lost: ")


def preparing(rank, world, folder):
    with (folder / str(rank)).open("w") as said:
        os.dup2(said.fileno(), 2)
    fit(rank, world, "cocod", ("is killed", "before the first collective", 0))


def test_rank_0_that_is_killed_while_it_prepares_the_data_is_named_before_lightnings_barrier_fails(tmp_path):
    """That is on a group of Lightning's own: torch's words follow, and the group is left to the end of the process."""
    victim, survivor = ends(preparing, tmp_path)
    assert victim[0] == KILLED
    assert survivor[0] == FAILED
    assert "[rank 1] rank 0" in (tmp_path / "1").read_text()
    assert "gloo" in survivor[1]


def ending(rank, world, fault):
    fit(rank, world, "cocod", fault, max_epochs=2)


def test_a_rank_that_is_killed_when_all_has_been_trained_ends_its_peer_which_names_it():
    survivor, victim = ends(ending, ("is killed", "at the end"))
    assert victim[0] == KILLED
    assert_lost(survivor, 1, " is lost: ")


def test_interrupting_all_ranks_is_no_success_of_any_and_leaves_nothing():
    for code, words in ends(fit, "cocod", ("is interrupted", "between rounds", None)):
        assert code == FAILED
        assert "left over" not in words


def saves(rank, world, strategy, fault, folder):
    save = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
    fit(rank, world, strategy, fault, callbacks=[save], enable_checkpointing=True)


@with_and_without_delay
def test_a_rank_that_is_killed_in_a_checkpoint_ends_its_peer_which_names_it(strategy, tmp_path):
    survivor, victim = ends(saves, strategy, ("is killed", "in a checkpoint"), tmp_path)
    assert victim[0] == KILLED
    assert_lost(survivor, 1, " is lost: ")


def evaluates(rank, world, stage, fault):
    getattr(make("cocod", world), stage)(Faulty(*fault), loader(shuffle=False))


@pytest.mark.parametrize("what", ["is killed", "is stopped"])
def test_a_rank_that_is_lost_in_a_test_ends_its_peer_which_names_it(what):
    survivor, victim = ends(evaluates, "test", (what, "in an evaluation"))
    assert victim[0] == KILLED
    assert_lost(survivor, 1, " is lost: ")


class Last(Callback):
    """The weights with which a rank fails."""

    def __init__(self, folder):
        self.folder = folder

    def on_exception(self, trainer, module, exception):
        torch.save(parameters(module), self.folder / str(trainer.global_rank))


def breaks(rank, world, strategy, what, folder):
    t = trainer(strategy, world, max_epochs=100_000, callbacks=[Last(folder)])
    t.fit(Faulty(what, "in a gradient"), loader(), loader(shuffle=False))


LOCAL = [pytest.param(s, False, id=name) for s, name in zip(made(timeout=DEADLINE, period=2), STRATEGIES, strict=True)]
SYNCHRONOUS = [
    pytest.param(kind(timeout=DEADLINE, warmup_steps=100_000), True, id=f"{kind.registered_name} in warm-up")
    for kind in having("warmup_steps")
]


@pytest.mark.parametrize("what", ["gets NaN", "gets infinity"])
@pytest.mark.parametrize(("strategy", "synchronous"), [*LOCAL, *SYNCHRONOUS])
def test_a_gradient_that_is_not_finite_ends_all_ranks_which_name_its_own_and_reaches_nobody(
    strategy, synchronous, what, tmp_path
):
    for code, words in ends(breaks, strategy, what, tmp_path):
        assert code == FAILED
        assert "NonFiniteMessage: " in words
        assert "NaN or infinity in the message of rank 1" in words
    survivor, broken = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    assert survivor.isfinite().all()
    assert broken.isfinite().all() == synchronous  # a local step had been made with it; no synchronous one


def uneven(rank, world, strategy, compression):
    """Rank 1 has a batch more in each epoch, and Lightning is told not to share the data out."""
    mine = Subset(dataset(), range(40 + 8 * rank))
    chosen = BY_NAME[strategy](timeout=DEADLINE, period=2, compression=compression)
    t = trainer(chosen, world, max_epochs=20, use_distributed_sampler=False)
    t.fit(Toy(dropout=0.0), DataLoader(mine, batch_size=8))


@with_and_without_delay
@pytest.mark.parametrize("compression", [None, "int8"])
def test_a_rank_that_runs_out_of_data_early_is_named_and_hangs_nobody(strategy, compression):
    both = ends(uneven, strategy, compression)
    assert [code for code, _ in both] == [FAILED, FAILED]
    named = r"out of step: rank (\d) sends .*, rank (\d) sends .*; every rank needs .* and the same number of batches"
    found = [match.groups() for _, words in both if (match := re.search(named, words))]
    assert found
    assert {("0", "1"), ("1", "0")}.issuperset(found)


# Callbacks that save when a run fails


def saves_on_exception(rank, world, fault, folder):
    saves = [
        OnExceptionCheckpoint(folder, "last_words"),
        ModelCheckpoint(folder, filename="model", every_n_train_steps=5, save_last=True, save_on_exception=True),
    ]
    fit(rank, world, "cocod", fault, callbacks=saves, enable_checkpointing=True)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("what", ["raises", "is killed"])
def test_saving_after_a_failure_waits_for_nobody(what, who, tmp_path):
    both = ends(saves_on_exception, (what, "between rounds", who), tmp_path)
    assert both[who][0] == (KILLED if what == "is killed" else FAILED)
    assert_lost(both[1 - who], who, "(,| is lost| failed)")
    if (what, who) != ("is killed", 0):  # rank 0 writes
        assert {path.name for path in tmp_path.iterdir()} == {"last_words.ckpt", "model.ckpt", "last.ckpt"}


# SIGTERM


def terminated(rank, world, strategy, fault, options):
    """The code of a script whose fit is stopped, and after how many steps."""
    model = Faulty(*fault)
    try:
        make(strategy, world, **options).fit(model, loader(), loader(shuffle=False))
    except SystemExit as stop:
        return stop.code, model.steps
    return 0, model.steps


@pytest.mark.parametrize("who", [0, 1, None], ids=["rank 0", "rank 1", "all"])
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("in the sanity check", {}),
        ("before the first step", {"num_sanity_val_steps": 0}),
        ("between rounds", {}),
        ("in validation", {}),
        ("in validation", {"max_epochs": 2}),  # no step follows
        ("at the end", {"max_epochs": 1}),  # all has been done, but for what the script has yet to do
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(map(str, v)),
)
def test_sigterm_stops_all_ranks_after_the_same_step_and_is_no_success(where, options, who):
    first, second = ends(terminated, "cocod", ("is terminated", where, who), options)
    code, steps = eval(first[1])
    if where == "at the end" and who is not None:  # the others had finished
        assert {code, eval(second[1])[0]} == {0, TERMINATED}
    else:
        assert first == second
        assert code == TERMINATED
    assert steps == {"in validation": 12, "at the end": 6}.get(where, steps)


@with_and_without_delay
def test_sigterm_stops_ranks_with_and_without_delay_alike(strategy):
    first, second = ends(terminated, strategy, ("is terminated", "between rounds", 1), {})
    assert first == second
    assert eval(first[1])[0] == TERMINATED


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_sigterm_ends_an_evaluation(stage):
    survivor, victim = ends(evaluates, stage, ("is terminated", "in an evaluation"))
    assert victim[0] == TERMINATED
    assert_lost(survivor, 1, " failed: SIGTERMException")


# What is survived. It is the way to the store that is cut here; Gloo's own connections are cut in test_netlab.py.


def stands_still(module):
    """The whole process is stopped and continued: the link, seen from the peers, is down in both directions."""
    resume = continued_after(3)
    os.kill(os.getpid(), signal.SIGSTOP)
    resume.wait()


def is_slow(module):
    """A long call outside of the interpreter."""
    time.sleep(5)


def loses_its_way_to_the_store(module):
    with module.relay.down():
        time.sleep(3)


def interrupted(rank, world, strategy, what, deadline):
    """The weights after two epochs in which rank 1 is held up for some seconds."""
    model = Faulty(what, "between rounds", dropout=0.2)
    with Relay(int(os.environ["MASTER_PORT"])) as model.relay:
        if rank == 1:
            os.environ["MASTER_PORT"] = str(model.relay.port)
        strategy = BY_NAME[strategy](timeout=deadline, period=2)
        trainer(strategy, world, max_epochs=2).fit(model, loader(), loader(shuffle=False))
    assert model.happened == (rank == 1)
    return sha256(parameters(model).numpy().tobytes()).hexdigest()


def test_a_short_outage_leaves_no_trace_in_the_weights():
    strategy = "cocod"
    undisturbed = ends(interrupted, strategy, nothing, 4.0)
    assert [code for code, _ in undisturbed] == [0, 0], undisturbed
    assert ends(interrupted, strategy, is_slow, 4.0) == undisturbed  # beats go on: no outage, however long it is
    for outage in (stands_still, loses_its_way_to_the_store):
        assert ends(interrupted, strategy, outage, 8.0) == undisturbed


def test_an_outage_beyond_the_deadline_is_a_loss():
    """The negative control: the relay does cut the rank off."""
    both = ends(interrupted, "cocod", loses_its_way_to_the_store, 1.5)
    assert all(code in (FAILED, KILLED) for code, _ in both)
    assert any("PeerLost: rank" in words for _, words in both)


# Coming together


def alone(rank, world, folder, listening):
    """Rank 1 never comes or, where another service listens at the master's port, both come."""
    with (folder / str(rank)).open("w") as said:
        os.dup2(said.fileno(), 2)
    if listening:
        os.environ["MASTER_PORT"] = str(listening)
    elif rank == 1:
        return
    trainer(CoCoDStrategy(connect_timeout=2), world).fit(Toy(), loader())


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_connect_timeout(tmp_path):
    (code, _), _ = ends(alone, tmp_path, None)
    assert code == FAILED
    assert "[rank 0] the ranks have not come together at 127.0.0.1:" in (tmp_path / "0").read_text()


def test_a_port_that_is_taken_is_named_and_nobody_waits_there_for_ever(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        host, guest = ends(alone, tmp_path, port)
    assert host[0] == guest[0] == FAILED
    last = host[1].strip().splitlines()[-1]
    assert last == f"ConnectionError: rank 0 cannot listen at 127.0.0.1:{port}: the port is taken; set MASTER_PORT"
    assert "something else listens at MASTER_PORT" in (tmp_path / "1").read_text()


def test_restarted_ranks_meet_in_a_part_of_the_store_where_nobody_was_before():
    store, parts = HashStore(), []
    for attempt in range(3):
        with ThreadPoolExecutor(3) as ranks:
            parts.append(list(ranks.map(lambda rank: fresh_part(store, rank, 3), range(3))))
        assert not any(part.check(["address"]) for part in parts[-1])
        parts[-1][0].set("address", str(attempt))
        assert [part.get("address").decode() for part in parts[-1]] == [str(attempt)] * 3
