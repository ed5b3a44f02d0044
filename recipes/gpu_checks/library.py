"""The package of this checkout, or what of it runs where Lightning is missing."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

try:
    import lightning.pytorch  # noqa: F401  # only whether it can be

    NO_LIGHTNING = ""
except ImportError as error:
    NO_LIGHTNING = f"Lightning is not importable ({error})"
    bare = ModuleType("lightning_cocod")  # its __init__ needs Lightning; the algorithms and what they stand on do not
    bare.__path__ = [str(ROOT / "lightning_cocod")]
    sys.modules["lightning_cocod"] = bare

from lightning_cocod.algorithms import Algorithm  # noqa: E402  # once it is known which package there is

SHARED = {"weights", "on_nonfinite", "communicator", "timeout", "process_group_timeout"}


def _descendants(base: type[Algorithm]) -> list[type[Algorithm]]:
    return [c for sub in base.__subclasses__() for c in (sub, *_descendants(sub))]


_EVERY = {c.name: c for c in _descendants(Algorithm) if hasattr(c, "name") and not inspect.isabstract(c)}
ALGORITHMS = {name: c for name, c in _EVERY.items() if not c.asynchronous}
"""Every algorithm of the package whose workers are in step, by its registered name."""
ASYNCHRONOUS = {name: c for name, c in _EVERY.items() if c.asynchronous}
"""Every other one."""


def only(names: list[str]) -> list[str]:
    """Leave all others out. Returns those that there are not; then none is left out."""
    if unknown := [name for name in names if name not in ALGORITHMS and name not in ASYNCHRONOUS]:
        return unknown
    for algorithms in (ALGORITHMS, ASYNCHRONOUS):
        for name in algorithms.keys() - set(names):
            del algorithms[name]
    return []


def strategies(*, asynchronous: bool = False) -> dict[str, Any]:
    """Every strategy whose ranks are in step by its registered name; or every other one."""
    from lightning_cocod.strategies import STRATEGIES

    algorithms = ASYNCHRONOUS if asynchronous else ALGORITHMS
    return {strategy.registered_name: strategy for strategy in STRATEGIES if strategy.registered_name in algorithms}


def takes(kind: type, option: str) -> bool:
    """Whether it has an option of its own of this name, or hands one on to what it is made of (but some are fixed)."""
    if option in ("period", "overlap_pull"):
        return option in inspect.signature(kind).parameters
    return any(option in inspect.signature(c.__init__).parameters for c in kind.__mro__)


def must_warm_up(kind: type) -> bool:
    """Whether it always begins with synchronous steps."""
    given = inspect.signature(kind).parameters.get("warmup_steps")
    return given is not None and given.default > 0


def options(kind: type, wanted: dict[str, Any]) -> dict[str, Any]:
    """Those that it takes, so that a check speaks of a period to all algorithms, one without any included."""
    short: dict[str, Any] = {"warmup_steps": 1} if must_warm_up(kind) else {}
    if "local_update" in inspect.signature(kind).parameters:
        short["local_update"] = "dc_asgd"  # beside any optimizer
    return {name: value for name, value in {**short, **wanted}.items() if name in SHARED or takes(kind, name)}
