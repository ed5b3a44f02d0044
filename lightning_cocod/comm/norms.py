"""Euclidean norms, as numbers on the tensors' device: NaN or infinite if the tensors are.

One may also be infinite where a square, or their sum, overflows: numbers beyond 10¹⁹ in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RunningNorm:
    """‖·‖ over tensors that come one after the other, each while it is in the cache."""

    def __init__(self) -> None:
        self._squares: list[Tensor] = []
        self._norms: list[Tensor] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Those of one dtype are looked at together: a call for each costs more than the arithmetic, but for BLAS's."""
        others: dict[torch.dtype, list[Tensor]] = {}
        for x in tensors:
            if x.dtype in (torch.float32, torch.float64) and x.dim() == 1 and x.device.type == "cpu":
                self._squares.append(torch.dot(x, x))  # twice as fast as torch's norms
            else:
                others.setdefault(x.dtype, []).append(x)
        for dtype, alike in others.items():
            self._norms += torch._foreach_norm(alike, 2, torch.promote_types(dtype, torch.float32))

    def value(self) -> Tensor:
        """So far, in float64."""
        parts = [torch.stack(alike).double().sqrt_() for alike in _by_dtype(self._squares)]
        parts += [torch.stack(alike).double() for alike in _by_dtype(self._norms)]
        both: Tensor = torch.linalg.vector_norm(torch.cat(parts)) if parts else torch.zeros((), dtype=torch.float64)
        return both


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Norm over all of them, in float64."""
    running = RunningNorm()
    running.add(tensors)
    return running.value()


def finite(tensors: Sequence[Tensor], size: Tensor | None = None) -> bool:
    """Whether all of them are. Their norm, given or taken, tells without new memory, unless it overflows by itself."""
    if bool(torch.isfinite(norm(tensors) if size is None else size)):
        return True
    return all(bool(t.isfinite().all()) for t in tensors)


def _by_dtype(numbers: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for number in numbers:
        kinds.setdefault(number.dtype, []).append(number)
    return list(kinds.values())
