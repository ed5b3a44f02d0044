"""What every codec can do: bytes for a tensor and back, in memory of the caller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """C(x) = decode(encode(x)). A codec has options and no state: residuals and random numbers belong to the caller.

    Values that are not finite give bytes that decode to values without meaning; nothing is raised. Callers look first.

    Attributes:
        name: under which it is registered, such as ``"int8"``.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def contraction(self) -> bool:
        """Whether E‖C(x) − x‖² ≤ (1 − δ)‖x‖² with a δ > 0, so that the residuals of error feedback stay bounded."""

    @property
    def needs_feedback(self) -> bool:
        """Whether the codec is of no use without error feedback, contraction or not."""
        return False

    @property
    def stochastic(self) -> bool:
        """Whether encode draws random numbers."""
        return False

    @property
    def draws_alike(self) -> bool:
        """Whether all ranks should draw the same numbers for what they are to add up."""
        return False

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Bytes of n encoded elements: exact, and a function of n alone, so that all ranks know it without talking."""

    @torch.no_grad()
    def encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None = None) -> None:
        """code ← x.

        Args:
            x: n values, 1-D and contiguous, float32 (or float64, rounded to float32 first), on any device. Not changed.
            code: uint8, ``nbytes(n)`` of them, 1-D and contiguous, on the same device. Overwritten.
            generator: of that device, for codecs that are ``stochastic``; by default that of torch.

        Raises:
            ValueError: the memory does not have this form.
        """
        self._check(x, code)
        self._encode(x.detach().float(), code, generator)

    @torch.no_grad()
    def decode(self, code: Tensor, out: Tensor) -> None:
        """out ← C(x).

        Args:
            code: what encode has written.
            out: n values as in encode. Overwritten.

        Raises:
            ValueError: the memory does not have this form.
        """
        self._check(out, code)
        if out.dtype == torch.float32:
            self._decode(code, out)
        else:
            single = torch.empty_like(out, dtype=torch.float32)
            self._decode(code, single)
            out.copy_(single)

    @abstractmethod
    def _encode(self, x: Tensor, code: Tensor, generator: torch.Generator | None) -> None:
        """Encode float32 values."""

    @abstractmethod
    def _decode(self, code: Tensor, out: Tensor) -> None:
        """Decode to float32 values."""

    def _check(self, x: Tensor, code: Tensor) -> None:
        if x.dim() != 1 or not x.is_contiguous() or x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{self.name}: values must be 1-D, contiguous and float32 or float64, got {_form(x)}")
        expected = self.nbytes(x.numel())
        if code.shape != (expected,) or not code.is_contiguous() or code.dtype != torch.uint8:
            n = x.numel()
            raise ValueError(f"{self.name}: the code of {n} values is uint8 of shape ({expected},), got {_form(code)}")


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
