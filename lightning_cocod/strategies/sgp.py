"""``Trainer(strategy="sgp")``."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_cocod.algorithms import SGP
from lightning_cocod.comm.mixing import Graph
from lightning_cocod.strategies.base import AlgorithmStrategy


class SGPStrategy(AlgorithmStrategy):
    """Stochastic Gradient Push under Lightning, and OSGP with a ``delay``: models are pushed along edges (see ``SGP``).

    Args:
        graph: "one_peer", "exponential", "full", a column-stochastic matrix with a row for each rank that receives, or
            ``{rank: [those it sends to]}``.
        delay: steps that a message may take: 0 blocks after each step, 1 hides it behind the next forward and backward.
        overlap: False waits for each message where it is launched: the same trajectory, nothing hidden.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range, or ``batch_sizes="proportional"``; in a fit, a graph of another size than there
            are ranks.
        TypeError: an option that only DDP understands, or an unknown one.
    """

    registered_name: ClassVar[str] = SGP.name

    def __init__(self, graph: Graph = "one_peer", *, delay: int = 0, overlap: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.runs(SGP, graph=graph, delay=delay, overlap=overlap)
