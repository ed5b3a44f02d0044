"""Small whole numbers in a few bits each, one after the other from the lowest bit of the first byte on."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lightning_cocod.compression.memory import constant, load, on_cpu
from lightning_cocod.compression.numpy_ops import pack_bits

_WORD = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # bits of a number: as many numbers, a byte each, as fill a byte


def packed(n: int, bits: int) -> int:
    """Bytes of n numbers."""
    return -(-n * bits // 8)


def pack(levels: Tensor, bits: int, code: Tensor) -> None:
    """The lowest ``bits`` bits of each number into the code.

    Args:
        levels: int8, n of them, in memory that begins a tensor of its own. Destroyed. Single bits: 0, or odd.
        bits: 1 to 8.
        code: uint8, ``packed(n, bits)`` of them.
    """
    if bits == 8:
        code.copy_(levels.view(torch.uint8))
        return
    if bits == 1 and on_cpu(code):
        pack_bits(levels, code)
        return
    if odd := levels.numel() % 8:
        even = levels.numel() - odd
        rest = torch.zeros(8, dtype=torch.int8, device=levels.device)
        rest[:odd] = levels[even:]
        whole = packed(even, bits)
        last = torch.empty(bits, dtype=torch.uint8, device=code.device)
        pack(rest, bits, last)
        code[whole:] = last[: code.numel() - whole]
        levels, code = levels[:even], code[:whole]
    if bits in _WORD:
        _multiply(levels, bits, code)
    else:
        _shift(levels, bits, code)


def _multiply(levels: Tensor, bits: int, code: Tensor) -> None:
    """One multiplication moves all numbers of a word into its highest byte: the i-th from bit 8i to 8(k − 1) + bits·i.

    What is done with all bytes alike is done in the longest words there are; torch is fastest there.
    """
    eights, words, k = levels.view(torch.int64), levels.view(_WORD[bits]), 8 // bits
    factor = sum(1 << 8 * (k - 1) + bits * i - 8 * i for i in range(k))
    eights.bitwise_and_(constant(((1 << bits) - 1) * 0x0101010101010101, torch.int64, levels.device))
    words.mul_(constant(factor, words.dtype, levels.device))
    eights.bitwise_right_shift_(constant(8 * (k - 1), torch.int64, levels.device))
    code.copy_(words)  # the lowest byte of each


def _shift(levels: Tensor, bits: int, code: Tensor) -> None:
    """Eight numbers at a time, whatever their bits."""
    eight = levels.view(-1, 8).long().bitwise_and_((1 << bits) - 1)
    eight <<= torch.arange(0, 8 * bits, bits, device=levels.device)
    code.copy_(eight.sum(1).view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1))


def unpack(code: Tensor, values: tuple[int, ...], n: int) -> Tensor:
    """n numbers out of a code, as int8.

    Args:
        code: as ``pack`` has written it.
        values: what each of the 2^bits codes stands for. ``signed(bits)``: what was packed.
        n: how many.

    Returns:
        The numbers, or the code where it is the same.
    """
    bits = len(values).bit_length() - 1
    if bits == 8:
        return code.view(torch.int8)
    if bits not in _WORD:
        return _unshift(code, bits, n, torch.tensor(values, dtype=torch.int8, device=code.device))
    wide = torch.uint8 if bits == 1 else torch.uint16  # of the code, that is looked up at a time
    k = 8 * wide.itemsize // bits
    even = n - n % k
    levels = torch.empty(n, dtype=torch.int8, device=code.device)
    table = _table(values, wide, code.device)
    index = load(code[: even * bits // 8], wide).int()
    torch.index_select(table, 0, index, out=levels[:even].view(table.dtype))
    if even < n:
        rest = torch.zeros(wide.itemsize, dtype=torch.uint8, device=code.device)
        rest[: code.numel() - even * bits // 8] = code[even * bits // 8 :]
        levels[even:] = table[rest.view(wide).int()].view(torch.int8)[: n - even]
    return levels


@cache
def _table(values: tuple[int, ...], wide: torch.dtype, device: torch.device) -> Tensor:
    """For each piece of code the word of the numbers in it, a byte each."""
    size, bits = 8 * wide.itemsize, len(values).bit_length() - 1
    numbers = torch.arange(1 << size)[:, None] >> torch.arange(0, size, bits) & (len(values) - 1)
    word = {4: torch.int32, 8: torch.int64}[size // bits]
    return torch.tensor(values, dtype=torch.int8)[numbers].view(word).view(-1).to(device)


def unpack_nibbles(code: Tensor, n: int) -> Tensor:
    """16 times each of n numbers of four bits in two's complement, as int8: without a table in less time than ``unpack``."""
    pairs = torch.empty(-(-n // 8) * 4, dtype=torch.int16, device=code.device)
    pairs[: code.numel()].copy_(code)
    four, high = (constant(value, torch.int64, code.device) for value in (4, -0x0F0F0F0F0F0F0F10))
    words = pairs.view(torch.int64)
    words.bitwise_or_(words << four).bitwise_left_shift_(four).bitwise_and_(high)
    return pairs.view(torch.int8)[:n]


def _unshift(code: Tensor, bits: int, n: int, values: Tensor) -> Tensor:
    groups = -(-n // 8)
    bytes_ = torch.zeros(groups * bits, dtype=torch.uint8, device=code.device)
    bytes_[: code.numel()] = code
    words = torch.zeros(groups, 8, dtype=torch.uint8, device=code.device)
    words[:, :bits] = bytes_.view(groups, bits)
    eight = words.view(torch.int64) >> torch.arange(0, 8 * bits, bits, device=code.device)
    return values[(eight & ((1 << bits) - 1)).view(-1)[:n]]


@cache
def signed(bits: int) -> tuple[int, ...]:
    """Codes in two's complement."""
    return tuple(range(1 << bits - 1)) + tuple(range(-(1 << bits - 1), 0))
