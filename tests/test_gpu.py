"""The GPU check: some of it on a GPU, where there is one; elsewhere that it runs at all, and says what it leaves out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gpu_check(*options, path=(), limit=200):
    """Exit code, the verdict of each check, and all that is printed."""
    run = subprocess.run(
        [sys.executable, ROOT / "recipes" / "gpu_check.py", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))},
        capture_output=True,
        text=True,
        timeout=limit,
    )
    table = run.stdout.rsplit("\n\n", 1)[-1].splitlines()[1:-1]
    rows = [line.split() for line in table if line and not line.startswith(" ")]
    assert rows, run.stdout + run.stderr
    return run.returncode, {row[0]: row[1] for row in rows}, run.stdout


@needs_cuda
@pytest.mark.parametrize(
    "name", ["bits", "nccl", "float64", "nonfinite", "no_host_wait", "trainer", "trace", "resume", "codes"]
)
def test_on_a_gpu(name):
    code, verdicts, printed = gpu_check("--only", name)
    assert (code, verdicts) == (0, {name: "ok"}), printed


@pytest.fixture
def no_lightning(tmp_path):
    """A directory for the import path; besides, without Lightning a process starts fast."""
    (tmp_path / "lightning.py").write_text("raise ImportError('hidden')")
    return tmp_path


def test_without_gpu_and_without_lightning_the_rest_is_checked_and_the_others_are_not_called_ok(no_lightning):
    code, verdicts, printed = gpu_check("--device", "cpu", "--only", "halves,resume,memory", path=[no_lightning])
    assert verdicts == {"halves": "ok", "resume": "skipped", "memory": "skipped"}, printed
    assert code == 0


def test_a_check_that_dies_is_a_failure_and_the_others_go_on(no_lightning):
    dies = "import os, sys\nif {'--rank-of', 'nccl'} <= set(sys.orig_argv): os._exit(3)"
    (no_lightning / "sitecustomize.py").write_text(dies)
    code, verdicts, printed = gpu_check("--device", "cpu", "--only", "nccl,memory", path=[no_lightning])
    assert verdicts == {"nccl": "FAILED", "memory": "skipped"}, printed
    assert "rank 0 ended with 3" in printed
    assert code == 1
