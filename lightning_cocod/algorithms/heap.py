"""The C library's heap, where activations and gradients are freed in the midst of backward."""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT, _FROM_THE_HEAP = 1 << 30, 32 << 20
_SET_BY_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let up to 1 GiB of memory that has been freed stay with the process.

    glibc gives the end of its heap back to the system where more than a threshold is free there, 64 MiB at most. Activations
    that are freed one by one let the heap shrink and grow many times in one backward, and every page that comes anew costs a
    fault: some 5 000 in a step of ResNet-18, and 18 000 where gradients are freed in between as well. What it costs to give
    them back: the row `plain` of ``cocod-bench`` (docs/benchmarks.md).

    For the whole process, and for good. Blocks of more than 32 MiB come from the system as before. Where variables of the
    environment say how malloc behaves, and with other C libraries, nothing is done.
    """
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in _SET_BY_THE_USER):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _FROM_THE_HEAP)  # the other call fixes it
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
