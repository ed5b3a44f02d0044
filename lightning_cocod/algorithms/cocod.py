"""CoCoD-SGD: local steps while the mean of the previous round is in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.options import flag
from lightning_cocod.algorithms.shared_base import SharedBase
from lightning_cocod.algorithms.when import When, as_when
from lightning_cocod.comm import Message
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.ledger import Reading


class CoCoD(Algorithm):
    r"""CoCoD-SGD (Shen, Xu, Liu, Liang, Cheng; IJCAI 2019; arXiv 1906.12043).

    Worker i of N holds x_i, a snapshot S_i, and has A = Σ_j w_j S_j in flight. U is the user's optimizer's update::

        t = 0:            S ← x ;  A ← async Σ_j w_j S_j
        every step:       x ← x + U(g(x))
        t = k, 2k, …:     wait(A) ;  x ← x + (A − S) ;  S ← x ;  A ← async Σ_j w_j S_j

    so that with plain SGD, at t ≥ k and t0 = (⌊t/k⌋ − 1)·k, x_i(t) = Σ_j w_j x_j(t0) − γ Σ_{τ=t0}^{t−1} G_i(τ).

    Merging happens before the forward of step k, 2k, …. Momentum and everything else in the optimizer stays local. Only
    parameters travel; BatchNorm's running statistics stay local until evaluation. Follows the authors' supplement. Memory
    beyond the parameters: one copy of them (S, which becomes its own correction A − S in place) and two buckets.

    With ``compression`` the workers send codes of how far they are from a base that they share (see ``SharedBase``): one
    more copy of the parameters.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        weights: w of every rank, in any scale; the mini-batch sizes in the paper. Equal by default.
        warmup_steps: synchronous steps first, whose gradients are averaged before the optimizer's step.
        overlap: False waits for A where it is launched: the same trajectory bit for bit, nothing hidden.
        **shared: ``compression``, ``on_nonfinite``, ``communicator``, … (see ``Algorithm``).

    Raises:
        ValueError: an option out of range.

    Example, in any loop that torchrun launches::

        with CoCoD(model, optimizer, period=4) as cocod:
            for x, y in batches:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
            with cocod.consensus():
                evaluate(model)
    """

    name: ClassVar[str] = "cocod"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 4,
        *,
        weights: Sequence[float] | None = None,
        warmup_steps: int = 0,
        overlap: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, when=as_when(period, warmup_steps), weights=weights, **shared)
        self.overlap = flag("overlap", overlap)
        self.S: Buffer | None = None
        self.A: Message | None = None
        self.base = None if self.compression is None else SharedBase(self.comm, self.compression)
        self._staleness = 0
        self._taken: tuple[list[nn.Parameter], Tensor | None] = [], None  # what S is a snapshot of already, and its norm

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0, then the first launch."""
        super().start(broadcast=broadcast)
        self._forget()
        self.rounds.ends = None
        self._at_boundary()

    def after_step(self) -> None:
        """Merge and launch where a round ends."""
        super().after_step()
        self._at_boundary()

    def finish(self) -> None:
        """Every replica becomes Σ_j w_j (x_j + c_j)."""
        super().finish()
        self._forget()

    def _forget(self) -> None:
        self.S, self.A, self.left_out = None, None, ()
        if self.base is not None:
            self.base.forget()

    def _at_boundary(self) -> None:
        if self.comm.world_size > 1 and self.rounds.begin(self.t):
            self._merge()
            self._launch()

    @torch.no_grad()
    def _merge(self) -> None:
        """wait(A) ; x ← x + (A − S), or x ← A without a finite S. S becomes the new x on the way: one pass over both."""
        if self.S is None:
            return
        if self.A is not None:
            self.A.wait()
            self._merged, self._staleness, self.left_out = self.A, self.t - self.A.step, self.A.left_out
        if self.comm.rank in self.left_out:
            self.S.copy_to(self.x)
        else:
            self._taken = self.x, self.S.fold(self.x)
        self.repair(self.left_out)

    @torch.no_grad()
    def _launch(self) -> None:
        """S ← x ; A ← async Σ_j w_j S_j."""
        self.begin_round()
        if self.base is not None:
            θ = self.base.θ
            self.repair(self.base.take_in(self.x, self.w, self.subject("new parameters") if self.apart else None))
            if self.base.θ is not θ:  # x has become a mean
                self._taken = [], None
        layout = self.comm.layout(self.x)
        if self.S is None or self.S.layout is not layout:
            self.S, self._taken = layout.buffer(), ([], None)
        (taken, size), self._taken = self._taken, ([], None)
        if list(map(id, taken)) != list(map(id, self.x)):
            size = self.S.take(self.x)
        subject, self.left_out = self.subject("round"), ()
        if self.base is None:
            self.A = self.comm.correction_(self.S, subject, size=size)
        else:
            self.A = self.base.correction_(self.S, subject, size=size)
        if not self.overlap:
            self.A.wait()

    def _drain(self) -> None:
        if self.A is not None:
            self.A.wait(counted=False)
            self.left_out = self.A.left_out

    def _pending_correction(self) -> Callable[[], None] | None:
        if self.S is None:
            return None
        self._drain()
        S, x = self.S, self.x
        return lambda: S.add_to(x)

    def state_dict(self) -> dict[str, Any]:
        """Adds the correction A - S of the round in flight: drained, not folded."""
        self._drain()
        correction = None if self.S is None else [bucket.clone() for bucket in self.S.buckets]
        θ = None if self.base is None else self.base.state_dict()
        return {**super().state_dict(), "correction": correction, "left_out": list(self.left_out), "theta": θ}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the correction that was in flight; it is folded at the step at which it would have been."""
        super().load_state_dict(state)
        self._drain()  # of the launch in start(): its buffer is used again
        layout = self.comm.layout(self.x)
        if state["correction"] is None:
            self.S = None
        elif self.S is None or self.S.layout is not layout:
            self.S = layout.buffer()
        self.A, self.left_out = None, tuple(state["left_out"])
        if self.base is not None:
            self.base.load_state_dict(state["theta"], self.x)
        if self.S is not None:
            for bucket, value in zip(self.S.buckets, state["correction"], strict=True):
                bucket.copy_(value)

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """Adds the staleness of the last merge: steps between the snapshot and its merging."""
        return {**super().metrics(since), "algo/staleness_steps": float(self._staleness)}
