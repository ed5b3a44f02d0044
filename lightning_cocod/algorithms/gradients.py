"""Synchronous steps: the blocking mean of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_cocod.comm import Communicator, Subject


@torch.no_grad()
def average_gradients(
    optimizers: Sequence[Optimizer], comm: Communicator, weight: float, subject: Subject
) -> tuple[int, ...]:
    """g ← Σ_j w_j g_j for every parameter that the optimizers move.

    A parameter without a gradient on this worker contributes zero; one without a gradient on any worker keeps none, so its
    optimizer skips it as it would for a single worker.

    Returns:
        The ranks whose gradients were not finite. They have the mean of the others' as well.

    Raises:
        TypeError: a sparse gradient.
    """
    members = dict.fromkeys(p for opt in optimizers for g in opt.param_groups for p in g["params"])
    params = [p for p in members if p.requires_grad]
    missing = [p for p in params if p.grad is None]
    if any(p.grad is not None and p.grad.is_sparse for p in params):
        raise TypeError("sparse gradients cannot be averaged; use sparse=False or warmup_steps=0")
    present = torch.tensor([p.grad is not None for p in params], dtype=torch.float32, device=comm.device)
    for p in missing:
        p.grad = torch.zeros_like(p)
    grads = [p.grad for p in params if p.grad is not None]
    mean = comm.mean_([*grads, present], weight, subject)
    mean.wait()
    for p, anywhere in zip(params, present.tolist(), strict=True) if missing or mean.left_out else ():
        if not anywhere:
            p.grad = None
    return mean.left_out
