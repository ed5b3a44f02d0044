"""What the recipe about stragglers makes of the times of batches, and what its command line refuses. No figure is judged."""

import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

import stragglers as recipe  # noqa: E402
from accuracy_runs import as_run  # noqa: E402
from stragglers import Batch, speed, tail  # noqa: E402

FAST = [Batch(t, t + 1, 8) for t in range(10)]


def test_ranks_that_never_wait_have_the_sum_of_their_speeds():
    slow = [Batch(0, 4, 8), Batch(4, 8, 8), Batch(8, 12, 8)]  # the last one in part
    assert speed([FAST, slow]) == pytest.approx(8 + 2)
    assert tail([FAST, slow]) == 2


def test_waiting_counts():
    waits = [Batch(t, t + 1, 8) for t in range(0, 10, 2)]
    assert speed([waits, [Batch(0, 9, 0)]]) == pytest.approx(8 * (4 * 1 + 1) / 9)
    assert speed([waits, [Batch(0, 9, 0)]]) < speed([FAST, [Batch(0, 9, 0)]])


def test_what_is_before_all_have_begun_does_not_count():
    late = [Batch(t, t + 1, 8) for t in range(5, 10)]
    assert speed([FAST, late]) == pytest.approx(16)
    assert tail([FAST, late]) == 0


def test_a_factor_is_a_number_or_late():
    assert [recipe.factor_of(word) for word in ("1", "2.5", "late")] == [1, 2.5, "late"]
    for word in ("0.5", "nan"):
        with pytest.raises(ValueError, match="at least 1"):
            recipe.factor_of(word)


def test_whose_batches_follow_speeds():
    assert recipe.shared(as_run("cocod(period=4, batch_sizes='proportional')"))
    assert not recipe.shared(as_run("cocod(period=4)"))
    assert not recipe.shared(as_run("ddp()"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--factors", "fast"], "fast"),
        (["--ranks", "0"], "--ranks must be positive"),
        (["--runs", "nobody"], "there is no run 'nobody'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(options, message, capsys):
    with pytest.raises(SystemExit):
        recipe.parse(options)
    assert message in capsys.readouterr().err.splitlines()[-1]
