"""How codecs walk through memory: in spans that stay in a core's cache, and typed views of a code's bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SPAN = 1 << 16  # elements; what a codec reads and writes at a time, scratch included, is then less than 1 MiB


def span(n: int, device: torch.device, multiple: int = 1) -> int:
    """Elements of a span, a multiple of ``multiple``: all of them where there is no cache to stay in."""
    most = SPAN if device.type == "cpu" else n
    return max(1, min(n, most) // multiple) * multiple


def spans(n: int, device: torch.device) -> Iterator[slice]:
    """The slices of n elements, one after the other."""
    step = span(n, device)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def store(values: Tensor, code: Tensor) -> None:
    """The values' bytes into the code, wherever it begins."""
    code.copy_(values.view(torch.uint8))


def load(code: Tensor, dtype: torch.dtype) -> Tensor:
    """Values whose bytes the code is: a view of it where it is aligned, else a copy."""
    aligned = code.storage_offset() % dtype.itemsize == 0
    return (code if aligned else code.clone()).view(dtype)
