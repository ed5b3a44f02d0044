"""Overlap-Local-SGD: workers are pulled towards an anchor, whose next position is computed behind the next round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.co2 import penalised
from lightning_cocod.algorithms.delay import Lag
from lightning_cocod.algorithms.options import below_one, share
from lightning_cocod.algorithms.outer import OuterRounds
from lightning_cocod.algorithms.when import When


class OverlapLocalSGD(OuterRounds):
    r"""Overlap-Local-SGD with anchor momentum (Wang, Liang, Joshi; ICASSP 2020; arXiv 2002.09539).

    Worker i holds x_i; the anchor z and its momentum v are the same for all. The mean Δ̄ of a round travels while the next
    one computes. U is the user's optimizer's update, g the gradient of worker i's own batch, w_j the weight of worker j; all
    weights sum to 1. x, z, v and Δ have the shapes and the units of the parameters::

        t = 0:            z ← x ;  v ← 0
        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     wait(Δ̄)                          # not at t = k
                          v ← β v + Δ̄ ;  z ← z − v
                          x_i ← (1 − α) x_i + α z          # the pull
                          Δ̄ ← async Σ_j w_j (z − x_j)

    The paper gives each worker the momentum of its own displacements and sends z − η v_i; while the weights stay as they
    are, the momentum of the mean is the mean of those, and the rate η cancels. The pull keeps workers together that see
    different data, and the anchor moves by their mean. With β = 0 the anchor is the mean of the pulled workers, a round
    late. α = 1 would undo every round, and is refused.

    The model to evaluate is the anchor, the Δ̄ in flight included: it, and the model at the end, have no local steps since
    the last round's end. Memory beyond the parameters: three copies of them, z, v and the message.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: optimizer steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        pull: 0 < α < 1, a pure number.
        anchor_momentum: 0 ≤ β < 1, a pure number.
        overlap: False waits for each mean where it is launched: the same trajectory bit for bit, nothing hidden.
        **shared: as for ``OuterRounds``: ``weights``, ``warmup_steps``, ``on_nonfinite``, …

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "overlap_local_sgd"
    brings_closer: ClassVar[str] = (
        "Shorter rounds (period=) help with both, a lower rate with the latter; where the data has to differ, raise pull"
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 2,
        *,
        pull: float = 0.6,
        anchor_momentum: float = 0.7,
        overlap: bool = True,
        **shared: Any,
    ) -> None:
        α, β = share("pull", pull), below_one("anchor_momentum", anchor_momentum)
        if α == 1:
            raise ValueError("pull=1 takes every round back, and nothing would ever move: pull less")
        outer, lag = penalised(1.0, β, 1.0, None), Lag(None, 1 - α, overlap=overlap)
        super().__init__(model, optimizer, period, outer=outer, delay=lag, **shared)
