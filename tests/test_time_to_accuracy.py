"""Time to accuracy: means of evaluations, when a target is reached, the table, what the command line refuses."""

import re
import sys
import time
from pathlib import Path

import pytest

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

import accuracy_curves as curves  # noqa: E402
import time_to_accuracy as recipe  # noqa: E402
from accuracy_curves import Point  # noqa: E402


def curve(*accuracies, pace=2.0):
    """An evaluation every ten steps, ``pace`` seconds a step."""
    return [Point(10 * i, 10 * i * pace, accuracy) for i, accuracy in enumerate(accuracies, start=1)]


DDP = curve(0.1, 0.3, 0.5, 0.6, 0.7)  # ends at 0.6


def test_an_accuracy_is_the_mean_of_three_evaluations_at_the_last_of_them():
    means = curves.smoothed(curve(0.1, 0.3, 0.5, 0.7))
    assert [(point.step, point.seconds) for point in means] == [(30, 60.0), (40, 80.0)]
    assert [point.accuracy for point in means] == pytest.approx([0.3, 0.5])
    assert curves.smoothed(curve(0.9, 0.9)) == []


def test_the_end_of_a_curve_needs_three_evaluations():
    assert curves.final(DDP) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="mean of 3 evaluations, there are 2"):
        curves.final(curve(0.9, 0.9))


def test_the_target_is_reached_at_the_first_mean_that_is_no_lower():
    assert curves.seconds_until(0.6, curve(0.6, 0.6, 0.6, 0.6)) == 60.0
    assert curves.seconds_until(0.7, curve(0.2, 0.5, 0.6, 0.7, 0.9, 0.1)) == 100.0  # what follows does not matter


def test_one_lucky_evaluation_does_not_reach_the_target():
    assert curves.seconds_until(0.6, curve(0.3, 0.3, 0.9, 0.3, 0.3)) is None


def test_ddp_reaches_its_own_target_at_its_end_or_before():
    assert curves.seconds_until(curves.final(DDP), DDP) == 100.0
    assert curves.seconds_until(0.5, curve(0.5, 0.5, 0.5, 0.5, 0.5)) == 60.0


def test_the_table_says_how_much_sooner_and_who_never_did():
    quick = curve(0.1, 0.4, 0.6, 0.7, 0.7, pace=0.5)
    poor = curve(0.1, 0.4, 0.5, 0.4, 0.3, pace=0.5)
    rows = {row[0]: row[1:] for row in curves.table({"ddp": DDP, "cocod": quick, "local_sgd": poor})}
    assert rows["ddp"] == ("0.50", "60.0%", "100", "1.00")
    assert rows["cocod"] == ("2.00", "66.7%", "25", "4.00")
    assert rows["local_sgd"] == ("2.00", "40.0%", "never (best 43.3%)", "-")


def test_a_slower_strategy_is_not_called_sooner():
    rows = {row[0]: row for row in curves.table({"ddp": DDP, "cocod": curve(0.1, 0.3, 0.5, 0.6, 0.7, pace=4.0)})}
    assert rows["cocod"][-1] == "0.50"


def test_without_ddp_there_is_no_target():
    assert curves.table({"cocod": DDP}) == [("cocod", "0.50", "60.0%", "-", "-")]


def test_the_table_is_the_same_from_the_saved_points(tmp_path, capsys):
    made = {"ddp": DDP, "cocod": curve(0.1, 0.4, 0.6, 0.7, pace=0.5)}
    curves.save(tmp_path, made)
    assert curves.load(tmp_path) == made
    curves.report(tmp_path, curves.load(tmp_path))
    text = (tmp_path / "table.md").read_text()
    assert "Target: 60.0%" in text
    assert text in capsys.readouterr().out
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1
    assert (tmp_path / "table.csv").read_text().count("\n") == 3


def test_other_files_are_not_taken_for_points(tmp_path):
    (tmp_path / "points.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="does not hold points"):
        curves.load(tmp_path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "--data"),
        ("--data x --strategies ddp,sgd", "no strategy 'sgd': choose from ddp, ad_psgd, a_psgd, "),
        ("--data x --strategies ddp,ad_psgd", "the ranks of ad_psgd are not in step"),
        ("--data x --period soon", "a period is .* got 'soon'"),
        ("--data x --period 0", "period"),
        ("--data x --steps 50", "multiple of --eval-every"),
        ("--data x --steps 60", "3 times it at least"),
        ("--data x --extra 0.5", "--extra must be 1 at least"),
        ("--data x --lr nan", "--lr must be positive"),
        ("--data x --rate 0", "a rate must be"),
        ("--data x --rate fast", "fast"),
    ],
)
def test_wrong_input_gets_one_line(line, complaint, capsys):
    with pytest.raises(SystemExit):
        recipe.parse(line.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(complaint, last), last


def test_what_is_right_is_taken():
    options = recipe.parse(["--data=x", "--rate=none", "--strategies=cocod,ddp,cocod", "--period=0:1,200:4"])
    assert (options.rate, options.strategies) == (None, ["cocod", "ddp"])
    assert recipe.periods("0:1,200:4") == {0: 1, 200: 4}
    assert recipe.periods("4") == 4
    without_a_period = "ssgd,compskip_dsgd,dc_s3gd"
    assert recipe.parse(["--data=x", f"--strategies={without_a_period}"]).strategies == without_a_period.split(",")


def test_longer_runs_end_with_an_evaluation():
    assert recipe.longer(600, 1.0, 30) == 600
    assert recipe.longer(600, 1.26, 30) == 780
    assert recipe.longer(600, 1.3, 30) == 780


class Process:
    """Stands in for a rank: its exit code, None while it runs."""

    def __init__(self, code):
        self.returncode = code

    def poll(self):
        return self.returncode


def test_jobs_are_bounded():
    recipe.wait("ddp", [Process(0), Process(0)], 5.0, Path("log"))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="ddp was not done within 0 s"):
        recipe.wait("ddp", [Process(None)], 0.0, Path("log"))
    with pytest.raises(RuntimeError, match="exit code -9: see log"):  # nobody waits for the peer, which would hang
        recipe.wait("ddp", [Process(None), Process(-9)], 60.0, Path("log"))
    assert time.monotonic() - began < 30


def test_the_plot_is_left_out_where_matplotlib_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    curves.report(tmp_path, {"ddp": DDP})
    assert "no plot: it needs matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "curves.svg").exists()
