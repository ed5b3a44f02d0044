"""The mean of the workers' models, in place of each one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lightning_cocod.comm import Communicator, Subject


@torch.no_grad()
def become_mean(
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    comm: Communicator,
    w: float,
    subject: Subject,
    *,
    fit: bool | None = None,
) -> tuple[int, ...]:
    """Parameters, and buffers that are numbers with a fraction, ← Σ_j w_j of the workers' ; counters ← rank 0's. Blocking.

    Args:
        parameters: of this worker.
        buffers: likewise.
        comm: of all workers. Collective.
        w: this worker's weight.
        subject: of the messages.
        fit: False where it is known that the worker's values are not finite; None to look.

    Returns:
        The ranks that the mean is one without; they have it now, like all.
    """
    with on_device(parameters, comm.device) as here:
        mean = comm.mean_(here, w, subject, fit=fit)
        mean.wait()
    with on_device([b for b in buffers if _has_fraction(b)], comm.device) as averaged:
        if averaged:  # not looked at: an attention mask holds -inf rightly
            fit = comm.rank not in mean.left_out
            comm.mean_(averaged, w, replace(subject, kind=f"{subject.kind}, buffers"), fit=fit).wait()
    with on_device([b for b in buffers if not _has_fraction(b)], comm.device) as counters:
        if counters:
            comm.broadcast_(counters, replace(subject, kind=f"{subject.kind}, counters")).wait()
    return mean.left_out


@contextmanager
def on_device(tensors: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """The tensors; for those that lie elsewhere, as an average in host memory does, copies that are written back."""
    here = [t.to(device) for t in tensors]
    yield here
    for tensor, copy in zip(tensors, here, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def _has_fraction(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
