"""Faults as a user's script meets them, under Lightning's own launcher (popen), spawn and torchrun.

Never 0 after a rank was lost, the original traceback first, and nothing left.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import lightning as L
import pytest
import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from support.faults import gone, not_in_shared_memory
from support.ranks import run_ranks
from support.toys import Toy, flat, loader, trainer
from test_launch import finish, start

from lightning_cocod import CoCoDStrategy, PeerLost
from lightning_cocod.strategies import leaving

SCRIPT = """
    import os, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    import psutil
    from lightning.pytorch.callbacks import Callback
    from support.faults import Faulty
    from support.toys import dataset, trainer
    from torch.utils.data import DataLoader
    from lightning_cocod import CoCoDStrategy

    class Writes(Callback):
        def on_train_start(self, trainer, module):
            Path(f"pid{{trainer.global_rank}}").write_text(str(os.getpid()))

        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 2:
                children = psutil.Process().children(recursive=True)  # the workers of the loader
                Path(f"children{{trainer.global_rank}}").write_text(" ".join(str(child.pid) for child in children))
                Path(f"trains{{trainer.global_rank}}").touch()

    if __name__ == "__main__":
        method, what, who = sys.argv[1:]
        strategy = CoCoDStrategy(timeout=4, start_method=method)
        model = Faulty(what, "between rounds", eval(who))
        try:
            data = DataLoader(dataset(), batch_size=8, num_workers=1, persistent_workers=True)
            trainer(strategy, 2, max_epochs=100_000, callbacks=[Writes()]).fit(model, data)
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            Path(f"code{{os.environ.get('LOCAL_RANK', '')}}").write_text(str(code))
            raise
"""
METHODS = {"popen": "popen", "spawn": "spawn", "torchrun": "popen"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TERMINATED = 128 + signal.SIGTERM


def ended_by_lightning(launcher, output):
    """Its observer looks every 5 s, and may see the end of a child a moment before rank 0 hears of it."""
    return launcher == "popen" and re.search(r"Child process with PID \d+ terminated with code -9", output)


@pytest.fixture
def launch(tmp_path):
    """Starts the script with a fault in one of its two ranks, or in both; in the end, nothing of them may be left."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT.format(tests=os.path.dirname(__file__))))

    def launch(launcher, what, who=1):
        command = TORCHRUN if launcher == "torchrun" else [sys.executable]
        return start([*command, path, METHODS[launcher], what, str(who)], tmp_path)

    yield launch
    pids = [int(file.read_text()) for file in tmp_path.glob("pid*")]
    assert len(pids) == 2
    workers = [int(pid) for file in tmp_path.glob("children*") for pid in file.read_text().split()]
    assert len(workers) >= 2
    assert gone(pids + workers)
    assert not_in_shared_memory(pids)


def end(process):
    ((output, code),) = finish(process)
    print(output)  # should it end before it trains
    return output, code


@pytest.mark.parametrize("launcher", ["popen", "torchrun"])
def test_the_original_traceback_comes_first_and_the_peer_names_the_rank(launcher, launch):
    output, code = end(launch(launcher, "raises"))
    assert code != 0
    original = output.index('raise ValueError("my own bug")')
    told = output.find("PeerLost: rank 1 failed: ValueError: my own bug")
    assert original < told or (told == -1 and launcher != "popen")  # the others may end the peer before it can say so


@pytest.mark.parametrize(("launcher", "what"), [("popen", "is killed"), ("spawn", "leaves")])
def test_a_rank_that_is_gone_ends_the_job_and_is_named(launcher, what, launch):
    output, code = end(launch(launcher, what))
    assert code != 0, output
    assert "rank 1 is lost: its process has ended" in output or ended_by_lightning(launcher, output), output


def test_a_rank_that_is_stopped_is_ended_so_that_its_launcher_ends_as_well(launch):
    output, code = end(launch("popen", "is stopped"))  # torchrun: see the restarts below
    assert code != 0
    why = r"rank 1 is lost: no heartbeat for 4 s; its process \d+ on this host was ended"
    assert re.search(why, output) or ended_by_lightning("popen", output), output


