"""Waiting for the transport without being at its mercy.

A Gloo operation whose connections have gone may never be told so. The communication thread therefore waits for the
operation's future, not inside the transport, and leaves once communication is over.
"""

from __future__ import annotations

import ctypes
import threading

import torch.distributed as dist

from lightning_cocod.comm.errors import GivenUp, transport

_PATIENCE = 0.5  # seconds between two looks at whether communication is over; completion wakes at once


def finish(work: dist.Work | None, group: dist.ProcessGroup, over: threading.Event) -> None:
    """Wait for an operation. On NCCL the current stream waits, not the host.

    Raises:
        TransportError: the operation failed.
        GivenUp: communication was over before the operation was.
    """
    assert work is not None  # every rank is a member of the group
    if dist.get_backend(group) != "nccl" and not work.is_completed():
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(_PATIENCE):
            if over.is_set() and not done.wait(_PATIENCE):
                raise GivenUp("it was given up")
    with transport():
        work.wait()


def abandon(group: dist.ProcessGroup) -> None:
    """Forget a group with an operation under way. Destroying it would wait for the operation, so it is leaked."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    dist.destroy_process_group(group)
