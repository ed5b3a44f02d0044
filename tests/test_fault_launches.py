"""Faults as a user's script meets them, under Lightning's own launcher, spawn, fork and torchrun.

Never 0 after a rank was lost, the original traceback first, and no process left.
"""

import os
import re
import sys
import textwrap

import pytest
from support.faults import gone, not_in_shared_memory
from test_launch import finish, start

LIMIT = 90
SCRIPT = """
    import os, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from lightning.pytorch.callbacks import Callback
    from support.faults import Faulty
    from support.toys import loader, trainer
    from lightning_cocod import CoCoDStrategy

    class Writes(Callback):
        def on_train_start(self, trainer, module):
            Path(f"pid{{trainer.global_rank}}").write_text(str(os.getpid()))

        def on_train_batch_start(self, trainer, module, *_):
            if module.steps == 8:
                Path(f"steps{{trainer.global_rank}}").touch()

    if __name__ == "__main__":
        method, what, who = sys.argv[1:]
        strategy = CoCoDStrategy(timeout=4, start_method=method)
        model = Faulty(what, "between rounds", int(who))
        t = trainer(strategy, 2, max_epochs=100_000, callbacks=[Writes()])
        try:
            t.fit(model, loader())
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            Path(f"code{{os.environ.get('LOCAL_RANK', 'main')}}").write_text(str(code))
            raise
"""
METHODS = {"popen": "popen", "spawn": "spawn", "torchrun": "popen"}


@pytest.fixture
def launch(tmp_path):
    """Start the script with a fault in one of two ranks."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT.format(tests=os.path.dirname(__file__))))

    def launch(launcher, what, who=1):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = torchrun if launcher == "torchrun" else [sys.executable]
        return start([*command, path, METHODS[launcher], what, str(who)], tmp_path)

    yield launch
    pids = [int(file.read_text()) for file in tmp_path.glob("pid*")]
    assert len(pids) == 2
    assert gone(pids)
    assert not_in_shared_memory(pids)


def end(process):
    ((output, code),) = finish(process, limit=LIMIT)
    assert code != 0, output
    return output, code


LOST = r"PeerLost: rank 1 (is lost: |failed: )"


@pytest.mark.parametrize("launcher", METHODS)
def test_the_original_traceback_comes_first_and_the_peers_name_the_rank(launcher, launch):
    output, _ = end(launch(launcher, "raises"))
    original = output.index('raise ValueError("my own bug")')
    assert original < re.search(r"PeerLost: rank 1 failed: ValueError: my own bug|\Z", output).start()


@pytest.mark.parametrize("launcher", METHODS)
def test_a_rank_that_is_stopped_is_ended_so_that_its_launcher_ends_as_well(launcher, launch):
    output, _ = end(launch(launcher, "is stopped"))
    assert re.search(r"PeerLost: rank 1 is lost: no heartbeat for 4 s; its process \d+ on this host was ended", output), (
        output
    )
