"""Checkpoint files: ordinary ones with the ranks' parts beside them, whole or not there, whatever happens while saving."""

import inspect
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.ranks import run_ranks, run_ranks_raw
from support.resuming import Adam, Saver, fit, resume, same, shuffled
from support.toys import STRATEGIES, Toy, flat, having, loader, parameters, trainer
from test_trainer_modes import Backbone
from torchmetrics import MeanMetric

from lightning_cocod import PeerLost
from lightning_cocod.algorithms.replica import named_tensors
from lightning_cocod.strategies import checkpoint_io, parts
from lightning_cocod.strategies.checkpoints import KEY, CheckpointFailed


def files_in(folder):
    """All files below a folder; the keys of parts are shown as KEY."""
    relative = [path.relative_to(folder).parts for path in Path(folder).rglob("*") if not path.is_dir()]
    return sorted("/".join([".ranks", "KEY", *p[2:]] if p[0] == ".ranks" else p) for p in relative)


def part_of(path, rank):
    key = torch.load(path, weights_only=True)[KEY]["parts"]
    return Path(path).parent / ".ranks" / key / f"rank-{rank}.pt"


@contextmanager
def replaced(owner, name, value):
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class At(Callback):
    """Does something before the batch that follows a step."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            self.what(trainer)


def interrupt(trainer):
    raise KeyError("interrupted")


WHOLE = [".ranks/KEY/rank-0.pt", ".ranks/KEY/rank-1.pt", "0.ckpt"]

# --- what a checkpoint is


class Look(Saver):
    """What is in place when it saves, which files this process writes, and how much is sent for it."""

    def save(self, trainer, module, *_):
        if self.calls != 5:
            super().save(trainer)
            return
        algorithm, strategy, write = trainer.strategy.algorithm, trainer.strategy, checkpoint_io.write_whole
        save, totals = strategy.save_checkpoint, algorithm.comm.ledger.totals

        def noted(content, place):
            self.written.append(Path(place).name)
            write(content, place)

        def counted(*args, **options):
            before = totals().sent
            save(*args, **options)
            self.sent = totals().sent - before

        self.replica, self.written = {name: t.detach().clone() for name, t in named_tensors(module).items()}, []
        strategy.save_checkpoint = counted
        with replaced(parts, "write_whole", noted), replaced(checkpoint_io, "write_whole", noted):
            super().save(trainer)
        del strategy.save_checkpoint


def looked_at(rank, world, strategy, folder):
    look = Look(folder, times=[6])
    fit(rank, world, strategy, callbacks=[look])
    return look.replica, look.written, look.sent


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_holds_the_consensus_and_each_rank_writes_its_own_part_beside_it(strategy, tmp_path):
    (first, *zero), (second, *one) = run_ranks(looked_at, 2, strategy, str(tmp_path), init=False)
    assert files_in(tmp_path) == WHOLE
    state = torch.load(tmp_path / "0.ckpt", weights_only=True)["state_dict"]
    assert state.keys() == Adam().state_dict().keys()
    assert not torch.equal(first["net.0.weight"], second["net.0.weight"])
    if strategy == "local_sgd":  # nothing is in flight: the mean
        for name, value in state.items():
            torch.testing.assert_close(
                value.double(), (first[name].double() + second[name].double()) / 2, rtol=1e-6, atol=1e-7
            )
    for rank, replica in enumerate((first, second)):
        part = torch.load(part_of(tmp_path / "0.ckpt", rank), weights_only=True)
        assert part["replica"].keys() == replica.keys()
        assert all(torch.equal(part["replica"][name], value) for name, value in replica.items())
    assert [written for written, _ in (zero, one)] == [["rank-0.pt", "0.ckpt"], ["rank-1.pt"]]
    assert all(sent < 200 for _, sent in (zero, one))  # the name of the parts, and headers


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["lightning_cocod"] = None  # importing it raises
import lightning as L
import torch
from torch import nn

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(), nn.Tanh(), nn.Linear(12, 1))

for path in sys.argv[1:]:
    for weights_only in (True, False):
        module = Module.load_from_checkpoint(path, weights_only=weights_only)
        assert module.net[4].bias.isfinite().all()
        state = torch.load(path, weights_only=weights_only)["state_dict"]
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
try:
    import lightning_cocod
except ImportError:
    print(len(sys.argv) - 1, "loaded without it")
"""


def saved(rank, world, folder):
    for strategy in STRATEGIES:
        saver = Saver(f"{folder}/{strategy}", times=[3])
        trainer(strategy, world, callbacks=[saver], max_epochs=1).fit(Toy(), loader())


