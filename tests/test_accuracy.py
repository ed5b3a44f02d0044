"""Accuracy at equal epochs: one tiny real run, what is done again and what is not, the table, what is refused."""

import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

import accuracy as recipe  # noqa: E402
import accuracy_results as results  # noqa: E402
import cifar10_job  # noqa: E402
import forked_ranks  # noqa: E402
from accuracy_results import Point, Result  # noqa: E402
from accuracy_runs import Run, as_run, fits  # noqa: E402

from lightning_cocod import DiLoCo  # noqa: E402
from lightning_cocod.comm import Communicator  # noqa: E402
from lightning_cocod.workloads import InputError  # noqa: E402

TINY = "--images 80 --batch-size 10 --test-images 20 --epochs 2 --ranks 2 --seeds 0 --runs ddp,cocod_4 --limit 120"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """CIFAR-10 as folders: 160 images to train with, 40 to test with, each class of one colour."""
    root = tmp_path_factory.mktemp("cifar10")
    for split, count in (("train", 16), ("test", 4)):
        for label in range(10):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (25 * label, 250 - 25 * label, number)).save(folder / f"{number}.png")
    return root


def tiny(data, out, more=""):
    return recipe.parse(["--data", str(data), "--out", str(out), *TINY.split(), *more.split()])


# A real run


def test_a_tiny_run_from_images_to_table_and_plot(data, tmp_path, capsys):
    assert recipe.compare(tiny(data, tmp_path, "--extra eager=eager_diloco(period=8)"))
    found = {result.name: result for result in results.load(tmp_path)}
    assert set(found) == {"ddp", "cocod_4", "eager"}
    for result in found.values():
        assert [point.epoch for point in result.points] == [1, 2]
        assert all(0 <= point.accuracy <= 1 for point in result.points)
    text = (tmp_path / "table.md").read_text()
    assert re.search(r"\| 2 +\| cocod_4 +\| cocod\(period=4\) +\| 1 +\|", text)
    assert text in capsys.readouterr().out
    assert "2 ranks" in (tmp_path / "curves.svg").read_text()
    assert not list(tmp_path.glob("*.part"))
    assert not any("steps are not in the model" in log.read_text() for log in tmp_path.glob("*.log"))


# Ranks in processes of their own


def talk(job, say):
    say((os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads(), job))


def lose_one(job, say):
    say(os.getpid())
    if os.environ["LOCAL_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def raise_one(job, say):
    print("about to fail", flush=True)
    raise ValueError(job)


def run(tmp_path, target, limit=120.0):
    heard = []
    forked_ranks.run(2, target, "job", heard.append, log=tmp_path / "log", limit=limit, imports=recipe.IMPORTS)
    return heard


def test_ranks_know_their_place_and_what_they_say_is_heard(tmp_path):
    assert sorted(run(tmp_path, talk)) == [("0", "2", 1, "job"), ("1", "2", 1, "job")]


def test_a_failure_names_the_log_which_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"exit code 1: see .*log"):
        run(tmp_path, raise_one)
    assert "about to fail" in (tmp_path / "log").read_text()
    assert "ValueError: job" in (tmp_path / "log").read_text()


def test_nobody_waits_for_a_lost_rank_and_none_is_left(tmp_path):
    heard = []
    with pytest.raises(RuntimeError, match="exit code -9"):
        forked_ranks.run(2, lose_one, None, heard.append, log=tmp_path / "log", limit=120.0, imports=recipe.IMPORTS)
    for pid in heard:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_training_is_bounded(tmp_path):
    with pytest.raises(RuntimeError, match="not done within 0 s"):
        run(tmp_path, talk, limit=0.0)


# What is done again


@pytest.fixture
def trained(monkeypatch):
    """Trainings that are over at once; (run, seed) of each, in their order. Those of `fails` fail."""

    class Trained(list):
        fails = ()

    done = Trained()

    def train(ranks, target, job, hear, **_):
        done.append((job["run"], job["seed"]))
        if job["run"] in done.fails:
            raise RuntimeError("failed with exit code 1")
        for epoch in range(job["epochs"]):
            hear(Point(epoch + 1, 0.5))
        hear(Point(job["epochs"], 0.25))

    monkeypatch.setattr(forked_ranks, "run", train)
    monkeypatch.setattr(recipe, "decode", lambda data, out: out / "images.pt")
    return done


def test_what_is_finished_is_not_done_again(data, tmp_path, trained):
    assert recipe.compare(tiny(data, tmp_path))
    assert trained == [("ddp()", 0), ("cocod(period=4)", 0)]
    assert all(result.points == [Point(1, 0.5), Point(2, 0.25)] for result in results.load(tmp_path))  # the last is the test
    assert recipe.compare(tiny(data, tmp_path))
    assert len(trained) == 2
    assert recipe.compare(tiny(data, tmp_path, "--seeds 0,1"))
    assert trained[2:] == [("ddp()", 1), ("cocod(period=4)", 1)]


