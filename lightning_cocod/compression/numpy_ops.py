"""Operations that take several times as long in torch as in NumPy, on the CPU: on booleans, and selection.

On other devices they are torch's. Tensors are contiguous, and do not require gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_cocod.compression.memory import on_cpu


def signs(x: Tensor, levels: Tensor) -> None:
    """levels ← the sign bits.

    Args:
        x: float32.
        levels: int8, of the same shape. Overwritten: 0, or an odd number where the bit is set.
    """
    if on_cpu(x):
        np.signbit(x.numpy(), out=levels.numpy().view(np.bool_))
    else:
        levels.copy_(x.view(torch.int32) >> 31)


def pack_bits(levels: Tensor, code: Tensor) -> None:
    """code ← a bit for each level, set where it is not 0, from the lowest bit of the first byte on. On the CPU only."""
    code.numpy()[:] = np.packbits(levels.numpy(), bitorder="little")


def at_least(sizes: Tensor, threshold: Tensor, flags: Tensor) -> None:
    """flags ← sizes ≥ threshold.

    Args:
        sizes: float32.
        threshold: of no dimension.
        flags: bool, of the shape of sizes. Overwritten.
    """
    if on_cpu(sizes):
        np.greater_equal(sizes.numpy(), threshold.numpy(), out=flags.numpy())
    else:
        torch.ge(sizes, threshold, out=flags)


def places(flags: Tensor) -> Tensor:
    """Where the flags are set, in ascending order."""
    if on_cpu(flags):
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().view(-1)


def kth_largest(sizes: Tensor, k: int) -> Tensor:
    """The k-th largest of some values, of no dimension. NaN is larger than all others."""
    if on_cpu(sizes):
        n = sizes.numel()
        return torch.from_numpy(np.partition(sizes.numpy(), n - k)[n - k : n - k + 1]).view(())
    return sizes.topk(k, sorted=False).values.amin()
