"""Euclidean norms, as numbers on the tensors' device: NaN or infinite if the tensors are.

One may also be infinite where a square, or their sum, overflows: numbers beyond 10¹⁹ in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Norm over all of them, in float64."""
    return total(norms(tensors))


def finite(tensors: Sequence[Tensor], size: Tensor | None = None) -> bool:
    """Whether all of them are. Their norm, given or taken, tells without new memory, unless it overflows by itself."""
    if bool(torch.isfinite(norm(tensors) if size is None else size)):
        return True
    return all(bool(t.isfinite().all()) for t in tensors)


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norm of each, those of one dtype together: a call for each costs more than the arithmetic."""
    sizes: list[Tensor] = []
    for dtype, alike in _by_dtype(tensors).items():
        if dtype in (torch.float32, torch.float64) and all(t.dim() == 1 and t.device.type == "cpu" for t in alike):
            sizes += [torch.dot(t, t).sqrt_() for t in alike]  # of BLAS: twice as fast as torch's norms
        else:
            sizes += torch._foreach_norm(alike, 2, torch.promote_types(dtype, torch.float32))
    return sizes


def total(sizes: Sequence[Tensor]) -> Tensor:
    """Norm over all tensors of which these are the norms, in float64."""
    parts = [torch.stack(alike).double() for alike in _by_dtype(sizes).values()]
    both: Tensor = torch.linalg.vector_norm(torch.cat(parts)) if parts else torch.zeros((), dtype=torch.float64)
    return both


def _by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return kinds
