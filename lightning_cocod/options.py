"""Options that all rooms validate alike: in one line, when they are given."""

from __future__ import annotations

import math
from collections.abc import Sequence


def whole(name: str, value: object, *, least: int) -> int:
    """A whole number.

    Raises:
        ValueError: anything else, True and 2.0 included, or less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def nonnegative(name: str, value: object) -> float:
    """A finite number of at least 0.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def above_zero(name: str, value: object) -> float:
    """A finite number greater than 0.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number greater than 0, got {value!r}")
    return float(value)


def below_one(name: str, value: object) -> float:
    """A number of at least 0 and less than 1, as a momentum has to be.

    Raises:
        ValueError: anything else.
    """
    if nonnegative(name, value) >= 1:
        raise ValueError(f"{name} must be less than 1, got {value!r}")
    return nonnegative(name, value)


def share(name: str, value: object) -> float:
    """A number greater than 0, and 1 at most.

    Raises:
        ValueError: anything else.
    """
    if not 0 < nonnegative(name, value) <= 1:
        raise ValueError(f"{name} must be greater than 0 and at most 1, got {value!r}")
    return nonnegative(name, value)


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    """One of the choices.

    Raises:
        ValueError: anything else.
    """
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
    return str(value)
