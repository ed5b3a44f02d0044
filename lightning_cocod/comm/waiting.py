"""Waiting for the transport without being at its mercy.

A Gloo operation whose connections have gone may never be told so. The communication thread therefore waits for a moment at a
time, and leaves once communication is over.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from lightning_cocod.comm.errors import TransportError, transport

_PATIENCE = timedelta(seconds=0.5)  # between two looks at whether communication is over; completion wakes at once
_KEPT = 1.0  # seconds after which whoever still has a group is taken to keep it


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
    """Destroy a group that may have an operation under way, which its destructor waits for: in a thread of its own.

    NCCL's, which is shut down first, gives its operations up.
    """
    if dist.get_backend(group) == "nccl":
        group.abort()
    outlive([group])
    dist.destroy_process_group(group)


def outlive(groups: Iterable[dist.ProcessGroup]) -> None:
    """Be the last one to let go of each of these, without keeping anybody waiting: it may take until their time-out.

    Leaked ones would go on looking at their connections, a hundred times a second, or all the time where something has come
    that nobody wants any more. One that somebody keeps, as an exception does, is leaked: whoever lets go of it might wait.
    """
    for group in groups:
        threading.Thread(target=_let_go, args=([group],), name="end of a process group", daemon=True).start()


def _let_go(last: list[dist.ProcessGroup]) -> None:
    deadline = time.monotonic() + _KEPT
    while sys.getrefcount(last[0]) > 2:  # the list's, and that of the question itself
        if time.monotonic() > deadline:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(last[0]))
            return
        time.sleep(_KEPT / 100)
    last.clear()  # its destructor does without the interpreter lock
