"""Only the largest values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.memory import load, store
from lightning_cocod.compression.selection import largest
from lightning_cocod.options import share


def kept(n: int, ratio: float) -> int:
    """k of n values: the ratio of them rounded, but one at least where there are any."""
    return min(n, max(1, round(ratio * n)))


@dataclass(frozen=True)
class TopK(Codec):
    """C(x) = the k values of largest magnitude, 0 elsewhere; of equal ones those that come first. Idempotent.

    ‖C(x) − x‖² ≤ (1 − k/d)‖x‖², with equality where all magnitudes are equal. 64 bits for each of the k: int32 indices in
    ascending order, then float32 values. Exact: a threshold read off a sample only finds the few that are to be compared.

    Source: Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, 2018.

    Args:
        ratio: k/d, greater than 0 and at most 1.

    Raises:
        ValueError: an option is out of range, or there are 2³¹ values or more.
    """

    name: ClassVar[str] = "topk"
    ratio: float = 0.01

    def __post_init__(self) -> None:
        share("ratio", self.ratio)

    @property
    def contraction(self) -> bool:
        """True: δ ≥ k/d."""
        return True

    def nbytes(self, n: int) -> int:
        """8k."""
        if n >= 1 << 31:
            raise ValueError(f"topk: indices have 31 bits, got {n} values; encode them in parts")
        return 8 * kept(n, self.ratio)

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        k = code.numel() // 8
        index = largest(x, k)
        store(index.int(), code[: 4 * k])
        store(x.index_select(0, index), code[4 * k :])

    def _decode(self, code: Tensor, out: Tensor) -> None:
        half = code.numel() // 2
        out.zero_()
        index = load(code[:half], torch.int32).long()
        out.scatter_(0, index, load(code[half:], torch.float32))
