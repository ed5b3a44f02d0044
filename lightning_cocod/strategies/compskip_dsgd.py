"""``Trainer(strategy="compskip_dsgd")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import CompSkipDSGD
from lightning_cocod.algorithms.skipping import SkipRule
from lightning_cocod.compression import Codec
from lightning_cocod.strategies.base import AlgorithmStrategy


class CompSkipDSGDStrategy(AlgorithmStrategy):
    """CompSkipDSGD under Lightning: codes both ways, and messages that are left out (see ``CompSkipDSGD``).

    All ranks hold the same weights. Gradients are pushed while backward runs in automatic optimization with one optimizer,
    else after it; also after it where gradients are clipped, which each rank does with its own before it sends them. The
    optimizer's step applies what the server answers.

    Args:
        compression: codec of the ranks, or its name; a contraction (docs/compression.md); "sign" by default, None
            for whole values.
        server_compression: codec of the server, or its name.
        worker_skip: when a rank does not send: n, to send in every n-th step, a probability below 1 of leaving a step out, a
            rule (``Randomly``, ``WhileSmall``) or a function; None or 0 to send always.
        server_skip: when the server does not.
        overlap: False pushes after backward: the same trajectory, nothing hidden.
        weights: of the ranks in every mean, in any scale. Equal by default.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"``; in a fit, another optimizer than SGD.
        TypeError: an option that only DDP understands, or an unknown one.
        MisconfigurationException: in a fit with ``precision="16-mixed"``.
    """

    registered_name: ClassVar[str] = CompSkipDSGD.name

    def __init__(
        self,
        *,
        compression: str | Codec | None = "sign",
        server_compression: str | Codec | None = "sign",
        worker_skip: SkipRule = None,
        server_skip: SkipRule = None,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            CompSkipDSGD,
            compression=compression,
            server_compression=server_compression,
            worker_skip=worker_skip,
            server_skip=server_skip,
            overlap=overlap,
            weights=weights,
        )
