"""``Trainer(strategy="ad_psgd")``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms.ad_psgd import ADPSGD
from lightning_cocod.compression import Codec
from lightning_cocod.strategies.asynchronous import AsynchronousStrategy


class ADPSGDStrategy(AsynchronousStrategy):
    """AD-PSGD under Lightning: ranks go on at their own speeds, and are averaged with one neighbour at a time (``ADPSGD``).

    Ranks share each epoch, a fast one trains on more batches (docs/asynchrony.md). Evaluation, checkpoints and the end have
    the mean of all ranks. A lost rank ends only itself, and may come back.

    Args:
        topology: who is averaged with whom: "ring", "exponential", "random", or a list of edges, pairs of an even and an odd
            rank that connect all of them; once ranks have been lost, a ring.
        every: a rank asks a neighbour at most once in so many of its steps.
        compression: codec of what is exchanged, or its name; none by default (docs/compression.md).
        max_staleness: steps after which a rank waits for the exchange in flight; None to go on for as long as it takes.
        seed: of a random topology and of codecs that draw.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one.
        MisconfigurationException: in a fit, what ranks with different numbers of steps cannot do.
    """

    registered_name: ClassVar[str] = ADPSGD.name

    def __init__(
        self,
        topology: str | Iterable[Sequence[int]] = "ring",
        *,
        every: int = 1,
        compression: str | Codec | None = None,
        max_staleness: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        edges = topology if isinstance(topology, str) else [tuple(edge) for edge in topology]
        self.runs(
            ADPSGD,
            topology=edges,
            every=every,
            compression=compression,
            max_staleness=max_staleness,
            seed=seed,
        )
