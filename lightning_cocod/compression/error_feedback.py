"""Error feedback: what a codec has left out is sent later."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_cocod.compression.codec import Codec


class ErrorFeedback:
    """p = g + e ; c = C(p) ; e ← p − c, with a residual e for each name: Σ c + e = Σ g.

    Source: Karimireddy et al.: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, 2019.

    Args:
        codec: a contraction, or one that needs error feedback.

    Raises:
        ValueError: the codec is neither: the residual would grow without bound.
    """

    def __init__(self, codec: Codec) -> None:
        if not (codec.contraction or codec.needs_feedback):
            raise ValueError(f"error feedback needs a contraction, and {codec!r} is none: leave its unbiased form out")
        self.codec = codec
        self.residuals: dict[str, Tensor] = {}

    @torch.no_grad()
    def encode(self, name: str, g: Tensor, code: Tensor, generator: torch.Generator | None = None) -> None:
        """code ← C(g + e), and the residual of that name.

        Args:
            name: of the residual, which begins as zeros.
            g: 1-D, float32 or float64; always of the same size for one name. Overwritten with C(g + e).
            code: see Codec.encode.
            generator: see Codec.encode.

        Raises:
            ValueError: another size than before, or see Codec.encode.
        """
        e = self.residuals[name].to(g) if name in self.residuals else torch.zeros_like(g)
        if e.shape != g.shape:
            raise ValueError(f"the residual {name!r} has {e.numel()} values, got {g.numel()}")
        self.residuals[name] = e.add_(g)
        self.codec.encode(e, code, generator)
        self.codec.decode(code, g)
        e -= g

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals: part of a checkpoint."""
        return {name: e.clone() for name, e in self.residuals.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from these residuals."""
        self.residuals = {name: e.clone() for name, e in state.items()}
