"""Low rank: a matrix as the product of two thin ones. No codec: the workers add up the first before they make the second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.seeds import seed_of
from lightning_cocod.options import whole


@dataclass(frozen=True)
class PowerSGD:
    r"""M̂ = P Qᵀ of rank r: one step of a subspace iteration, from the Q of the message before. M_j is worker j's part::

        P ← Σ_j w_j M_j Q ;  P ← orth(P) ;  Q ← Σ_j w_j M_jᵀ P ;  M̂ ← P Qᵀ

    so that M̂ = P Pᵀ M is a projection of M = Σ_j w_j M_j: ‖M − M̂‖² = ‖M‖² − ‖M̂‖². P and Q are sums, and so of the same size
    for any number of workers. Of worker j M̂ has P Q_jᵀ, Q_j = M_jᵀ P. 32 r (m + n) bits in place of 32 m n; what is no
    matrix, or not worth it, travels whole.

    Source: Vogels, Karimireddy, Jaggi: PowerSGD, 2019 (arXiv 1905.13727).

    Args:
        rank: r, at least 1.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 2

    def __post_init__(self) -> None:
        whole("rank", self.rank, least=1)

    def saves(self, m: int, n: int) -> bool:
        """Whether two factors of an m × n matrix are smaller than it."""
        return self.rank * (m + n) < m * n

    def factor(self, n: int, like: Tensor) -> Tensor:
        """New, uninitialised memory for one of n × r, each column in one piece; dtype and device of another tensor."""
        return torch.empty(self.rank, n, dtype=like.dtype, device=like.device).t()


def start_(Q: Tensor, seed: Sequence[int]) -> None:
    """Q ← random columns, the same wherever the seed is: numbers that are exact on every machine."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    Q.copy_(torch.rand(Q.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1))
    Q.div_(torch.linalg.vector_norm(Q, dim=0))


def orthonormalise_(P: Tensor) -> None:
    """P ← an orthonormal basis of what its columns span, and of more where they depend on each other.

    By Householder reflections in float64, on the CPU: few numbers, whose bits are not to depend on a device.
    """
    P.copy_(torch.linalg.qr(P.to("cpu", torch.float64)).Q)


def warm_(Q: Tensor, seed: Sequence[int]) -> None:
    """Q ← its columns with norm 1, to begin the next message with. What is only rounding begins anew, at random.

    A column of zeros would stay one for ever, and so would P's; one that shrinks with M would come to underflow.
    """
    norms = torch.linalg.vector_norm(Q, dim=0, dtype=torch.float64)  # squares of small numbers
    spent = norms <= 16 * torch.finfo(Q.dtype).eps * torch.linalg.vector_norm(norms)
    Q.div_(torch.where(spent, torch.ones_like(norms), norms))
    if bool(spent.any()):
        new = torch.empty_like(Q)
        start_(new, seed)
        Q.copy_(torch.where(spent, new, Q))