@pytest.mark.parametrize(
    "change",
    [
        "--lr 0.2",
        "--epochs 3",
        "--warmup 0.2",
        "--images 160",
        "--batch-size 20",
        "--test-images 40",
        "--precision bf16-mixed",
        "--compile",
    ],
)
def test_other_settings_are_done_and_do_not_mix(change, data, tmp_path, trained):
    recipe.compare(tiny(data, tmp_path))
    recipe.compare(tiny(data, tmp_path, change))
    assert len(trained) == 4
    assert (tmp_path / "table.md").read_text().count("| ddp ") == 2
    assert (tmp_path / "table.md").read_text().count("| ranks |") == 2  # a table of its own
    assert (tmp_path / "curves-2.svg").exists()


def test_what_has_failed_is_left_out_and_tried_again(data, tmp_path, trained, capsys):
    trained.fails = ("ddp()",)
    assert not recipe.compare(tiny(data, tmp_path))
    assert "ddp, 2 ranks, seed 0: failed with exit code 1" in capsys.readouterr().out
    assert [result.name for result in results.load(tmp_path)] == ["cocod_4"]
    trained.fails = ()
    assert recipe.compare(tiny(data, tmp_path))
    assert trained == [("ddp()", 0), ("cocod(period=4)", 0), ("ddp()", 0)]


# The table


def result(name, accuracy, seed=0, ranks=2, what="", **settings):
    """With that accuracy in percent at its end."""
    settings = {"run": what or f"{name}()", "ranks": ranks, "seed": seed, "data": "/some/c.zip", "lr": 0.1, **settings}
    return Result(name, settings, [Point(1, 0.1), Point(2, accuracy / 100)])


def rows(*given):
    return [row[:2] + row[3:] for row in results.table(given, ["ddp", "cocod"])]


def test_differences_are_taken_seed_by_seed():
    ddp = [result("ddp", 70, 0), result("ddp", 74, 1)]
    assert rows(*ddp, result("cocod", 69, 0), result("cocod", 75, 1)) == [
        ("2", "ddp", "2", "72.00 (70.00 to 74.00)", "", ""),
        ("2", "cocod", "2", "72.00 (69.00 to 75.00)", "+0.00 (-1.00 to +1.00)", ""),
    ]
    assert rows(*ddp, result("cocod", 75, 1))[1] == ("2", "cocod", "1", "75.00", "+1.00", "")  # beside seed 1 alone


def test_more_than_half_a_point_behind_is_said():
    assert rows(result("ddp", 70), result("cocod", 69.5))[1][-2:] == ("-0.50", "")
    assert rows(result("ddp", 70), result("cocod", 69.49))[1][-2:] == ("-0.51", "yes")
    assert rows(result("ddp", 70), result("cocod", 71))[1][-2:] == ("+1.00", "")


def test_ranks_are_compared_with_as_many_ranks():
    given = [result("cocod", 60, ranks=4), result("ddp", 70, ranks=4), result("ddp", 80), result("cocod", 79.8)]
    assert [(row[0], row[1], row[4]) for row in rows(*given)] == [
        ("2", "ddp", ""),
        ("2", "cocod", "-0.20"),
        ("4", "ddp", ""),
        ("4", "cocod", "-10.00"),
    ]
    assert rows(result("ddp", 70, ranks=4), result("cocod", 60))[0][-2:] == ("", "")  # nothing to compare with


def test_one_name_for_two_trainings_has_two_rows():
    given = [result("x", 60, what="cocod(period=2)"), result("x", 50, what="cocod(period=4)")]
    assert sorted(row[2:5] for row in results.table(given, [])) == [
        ("cocod(period=2)", "1", "60.00"),
        ("cocod(period=4)", "1", "50.00"),
    ]


def test_table_and_plot_are_the_same_from_the_saved_points(tmp_path, capsys):
    given = [result("ddp", 70), result("cocod", 69, seed=0), result("cocod", 69, seed=1), result("ddp", 60, lr=0.2)]
    for each in given:
        results.save(tmp_path, each)
    found = results.load(tmp_path)
    assert len(found) == 4
    assert all(each in found for each in given)
    results.report(tmp_path, found, [])
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out
    titles = [line for line in text.splitlines() if line and not line.startswith("|")]
    assert titles == ["data c.zip, lr 0.1", "data c.zip, lr 0.2"]
    assert (tmp_path / "curves.svg").exists()
    assert (tmp_path / "curves-2.svg").exists()


def test_other_files_are_not_taken_for_results(tmp_path):
    with pytest.raises(ValueError, match="holds no finished training"):
        results.load(tmp_path)
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"other\.json does not hold a training"):
        results.load(tmp_path)


# Runs


