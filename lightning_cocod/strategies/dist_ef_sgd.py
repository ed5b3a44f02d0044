"""``Trainer(strategy="dist_ef_sgd")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import DistEFSGD
from lightning_cocod.compression import Codec
from lightning_cocod.strategies.base import AlgorithmStrategy


class DistEFSGDStrategy(AlgorithmStrategy):
    """dist-EF-SGD under Lightning: codes both ways, with error feedback on both sides (see ``DistEFSGD``).

    All ranks hold the same weights. Gradients are pushed while backward runs in automatic optimization with one optimizer,
    else after it; also after it where gradients are clipped, which each rank does with its own before it sends them. The
    optimizer's step applies what the server answers.

    Args:
        compression: codec of both directions, or its name; a contraction (docs/compression.md); "sign" by default, None
            for whole values.
        overlap: False pushes after backward: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale. Equal by default.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"``; in a fit, another optimizer than SGD.
        TypeError: an option that only DDP understands, or an unknown one.
        MisconfigurationException: in a fit with ``precision="16-mixed"``.
    """

    registered_name: ClassVar[str] = DistEFSGD.name

    def __init__(
        self,
        *,
        compression: str | Codec | None = "sign",
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            DistEFSGD,
            compression=compression,
            overlap=overlap,
            weights=weights,
        )
