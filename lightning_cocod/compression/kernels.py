"""Loops over blocks that numba compiles: each reads the values once and writes the code at once, or the reverse.

They leave the GIL alone, so that training goes on beside them, and write bit for bit what torch and NumPy write in more
passes: the same roundings in the same order. All arrays are C-contiguous, of one row for each block: values float32 of
shape (blocks, elements), codes uint8 of shape (blocks, bytes), scales float32 of shape (blocks,). This file imports numba.
"""

# NumPy types its scalars' arithmetic as Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_cocod.compression import blocks

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Function = TypeVar("Function", bound=Callable[..., Any])

TINY, HUGE = np.float32(blocks.TINY), np.float32(blocks.HUGE)
ROUNDING = np.float32(1.5 * 2.0**23)  # what is added to it is rounded to a whole number, the lowest bits of the sum


def compiled(function: Function) -> Function:
    """At its first call; kept on disk for later processes where a place can be written.

    A product and a sum may be fused, as torch's ``addcmul`` fuses them; nothing else may be rearranged.
    """
    try:
        return cast(Function, numba.njit(nogil=True, fastmath={"contract"}, cache=True)(function))
    except RuntimeError:  # numba has found no such place
        return cast(Function, numba.njit(nogil=True, fastmath={"contract"})(function))


@compiled
def bits_of(value: np.float32) -> np.int32:
    """A float's bits. (numba's integers are of 64 bits unless narrowed, and such loops slower.)"""
    return np.int32(np.float32(value).view(np.int32))


@compiled
def largest(row: Floats) -> np.float32:
    """max|x| between TINY and HUGE, NaN where there is one: magnitudes have the order of their bits."""
    most = np.int32(0)
    for i in range(row.size):
        most = np.int32(max(most, np.int32(bits_of(row[i]) & np.int32(0x7FFFFFFF))))
    size = np.int32(most).view(np.float32)
    return size if np.isnan(size) else min(max(size, TINY), HUGE)


@compiled
def level(value: np.float32, factor: np.float32) -> np.int32:
    """value · factor to the nearest, of ties the even one: in the lowest byte."""
    return bits_of(np.float32(value * factor + ROUNDING))


@compiled
def encode_int8(x: Floats, n: int, code: Bytes, scales: Floats) -> None:
    """A level is a byte."""
    for b in range(x.shape[0]):
        scales[b] = largest(x[b])
        factor = np.float32(127) / scales[b]
        for i in range(x.shape[1]):
            code[b, i] = level(x[b, i], factor)


@compiled
def decode_int8(code: Bytes, scales: Floats, x: Floats) -> None:
    """Level times scale."""
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[b, i] = np.float32(np.int8(code[b, i])) * scales[b]


@compiled
def encode_int4(x: Floats, n: int, code: Bytes, scales: Floats) -> None:
    """The first of two levels is in the lower half of a byte."""
    for b in range(x.shape[0]):
        scales[b] = largest(x[b])
        factor = np.float32(7) / scales[b]
        for i in range(code.shape[1]):
            low, high = level(x[b, 2 * i], factor), level(x[b, 2 * i + 1], factor)
            code[b, i] = np.int32(low & np.int32(0x0F)) | np.int32(high << np.int32(4))


@compiled
def decode_int4(code: Bytes, scales: Floats, x: Floats) -> None:
    """16 times the level, times the scale."""
    for b in range(x.shape[0]):
        for i in range(code.shape[1]):
            x[b, 2 * i] = np.float32(np.int8(code[b, i] << 4)) * scales[b]
            x[b, 2 * i + 1] = np.float32(np.int8(code[b, i] & 0xF0)) * scales[b]


@compiled
def total(values: Floats) -> np.float32:
    """The sum of 2^k values in the order of ``sign.totals``. Destroys the values."""
    n = values.size
    while n > 1:
        rows = 16 if n >= 1024 else min(4, n)
        n //= rows
        for i in range(n):
            for row in range(1, rows):
                values[i] += values[row * n + i]
    return np.float32(values[0])


@compiled
def total_size_of_1024(row: Floats, sums: Floats) -> np.float32:
    """The same for the magnitudes of the usual block: as the numbers of rows are known, these loops are vectorised."""
    for i in range(64):
        size = abs(row[i])
        for k in range(1, 16):
            size += abs(row[64 * k + i])
        sums[i] = size
    for i in range(16):
        sums[i] = ((sums[i] + sums[16 + i]) + sums[32 + i]) + sums[48 + i]
    for i in range(4):
        sums[i] = ((sums[i] + sums[4 + i]) + sums[8 + i]) + sums[12 + i]
    return np.float32(((sums[0] + sums[1]) + sums[2]) + sums[3])


@compiled
def mean_size(row: Floats, n: int, scratch: Floats) -> np.float32:
    """mean|x| of n elements, finite also where the sum is not, as ``sign.mean_size`` has it."""
    if row.size == 1024:
        mean = total_size_of_1024(row, scratch) / np.float32(n)
    else:
        for i in range(row.size):
            scratch[i] = abs(row[i])
        mean = total(scratch) / np.float32(n)
    if np.isfinite(mean):
        return mean
    down = 1
    while down < n:
        down *= 2
    for i in range(row.size):
        scratch[i] = abs(row[i]) * np.float32(1 / down)
    mean = total(scratch) / np.float32(n / down)
    return mean if np.isnan(mean) else np.float32(min(mean, HUGE))


@compiled
def encode_sign(x: Floats, n: int, code: Bytes, scales: Floats) -> None:
    """The first of eight sign bits is the lowest of a byte."""
    length = 8
    while length < x.shape[1]:
        length *= 2
    scratch = np.zeros(length, np.float32)
    for b in range(x.shape[0]):
        scales[b] = mean_size(x[b], n, scratch)
        for i in range(code.shape[1]):
            byte = 0
            for k in range(8):
                byte |= (bits_of(x[b, 8 * i + k]) < 0) << k
            code[b, i] = byte


@compiled
def decode_sign(code: Bytes, scales: Floats, x: Floats) -> None:
    """The scale, or its negative where the bit is set."""
    for b in range(x.shape[0]):
        for i in range(code.shape[1]):
            for k in range(8):
                x[b, 8 * i + k] = -scales[b] if code[b, i] >> k & 1 else scales[b]


class Kernels(NamedTuple):
    """Of a codec.

    Attributes:
        encode: (values, elements, code, scales): overwrites the last two. Elements: of a row, without zeros at its end.
        decode: (code, scales times unit, values): overwrites the last.
        of_a_byte: levels that share one. A row's elements are a multiple.
    """

    encode: Callable[[Floats, int, Bytes, Floats], None]
    decode: Callable[[Bytes, Floats, Floats], None]
    of_a_byte: int


KERNELS = {
    "int8": Kernels(encode_int8, decode_int8, 1),
    "int4": Kernels(encode_int4, decode_int4, 2),
    "sign": Kernels(encode_sign, decode_sign, 8),
}
