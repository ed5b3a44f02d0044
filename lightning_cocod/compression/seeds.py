"""Random numbers that are the same wherever they are drawn."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def seed_of(numbers: Sequence[int]) -> int:
    """A seed made of whole numbers of 64 bits: the same on every machine, and another one for other numbers."""
    return int.from_bytes(hashlib.blake2b(struct.pack(f"{len(numbers)}q", *numbers), digest_size=7).digest(), "big")