def test_a_checkpoint_is_loaded_where_this_package_is_not_installed(tmp_path):
    run_ranks(saved, 2, str(tmp_path), init=False)
    script = [sys.executable, "-c", WITHOUT_THE_PACKAGE, *(str(tmp_path / name / "0.ckpt") for name in STRATEGIES)]
    said = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True).stdout
    assert f"{len(STRATEGIES)} loaded without it" in said


def plain(rank, world, folder):
    """Everything that is saved without training going on from it, and weights alone."""

    class InTest(Callback):
        def on_test_start(self, trainer, *_):
            trainer.save_checkpoint(folder / "test.ckpt")

    weights = ModelCheckpoint(folder / "weights", every_n_train_steps=3, save_weights_only=True)

    def twice(trainer):
        for weights_only in (False, True):
            trainer.save_checkpoint(folder / "by_hand.ckpt", weights_only=weights_only)

    by_hand = At(4, twice)
    options = {"max_epochs": 1, "enable_checkpointing": True, "callbacks": [weights, by_hand, InTest()]}
    run, model = trainer("cocod", world, **options), Toy()
    run.fit(model, loader())
    run.save_checkpoint(folder / "after.ckpt")
    run.test(model, loader(shuffle=False), verbose=False)
    again = trainer("cocod", world, max_epochs=2)
    again.fit(Toy(), loader(), ckpt_path=folder / "after.ckpt")
    return flat(model), again.global_step


def test_weights_alone_and_what_is_saved_outside_of_a_fit_are_plain_checkpoints(tmp_path):
    first, second = run_ranks(plain, 2, tmp_path, init=False)
    assert first[1] == second[1] == 12
    assert [name for name in files_in(tmp_path) if "ranks" in name] == []
    for name in ("test.ckpt", "after.ckpt", "by_hand.ckpt", "weights/epoch=0-step=6.ckpt"):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert KEY not in checkpoint
        end = Toy()
        end.load_state_dict(checkpoint["state_dict"])
        assert torch.equal(flat(end), first[0]) == (name != "by_hand.ckpt")


# --- a crash, or a full disk, while saving


class Twice(Saver):
    """Saves in two steps, to one path."""

    def __init__(self, folder, second=lambda: None):
        super().__init__(folder, times=[3, 6])
        self.second = second

    def save(self, trainer, *_):
        if self.calls == 5:
            self.second()
        super().save(trainer)
        self.saved = []  # the same name again


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(content, file):
    file.write(b"PK the first half")
    file.flush()
    die()


LATER = "rank 0 before the file, which is written later"
CRASHES = {
    "rank 1 in its part": (1, lambda: setattr(checkpoint_io.torch, "save", die_half_way)),
    "rank 0 before the file": (0, lambda: setattr(checkpoint_io.WholeFileIO, "save_checkpoint", die)),
    "rank 0 in the file": (
        0,
        lambda: setattr(checkpoint_io.WholeFileIO, "save_checkpoint", lambda _, content, path, **__: half(path)),
    ),
    LATER: (0, lambda: setattr(checkpoint_io.WholeFileIO, "save_checkpoint", never)),
}


def half(path):
    checkpoint_io.torch.save = die_half_way
    checkpoint_io.write_whole({}, str(path))


def never(*_, **__):
    threading.Event().wait()


class Written(AsyncCheckpointIO):
    """Another thread writes; the first checkpoint is waited for."""

    def save_checkpoint(self, *args, **options):
        super().save_checkpoint(*args, **options)
        if checkpoint_io.WholeFileIO.save_checkpoint is not never:
            self._executor.submit(lambda: None).result()


def crashes(rank, world, folder, where):
    who, how = CRASHES[where]
    callbacks, plugins = [Twice(folder, how if rank == who else lambda: None)], []
    if where == LATER:
        plugins.append(Written())
        callbacks += [At(6, die)] * (rank == who)
    fit(rank, world, "cocod", callbacks=callbacks, plugins=plugins)


def after_the_crash(rank, world, folder):
    """Resumes from what is there, and saves again where the other run crashed."""
    step = torch.load(folder + "/0.ckpt", weights_only=True)["global_step"]
    before = files_in(folder)
    resumed = resume(rank, world, "cocod", path=folder + "/0.ckpt", callbacks=[Saver(folder, times=[3])])
    return step, before, same(fit(rank, world, "cocod"), resumed)


@pytest.mark.parametrize("where", CRASHES)
def test_a_crash_while_saving_leaves_the_checkpoint_before_exactly_resumable_and_is_tidied_up(where, tmp_path):
    who, _ = CRASHES[where]
    outcomes = run_ranks_raw(crashes, 2, str(tmp_path), where, init=False, grace=30)
    assert outcomes[who].status == "died"
    assert outcomes[1 - who].status == "error"
    assert f"PeerLost: rank {who}" in outcomes[1 - who].traceback
    for step, before, exact in run_ranks(after_the_crash, 2, str(tmp_path), init=False):
        assert step == 3
        assert len(before) > len(WHOLE)  # something had been left
        assert exact
    assert files_in(tmp_path) == WHOLE


