"""Curves of accuracy against training seconds: when each reaches the accuracy with which DDP ends, as a table and a plot.

One lucky evaluation proves nothing: accuracies are means of the last three evaluations. The target is DDP's such mean at
the end of its schedule, and a strategy has reached it at the first evaluation at which its own mean is no lower. That holds
for DDP as well: a DDP that stood at its final accuracy long before the end is not counted as slow.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from table_and_plot import markdown, plot

WINDOW = 3  # evaluations in a mean
REFERENCE = "ddp"
HEADER = ("strategy", "steps/s", "accuracy at the end", "training seconds until the target", "times sooner than ddp")


class Point(NamedTuple):
    """An evaluation: optimizer steps and seconds of training before it, and the fraction of images it had right."""

    step: int
    seconds: float
    accuracy: float


Curves = Mapping[str, Sequence[Point]]  # a name to its evaluations, in their order


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Each accuracy the mean of the last three; the first two evaluations have no mean yet."""
    recent = [points[i : i + WINDOW] for i in range(len(points) - WINDOW + 1)]
    return [some[-1]._replace(accuracy=sum(point.accuracy for point in some) / WINDOW) for some in recent]


def final(points: Sequence[Point]) -> float:
    """The accuracy at the end.

    Raises:
        ValueError: too few evaluations for a mean.
    """
    if len(points) < WINDOW:
        raise ValueError(f"an accuracy is the mean of {WINDOW} evaluations, there are {len(points)}")
    return smoothed(points)[-1].accuracy


def seconds_until(target: float, points: Sequence[Point]) -> float | None:
    """Training seconds until the target; None if it was never reached."""
    return next((point.seconds for point in smoothed(points) if point.accuracy >= target), None)


def table(curves: Curves) -> list[tuple[str, ...]]:
    """A row for every strategy, under ``HEADER``. Without DDP there is no target."""
    target = final(curves[REFERENCE]) if REFERENCE in curves else None
    rows = []
    for name, points in curves.items():
        until, sooner = "-", "-"
        if target is not None:
            reached, reference = seconds_until(target, points), seconds_until(target, curves[REFERENCE])
            best = max(point.accuracy for point in smoothed(points))
            until = f"never (best {best:.1%})" if reached is None else f"{reached:.0f}"
            sooner = "-" if reached is None or reference is None else f"{reference / reached:.2f}"
        last = points[-1]
        rows.append((name, f"{last.step / last.seconds:.2f}", f"{final(points):.1%}", until, sooner))
    return rows


def save(folder: Path, curves: Curves) -> None:
    """The points, from which all else can be made again."""
    with (folder / "points.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("strategy", *Point._fields))
        out.writerows((name, *point) for name, points in curves.items() for point in points)


def load(folder: Path) -> dict[str, list[Point]]:
    """What ``save`` has written.

    Raises:
        OSError: it is not there.
        ValueError: it is something else.
    """
    curves: dict[str, list[Point]] = {}
    with (folder / "points.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
        if header != ["strategy", *Point._fields]:
            raise ValueError(f"{folder / 'points.csv'} does not hold points of this recipe")
        for name, step, seconds, accuracy in rows:
            curves.setdefault(name, []).append(Point(int(step), float(seconds), float(accuracy)))
    return curves


def report(folder: Path, curves: Curves) -> None:
    """Print the table, and write it and the plot into the folder."""
    rows = table(curves)
    title = f"Target: {final(curves[REFERENCE]):.1%}, DDP's at its end.\n" if REFERENCE in curves else ""
    text = f"{title}Accuracies are means of {WINDOW} evaluations.\n\n{markdown(HEADER, rows)}\n"
    print(f"\n{text}", flush=True)
    (folder / "table.md").write_text(text)
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    plot(folder / "curves.svg", lambda axes: draw(axes, curves))


def draw(axes: Any, curves: Curves) -> None:
    """A line for each strategy, its single evaluations as dots, and the target."""
    for name, points in curves.items():
        means = smoothed(points)
        (line,) = axes.plot([p.seconds for p in means], [100 * p.accuracy for p in means], label=name)
        axes.plot([p.seconds for p in points], [100 * p.accuracy for p in points], ".", color=line.get_color(), alpha=0.3)
    if REFERENCE in curves:
        axes.axhline(100 * final(curves[REFERENCE]), color="gray", linestyle=":", label="target")
    axes.set(xlabel="seconds of training", ylabel="test accuracy (%)", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
