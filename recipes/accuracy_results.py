"""Finished trainings in files of their own, and the table and plots made of them.

A difference is taken seed by seed: both runs begin with the same weights and see the same images. Results with other
settings, be it one, get tables of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from table_and_plot import markdown, plot

REFERENCE, BEHIND = "ddp", 0.5  # percentage points
OWN = ("run", "ranks", "seed")  # settings in which the results of one table differ
DASHES = ("-", "--", ":")  # of ten colours each
HEADER = ("ranks", "run", "what", "seeds", "accuracy, %", f"beside {REFERENCE}, points", f"over {BEHIND} behind")


class Point(NamedTuple):
    """The fraction of test images that the model has right after an epoch."""

    epoch: int
    accuracy: float


class Result(NamedTuple):
    """A finished training: its name, its settings, and its points, of which the last counts."""

    name: str
    settings: dict[str, Any]
    points: list[Point]

    @property
    def accuracy(self) -> float:
        """In percent, at the end."""
        return 100 * self.points[-1].accuracy


def place(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """The file of the training with these settings: another for every change of one."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return folder / f"{name}-{settings['ranks']}-{settings['seed']}-{digest[:12]}.json"


def save(folder: Path, result: Result) -> None:
    """Write it, whole or not at all."""
    path = place(folder, result.name, result.settings)
    path.with_suffix(".part").write_text(json.dumps(result._asdict()) + "\n")
    os.replace(path.with_suffix(".part"), path)


def load(folder: Path) -> list[Result]:
    """All that have been saved.

    Raises:
        ValueError: there are none, or a file is something else.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            held = json.loads(path.read_text())
            found.append(Result(held["name"], held["settings"], [Point(*point) for point in held["points"]]))
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} does not hold a training of this recipe: move it away") from None
    if not found:
        raise ValueError(f"{folder} holds no finished training")
    return found


def alike(results: Sequence[Result]) -> list[tuple[dict[str, Any], list[Result]]]:
    """Parts with the same settings, but for ``OWN``, and these settings."""
    parts: dict[str, tuple[dict[str, Any], list[Result]]] = {}
    for result in results:
        shared = {key: value for key, value in result.settings.items() if key not in OWN}
        parts.setdefault(json.dumps(shared, sort_keys=True), (shared, []))[1].append(result)
    return [parts[key] for key in sorted(parts)]


def trainings(results: Sequence[Result], order: Sequence[str]) -> dict[tuple[int, str, str], dict[int, Result]]:
    """(ranks, name, run) to seeds to results, names in this order and others after them."""
    position = {name: number for number, name in enumerate(order)}
    found: dict[tuple[int, str, str], dict[int, Result]] = {}
    for result in sorted(results, key=lambda r: (r.settings["ranks"], position.get(r.name, len(order)), r.name)):
        key = (result.settings["ranks"], result.name, result.settings["run"])
        found.setdefault(key, {})[result.settings["seed"]] = result
    return found


def table(results: Sequence[Result], order: Sequence[str]) -> list[tuple[str, ...]]:
    """A row for every training and number of ranks, under ``HEADER``."""
    found = trainings(results, order)
    references = {ranks: seeds for (ranks, name, _), seeds in found.items() if name == REFERENCE}
    rows = []
    for (ranks, name, run), seeds in found.items():
        reference = references.get(ranks, {})
        beside = [seeds[seed].accuracy - reference[seed].accuracy for seed in seeds if seed in reference]
        is_other = name != REFERENCE and bool(beside)
        rows.append(
            (
                str(ranks),
                name,
                run,
                str(len(seeds)),
                spread([result.accuracy for result in seeds.values()], ".2f"),
                spread(beside, "+.2f") if is_other else "",
                "yes" if is_other and fmean(beside) < -BEHIND else "",
            )
        )
    return rows


def spread(values: Sequence[float], form: str) -> str:
    """The mean; of several also the least and the most."""
    mean = format(fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def report(folder: Path, results: Sequence[Result], order: Sequence[str]) -> None:
    """Print the tables, and write them and the plots into the folder."""
    text = ""
    for number, (shared, some) in enumerate(alike(results)):
        # Of the path of the data only the name: the text is for a page.
        said = ", ".join(f"{key} {Path(value).name if key == 'data' else value}" for key, value in shared.items())
        text += f"{said}\n\n{markdown(HEADER, table(some, order))}\n\n"
        panels = len({result.settings["ranks"] for result in some})
        name = f"curves-{number + 1}.svg" if number else "curves.svg"
        plot(folder / name, partial(draw, results=some, order=order), panels)
    print(f"\n{text}", end="", flush=True)
    (folder / "table.md").write_text(text)


def draw(*axes: Any, results: Sequence[Result], order: Sequence[str]) -> None:
    """A panel for each number of ranks, with a line through the means of the seeds and a dot for each seed."""
    panels = dict(zip(sorted({result.settings["ranks"] for result in results}), axes, strict=True))
    names = [name for name in dict.fromkeys([*order, *(r.name for r in results)]) if name != REFERENCE]
    styles: dict[str, dict[str, Any]] = {REFERENCE: {"color": "black", "linestyle": "-", "linewidth": 2}}
    styles |= {name: {"color": f"C{n % 10}", "linestyle": DASHES[n // 10 % len(DASHES)]} for n, name in enumerate(names)}
    lines: dict[str, Any] = {}
    for (ranks, name, _), seeds in trainings(results, order).items():
        curves = [result.points for result in seeds.values()]
        means = [(points[0].epoch, 100 * fmean(p.accuracy for p in points)) for points in zip(*curves, strict=True)]
        (lines[name],) = panels[ranks].plot(*zip(*means, strict=True), label=name, **styles[name])
        dots = [(point.epoch, 100 * point.accuracy) for points in curves for point in points]
        panels[ranks].plot(*zip(*dots, strict=True), ".", color=styles[name]["color"], alpha=0.3)
    for ranks, panel in panels.items():
        panel.set(title=f"{ranks} ranks", xlabel="epoch")
        panel.grid(alpha=0.3)
    axes[0].set(ylabel="test accuracy (%)")
    axes[0].figure.legend(handles=list(lines.values()), loc="outside right upper", fontsize="x-small")
