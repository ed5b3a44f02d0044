"""Memory for buckets that together are as large as a model: in huge pages, where the system gives them.

A pass over 500 MB touches 130 000 pages of 4 kB, and looking each up takes time; of 2 MiB there are 256. Linux gives them to
whoever asks, unless it is set to ``never``.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

MANY_BYTES = 64 << 20
"""Less is not worth it: a page that is used in part is taken whole."""
_LINE = 64  # bytes: where a bucket may begin, as torch's own memory does


def buckets(kinds: Sequence[tuple[int, torch.dtype, torch.device]], *, zero: bool) -> list[Tensor]:
    """New memory.

    Args:
        kinds: of each bucket the number of elements, their dtype, and where they are.
        zero: whether they must be.
    """
    ends = [0]
    for size, dtype, _ in kinds:
        ends.append(ends[-1] + -(-size * dtype.itemsize // _LINE) * _LINE)
    if ends[-1] < MANY_BYTES or not hasattr(mmap, "MADV_HUGEPAGE") or any(device.type != "cpu" for *_, device in kinds):
        made = torch.zeros if zero else torch.empty
        return [made(size, dtype=dtype, device=device) for size, dtype, device in kinds]
    block = mmap.mmap(-1, ends[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros
    with suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return [
        torch.frombuffer(block, dtype=dtype, count=size, offset=begin)  # the block lives as long as one of them
        for begin, (size, dtype, _) in zip(ends, kinds, strict=False)
    ]
