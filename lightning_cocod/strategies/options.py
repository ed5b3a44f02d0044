"""Options that several strategies validate alike, at construction."""

from __future__ import annotations

import math
from collections.abc import Sequence


def without_codec(compression: str | None) -> None:
    """Refuse what cannot be honoured yet.

    Raises:
        ValueError: any codec.
    """
    if compression is not None:
        raise ValueError(f"compression={compression!r} is not available; the choices are: None")


def positive(weights: Sequence[float] | None) -> list[float] | None:
    """Weights of the ranks; their number is checked once the world is known.

    Raises:
        ValueError: a weight that is not a positive, finite number.
    """
    if weights is None:
        return None
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"weights must be positive numbers, one for each rank, got {list(weights)}")
    return list(weights)
