"""``Trainer(strategy="cd_sgd")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import CDSGD
from lightning_cocod.algorithms.local_update import LocalUpdate
from lightning_cocod.compression import Codec
from lightning_cocod.strategies.base import AlgorithmStrategy


class CDSGDStrategy(AlgorithmStrategy):
    """CD-SGD under Lightning: SSD-SGD with a pull every step, and codes in place of most gradients (see ``CDSGD``).

    Evaluation, checkpoints and the end of a fit see the server's parameters. ``optimizer.step`` moves nothing: the server
    steps, with the rates of the optimizer's groups, and each rank makes a local update of its own.

    Args:
        compression: codec of the gradients, or its name (docs/compression.md); "threshold" by default, None for whole ones.
        compress_steps: c: every c-th step pushes gradients whole.
        local_update: "sgd", "glu" beside SGD only, "dc_asgd", "dc_asgd_a", or an object such as ``GLU(alpha=1.0)``.
        warmup_steps: steps of S-SGD first, which push gradients whole.
        overlap: False waits for what is launched: the same trajectory, nothing hidden.
        elementwise: True says that the optimizer treats every element by itself although a trial says otherwise, as it does
            of one whose steps are random (see ``SSGD``).
        weights: of the ranks in every mean, in any scale. Equal by default.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range, or ``on_nonfinite="skip"``; in a fit, "glu" beside another optimizer than SGD.
        TypeError: an option that only DDP understands, or an unknown one; in a fit, an optimizer that needs whole tensors.
        MisconfigurationException: in a fit with ``precision="16-mixed"``.
    """

    registered_name: ClassVar[str] = CDSGD.name

    def __init__(
        self,
        *,
        compression: str | Codec | None = "threshold",
        compress_steps: int = 5,
        local_update: str | LocalUpdate = "sgd",
        warmup_steps: int = 0,
        overlap: bool = True,
        elementwise: bool = False,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            CDSGD,
            compression=compression,
            compress_steps=compress_steps,
            local_update=local_update,
            warmup_steps=warmup_steps,
            overlap=overlap,
            elementwise=elementwise,
            weights=weights,
        )