class Held(AsyncCheckpointIO):
    """Another thread writes: the first checkpoint at once, the others when they are let go."""

    def __init__(self):
        super().__init__()
        self.go, self.first = threading.Event(), True

    def save_checkpoint(self, *args, **options):
        super().save_checkpoint(*args, **options)
        if self.first:
            self.first = False
            self._executor.submit(lambda: None).result()
            self._executor.submit(self.go.wait)


class Thrice(Saver):
    """Saves in three steps, to one path; keeps what a crash would leave while the last two are still unwritten."""

    def __init__(self, folder, io):
        super().__init__(folder + "/run", times=[3, 4, 5])
        self.io = io

    def save(self, trainer, *_):
        super().save(trainer)
        self.saved = []  # the same name again
        if self.calls == 5 and trainer.is_global_zero:
            shutil.copytree(self.folder, Path(self.folder).parent / "crashed")
            self.io.go.set()


def unwritten(rank, world, folder):
    io = Held()
    fit(rank, world, "cocod", callbacks=[Thrice(folder, io)], plugins=[io])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = resume(rank, world, "cocod", path=f"{folder}/crashed/0.ckpt")[1]
    return steps, [str(w.message) for w in caught if "training goes on" in str(w.message)]


def test_after_a_crash_with_two_checkpoints_of_a_name_unwritten_the_one_before_has_lost_its_parts(tmp_path):
    (steps, notices), second = run_ranks(unwritten, 2, str(tmp_path), init=False)
    assert torch.load(tmp_path / "crashed" / "0.ckpt", weights_only=True)["global_step"] == 3
    assert files_in(tmp_path / "crashed") == [f".ranks/KEY/rank-{rank}.pt" for rank in (0, 0, 1, 1)] + ["0.ckpt"]
    assert len(notices) == 1
    assert "lacks the part of rank 0, 1; training goes on from its consensus model" in notices[0]
    assert (steps, []) == second == (12, [])
    assert torch.load(tmp_path / "run" / "0.ckpt", weights_only=True)["global_step"] == 5
    assert files_in(tmp_path / "run") == [f".ranks/KEY/rank-{rank}.pt" for rank in (0, 0, 1, 1)] + ["0.ckpt"]