def test_lightnings_observer_ends_nobody_who_leaves_in_order(monkeypatch):
    """It would, in mid-checkpoint, as a child has ended; and does where that takes for ever."""
    t = trainer(CoCoDStrategy(start_method="popen"), 2)
    children, clock, killed = t.strategy.launcher.procs, [0.0], []
    children.append(subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]))
    children[0].wait()
    monkeypatch.setattr(leaving.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    observer = _ChildProcessObserver(main_pid=os.getpid(), child_processes=children)
    t.strategy.leave(PeerLost("rank 1 is lost"))
    assert not observer._run()
    assert killed == []
    clock[0] += 2 * leaving.IN_ORDER
    assert observer._run()
    assert killed == [os.getpid()]


def test_rank_0_that_leaves_under_lightnings_launcher_takes_its_children_along(launch, tmp_path):
    """Rank 0 is the script's own process: that this one ends with 0 is all that the shell can see."""
    output, code = end(launch("popen", "leaves", 0))
    assert code == 0
    assert (tmp_path / "code1").read_text() == "1"
    assert "PeerLost: rank 0" in output


@pytest.mark.parametrize("launcher", ["popen", "torchrun"])
def test_sigterm_at_one_rank_is_no_success_of_any(launcher, launch, tmp_path):
    _, code = end(launch(launcher, "is terminated"))
    codes = {file.name: file.read_text() for file in tmp_path.glob("code*")}
    if launcher == "spawn":  # the ranks' codes are the launcher's to read
        assert code == TERMINATED
    elif launcher == "popen":  # rank 0 is the script
        assert code == TERMINATED
        assert codes["code1"] == str(TERMINATED)
    else:
        assert code != 0
        assert codes == {"code0": str(TERMINATED), "code1": str(TERMINATED)}


def test_sigterm_at_the_script_reaches_all_its_ranks_and_is_no_success(launch, tmp_path):
    process = launch("popen", "raises", 7)  # no rank of this number meets it
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("trains*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, code = end(process)
    assert code == TERMINATED
    assert (tmp_path / "code1").read_text() == str(TERMINATED)


@pytest.mark.parametrize("launcher", ["popen", "spawn"])
def test_interrupting_all_ranks_is_no_success_and_leaves_nobody_waiting(launcher, launch):
    """Under spawn torch takes an interrupted rank for one that has finished, and Lightning would wait for its result."""
    output, code = end(launch(launcher, "is interrupted", None))
    assert code != 0, output


RESTARTS = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    import lightning as L
    import torch
    from support.toys import Toy, flat, loader, trainer
    from lightning_cocod import CoCoDStrategy

    class Fails(Callback):
        def on_train_start(self, trainer, module):
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            Path(f"rank {{trainer.global_rank}}, attempt {{attempt}}").write_text(str(trainer.global_step))

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            for step, number in ((9, signal.SIGKILL), (14, signal.SIGSTOP)):
                marker = Path(f"failed at {{step}}")
                if trainer.global_rank == 1 and trainer.global_step == step and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), number)

    if __name__ == "__main__":
        save = ModelCheckpoint(".", every_n_train_steps=4, save_last=True)
        options = dict(max_epochs=3, callbacks=[Fails(), save], enable_checkpointing=True)
        t = trainer(CoCoDStrategy(timeout=4, period=2), 2, **options)
        L.seed_everything(2, verbose=False)
        model = Toy()
        t.fit(model, loader(), ckpt_path="last")
        assert t.global_step == 18
        torch.save(flat(model), f"end{{t.global_rank}}.pt")
"""


def undisturbed(rank, world):
    L.seed_everything(2, verbose=False)
    model = Toy()
    trainer(CoCoDStrategy(period=2), world, max_epochs=3).fit(model, loader())
    return flat(model)


def test_torchrun_restarts_the_job_which_goes_on_from_the_last_checkpoint(tmp_path):
    """Rank 1 is killed in the first attempt and stopped in the second; the third ends as if nothing had been."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(RESTARTS.format(tests=os.path.dirname(__file__))))
    output, code = end(start([*TORCHRUN, "--max-restarts", "2", path], tmp_path))
    assert code == 0, output
    assert (tmp_path / "failed at 9").exists()
    assert (tmp_path / "failed at 14").exists()
    ends = run_ranks(undisturbed, 2, init=False)
    for rank in range(2):
        begun = [(tmp_path / f"rank {rank}, attempt {attempt}").read_text() for attempt in range(3)]
        assert begun == ["0", "8", "12"]
        assert torch.equal(torch.load(tmp_path / f"end{rank}.pt"), ends[rank])
