"""``Trainer(strategy="dc_asgd")``."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_cocod.algorithms.dc_asgd import DCASGD
from lightning_cocod.strategies.asynchronous import AsynchronousStrategy


class DCASGDStrategy(AsynchronousStrategy):
    """DC-ASGD under Lightning: ``APSGDStrategy`` whose server compensates the delay of a gradient (see ``DCASGD``).

    Args:
        adaptive: DC-ASGD-a in place of DC-ASGD-c.
        lambda_0: λ of the compensation; by default 0.04, and 2 if it is adaptive.
        beta: β of the adaptive one.
        epsilon: ε of the adaptive one.
        overlap: see ``APSGDStrategy``.
        max_staleness: see ``APSGDStrategy``.
        elementwise: see ``APSGDStrategy``.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one; in a fit, an optimizer that needs whole tensors.
        MisconfigurationException: in a fit, what ranks with different numbers of steps cannot do, or ``"16-mixed"``.
    """

    registered_name: ClassVar[str] = DCASGD.name

    def __init__(
        self,
        *,
        adaptive: bool = False,
        lambda_0: float | None = None,
        beta: float = 0.95,
        epsilon: float = 1e-7,
        overlap: bool = True,
        max_staleness: int | None = None,
        elementwise: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(
            DCASGD,
            adaptive=adaptive,
            lambda_0=lambda_0,
            beta=beta,
            epsilon=epsilon,
            overlap=overlap,
            max_staleness=max_staleness,
            elementwise=elementwise,
        )
