"""The random state of one rank, as plain values that a checkpoint can hold."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

_MT19937_BYTES = 4 * 624 + 4
"""Its words and its position, as they lie in memory."""


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators; on CUDA that of this rank's device as well."""
    state = {"python": random.getstate(), "numpy": _numpy_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what ``random_state`` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class _NumPyState:
    """NumPy's global state. Reading it takes longer than all the rest, so it is read again only where it may have changed.

    It is the generator's, and the second of a pair of normal numbers, if one is kept for the next call. Where none is kept,
    every draw shows in the generator's memory.
    """

    def __init__(self) -> None:
        self._memory: bytes | None = None
        self._state: tuple[Any, ...] = ()

    def __call__(self) -> tuple[Any, ...]:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's types do not know it
        if not isinstance(generator, np.random.MT19937):
            return self._read()
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if memory != self._memory:
            self._state = self._read()
            *_, one_is_kept, _ = self._state
            self._memory = None if one_is_kept else memory
        return self._state

    @staticmethod
    def _read() -> tuple[Any, ...]:
        name, keys, *rest = np.random.get_state(legacy=True)
        return name, torch.from_numpy(np.asarray(keys)), *rest


_numpy_state = _NumPyState()
