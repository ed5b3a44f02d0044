"""Plots of the rows: speed against link rate, bytes, memory. Needs matplotlib, which nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isinf
from pathlib import Path

from lightning_cocod.cli.bench.plan import CEILING
from lightning_cocod.cli.bench.statistics import TRANSPORT, Row, Setting


def save(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a picture for each setting, with all rates of the link in it.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    written = []
    measured = [row for row in rows if row.fraction is not None and row.contender not in (CEILING, TRANSPORT)]
    for alike in dict.fromkeys(map(_but_the_rate, measured)):
        chosen = sorted((row for row in measured if _but_the_rate(row) == alike), key=_rate)
        rates = list(dict.fromkeys(map(_rate, chosen)))
        names = [
            name for name in dict.fromkeys(row.contender for row in rows) if any(row.contender == name for row in chosen)
        ]
        figure, (speed, sent, memory) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
        for name in names:
            points = [row for row in chosen if row.contender == name]
            middle, least, most = zip(*((row.fraction, row.least, row.most) for row in points), strict=True)
            spread = [
                [m - low for m, low in zip(middle, least, strict=True)],
                [h - m for m, h in zip(middle, most, strict=True)],
            ]
            places = [rates.index(_rate(row)) for row in points]
            speed.errorbar(places, middle, yerr=spread, marker="o", capsize=3, label=name)
        speed.set_xticks(range(len(rates)), ["as it is" if isinf(rate) else f"{rate:g}" for rate in rates])
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
        figure.suptitle(f"{alike.workload}, batch {alike.batch_size}, {alike.ranks} ranks, period {alike.period}")
        shared = "-shared" if alike.device == "lo" else ""
        path = folder / f"{alike.workload}-{alike.ranks}-ranks{shared}-period-{alike.period}.svg"
        figure.savefig(path)
        pyplot.close(figure)
        written.append(path)
    return written


def _but_the_rate(row: Row) -> Setting:
    return row.setting._replace(link_mbit=None)


def _rate(row: Row) -> float:
    return row.setting.link_mbit or inf
