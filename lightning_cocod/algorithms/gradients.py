"""Gradients that are averaged: those of a list of parameters, of which a worker may lack some."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.comm import Group, Subject
from lightning_cocod.comm.buckets import in_the_order_of


@torch.no_grad()
def average_gradients(optimizers: Sequence[Optimizer], comm: Group, weight: float, subject: Subject) -> tuple[int, ...]:
    """g ← Σ_j w_j g_j for every parameter that the optimizers move. Blocking.

    A parameter without a gradient on this worker contributes zero; one without a gradient on any worker keeps none, so its
    optimizer skips it as it would for a single worker.

    Returns:
        The ranks whose gradients were not finite. They have the mean of the others' as well.

    Raises:
        TypeError: a sparse gradient.
    """
    params = trainable(optimizers)
    grads, present, complete = filled(params, comm.device)
    mean = comm.mean_([*grads, present], weight, subject)
    mean.wait()
    if not complete or mean.left_out:
        withdraw(params, present)
    return mean.left_out


def trainable(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """The parameters that the optimizers move, each once."""
    members = dict.fromkeys(p for opt in optimizers for g in opt.param_groups for p in g["params"])
    return [p for p in members if p.requires_grad]


def filled(params: Sequence[nn.Parameter], device: torch.device) -> tuple[list[Tensor], Tensor, bool]:
    """Their gradients, which lie in memory as they do, zero where there was none; on the device, a 1 or 0 for each that was
    or was not there; and whether all were.

    Raises:
        TypeError: a sparse gradient.
    """
    there = [p.grad is not None for p in params]
    if any(p.grad is not None and p.grad.is_sparse for p in params):
        raise TypeError("sparse gradients cannot be averaged; use sparse=False, or warmup_steps=0 in a warm-up")
    if all(there):
        present = torch.ones(len(params), device=device)  # a list would make the host wait for the device
    else:
        present = torch.tensor(there, dtype=torch.float32, device=device)
    grads = []
    for p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else in_the_order_of(p, p.grad)
        grads.append(p.grad)
    return grads, present, all(there)


def withdraw(params: Sequence[nn.Parameter], present: Tensor) -> None:
    """No gradient where no worker had one, given the mean of what is ``present``."""
    for p, anywhere in zip(params, present.tolist(), strict=True):
        if not anywhere:
            p.grad = None
