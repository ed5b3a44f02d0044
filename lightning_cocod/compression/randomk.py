"""Only some values, whichever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.memory import load, store
from lightning_cocod.compression.topk import kept
from lightning_cocod.options import flag, share

TRIES = 64


@dataclass(frozen=True)
class RandomK(Codec):
    """C(x) = x at k random places, 0 elsewhere: each place is among them with probability k/d.

    E‖C(x) − x‖² = (1 − k/d)‖x‖²: a contraction, with equality. Unbiased it is d/k · C(x), U(d/k − 1) with equality.

    The places are (a + b·i) mod d for i = 0 … k − 1, a being uniform in 0 … d − 1 and b among the numbers that have no
    divisor in common with d. A code is a and b as int32, a seed of 8 bytes, then the float32 values in the order of i; no
    indices. Where all ranks draw from generators in one state, their values lie at the same places and can be summed.

    Source: Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, 2018.

    Args:
        ratio: k/d, greater than 0 and at most 1.
        unbiased: multiplied by d/k, which error feedback cannot wrap.

    Raises:
        ValueError: an option is out of range, or there are 2³¹ values or more.
    """

    name: ClassVar[str] = "randomk"
    ratio: float = 0.01
    unbiased: bool = False

    def __post_init__(self) -> None:
        share("ratio", self.ratio)
        flag("unbiased", self.unbiased)

    @property
    def contraction(self) -> bool:
        """Unless it is unbiased, and then only if all values are kept."""
        return not self.unbiased or self.ratio == 1

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    @property
    def draws_alike(self) -> bool:
        """True: their places are then the same, and so are those of their mean."""
        return True

    def nbytes(self, n: int) -> int:
        """8 + 4k; 0 for no values."""
        if n >= 1 << 31:
            raise ValueError(f"randomk: indices have 31 bits, got {n} values; encode them in parts")
        return 8 + 4 * kept(n, self.ratio) if n else 0

    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        n, k = x.numel(), kept(x.numel(), self.ratio)
        if n == 0:
            return
        draws = torch.randint(n, (1 + TRIES,), generator=generator, device=x.device)
        draws = torch.cat([draws, torch.ones_like(draws[:1])])  # 1 will always do
        coprime = torch.gcd(draws[1:], torch.full_like(draws[1:], n)) == 1
        seed = torch.stack([draws[0], draws[1:][coprime.int().argmax()]])
        store(seed.int(), code[:8])
        values = x[places(seed, n, k)]
        store(values * (n / k) if self.unbiased else values, code[8:])

    def _decode(self, code: Tensor, out: Tensor) -> None:
        out.zero_()
        if n := out.numel():
            values = load(code[8:], torch.float32)
            out.scatter_(0, places(load(code[:8], torch.int32).long(), n, values.numel()), values)


def places(seed: Tensor, n: int, k: int) -> Tensor:
    """(a + b·i) mod n for i = 0 … k − 1."""
    a, b = seed
    return torch.arange(k, device=seed.device).mul_(b).add_(a).remainder_(n)
