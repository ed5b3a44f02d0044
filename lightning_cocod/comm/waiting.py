"""Waiting for the transport without being at its mercy.

A Gloo operation whose connections have gone may never be told so. The communication thread therefore waits for a moment at a
time, and leaves once communication is over.
"""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta

import torch.distributed as dist

from lightning_cocod.comm.errors import TransportError, transport

_PATIENCE = timedelta(seconds=0.5)  # between two looks at whether communication is over; completion wakes at once


def finish(work: dist.Work, group: dist.ProcessGroup, over: threading.Event) -> None:
    """Wait for an operation. On NCCL the current stream waits, not the host.

    Raises:
        TransportError: the operation failed, or communication was over before it was.
    """
    was_over = False
    while dist.get_backend(group) != "nccl" and not _completes(work):
        if was_over:
            raise TransportError("it was given up")
        was_over = over.is_set()
    with transport:
        work.wait()


def _completes(work: dist.Work) -> bool:
    """Whether the operation ends, well or not, within a moment. One that does not goes on unharmed."""
    try:
        work.wait(_PATIENCE)
    except RuntimeError:  # it has failed, or the moment is over
        return work.is_completed()
    return True


def abandon(group: dist.ProcessGroup) -> None:
    """Forget a group that may have an operation under way. Destroying it would wait for that, so it is leaked; NCCL's, which
    is shut down all the same, gives its operations up before.
    """
    if dist.get_backend(group) == "nccl":
        group.abort()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    dist.destroy_process_group(group)
