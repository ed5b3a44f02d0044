"""Rounding at random."""

from __future__ import annotations

import torch
from torch import Tensor


def stochastic_(v: Tensor, generator: torch.Generator | None) -> Tensor:
    """v ← ⌊v⌋ + 1 with probability v − ⌊v⌋, else ⌊v⌋: unbiased, up to 2⁻²⁴ of a unit."""
    low = torch.floor(v)
    u = torch.empty_like(v).uniform_(generator=generator)
    return torch.lt(u, v.sub_(low), out=v).add_(low)
