"""What workers that mix with neighbours have in common: a snapshot goes out, its correction is folded in later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.options import flag, whole
from lightning_cocod.algorithms.repair import restore
from lightning_cocod.algorithms.when import Every
from lightning_cocod.comm import Message
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.comm.mixing import Matrix
from lightning_cocod.comm.shards import Rows


class Mixing(Algorithm):
    r"""Worker i of N has x_i. W is a matrix, or one for each exchange in turns; U is the user's optimizer's update::

        τ ≥ 1, t = 0, τ, 2τ, …:   wait(C) ;  x_i ← x_i + C_i ;  C_i ← async Σ_j W_ij x_j − x_i
        τ = 0, t = 1, 2, …:       C_i ← Σ_j W_ij x_j − x_i ;  x_i ← x_i + C_i
        every step:               x_i ← x_i + U(g(x_i))

    Only parameters are mixed; BatchNorm's running statistics are local until evaluation, and the optimizer's state always.
    Where a snapshot is not finite and ``on_nonfinite`` is "skip", that exchange mixes nothing, and the worker goes on from a
    copy of the first sound one. Memory beyond the parameters: one copy of them, and buckets for each neighbour.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        matrices: what makes the W of all exchanges from a graph, given the number of workers.
        graph: what a user gave.
        delay: τ.
        overlap: False waits for C where it is launched: the same trajectory bit for bit, nothing hidden.
        **shared: see ``Algorithm``.

    Raises:
        ValueError: an option out of range, ``weights`` or ``compression``.
    """

    has_rounds: ClassVar[bool] = False
    brings_closer: ClassVar[str] = "More neighbours (graph=) help with both"
    weighs_workers: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        matrices: Callable[[Any, int], tuple[Matrix, ...]],
        graph: Any,
        delay: int,
        overlap: bool,
        **shared: Any,
    ) -> None:
        self.τ, self.overlap = whole("delay", delay, least=0), flag("overlap", overlap)
        super().__init__(model, optimizer, when=Every(max(1, self.τ)), **shared)
        if self.compression is not None:
            raise ValueError(
                f"{self.name} sends models, in which a codec's error would stay: leave compression out, "
                "or use cocod, which sends codes of what has moved"
            )
        self.matrices = matrices(graph, self.comm.world_size)
        self._rows = Rows()
        self._forget()

    def _forget(self) -> None:
        self.S: Buffer | None = None
        self.A: Message | None = None
        self.k = 0
        """Exchanges so far."""
        self.left_out = ()
        self._pending = False  # whether S is, or becomes, a correction that has yet to be folded in
        self._staleness = 0

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0, then the first launch, if there are delays."""
        super().start(broadcast=broadcast)
        self._forget()
        self.rounds.ends = None
        if self.τ:
            self._at_boundary()

    def after_step(self) -> None:
        """Merge and launch where it is time."""
        super().after_step()
        self._at_boundary()

    def finish(self) -> None:
        """Every replica becomes the consensus."""
        super().finish()
        self._forget()

    def _at_boundary(self) -> None:
        if self.comm.world_size == 1 or not self.rounds.begin(self.t):
            return
        if self.τ:
            self._launch(self._merge())
        else:
            self._launch(None)
            self._merge()

    @torch.no_grad()
    def _merge(self) -> Tensor | None:
        """wait(C) ; x ← x + C. Returns ‖x‖ where S has become a snapshot of it on the way."""
        if self.S is None or not self._pending:
            return None
        self._drain()
        if self.A is not None:
            self._merged, self._staleness = self.A, self.t - self.A.step
        left_out, size = self.left_out, None
        if left_out:
            restore([p.detach() for p in self.x], self.comm, left_out, self.subject("repair"))
        else:
            size = self._fold(self.S)
        self._pending, self.left_out = False, ()
        self.repair(left_out)
        return size

    def _fold(self, S: Buffer) -> Tensor | None:
        """x ← x + C ; S ← x, of which the norm is returned."""
        return S.fold(self.x)

    @torch.no_grad()
    def _launch(self, size: Tensor | None) -> None:
        """C ← async Σ_j W_ij x_j − x_i."""
        members = self.x
        self.begin_round()
        layout = self.comm.layout(self.x, whole=True)
        if self.S is None or self.S.layout is not layout:
            self.S, size = layout.buffer(), None
        if size is None or list(map(id, members)) != list(map(id, self.x)):
            size = self.S.take(self.x)
        W, kept = self._mixture()
        self.A = self.comm.mix_(self.S, W, self._rows, self.subject("round"), kept=kept, size=size)
        self.k, self._pending = self.k + 1, True
        if not self.overlap:
            self.A.wait()

    def _mixture(self) -> tuple[Matrix, float]:
        """W of this exchange, and Σ_j W_ij − 1, of which nothing is left where rows add up to 1."""
        return self.matrices[self.k % len(self.matrices)], 0.0

    def _drain(self, *, counted: bool = True) -> None:
        if self._pending and self.A is not None:
            self.A.wait(counted=counted)
            self.left_out = self.A.left_out

    def _pending_correction(self) -> Callable[[], None] | None:
        if self.S is None or not self._pending:
            return None
        self._drain(counted=False)
        S, x = self.S, self.x
        return lambda: S.add_to(x)

    def state_dict(self) -> dict[str, Any]:
        """Adds the correction in flight: drained, not folded; and the number of exchanges."""
        self._drain(counted=False)
        correction = [bucket.clone() for bucket in self.S.buckets] if self.S is not None and self._pending else None
        return {**super().state_dict(), "correction": correction, "left_out": list(self.left_out), "exchanges": self.k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the correction that was in flight; it is folded at the step at which it would have been."""
        super().load_state_dict(state)
        self._drain(counted=False)  # of the launch in start()
        self._forget()
        self.k, self.left_out = state["exchanges"], tuple(state["left_out"])
        if state["correction"] is not None:
            self.S, self._pending = self.comm.layout(self.x, whole=True).buffer(), True
            for bucket, value in zip(self.S.buckets, state["correction"], strict=True):
                bucket.copy_(value)

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """Adds the staleness of the last merge: steps between the snapshot and its merging."""
        return {**super().metrics(since), "algo/staleness_steps": float(self._staleness)}
