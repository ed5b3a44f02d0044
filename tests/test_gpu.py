"""The GPU check: some of it on a GPU, where there is one; elsewhere some of it on the CPU, and what it says of the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

import gpu_check as recipe  # noqa: E402
from gpu_checks import costs, library  # noqa: E402
from gpu_checks.rank import Check, Rank  # noqa: E402
from gpu_checks.training import Run  # noqa: E402


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


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name",
    [
        *("bits", "nccl", "float64", "float16", "halves", "nonfinite", "no_host_wait", "lost_rank", "codes", "asynchrony"),
        *("trainer", "trainer_asynchrony", "trace", "resume", "overlap", "memory", "overhead"),
    ],
)
def test_on_a_gpu(name):
    code, verdicts, printed = gpu_check("--only", name)
    assert (code, verdicts) == (0, {name: "ok"}), printed


def test_what_needs_a_gpu_can_be_selected(pytestconfig):
    assert [mark.name for mark in test_on_a_gpu.pytestmark] == ["parametrize", "cuda"]
    assert any(marker.startswith("cuda:") for marker in pytestconfig.getini("markers"))  # others are errors


@pytest.fixture
def no_lightning(tmp_path):
    """A directory for the import path; besides, without Lightning a process starts fast."""
    (tmp_path / "lightning.py").write_text("raise ImportError('hidden')")
    return tmp_path


def on_the_cpu(names, path=()):
    code, verdicts, printed = gpu_check("--device", "cpu", "--only", names, "--of", "cocod,dist_ef_sgd", path=path)
    assert (code, verdicts) == (0, dict.fromkeys(names.split(","), "ok")), printed


def test_plain_loops_on_the_cpu(no_lightning):
    on_the_cpu("bits,nccl", [no_lightning])


def test_trainers_on_the_cpu():
    on_the_cpu("trainer,resume")


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


def test_what_is_not_reached_has_failed_and_what_is_of_none_of_the_strategies_is_not_called_ok(no_lightning):
    options = "--device", "cpu", "--of", "ad_psgd", "--only", "asynchrony,bits,memory", "--limit", "1"
    code, verdicts, printed = gpu_check(*options, path=[no_lightning])
    assert verdicts == {"asynchrony": "FAILED", "bits": "skipped", "memory": "skipped"}, printed
    assert "0 ok, 2 skipped, 1 FAILED (1 not reached within --limit)" in printed
    assert code == 1


def test_strategies_that_there_are_not_are_told():
    before = dict(library.ALGORITHMS)
    assert library.only(["cocod", "cocoa"]) == ["cocoa"]
    assert before == library.ALGORITHMS


# Verdicts


def judged(folder, ranks, left=30.0, **needs):
    """Of ranks that leave these reports, and then end with these codes or by these commands."""
    for number, (report, _) in enumerate(ranks):
        whole = {"failed": [], "figures": {}, "skipped": "", **report}
        (folder / f"rank-{number}.json").write_text(json.dumps(whole))
        (folder / f"{number}.sh").write_text(str(ranks[number][1]))
    command = ["sh", "-c", 'exec sh "$GPU_CHECK_FOLDER/$RANK.sh"']
    group = recipe.Group(Check(lambda rank: None, ranks=len(ranks), **needs), folder, command)
    return group.judge(group.wait(left))


def test_a_rank_that_skips_hides_no_failure_of_another(tmp_path):
    ok, skips, fails = ({}, "exit 0"), ({"skipped": "no such thing"}, "exit 0"), ({"failed": ["not so"]}, "exit 1")
    assert judged(tmp_path, [skips, ok]) == ("skipped", "no such thing")
    assert judged(tmp_path, [skips, fails]) == ("FAILED", "rank 1: not so; ")
    verdict, text = judged(tmp_path, [skips, ({}, "echo out of luck; exit 3")])
    assert (verdict, "rank 1 ended with 3: out of luck" in text) == ("FAILED", True)
    verdict, text = judged(tmp_path, [skips, ({}, "exec sleep 60")], limit=0.5)
    assert (verdict, text.startswith("hung: ended after")) == ("FAILED", True)


def test_a_check_that_the_limit_cuts_off_has_not_hung(tmp_path):
    verdict, text = judged(tmp_path, [({}, "exec sleep 60")], left=0.5, limit=75.0)
    assert (verdict, text) == ("FAILED", "not done within --limit: ended after 0 of the 75 s that it may take; ")


@pytest.mark.parametrize(("copies", "microseconds"), [(1.04, 290.0), (1.07, 310.0)])
def test_costs_are_judged_by_what_is_promised(copies, microseconds, monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "ALGORITHMS", {"cocod": library.ALGORITHMS["cocod"]})
    monkeypatch.setattr(costs, "_peak", lambda rank, algorithm, layers: copies)
    monkeypatch.setattr(costs, "_steps", lambda rank, algorithm, steps: (500.0, microseconds))
    rank = Rank(torch.device("cuda"), 0, 1, "nccl", tmp_path)
    costs.memory(rank)
    costs.overhead_alone(rank)
    assert len(rank.failed) == (0 if copies == 1.04 else 2), rank.failed


@pytest.mark.parametrize(("hidden", "steps", "failures"), [(0.5, 16.0, 0), (0.0, 16.0, 1), (0.0, 0.0, 0)])
def test_something_must_be_hidden_where_messages_have_whole_steps_to_travel(hidden, steps, failures, monkeypatch, tmp_path):
    metrics = {f"comm/{part}_ms": 1.0 for part in ("busy", "exposed", "skew")}
    metrics |= {"comm/hidden_fraction": hidden, "algo/staleness_steps": steps}
    monkeypatch.setattr(costs, "ALGORITHMS", {"cocod": library.ALGORITHMS["cocod"]})
    monkeypatch.setattr(costs, "train", lambda *_, **__: Run(torch.empty(0), torch.empty(0), 1.0, metrics, 64))
    rank = Rank(torch.device("cuda"), 0, 2, "gloo", tmp_path)
    costs.overlap(rank)
    assert len(rank.failed) == failures, rank.failed
