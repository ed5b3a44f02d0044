"""Cutting one labelled set into parts with the same share of every class."""

import torch
from torch import Tensor


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices [N−M] to keep and [M] held out, M ≈ `fraction`·N, each class in proportion; `seed` decides."""
    generator = torch.Generator().manual_seed(seed)
    kept, held_out = [], []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        cut = round(fraction * len(members))
        held_out.append(members[:cut])
        kept.append(members[cut:])
    return torch.cat(kept).sort().values, torch.cat(held_out).sort().values