@contextmanager
def full_disk():
    """No file of this process grows beyond a thousand bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


class Full(Saver):
    """Saves three times to one path. The second time the disk is full: for the part of rank 1, or for the file."""

    def __init__(self, folder, owner, name, who):
        super().__init__(folder)
        self.owner, self.name, self.who, self.error, self.left = owner, name, who, None, None

    def save(self, trainer, *_):
        self.calls += 1
        write = getattr(self.owner, self.name)

        def fails(*args):
            with full_disk():
                return write(*args)

        if self.calls in (3, 9):
            trainer.save_checkpoint(f"{self.folder}/0.ckpt")
        if self.calls == 5:
            before = Path(self.folder, "0.ckpt").read_bytes()
            here = fails if trainer.global_rank == self.who else write
            with replaced(self.owner, self.name, here), pytest.raises(CheckpointFailed) as caught:
                trainer.save_checkpoint(f"{self.folder}/0.ckpt")
            self.error = str(caught.value)
            trainer.strategy.barrier()
            self.left = files_in(self.folder), before == Path(self.folder, "0.ckpt").read_bytes()


def full(rank, world, folder):
    expected, seen = fit(rank, world, "cocod"), []
    for who, owner, name in ((1, parts, "write_whole"), (0, checkpoint_io, "write_whole")):
        saver = Full(folder, owner, name, who)
        undisturbed = same(expected, fit(rank, world, "cocod", callbacks=[saver]))
        seen.append(
            (saver.error, saver.left, undisturbed and same(expected, resume(rank, world, "cocod", path=f"{folder}/0.ckpt")))
        )
    return seen


def test_a_full_disk_is_named_on_all_ranks_and_leaves_the_checkpoint_before(tmp_path):
    ranks = run_ranks(full, 2, str(tmp_path), init=False)
    for which, (who, what) in enumerate([(1, "its part of"), (0, "the file of")]):
        for rank, seen in enumerate(ranks):
            error, left, exact = seen[which]
            told = f"rank {who} could not write {what} {tmp_path}/0.ckpt, what was there before is intact"
            assert error == told + (": [Errno 27] File too large" if rank == who else "")
            assert left == (WHOLE, True)
            assert exact
    assert files_in(tmp_path) == WHOLE


def alone(rank, world, strategy):
    class Alone(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.is_global_zero and trainer.global_step == 3:
                trainer.save_checkpoint("never.ckpt")

    trainer(strategy, world, callbacks=[Alone()]).fit(Toy(), loader())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saving_on_one_rank_alone_is_an_error_on_all(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for outcome in run_ranks_raw(alone, 2, strategy, init=False, grace=30):
        assert outcome.status == "error"
        assert "consensus" in outcome.traceback
        assert "out of step" in outcome.traceback
    assert files_in(tmp_path) == []


# --- files that come and go


def kept(rank, world, folder):
    def options():
        save = {"every_n_train_steps": 2, "save_top_k": 2, "monitor": "step", "mode": "max", "save_last": "link"}
        return {"callbacks": [ModelCheckpoint(folder, filename="{step}", **save)], "enable_checkpointing": True}

    expected = fit(rank, world, "cocod")
    seen = []

    class Interrupted(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 9:
                trainer.strategy.barrier()
                seen.extend([files_in(folder), os.path.islink(f"{folder}/last.ckpt")])
                raise KeyError("interrupted")

    chosen = options()
    chosen["callbacks"].append(Interrupted())
    with pytest.raises(KeyError, match="interrupted"):
        fit(rank, world, "cocod", **chosen)
    exact = same(expected, resume(rank, world, "cocod", path="last", **options()))
    remover = trainer("cocod", world, logger=False)
    remover.strategy.connect(Toy())
    for name in ("step=10.ckpt", "step=12.ckpt"):
        remover.strategy.remove_checkpoint(f"{folder}/{name}")
    return (*seen, exact)


def test_parts_go_with_their_checkpoints_and_the_link_to_the_last_finds_its_own(tmp_path):
    two = [".ranks/KEY/rank-0.pt", ".ranks/KEY/rank-0.pt", ".ranks/KEY/rank-1.pt", ".ranks/KEY/rank-1.pt"]
    for files, is_link, exact in run_ranks(kept, 2, str(tmp_path), init=False):
        assert files == [*two, "last.ckpt", "step=6.ckpt", "step=8.ckpt"]
        assert is_link
        assert exact
    assert [name.name for name in tmp_path.iterdir()] == ["last.ckpt"]


def elsewhere(rank, world, folder):
    """A checkpoint is written over a link to one in another folder."""
    for name in ("first", "second"):
        fit(rank, world, "cocod", callbacks=[Saver(f"{folder}/{name}", times=[6])])
        if rank == 0 and name == "first":
            os.mkdir(f"{folder}/second")
            os.symlink("../first/0.ckpt", f"{folder}/second/0.ckpt")
    expected = fit(rank, world, "cocod")
    return [same(expected, resume(rank, world, "cocod", path=f"{folder}/{name}/0.ckpt")) for name in ("first", "second")]


def test_a_link_that_is_written_over_leaves_what_it_pointed_to(tmp_path):
    assert run_ranks(elsewhere, 2, str(tmp_path), init=False) == [[True, True]] * 2


def on_two_machines(rank, world, folder):
    """Each rank is a machine of its own, with a disk of its own; the user copies the checkpoint itself."""
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank), NODE_RANK=str(rank), LOCAL_WORLD_SIZE="1")
    mine, path, options = folder / str(rank), "0.ckpt", {"num_nodes": world}
    mine.mkdir()
    os.chdir(mine)
    expected = fit(rank, 1, "cocod", callbacks=[Twice(".")], **options)
    left = files_in(mine)
    if rank == 1:
        shutil.copy(folder / "0" / path, mine)
    return left, same(expected, resume(rank, 1, "cocod", path=path, **options))


def test_machines_that_share_no_disk_keep_one_part_each(tmp_path):
    (zero, *first), (one, *second) = run_ranks(on_two_machines, 2, tmp_path, init=False)
    assert zero == [".ranks/KEY/rank-0.pt", "0.ckpt"]
    assert one == [".ranks/KEY/rank-1.pt"]
    assert first == second == [True]


# --- where a rank cannot go on exactly


def first_steps(rank, world, strategy, folder):
    """Resume and note the notices, and the weights and steps with which training begins and ends."""
    begun = []

    class Begin(Callback):
        def on_train_batch_start(self, trainer, module, *_):
            if not begun:
                algorithm = getattr(trainer.strategy, "_algorithm", None)
                begun.extend([flat(module), trainer.global_step, algorithm and algorithm.t])

    L.seed_everything(7 + rank, verbose=False)
    model = Toy()
    run = trainer(strategy, world, callbacks=[Begin()], max_epochs=-1, max_steps=9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(model, loader(), ckpt_path=f"{folder}/0.ckpt")
    notices = [str(w.message) for w in caught if "training goes on" in str(w.message)]
    end = parameters(model) if strategy == "ddp" else flat(model)  # DDP leaves each rank its buffers
    return {"notices": notices, "begun": begun, "end": end, "steps": run.global_step}


NOTICES = {
    "fewer ranks": ("cocod", 2, "cocod", 1, "it was saved by 2 ranks, there are 1"),
    "a rank more": ("local_sgd", 2, "local_sgd", 3, "it was saved by 2 ranks, there are 3"),
    "more ranks than one": ("cocod", 1, "cocod", 2, "it was saved by 1 ranks, there are 2"),
    "ours after DDP": ("ddp", 2, "cocod", 2, "it holds nothing of single ranks"),
    "another of ours": ("cocod", 2, "local_sgd", 2, "it was saved by cocod, this is local_sgd"),
    "DDP after ours": ("local_sgd", 2, "ddp", 2, "callbacks: ['none, but a strategy of lightning_cocod: without it"),
}


def assert_consensus_model_goes_on(ranks, folder, why, ours=True):
    module = Toy()
    module.load_state_dict(torch.load(folder / "0.ckpt", weights_only=True)["state_dict"])
    for number, rank in enumerate(ranks):
        assert len(rank["notices"]) == (1 if number == 0 else 0)
        weights, *steps = rank["begun"]
        assert torch.equal(weights, flat(module))
        assert steps == [5, 5 if ours else None]
        assert rank["steps"] == 9
        assert torch.equal(rank["end"], ranks[0]["end"])
    text = f"{folder}/0.ckpt: {why}; training goes on from its consensus model, not exactly where each rank was."
    assert ranks[0]["notices"] == [text] if ours else f"{why} training goes on" in ranks[0]["notices"][0]


def saved_in_step_5(rank, world, strategy, folder):
    run = trainer(strategy, world, callbacks=[Saver(folder, times=[5])], max_steps=6)
    run.fit(Toy(), loader())


@pytest.mark.parametrize("case", NOTICES)
def test_other_ranks_or_another_strategy_go_on_from_the_consensus_model_and_say_so_once(case, tmp_path):
    before, world, after, new_world, why = NOTICES[case]
    run_ranks(saved_in_step_5, world, before, str(tmp_path), init=False)
    ranks = run_ranks(first_steps, new_world, after, str(tmp_path), init=False)
    assert_consensus_model_goes_on(ranks, tmp_path, why, ours=after != "ddp")


@pytest.mark.parametrize(("lost", "ranks"), [(["rank-1.pt"], "1"), (["rank-0.pt", "rank-1.pt"], "0, 1")])
def test_without_the_part_of_a_rank_all_go_on_from_the_consensus_model(lost, ranks, tmp_path):
    run_ranks(saved_in_step_5, 2, "cocod", str(tmp_path), init=False)
    folder = part_of(tmp_path / "0.ckpt", 0).parent
    for name in lost:
        (folder / name).unlink()
    why = f".ranks/{folder.name} beside it lacks the part of rank {ranks}"
    assert_consensus_model_goes_on(run_ranks(first_steps, 2, "cocod", str(tmp_path), init=False), tmp_path, why)


def resume_from_damage(rank, world, folder):
    run = trainer("cocod", world, max_steps=9)
    with pytest.raises(RuntimeError) as caught:
        run.fit(Toy(), loader(), ckpt_path=f"{folder}/0.ckpt")
    return str(caught.value)


def test_a_damaged_part_is_named_on_all_ranks(tmp_path):
    run_ranks(saved_in_step_5, 2, "cocod", str(tmp_path), init=False)
    part = part_of(tmp_path / "0.ckpt", 1)
    part.write_bytes(part.read_bytes()[:1000])
    for error in run_ranks(resume_from_damage, 2, str(tmp_path), init=False):
        assert f"{part} cannot be read" in error
        assert "remove the folder" in error


class Edits(Adam):
    def on_load_checkpoint(self, checkpoint):
        for value in checkpoint["state_dict"].values():
            value.zero_()


class Begin(Callback):
    """The weights with which training begins."""

    weights = None

    def on_train_batch_start(self, trainer, module, *_):
        self.weights = flat(module) if self.weights is None else self.weights


def edited(rank, world, folder):
    saver, begin = Saver(folder, times=[3]), Begin()
    expected = fit(rank, world, "cocod", callbacks=[saver])
    exact = same(expected, resume(rank, world, "cocod", module=Edits, path=saver.saved[0]))
    if rank == 0:
        shutil.rmtree(f"{folder}/.ranks")
    resume(rank, world, "cocod", module=Edits, path=saver.saved[0], callbacks=[begin])
    return exact, begin.weights


def test_what_a_module_makes_of_a_checkpoint_is_trained_only_without_the_ranks_parts(tmp_path):
    for exact, weights in run_ranks(edited, 2, str(tmp_path), init=False):
        assert exact
        assert not weights.any()


class Rounds(Callback):
    """At every step: where the round ends, the weights of the ranks in the next mean, and the gradient that is applied."""

    def __init__(self):
        self.ends, self.weights, self.gradients = [], [], []

    def on_train_batch_start(self, trainer, *_):
        self.ends.append(trainer.strategy.algorithm.rounds.ends)
        self.weights.append(trainer.strategy.algorithm.weights)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients.append(module.net[0].weight.grad.clone())


def with_other_options(rank, world, kind, folder):
    """Saved at step 5 of 12, in the round from 4 to 8."""
    saver, seen = Saver(folder, times=[5]), []
    fit(rank, world, kind(period=4), callbacks=[saver], max_epochs=1)
    for options in ({"period": 2, "weights": [3, 1]}, {"period": 4, "warmup_steps": 7}):
        seen.append(Rounds())
        resume(rank, world, kind(**options), path=saver.saved[0], callbacks=seen[-1:])
    return [(rounds.ends, rounds.weights, rounds.gradients) for rounds in seen]


@pytest.mark.parametrize("kind", having("period", "weights", "warmup_steps"))
def test_options_that_are_changed_on_resuming_wait_for_the_rounds_end_a_warm_up_does_not(kind, tmp_path):
    ranks = run_ranks(with_other_options, 2, kind, str(tmp_path), init=False)
    for (ends, weights, _), (after_warm_up, *_) in ranks:
        assert ends == [8, 8, 8, 10, 10, 12, 12]
        assert weights[:3] == [[0.5, 0.5]] * 3
        assert weights[-2:] == [[0.75, 0.25]] * 2
        assert after_warm_up == [8, 8, 8, 12, 12, 12, 12]
    applied = zip(*(warm_up[2] for _, warm_up in ranks), strict=True)
    assert [torch.equal(one, other) for one, other in applied] == [True] * 2 + [False] * 5


def finetuned(rank, world, strategy, folder):
    """Whether the backbone is free before each step: of the run, and of those that are resumed."""

    def run(path=None):
        free, model = [], Backbone()
        thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, backbone_initial_lr=0.05)
        model.on_train_batch_start = lambda *_: free.append(model.backbone[0].weight.requires_grad)
        savers = [] if path else [Saver(folder, times=[9, 15])]
        trainer(strategy, world, callbacks=[thaw, *savers], max_epochs=3).fit(model, loader(), ckpt_path=path)
        return free

    return run(), run(f"{folder}/0.ckpt"), run(f"{folder}/1.ckpt")


@pytest.mark.parametrize("strategy", [*STRATEGIES, "ddp"])
def test_layers_that_a_callback_has_thawed_are_frozen_again(strategy, tmp_path):
    for run, in_this_epoch, in_an_earlier_one in run_ranks(finetuned, 2, strategy, str(tmp_path), init=False):
        assert run == [False] * 6 + [True] * 12
        assert in_this_epoch == [False] * 9
        assert in_an_earlier_one == [False] * 3


# --- everything in a part is needed


def without(part, what, checkpoint):
    if what == "replica":
        return {**part, "replica": {**part["replica"], **checkpoint["state_dict"]}}
    if what == "optimizers":
        return {**part, "lightning": {**part["lightning"], "optimizer_states": checkpoint["optimizer_states"]}}
    if what == "random":
        other = torch.manual_seed(1).get_state()
        return {**part, "random": {**part["random"], "torch": other}}
    return {**part, what: {"algorithm": None, "gradients": {}, "positions": []}[what]}


def left_out(rank, world, strategy, folder, pieces):
    """Saved in the middle of a round, of an accumulation and of an epoch."""
    options = {"accumulate_grad_batches": 2, "max_epochs": 4}
    saver = Saver(folder, times=[15])
    expected, equal, read = fit(rank, world, strategy, callbacks=[saver], **options), {}, parts.read
    checkpoint = torch.load(saver.saved[0], weights_only=True)
    for what in ("nothing", *pieces):

        def lacking(*args, what=what):
            part = read(*args)
            return part if what == "nothing" else without(part, what, checkpoint)

        with replaced(parts, "read", lacking):
            equal[what] = same(expected, resume(rank, world, strategy, path=saver.saved[0], **options))
    return equal


PIECES = ["replica", "optimizers", "algorithm", "gradients", "random", "positions"]


@pytest.mark.parametrize(
    ("strategy", "pieces"), [(name, PIECES if name == "cocod" else ["algorithm"]) for name in STRATEGIES]
)
def test_a_resumed_run_differs_if_anything_is_left_out(strategy, pieces, tmp_path):
    ranks = run_ranks(left_out, 2, strategy, str(tmp_path), pieces, init=False)
    assert all(rank.pop("nothing") for rank in ranks)
    for what in pieces:
        assert not all(rank[what] for rank in ranks), what


def less_data(rank, world, folder):
    saver = Saver(folder, times=[5])
    fit(rank, world, "cocod", callbacks=[saver], max_epochs=1)
    with pytest.raises(RuntimeError, match="saved after 5 batches of an epoch, and the training data has only 2 now"):
        resume(rank, world, "cocod", loader=shuffled(16), path=saver.saved[0])


def test_resuming_with_less_data_is_an_error(tmp_path):
    run_ranks(less_data, 2, str(tmp_path), init=False)


class SeedsAnew(Callback):
    def on_train_epoch_start(self, *_):
        L.seed_everything(100, verbose=False)


def reordered(rank, world, folder):
    """The samples of the second epoch, in a run and in one that resumes it from the first epoch's end."""

    class Sees(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.current_epoch == 1:
                self.seen = [*getattr(self, "seen", []), batch[0].clone()]

    orders = []
    for path in (None, folder + "/0.ckpt"):
        L.seed_everything(1, verbose=False)
        sees = Sees()
        callbacks = [SeedsAnew(), sees, *([Saver(folder, times=[7])] if path is None else [])]
        trainer("cocod", world, callbacks=callbacks).fit(Toy(), loader(), ckpt_path=path)
        orders.append(torch.stack(sees.seen))
    return orders


def test_a_seed_that_changes_in_mid_run_does_not_change_the_order_after_resuming(tmp_path):
    for undisturbed, resumed in run_ranks(reordered, 2, str(tmp_path), init=False):
        assert len(undisturbed) == 6
        assert torch.equal(undisturbed[1:], resumed)


class Counts(Toy):
    """The mean over an epoch of the numbers of its batches, as Lightning takes it and as torchmetrics does."""

    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        self.log("lightning", float(batch_idx), on_step=False, on_epoch=True)
        self.metric(float(batch_idx))
        self.log("torchmetrics", self.metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def counted(rank, world, folder):
    means = []
    for path in (None, folder + "/0.ckpt"):
        run = trainer("cocod", world, max_epochs=1, callbacks=[Saver(folder, times=[3])] if path is None else [])
        run.fit(Counts(), loader(), ckpt_path=path)
        means.append([run.callback_metrics[name].item() for name in ("lightning", "torchmetrics")])
    return means


def test_means_over_an_epoch_begin_anew_where_it_is_resumed(tmp_path):
    for undisturbed, resumed in run_ranks(counted, 2, str(tmp_path), init=False):
        assert undisturbed == [2.5, 2.5]  # of 0 ... 5
        assert resumed == [4.0, 4.0]  # of 3, 4 and 5


def between(rank, world, folder):
    fit(rank, world, "cocod", callbacks=[Saver(folder, "on_before_zero_grad", times=[2])])


def test_after_saving_between_a_forward_and_its_backward_torch_refuses_to_go_on(tmp_path):
    for outcome in run_ranks_raw(between, 2, str(tmp_path), init=False, grace=30):
        assert outcome.status == "error"
        assert "modified by an inplace operation" in outcome.traceback


# --- training with saving, validating and resuming again


class Trajectory(Callback):
    def __init__(self):
        self.path = []

    def on_train_batch_start(self, trainer, module, *_):
        self.path.append(torch.cat([flat(module), torch.get_rng_state().double()]))


HOOKS = [
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_end",
]


def disturbed(rank, world, strategy, folder):
    paths = []
    for callbacks, options in (([], {}), ([Saver(f"{folder}/{hook}", hook) for hook in HOOKS], {"val_check_interval": 2})):
        seen = Trajectory()
        fit(rank, world, strategy, callbacks=[seen, *callbacks], **options)
        paths.append(torch.stack(seen.path))
    return [len(saver.saved) for saver in callbacks], torch.equal(*paths)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neither_saving_nor_validating_disturbs_training(strategy, tmp_path):
    for times, equal in run_ranks(disturbed, 2, strategy, str(tmp_path), init=False):
        assert times == [2, 12, 12, 6, 6]
        assert equal


def again_and_again(rank, world, folder):
    """Interrupted after steps 3 and 8 of 12; the second checkpoint is one of a resumed run, of ModelCheckpoint's last."""

    def keeping():
        save = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, save_top_k=-1, filename="{step}")
        return {"callbacks": [save], "enable_checkpointing": True}

    expected = fit(rank, world, "cocod", **keeping())
    assert same(expected, fit(rank, world, "cocod"))
    for stop, path in ((3, None), (8, "last")):
        options = keeping()
        options["callbacks"].append(At(stop, interrupt))
        with pytest.raises((KeyError, PeerLost), match="interrupted"):  # the other one may be first
            fit(rank, world, "cocod", path=path, **options)
    return same(expected, resume(rank, world, "cocod", path="last", **keeping()))


def test_a_resumed_run_is_resumed(tmp_path):
    assert run_ranks(again_and_again, 2, str(tmp_path), init=False) == [True, True]


def persistent(rank, world, folder):
    workers = shuffled(num_workers=1, persistent_workers=True)
    saver = Saver(folder, times=[8])
    fit(rank, world, "cocod", loader=workers, callbacks=[saver])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume(rank, world, "cocod", loader=workers, path=saver.saved[0])
    return [str(w.message) for w in caught if "persistent_workers" in str(w.message)]


def test_persistent_workers_are_said_to_begin_anew(tmp_path):
    first, second = run_ranks(persistent, 2, str(tmp_path), init=False)
    assert len(first) == 1
    assert "only without persistent workers is a resumed run exact" in first[0]
    assert second == []


# --- saving what can be saved after a failure

HAS_SAVE_ON_EXCEPTION = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters  # not in every Lightning


def fails(rank, world, folder, what):
    """Rank 0 or rank 1 fails at step 3, and sees whether last.ckpt was exact until then."""
    kinds = {
        "an error of rank 0": (0, ValueError),
        "an error of rank 1": (1, ValueError),
        "ctrl-c on rank 0": (0, KeyboardInterrupt),
    }
    who, kind = kinds[what]

    def fail(trainer):
        store = dist.distributed_c10d._get_default_store()
        if trainer.global_rank == 0:
            store.set("rank 0 has made a step since it saved", "")
        if trainer.global_rank == who:
            store.wait(["rank 0 has made a step since it saved"])
            before.extend(KEY in torch.load(path, weights_only=True) for path in Path(folder).glob("last.ckpt"))
            raise kind("failed")

    rescue = [OnExceptionCheckpoint(folder)]
    if HAS_SAVE_ON_EXCEPTION:
        every = {"every_n_train_steps": 2, "save_last": True}
        rescue.append(ModelCheckpoint(folder, filename="rescued", save_on_exception=True, **every))
    error, notices, before = None, [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(rank, world, "cocod", callbacks=[At(3, fail), *rescue], enable_checkpointing=True)
        except (Exception, SystemExit) as failure:
            error = type(failure).__name__
        notices = [str(w.message) for w in caught if "Communication has failed" in str(w.message)]
    return error, len(notices), before


@pytest.mark.parametrize(
    ("what", "errors"),
    [
        ("an error of rank 0", ["ValueError", "PeerLost"]),
        ("an error of rank 1", ["PeerLost", "ValueError"]),
        ("ctrl-c on rank 0", ["SystemExit", "PeerLost"]),
    ],
)
def test_after_a_failure_rank_0_saves_its_replica_without_the_others(what, errors, tmp_path):
    first, second = run_ranks(fails, 2, str(tmp_path), what, init=False, leftovers_ok=True)
    assert [first[0], second[0]] == errors
    assert first[1] >= 1
    assert first[2] + second[2] == ([True] if HAS_SAVE_ON_EXCEPTION else [])
    rescued = ["last.ckpt", "on_exception.ckpt", "rescued.ckpt"]
    assert files_in(tmp_path) == (rescued if HAS_SAVE_ON_EXCEPTION else ["on_exception.ckpt"])
    for name in files_in(tmp_path):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert checkpoint["global_step"] >= 3  # rank 0 may be ahead of rank 1
        assert KEY not in checkpoint


def terminated(rank, world, folder, samples):
    """SIGTERM reaches rank 1 alone; all stop at an agreed step and save there. The run is resumed for some steps more."""

    class Terminate(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 3 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)  # until all have heard of it

    rescue, path = OnExceptionCheckpoint(folder), f"{folder}/on_exception.ckpt"
    options = {"loader": shuffled(samples), "max_epochs": -1}
    with pytest.raises(SIGTERMException):
        fit(rank, world, "cocod", callbacks=[Terminate(), rescue], enable_checkpointing=True, **options)
    step = torch.load(path, weights_only=True)["global_step"]
    options |= {"max_steps": step + 6}
    return step, same(fit(rank, world, "cocod", **options), resume(rank, world, "cocod", path=path, **options))


@pytest.mark.parametrize("samples", [400, 48], ids=["in an epoch", "at its end"])
def test_what_is_saved_at_a_sigterm_is_exact(samples, tmp_path):
    first, second = run_ranks(terminated, 2, str(tmp_path), samples, init=False)
    assert first == second
    assert first[0] >= 3
    assert first[1]
