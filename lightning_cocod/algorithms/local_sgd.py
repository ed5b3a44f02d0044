"""Local SGD: local steps, then a blocking mean of the parameters. CoCoD without the delay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.shared_base import SharedBase
from lightning_cocod.algorithms.when import When, as_when
from lightning_cocod.comm import Message


class LocalSGD(Algorithm):
    r"""Local SGD (Stich; ICLR 2019; arXiv 1805.09767), the blocking twin of CoCoD.

    U is the user's optimizer's update, w_j the workers' weights::

        every step:       x ← x + U(g(x))
        t = k, 2k, …:     x ← Σ_j w_j x_j            # blocking, before the forward of step t

    With k = 1 and an optimizer that is linear in the gradient (SGD with or without momentum, no clipping) it is
    synchronous SGD. Everything in the optimizer stays local. Memory beyond the parameters: two buckets.

    With ``compression`` the workers send codes of how far they are from a base that they share (see ``SharedBase``): two
    copies of the parameters.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        weights: w of every rank, in any scale. Equal by default.
        warmup_steps: synchronous steps first, whose gradients are averaged before the optimizer's step.
        **shared: ``compression``, ``on_nonfinite``, ``communicator``, … (see ``Algorithm``).

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "local_sgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 4,
        *,
        weights: Sequence[float] | None = None,
        warmup_steps: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, when=as_when(period, warmup_steps), weights=weights, **shared)
        self.base = None if self.compression is None else SharedBase(self.comm, self.compression)

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0."""
        super().start(broadcast=broadcast)
        if self.base is not None:
            self.base.forget()
        self.rounds.ends = None
        self._at_boundary()

    def after_step(self) -> None:
        """Average where a round ends."""
        super().after_step()
        self._at_boundary()

    def _at_boundary(self) -> None:
        first = self.rounds.ends is None  # all workers still have the same weights
        if self.comm.world_size == 1 or not self.rounds.begin(self.t):
            return
        self.begin_round()
        if self.base is not None:
            self.repair(self.base.take_in(self.x, self.w, self.subject("new parameters") if self.apart else None))
        if not first:
            self._merged = self._average()
            self.repair(self._merged.left_out)
        self.weighing.report_round()  # nothing is in flight: what is averaged next is the round that begins

    def _average(self) -> Message:
        """x ← Σ_j w_j x_j."""
        subject = self.subject("round")
        if self.base is not None:
            return self.base.average_(self.x, subject)
        mean = self.comm.mean_([p.detach() for p in self.x], self.w, subject, measured=True)
        mean.wait()
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Adds the base of compressed rounds, if they are."""
        return {**super().state_dict(), "theta": None if self.base is None else self.base.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in mid-round."""
        super().load_state_dict(state)
        if self.base is not None:
            self.base.load_state_dict(state["theta"], self.x)
