"""A logger that keeps in memory what the summary is made of."""

from argparse import Namespace
from collections import defaultdict
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class History(Logger):
    """On rank 0, all values of every metric that anyone logged, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[float]] = defaultdict(list)

    @property
    def name(self) -> None:
        """None: nothing is written."""

    @property
    def version(self) -> None:
        """None: nothing is written."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append."""
        for key, value in metrics.items():
            self.values[key].append(float(value))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Not kept: Hydra writes the configuration."""

    def last(self, key: str) -> float | None:
        """The latest value, or None if there is none."""
        values = self.values.get(key)
        return values[-1] if values else None

    def mean(self, key: str) -> float | None:
        """The mean, or None if there is no value."""
        values = self.values.get(key)
        return sum(values) / len(values) if values else None
