"""How recipes show figures: a table for a terminal and for a page, and a plot where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def plot(path: Path, draw: Callable[..., None], panels: int = 1) -> None:
    """A figure with axes side by side, which are given to ``draw``; without matplotlib a line says what to do."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: it needs matplotlib; install it and call this again with --plot", flush=True)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    size: Any = (7 if panels == 1 else 5 * panels, 4)
    figure, axes = pyplot.subplots(1, panels, figsize=size, sharey=True, squeeze=False, layout="constrained")
    draw(*axes[0])
    figure.savefig(path)
    pyplot.close(figure)
