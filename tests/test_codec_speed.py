"""The table of codecs' speed: what is measured, the files, targets, what the command line refuses. No figure is judged."""

import csv
import sys
from pathlib import Path

import pytest
import torch

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

import codec_speed as recipe  # noqa: E402
from codec_speed import Fraction, Row  # noqa: E402


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def row(encode, decode, codec="int8"):
    return Row(codec, 1, 10.0, Fraction(1, 1, 1), Fraction(encode, 0, 9), Fraction(decode, 0, 9), 1.0)


def test_a_fraction_is_the_memorys_seconds_in_those_of_the_codec():
    assert Fraction.of([1, 1, 1, 1, 2], [4, 2, 1, 1, 1]) == (1, 0.5, 1)
    assert Fraction.of([1, 1], [4, 4]) == (0.25, 0.25, 0.25)


def test_a_target_is_for_both_directions():
    assert recipe.verdict(row(0.5, 0.5)) == "0.50: reached"
    assert recipe.verdict(row(0.49, 0.5)) == "0.50: encode below"
    assert recipe.verdict(row(0.1, 0.2)) == "0.50: encode, decode below"
    assert recipe.verdict(row(0.17, 0.2, "topk")) == "0.17: reached"
    assert recipe.verdict(row(0.1, 0.1, "natural")) == ""
    assert recipe.verdict(row(0.1, 0.1, "int8, stochastic")) == ""


def test_every_codec_and_size_has_a_row_in_the_table_and_the_files(tmp_path, capsys):
    page, figures = tmp_path / "speed.md", tmp_path / "speed.csv"
    sizes = ["--mib", "0.01", "0.02", "--repeats", "2", "--markdown", str(page), "--csv", str(figures)]
    recipe.main(["--only", "int8", "sign", *sizes])
    with figures.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(r["codec"], r["mib"]) for r in rows] == [
        (name, size) for name in ("int8", "sign", "int8, stochastic") for size in ("0.01", "0.02")
    ]
    n = int(0.02 * 2**18)
    assert float(rows[3]["bytes"]) == ((n + 7) // 8 + 4 * -(-n // 1024)) / n
    assert all(float(r[what]) > 0 for r in rows for what in ("memory_gb_s", "copy", "encode", "decode"))
    assert len(page.read_text(encoding="utf-8").splitlines()) == 2 + len(rows)
    assert "decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--only", "int9"], "no codec int9; there are none, fp16"), (["--mib", "0"], "must be positive")],
)
def test_what_cannot_be_measured_is_refused_in_one_line(options, message, capsys):
    with pytest.raises(SystemExit):
        recipe.main(options)
    assert message in capsys.readouterr().err.splitlines()[-1]
