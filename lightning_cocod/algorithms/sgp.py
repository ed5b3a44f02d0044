"""SGP and OSGP: models are pushed along directed edges, and what a worker has of all of them is divided out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.mixing import Mixing
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.mixing import Graph, Matrix, directed, is_regular, pushed

T = TypeVar("T")


class SGP(Mixing):
    r"""Stochastic Gradient Push (Assran, Loizou, Ballas, Rabbat; ICML 2019; arXiv 1811.10792), OSGP with a ``delay``.

    Worker i of N has x_i and a weight w_i, at first 1; the model is z_i = x_i / w_i. P is column-stochastic: its column j
    says what worker j gives to whom. U is the user's optimizer's update::

        every step:                 x_i ← x_i + U(g(z_i))
        τ = 0:                      (x_i, w_i) ← Σ_j P_ij (x_j, w_j)                         # after it, blocking
        τ ≥ 1, t = 0, τ, 2τ, …:     wait(C) ;  (x_i, w_i) ← (x_i, w_i) + C_i
                                    C_i ← async Σ_j P_ij (x_j, w_j) − (x_i, w_i)

    Neither Σ x_i nor Σ w_i = N is changed by mixing, so without gradients every z_i goes to the mean, whatever the graph.
    In a regular one (all named ones are) rows of P add up to 1 as well, and w is exactly 1. The consensus is the mean
    Σ x_i / Σ w_i, of all else as well the mean with the weights w_i / N.

    z_j is what travels, and P_ij w_j what it is weighed by where it arrives: the graph is known to all, and so are all w.
    Elsewhere p_ij x_j and p_ij w_j are sent; that is the same to rounding. By the authors' code (the paper's text was not at
    hand) a worker gives its share away when it sends, so that with τ ≥ 1 its w is smaller, and a step takes z_i further,
    until something arrives; here it goes on with all that it has. For τ = 1 that changes nothing but what weight decay is
    computed from.

    The optimizer steps x, as in the authors' code: where w is not 1, weight decay is that of x. Halves are then rounded
    twice more in each step. What is mixed, and memory, are as in ``Mixing``.

    Args:
        model: the module that is trained; it holds z.
        optimizer: one or several torch optimizers over its parameters.
        graph: "one_peer": worker i sends a half to i + 1, i + 2, i + 4, … in turns; "exponential": to all of these at once;
            "full": to all; P, a row for each receiver; or ``{worker: [those it sends to]}``.
        delay: τ, steps that a message may take: 0 blocks, 1 hides it behind the next forward and backward.
        overlap: False waits for each message where it is launched: the same trajectory bit for bit, nothing hidden.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: an option out of range; a P that is not square, of another size than N, not column-stochastic, in which
            a worker keeps nothing, or that does not connect all workers; ``weights``, ``compression`` or ``intra_node``.

    In a plain loop whose graph is not regular call ``sgp.step()`` after ``backward()``.
    """

    name: ClassVar[str] = "sgp"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        graph: Graph = "one_peer",
        *,
        delay: int = 0,
        overlap: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, matrices=directed, graph=graph, delay=delay, overlap=overlap, **shared)

    def _forget(self) -> None:
        super()._forget()
        self.push_weights = [1.0] * self.comm.world_size
        """w of all workers."""
        self._after = self.push_weights  # what they are once the correction in flight is folded in

    @property
    def push_weight(self) -> float:
        """w_i."""
        return self.push_weights[self.comm.rank]

    @property
    def weights(self) -> list[float]:
        """w / N: of the workers' z in the consensus, what is in flight included."""
        whole = self._after if self._pending and not self.left_out else self.push_weights
        return [w / self.comm.world_size for w in whole]

    def step(self, update: Callable[[], T] | None = None, *, scaler: torch.amp.GradScaler | None = None) -> T | None:
        """x ← x + U(g(z))."""
        if update is None or self.push_weight == 1:
            return super().step(update, scaler=scaler)
        x = [p.detach() for p in self._parameters()]
        torch._foreach_mul_(x, self.push_weight)
        try:
            return super().step(update, scaler=scaler)
        finally:
            torch._foreach_div_(x, self.push_weight)

    def _mixture(self) -> tuple[Matrix, float]:
        """P_ij w_j, and w_i' − w_i, w' being the weights after the exchange: S is z, and becomes x' − x."""
        P, w = self.matrices[self.k % len(self.matrices)], self.push_weights
        self._after = pushed(P, w)
        i = self.comm.rank
        return tuple(tuple(p * v for p, v in zip(row, w, strict=True)) for row in P), self._after[i] - w[i]

    def _fold(self, S: Buffer) -> Tensor | None:
        if self.push_weight == self._after[self.comm.rank] == 1:
            self.push_weights = self._after
            return super()._fold(S)
        self._to_z(S)
        self.push_weights = self._after
        return None

    def _to_z(self, S: Buffer) -> None:
        """z ← (w z + C) / w'."""
        x = [p.detach() for p in self.x]
        torch._foreach_mul_(x, self.push_weight)
        S.add_to(self.x)
        torch._foreach_div_(x, self._after[self.comm.rank])

    def _pending_correction(self) -> Callable[[], None] | None:
        fold, S = super()._pending_correction(), self.S
        if fold is None or S is None or self.left_out:
            return fold
        return lambda: self._to_z(S)

    def state_dict(self) -> dict[str, Any]:
        """Adds w, now and once the correction in flight is folded in."""
        return {**super().state_dict(), "push_weights": [list(self.push_weights), list(self._after)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue; the model's z are those of these weights."""
        super().load_state_dict(state)
        self.push_weights, self._after = map(list, state["push_weights"])

    def _why_explicit(self) -> str | None:
        irregular = not all(map(is_regular, self.matrices))
        why = "the graph is not regular: the model holds z = x / w, and the optimizer steps x" if irregular else None
        return super()._why_explicit() or why
