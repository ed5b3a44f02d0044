"""How old things are when they are used: mean, largest, and a histogram with fixed buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable

BOUNDS = (0, 1, 2, 4, 8, 16, 32)


class Staleness:
    """Counts of steps."""

    def __init__(self) -> None:
        self.count = self.total = self.largest = 0
        self.histogram = [0] * (len(BOUNDS) + 1)
        """How many lie up to each of ``BOUNDS`` and above the one before it, and how many above all of them."""

    def add(self, steps: Iterable[int]) -> None:
        """Some more."""
        for value in steps:
            self.count, self.total, self.largest = self.count + 1, self.total + value, max(self.largest, value)
            self.histogram[next((n for n, bound in enumerate(BOUNDS) if value <= bound), len(BOUNDS))] += 1

    @property
    def mean(self) -> float:
        """0 of none."""
        return self.total / self.count if self.count else 0.0

    def metrics(self, name: str) -> dict[str, float]:
        """``…_steps``, ``…_max``, and ``…_le_n``: the share that was at most n steps old."""
        below, shares = 0, {}
        for bound, number in zip(BOUNDS, self.histogram, strict=False):
            below += number
            shares[f"{name}_le_{bound}"] = below / self.count if self.count else math.nan
        return {f"{name}_steps": self.mean, f"{name}_max": float(self.largest), **(shares if self.count else {})}
