"""``Trainer(strategy="ssd_sgd")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lightning_cocod.algorithms import SSDSGD, When
from lightning_cocod.algorithms.local_update import LocalUpdate
from lightning_cocod.strategies.base import AlgorithmStrategy


class SSDSGDStrategy(AlgorithmStrategy):
    """SSD-SGD under Lightning: gradients are pushed every step, parameters pulled every k-th (see ``SSDSGD``).

    Evaluation, checkpoints and the end of a fit see the server's parameters. ``optimizer.step`` moves nothing: the server
    steps, with the rates of the optimizer's groups, and each rank makes a local update of its own.

    Args:
        period: steps between two pulls, or a schedule ``{step: k}``.
        local_update: "glu" beside SGD only, "sgd", "dc_asgd", "dc_asgd_a", or an object such as ``GLU(alpha=1.0)``.
        scaling: "plain" or "paper": of the local update.
        pre_refresh: "pull" or "every_step": of "glu".
        warmup_steps: steps of S-SGD first; the authors have 500.
        overlap: False waits for what is launched: the same trajectory, nothing hidden.
        elementwise: True says that the optimizer treats every element by itself although a trial says otherwise, as it does
            of one whose steps are random (see ``SSGD``).
        weights: of the ranks in every mean, in any scale. Equal by default.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range; in a fit, "glu" beside another optimizer than SGD.
        TypeError: an option that only DDP understands, or an unknown one; in a fit, an optimizer that needs whole tensors.
        MisconfigurationException: in a fit with ``precision="16-mixed"``.
    """

    registered_name: ClassVar[str] = SSDSGD.name

    def __init__(
        self,
        period: int | Mapping[int, int] | When = 5,
        *,
        local_update: str | LocalUpdate = "glu",
        scaling: Literal["plain", "paper"] = "plain",
        pre_refresh: Literal["pull", "every_step"] = "pull",
        warmup_steps: int = 0,
        overlap: bool = True,
        elementwise: bool = False,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            SSDSGD,
            period=period,
            local_update=local_update,
            scaling=scaling,
            pre_refresh=pre_refresh,
            warmup_steps=warmup_steps,
            overlap=overlap,
            elementwise=elementwise,
            weights=weights,
        )
