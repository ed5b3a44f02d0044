"""``Trainer(strategy="od_sgd")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import ODSGD
from lightning_cocod.algorithms.local_update import LocalUpdate
from lightning_cocod.strategies.base import AlgorithmStrategy


class ODSGDStrategy(AlgorithmStrategy):
    """OD-SGD under Lightning: parameters that are a step old, moved by the rank's own gradient (see ``ODSGD``).

    Args:
        local_update: "dc_asgd_a", "dc_asgd", "sgd", "glu" beside SGD only, or a ``DelayCompensation(lambda_0=1.0)``.
        warmup_steps: steps of S-SGD first.
        overlap: False waits for what is launched: the same trajectory, nothing hidden.
        elementwise: True says that the optimizer treats every element by itself although a trial says otherwise, as it does
            of one whose steps are random (see ``SSGD``).
        weights: of the ranks in every mean, in any scale. Equal by default.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one; in a fit, an optimizer that needs whole tensors.
        MisconfigurationException: in a fit with ``precision="16-mixed"``.
    """

    registered_name: ClassVar[str] = ODSGD.name

    def __init__(
        self,
        *,
        local_update: str | LocalUpdate = "dc_asgd_a",
        warmup_steps: int = 0,
        overlap: bool = True,
        elementwise: bool = False,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            ODSGD,
            local_update=local_update,
            warmup_steps=warmup_steps,
            overlap=overlap,
            elementwise=elementwise,
            weights=weights,
        )
