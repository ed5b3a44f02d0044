"""Codes of values on the CPU by compiled loops, for codecs that have some and where numba is installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from lightning_cocod.compression.memory import on_cpu

if TYPE_CHECKING:  # numba takes long to import, and may be missing
    from lightning_cocod.compression.kernels import Floats, Kernels


@cache
def kernels() -> dict[str, Kernels]:
    """By the names of codecs; none without numba. The first call imports it."""
    try:
        from lightning_cocod.compression.kernels import KERNELS
    except ImportError as error:
        if error.name != "numba":  # it is there, and does not work
            warnings.warn(f"codecs are slower than they could be, as numba cannot be imported: {error}", stacklevel=2)
        return {}
    return KERNELS


def kernels_for(name: str, values: Tensor) -> Kernels | None:
    """Those of a codec for values where these are."""
    return kernels().get(name) if on_cpu(values) else None


def encode(loops: Kernels, block: int, x: Tensor, code: Tensor) -> None:
    """What ``BlockCodec._encode`` does. In NumPy's arrays: views of tensors take several times as long."""
    values, levels, scales = x.numpy(), code.numpy(), np.empty(-(-x.numel() // block), np.float32)
    for rows, bytes_, sizes in _parts(values.size, block, loops.of_a_byte):
        part = _rows(values[rows], block, loops.of_a_byte)
        n = min(block, values.size - rows.start)
        loops.encode(part, n, levels[bytes_].reshape(len(part), -1), scales[sizes])
    levels[levels.size - scales.nbytes :] = scales.view(np.uint8)


def decode(loops: Kernels, block: int, unit: float, code: Tensor, out: Tensor) -> None:
    """What ``BlockCodec._decode`` does."""
    values, levels, blocks = out.detach().numpy(), code.numpy(), -(-out.numel() // block)
    scales = levels[levels.size - 4 * blocks :].copy().view(np.float32) * np.float32(unit)
    for rows, bytes_, sizes in _parts(values.size, block, loops.of_a_byte):
        part = _rows(values[rows], block, loops.of_a_byte)
        loops.decode(levels[bytes_].reshape(len(part), -1), scales[sizes], part)
        if part.size > rows.stop - rows.start:
            values[rows] = part[0, : rows.stop - rows.start]


def _parts(n: int, block: int, of_a_byte: int) -> Iterator[tuple[slice, slice, slice]]:
    """Elements, bytes and scales of the whole blocks, then of the last block where it is shorter."""
    blocks = n // block
    whole = blocks * block
    if blocks:
        yield slice(0, whole), slice(0, whole // of_a_byte), slice(0, blocks)
    if whole < n:
        yield slice(whole, n), slice(whole // of_a_byte, -(-n // of_a_byte)), slice(blocks, blocks + 1)


def _rows(values: Floats, block: int, of_a_byte: int) -> Floats:
    """A row for each block. Where levels do not fill the last byte it is a copy, with zeros at the end."""
    if more := -values.size % of_a_byte:
        values = np.pad(values, (0, more))
    return values.reshape(-1, min(block, values.size))