def test_every_run_of_the_recipe_is_one():
    assert all(str(as_run(str(as_run(call)))) == str(as_run(call)) == call for call in recipe.RUNS.values())


def test_a_call_becomes_a_run():
    assert as_run("eager_diloco(period={0: 1, 8: 16}, outer_lr=0.5, optimizer='adamw', lr=0.02)") == Run(
        "eager_diloco", {"period": {0: 1, 8: 16}, "outer_lr": 0.5}, 0.02, "adamw"
    )


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("period", [1, 3, {0: 2, 3: 4}])
def test_an_epoch_fits_where_no_step_is_lost(period, warmup, caplog):
    def loses(steps):
        x = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(x.parameters(), lr=0.1)
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            DiLoCo(x, optimizer, period, warmup_steps=warmup, communicator=Communicator()) as diloco,
        ):
            for _ in range(steps):
                diloco.step()
        return "steps are not in the model" in caplog.text

    options = {"period": period, "warmup_steps": warmup}
    lost = [loses(steps) for steps in range(1, 13)]
    assert [not fits(Run("diloco", options), steps, 1) for steps in range(1, 13)] == lost
    assert any(lost) == (period != 1)
    assert fits(Run("diloco", options), 6, 2) == (fits(Run("diloco", options), 6, 1) and fits(Run("diloco", options), 12, 1))


# Images


def test_images_are_decoded_once_for_each_source(data, tmp_path, monkeypatch):
    cache = cifar10_job.decode(data, tmp_path)
    images, labels, test_images, _ = torch.load(cache)
    assert images.shape == (160, 3, 32, 32)
    assert test_images.shape == (40, 3, 32, 32)
    assert torch.equal(labels.bincount(), torch.full((10,), 16))
    assert torch.equal(images[:, 0, 0, 0] // 25, labels)
    monkeypatch.setattr(cifar10_job, "CIFAR10DataModule", None)
    assert cifar10_job.decode(data, tmp_path) == cache
    with pytest.raises(TypeError):
        cifar10_job.decode(data / "train", tmp_path)


def test_parts_have_equally_many_of_every_class(data, tmp_path):
    splits = cifar10_job.Decoded(cifar10_job.decode(data, tmp_path), 4, test_images=20, images=80).splits()
    assert [len(some) for some in splits] == [80, 20, 40]
    assert torch.equal(splits.train.labels.bincount(), torch.full((10,), 8))
    with pytest.raises(ValueError, match="of 40 images 25 cannot be taken"):
        cifar10_job.Decoded(cifar10_job.decode(data, tmp_path), 4, test_images=25).splits()


# The command line


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "--data"),
        ("--data x --runs ddp,sgd", "no run 'sgd': choose from ddp, "),
        ("--data x --extra cocod(period=4)", "a new name"),
        ("--data x --extra ddp=cocod()", "a new name"),
        ("--data x --extra y=cocod", r"a call such as cocod\(period=4, lr=0.5\), got 'cocod'"),
        ("--data x --extra y=cocod(period=k)", "a call such as"),
        ("--data x --extra y=sgd()", "no strategy 'sgd'"),
        ("--data x --extra y=cocod(period=0)", "period"),
        ("--data x --extra y=cocod(speed=1)", "speed"),
        ("--data x --extra y=ddp(period=4)", "ddp has no options here, got period"),
        ("--data x --extra y=cocod(lr=0)", "lr is a positive factor"),
        ("--data x --extra y=cocod(optimizer='lion')", "optimizer must be one of sgd, adamw"),
        ("--data x --extra y=cocod(period=7)", r"y: an epoch of 160 steps .* end where a round of cocod\(period=7\) does"),
        ("--data x --ranks 2,0", "--ranks are whole numbers of at least 1"),
        ("--data x --ranks 3", "multiples of the number of ranks, 3"),
        ("--data x --seeds one", "--seeds are whole numbers"),
        ("--data x --images 10000", "--images must be a multiple of --batch-size"),
        ("--data x --images 64", "number of classes, 10"),
        ("--data x --lr nan", "--lr must be positive"),
        ("--data x --warmup 1", "--warmup is a fraction"),
    ],
)
def test_wrong_input_gets_one_line(line, complaint, capsys):
    with pytest.raises(SystemExit):
        recipe.parse(line.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(complaint, last), last


def test_what_is_right_is_taken():
    options = recipe.parse(["--data=x", "--runs=none", "--extra=y=cocod(period={0: 1, 32: 8})", "--ranks=4,2,4"])
    assert {name: str(run) for name, run in options.runs.items()} == {"y": "cocod(period={0: 1, 32: 8})"}
    assert (options.ranks, options.seeds) == ([4, 2], [0, 1])


def test_images_that_are_not_there_get_one_line(tmp_path):
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        recipe.compare(tiny(tmp_path / "nowhere", tmp_path / "out"))
