"""Plots of the rows: speed against link rate, bytes, memory. Needs matplotlib, which nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_cocod.cli.bench.plan import CEILING
from lightning_cocod.cli.bench.statistics import TRANSPORT, Row


def save(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a picture for each workload and number of ranks.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    written = []
    for workload, ranks in dict.fromkeys((row.workload, row.ranks) for row in rows):
        chosen = [r for r in rows if (r.workload, r.ranks) == (workload, ranks) and r.contender not in (CEILING, TRANSPORT)]
        chosen = [row for row in chosen if row.fraction is not None]
        names = list(dict.fromkeys(row.contender for row in chosen))
        if not names:
            continue
        figure, (speed, sent, memory) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
        for name in names:
            points = sorted((row for row in chosen if row.contender == name), key=lambda row: row.link_mbit or float("inf"))
            places = [f"{row.link_mbit:g}" if row.link_mbit else "as it is" for row in points]
            middle = [row.fraction for row in points]
            spread = [[r.fraction - r.least for r in points], [r.most - r.fraction for r in points]]  # type: ignore[operator]
            speed.errorbar(places, middle, yerr=spread, marker="o", capsize=3, label=name)
        speed.axhline(1.0, color="grey", linewidth=0.8)
        speed.set(xlabel="link, Mbit/s", ylabel="throughput, of training without communication", ylim=(0, 1.1))
        speed.legend(fontsize="small")
        last = {row.contender: row for row in chosen}  # bytes and memory do not depend on the link
        for axes, values, label in (
            (sent, [last[name].sent_mb for name in names], "sent for each step by each rank, MB"),
            (memory, [last[name].peak_mb for name in names], "peak memory beyond training alone, MB"),
        ):
            axes.barh(names, values)
            axes.invert_yaxis()
            axes.set_xlabel(label)
        figure.suptitle(f"{workload}, {ranks} ranks")
        path = folder / f"{workload}-{ranks}-ranks.svg"
        figure.savefig(path)
        pyplot.close(figure)
        written.append(path)
    return written
