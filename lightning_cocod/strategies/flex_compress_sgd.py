"""``Trainer(strategy="flex_compress_sgd")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import FlexCompressSGD
from lightning_cocod.compression import Codec
from lightning_cocod.strategies.base import AlgorithmStrategy


class FlexCompressSGDStrategy(AlgorithmStrategy):
    """FlexCompressSGD under Lightning: a codec for each direction (see ``FlexCompressSGD``).

    All ranks hold the same weights. Gradients are pushed while backward runs in automatic optimization with one optimizer,
    else after it; also after it where gradients are clipped, which each rank does with its own before it sends them. The
    optimizer's step applies what the server answers.

    Args:
        compression: codec of the ranks, or its name; a contraction (docs/compression.md); "topk" by default, None
            for whole values.
        server_compression: codec of the server, or its name.
        overlap: False pushes after backward: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale. Equal by default.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"``; in a fit, another optimizer than SGD.
        TypeError: an option that only DDP understands, or an unknown one.
        MisconfigurationException: in a fit with ``precision="16-mixed"``.
    """

    registered_name: ClassVar[str] = FlexCompressSGD.name

    def __init__(
        self,
        *,
        compression: str | Codec | None = "topk",
        server_compression: str | Codec | None = "sign",
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            FlexCompressSGD,
            compression=compression,
            server_compression=server_compression,
            overlap=overlap,
            weights=weights,
        )
