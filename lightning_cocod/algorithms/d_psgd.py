"""D-PSGD: at every step a worker mixes its model with those of its neighbours, while it computes its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.mixing import Mixing
from lightning_cocod.comm.mixing import Graph, undirected


class DPSGD(Mixing):
    r"""D-PSGD (Lian, Zhang, Zhang, Hsieh, Zhang, Liu; NeurIPS 2017; arXiv 1705.09056).

    Worker i of N has x_i; W is symmetric and doubly stochastic. U is the user's optimizer's update::

        every step:       x_i ← Σ_j W_ij x_j + U(g(x_i))

    g is taken at the x_i that is sent, so the exchange overlaps forward and backward; it has ended before the next forward.
    What a worker sends does not grow with N. The mean moves as x̄ ← x̄ + Σ_j U(g(x_j)) / N, and without gradients the
    distance of workers from it shrinks at each step by the second largest eigenvalue of W in absolute value at least. It is
    the model to evaluate, and that of the end. Momentum and everything else in the optimizer is local. With "full" and
    SGD it is ``CoCoD`` with a period of 1 and equal weights.

    What is mixed, and memory, are as in ``Mixing`` with τ = 1.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        graph: "ring": a third of oneself and of either neighbour; "exponential": neighbours at the distances 1, 2, 4, …;
            "full": all; or W, a row for each worker.
        overlap: False waits for the exchange where it is launched: the same trajectory bit for bit, nothing hidden.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: an option out of range; a W that is not square, of another size than N, not symmetric, not doubly
            stochastic, or that does not connect all workers; ``weights``, ``compression`` or ``intra_node``.
    """

    name: ClassVar[str] = "d_psgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        graph: Graph = "ring",
        *,
        overlap: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, matrices=undirected, graph=graph, delay=1, overlap=overlap, **shared)
