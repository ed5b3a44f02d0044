"""Rounding to whole numbers, to the nearest and at random."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDER = 1.5 * 2**23
"""Where |v| < 2²², v + ROUNDER is v rounded to the nearest whole number, ties to even; its lowest bits are that number."""


def stochastic_(v: Tensor, generator: torch.Generator | None) -> Tensor:
    """v ← ⌊v⌋ + 1 with probability v − ⌊v⌋, else ⌊v⌋: unbiased, up to 2⁻²⁴ of a unit."""
    low = torch.floor(v)
    u = torch.empty_like(v).uniform_(generator=generator)
    return torch.lt(u, v.sub_(low), out=v).add_(low)
