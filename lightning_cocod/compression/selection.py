"""The k largest of many magnitudes, in a few passes over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cocod.compression.memory import new, span, spans


def largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k values of largest magnitude, in ascending order; of equal ones those that come first.

    A threshold that a sample suggests leaves a few candidates, which are compared exactly. NaN counts as infinite.
    """
    if k == x.numel():
        return torch.arange(k, device=x.device)
    where = _above(x, _threshold(x, k))
    if where.numel() < k:  # the sample has misled
        where = torch.arange(x.numel(), device=x.device)
    size = x[where].abs_().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = size.topk(k, sorted=False).values.amin()
    keep = size > least
    ties = (size == least).nonzero().view(-1)
    keep[ties[: k - int(keep.sum())]] = True
    return where[keep]


def _threshold(x: Tensor, k: int) -> Tensor:
    """A magnitude that k values or some more most probably reach: four deviations below the sample's share k/n."""
    stride = max(1, x.numel() // min(1 << 16, max(1 << 12, x.numel() >> 6)))
    sample = x[::stride].abs()
    expected = k * sample.numel() / x.numel()
    rank = int(expected + 4 * expected**0.5) + 4
    return sample.topk(min(rank, sample.numel()), sorted=False).values.amin()


def _above(x: Tensor, threshold: Tensor) -> Tensor:
    """Indices of the magnitudes that are not below a threshold, in ascending order."""
    n = x.numel()
    hits = torch.empty(-(-n // 8) * 8, dtype=torch.int8, device=x.device)
    hits[n:] = 0
    scratch = new(x, torch.float32, span(n, x.device))
    for here in spans(n, x.device):
        size = torch.abs(x[here], out=scratch[: here.stop - here.start])
        hits[here].copy_(torch.ge(size, threshold, out=size))
    eights = hits.view(torch.int64)  # nonzero takes its time for each element, so for eight at once where there is nothing
    some = eights.nonzero().view(-1)
    each = eights[some].view(torch.int8).nonzero().view(-1)
    return some[each >> 3].mul_(8).add_(each & 7)
