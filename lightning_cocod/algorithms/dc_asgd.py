"""DC-ASGD: asynchronous SGD that compensates the delay of a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.a_psgd import APSGD
from lightning_cocod.algorithms.arrival_server import ArrivalServer
from lightning_cocod.algorithms.options import above_zero, below_one, flag, nonnegative
from lightning_cocod.comm.shard_service import Question

CONSTANT, ADAPTIVE = 0.04, 2.0  # λ


class DCASGD(APSGD):
    r"""DC-ASGD (Zheng, Meng, Wang, Chen, Yu, Ma, Liu; ICML 2017; arXiv 1609.08326): A-PSGD whose owners correct a gradient.

    A gradient was computed at w_bak(m), what worker m had pulled, and W has moved since. With the diagonal of g gᵀ in place
    of the Hessian::

        pull(m):     w_bak(m) ← W
        push(m, g):  g̃ = g + λ g ⊙ g ⊙ (W − w_bak(m)) ;  W ← W + U(g̃)          # with SGD: W − η g̃

        adaptive:    v(m) ← β v(m) + (1 − β) g ⊙ g  before its use, and λ/√(v(m) + ε) in place of λ

    The paper has plain SGD. Here U is that of any element-wise optimizer: momentum and weight decay come after the
    correction, of which decay is no part. A gradient comes with the version of its pull and is compensated from that one,
    also with ``overlap``, where a worker's next pull has been made already.

    Memory beyond that of A-PSGD, on each worker: w_bak of the last two pulls, twice the parameters; v, as much as these.

    Args:
        model: the module that is trained.
        optimizer: see ``APSGD``.
        lambda_0: λ. By default 0.04, and 2 if it is adaptive.
        adaptive: DC-ASGD-a in place of DC-ASGD-c.
        beta: β.
        epsilon: ε.
        **shared: see ``APSGD``.

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "dc_asgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        adaptive: bool = False,
        lambda_0: float | None = None,
        beta: float = 0.95,
        epsilon: float = 1e-7,
        **shared: Any,
    ) -> None:
        self.adaptive = flag("adaptive", adaptive)
        default = ADAPTIVE if adaptive else CONSTANT
        self.lambda_0 = default if lambda_0 is None else nonnegative("lambda_0", lambda_0)
        self.beta, self.epsilon = below_one("beta", beta), above_zero("epsilon", epsilon)
        super().__init__(model, optimizer, **shared)

    def make_server(self, optimizer: Optimizer) -> ArrivalServer:
        """One that remembers what has been pulled."""
        server = CompensatingServer(optimizer, self.comm, self.turn, self.staleness, elementwise=self.elementwise)
        server.λ, server.β, server.ε = self.lambda_0, self.beta if self.adaptive else None, self.epsilon
        return server

    def _options(self) -> str:
        return super()._options() + repr((self.adaptive, self.lambda_0, self.beta, self.epsilon))


class CompensatingServer(ArrivalServer):
    """As above."""

    λ: float
    β: float | None
    """None for a constant λ."""
    ε: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        first = [W.clone() for W in self.W]
        self.w_bak: list[dict[int, list[Tensor]]] = [{0: first} for _ in range(self.comm.world_size)]
        """Of each worker, what it has pulled and may have a gradient of under way, by version."""
        self.v: list[list[Tensor] | None] = [None] * self.comm.world_size

    def correct(self, question: Question, g: list[Tensor]) -> None:
        """g ← g̃."""
        pulled = self.w_bak[question.worker]
        if self.β is not None and self.v[question.worker] is None:
            self.v[question.worker] = [torch.zeros_like(W) for W in self.W]
        v = self.v[question.worker]
        for j, (W, w_bak) in enumerate(zip(self.W, pulled[question.base], strict=True)):
            square = g[j] * g[j]
            correction = square * (W - w_bak)
            if self.β is not None and v is not None:
                v[j].mul_(self.β).add_(square, alpha=1 - self.β)
                correction.div_((v[j] + self.ε).sqrt_())
            g[j].add_(correction, alpha=self.λ)

    def pulled(self, worker: int) -> None:
        """w_bak ← W. That of the pull before may still be needed: no gradient under way has an older one."""
        held = self.w_bak[worker]
        held.pop(self.version, None)
        while len(held) > 1:
            del held[next(iter(held))]
        held[self.version] = [W.clone() for W in self.W]

    def state_dict(self) -> dict[str, Any]:
        """w_bak and v as well."""
        w_bak = [{version: [t.clone() for t in held] for version, held in of.items()} for of in self.w_bak]
        v = [None if of is None else [t.clone() for t in of] for of in self.v]
        return {**super().state_dict(), "w_bak": w_bak, "v": v}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """w_bak and v as well."""
        super().load_state_dict(state)
        device = self.comm.device
        self.w_bak = [
            {version: [t.to(device, copy=True) for t in held] for version, held in of.items()} for of in state["w_bak"]
        ]
        self.v = [None if of is None else [t.to(device, copy=True) for t in of] for of in state["v"]]
