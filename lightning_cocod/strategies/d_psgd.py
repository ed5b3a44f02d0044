"""``Trainer(strategy="d_psgd")``."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_cocod.algorithms import DPSGD
from lightning_cocod.comm.mixing import Graph
from lightning_cocod.strategies.base import AlgorithmStrategy


class DPSGDStrategy(AlgorithmStrategy):
    """D-PSGD under Lightning: models are mixed with those of neighbours at every step (see ``DPSGD``).

    Args:
        graph: "ring", "exponential", "full", or a symmetric, doubly stochastic matrix with a row for each rank.
        overlap: False waits for each exchange where it is launched: the same trajectory, nothing hidden.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range, or ``batch_sizes="proportional"``; in a fit, a matrix of another size than there
            are ranks.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = DPSGD.name

    def __init__(self, graph: Graph = "ring", *, overlap: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.runs(DPSGD, graph=graph, overlap=overlap)
