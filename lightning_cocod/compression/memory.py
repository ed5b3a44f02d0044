"""How codecs walk through memory: in spans that stay in a core's cache, and typed views of a code's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

SPAN = 1 << 17  # elements a codec works on at a time: about 1 MiB with scratch; of less, the calls into torch would show


def on_cpu(tensor: Tensor) -> bool:
    """Whether there are caches to stay in, results can be looked at without waiting, and NumPy sees the memory."""
    return tensor.device.type == "cpu"


def span(n: int, device: torch.device, multiple: int = 1) -> int:
    """Elements of a span, a multiple of ``multiple``: all of them where there is no cache to stay in."""
    most = SPAN if device.type == "cpu" else n
    return max(1, min(n, most) // multiple) * multiple


def spans(n: int, device: torch.device) -> Iterator[slice]:
    """The slices of n elements, one after the other."""
    step = span(n, device)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def new(like: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    """Scratch of n elements on the device of another tensor, in memory of a multiple of 8 bytes."""
    memory = torch.empty(-(-n // 8) * 8, dtype=dtype, device=like.device)
    return memory[:n] if n % 8 else memory


@cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor, with which a small call takes half as long as with one of Python's."""
    return torch.tensor(value, dtype=dtype, device=device)


def store(values: Tensor, code: Tensor) -> None:
    """The values' bytes into the code, wherever it begins."""
    code.copy_(values.view(torch.uint8))


def load(code: Tensor, dtype: torch.dtype) -> Tensor:
    """Values whose bytes the code is: a view of it where it is aligned, else a copy."""
    aligned = code.storage_offset() % dtype.itemsize == 0
    return (code if aligned else code.clone()).view(dtype)
