"""OD-SGD: one-step delay, which is SSD-SGD with a pull every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.local_update import LocalUpdate
from lightning_cocod.algorithms.ssd_sgd import SSDSGD


class ODSGD(SSDSGD):
    """OD-SGD (Xu et al.; arXiv 2005.06728): ``SSDSGD`` with k = 1 and the local update of DC-ASGD-a, λ = 2.

    A worker computes on what the server had a step ago, moved by its own gradient, which is corrected for that to the first
    order.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        local_update: see ``SSDSGD``.
        warmup_steps: steps of S-SGD first.
        overlap: False waits for what is launched: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: ``scaling``, ``pre_refresh`` (see ``SSDSGD``); ``elementwise`` (see ``SSGD``); ``on_nonfinite``,
            ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "od_sgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        local_update: str | LocalUpdate = "dc_asgd_a",
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            1,
            local_update=local_update,
            warmup_steps=warmup_steps,
            overlap=overlap,
            weights=weights,
            **shared,
        )
