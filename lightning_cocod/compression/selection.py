"""The k largest of many magnitudes, in a few passes over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cocod.compression.memory import span, spans
from lightning_cocod.compression.numpy_ops import at_least, kth_largest, places


def largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k values of largest magnitude, in ascending order; of equal ones those that come first.

    A threshold that a sample suggests leaves a few candidates, which are compared exactly. NaN counts as infinite.
    """
    if k == x.numel():
        return torch.arange(k, device=x.device)
    where = _above(x, _threshold(x, k))
    if where.numel() < k:  # the sample has misled
        where = torch.arange(x.numel(), device=x.device)
    sizes = x.index_select(0, where).abs_().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = kth_largest(sizes, k)
    flags = torch.empty(sizes.shape, dtype=torch.bool, device=x.device)
    at_least(sizes, least, flags)
    chosen = places(flags)
    if (more := chosen.numel() - k) > 0:
        flags[places(sizes == least)[-more:]] = False
        chosen = places(flags)
    return where.index_select(0, chosen)


def _threshold(x: Tensor, k: int) -> Tensor:
    """A magnitude that k values or some more most probably reach: three deviations below the sample's share k/n."""
    sample = x[:: stride(x.numel())].abs()
    expected = k * sample.numel() / x.numel()
    rank = int(expected + 3 * expected**0.5) + 4
    return kth_largest(sample, min(rank, sample.numel()))


def stride(n: int) -> int:
    """Of n values every so many-th is in the sample: 2¹³ to 2¹⁶ of them, or all."""
    return max(1, n // min(1 << 16, max(1 << 13, n >> 6)))


def _above(x: Tensor, threshold: Tensor) -> Tensor:
    """Indices of the magnitudes that are not below a threshold, in ascending order."""
    n = x.numel()
    flags, scratch = torch.empty(n, dtype=torch.bool, device=x.device), x.new_empty(span(n, x.device))
    for here in spans(n, x.device):
        at_least(torch.abs(x[here], out=scratch[: here.stop - here.start]), threshold, flags[here])
    return places(flags)
