"""The C library's heap, where gradients are freed in the midst of backward."""

from __future__ import annotations

import torch

_LARGEST = 31 << 20  # glibc takes note of blocks of up to 32 MiB, its own bytes included


def keep_freed_memory() -> None:
    """Let up to 62 MiB of freed memory stay with the process.

    glibc gives the end of its heap back to the system where more than a threshold is free there: twice the largest block
    that it has ever mapped apart and freed, 128 KiB at first. Gradients that are freed one by one, between activations that
    are freed as well, let the heap shrink and grow many times in one backward, and every page that comes anew costs a fault:
    20 000 of them, a tenth of its time, in a step of ResNet-18. So a block that large is mapped and freed, which touches
    none of its pages. No setting is changed; where ``MALLOC_*`` variables have fixed the threshold, or with another C
    library, nothing happens.
    """
    torch.empty(_LARGEST, dtype=torch.uint8)
