"""Rows as CSV, Markdown and on the terminal."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_cocod.cli.bench.statistics import TRANSPORT, Row, Setting


def _number(digits: int, sign: str = "") -> Callable[[Any], str]:
    return lambda value: "–" if value is None else f"{value:{sign},.{digits}f}"


def _fraction(row: Row) -> str:
    if row.fraction is None:
        return "–"
    return f"{row.fraction:.3f} ({row.least:.3f}–{row.most:.3f})"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "contender": lambda row: row.contender,
    "step, ms": lambda row: _number(2)(row.step_ms),
    "of the ceiling": _fraction,
    "by CPU time": lambda row: _number(3)(row.by_cpu),
    "transport, %": lambda row: _number(1)(row.transport_percent),
    "limit": lambda row: _number(3)(row.limit),
    "target": lambda row: _number(3)(row.target),
    "own, %": lambda row: _number(1, "+")(row.own_percent),
    "own, ms": lambda row: _number(2, "+")(row.own_ms),
    "sent, MB": lambda row: _number(2)(row.sent_mb),
    "memory, MB": lambda row: _number(0, "+")(row.peak_mb),
    "in parameters": lambda row: _number(2, "+")(row.peak_parameters),
    "CPU training": lambda row: _number(1)(row.training_ms),
    "communication": lambda row: _number(1)(row.communication_ms),
    "heartbeat": lambda row: _number(1)(row.heartbeat_ms),
    "others": lambda row: _number(1)(row.others_ms),
    "machine": lambda row: _number(1)(row.machine_ms),
    "repeats": lambda row: str(row.repeats),
    "note": lambda row: row.note,
}
"""Heading → text of a row."""


def title(setting: Setting) -> str:
    """A setting in words."""
    link = "network as it is" if setting.link_mbit is None else f"{setting.link_mbit:g} Mbit/s"
    shared = " shared by all" if setting.device == "lo" else ""
    trained = f"{setting.workload}, batch {setting.batch_size}"
    return f"{trained}, {setting.ranks} ranks, {link}{shared}, period {setting.period}"


def hint(rows: Sequence[Row]) -> str:
    """What is missing in a setting's table, on a line of its own; empty if nothing is."""
    if any(row.contender == TRANSPORT for row in rows):
        return ""
    return f"No transport, limit, target and own %: they need {TRANSPORT} among the --contenders.\n"


def markdown(rows: Sequence[Row]) -> str:
    """A table for each setting, under a heading that names it."""
    parts = []
    for setting, of in groupby(rows, lambda row: row.setting):
        group, head = list(of), list(COLUMNS)
        lines = [head, ["---", *["---:"] * (len(head) - 2), "---"]]
        lines += [[text(row).replace("|", "\\|") for text in COLUMNS.values()] for row in group]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
        parts.append("\n".join(filter(None, [f"## {title(setting)}\n", table, hint(group)])))
    return "\n".join(parts)


def plain(rows: Sequence[Row]) -> str:
    """For the terminal."""
    parts = []
    for setting, of in groupby(rows, lambda row: row.setting):
        group = list(of)
        lines = [list(COLUMNS), *([text(row) for text in COLUMNS.values()] for row in group)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (
            "  ".join(f"{cell:<{width}}" if at in (0, len(widths) - 1) else f"{cell:>{width}}" for at, (cell, width) in row)
            for row in (list(enumerate(zip(cells, widths, strict=True))) for cells in lines)
        )
        parts.append(f"{title(setting)}\n" + "\n".join(line.rstrip() for line in padded) + "\n" + hint(group))
    return "\n".join(parts)


def save(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write `table.csv` (every field of every row) and `table.md`."""
    table, text = folder / "table.csv", folder / "table.md"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Setting._fields, *Row._fields[1:]])
        writer.writerows([*row.setting, *row[1:]] for row in rows)
    text.write_text(markdown(rows))
    return [table, text]
