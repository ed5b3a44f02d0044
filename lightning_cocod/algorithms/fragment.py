"""Parameters with rounds of their own: their outer parameters, and what is on its way about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cocod.comm import Message
from lightning_cocod.comm.buckets import Buffer


class Fragment:
    """Some of the parameters, or all of them, and their clock.

    Attributes:
        θ: the outer parameter of each, in the order in which they travel; those that join later come last.
        D: what has been sent, and what becomes of it in place: Δ, then Δ̄ (or Δ̄ − a Δ). None where nothing has been.
        e: what the codec has dropped of D, where a worker keeps it in θ − x; None without a codec.
        A: its message; None where there is only one worker, or D is that of a run that is resumed.
        sent: how many of the parameters D is about.
        left_out: ranks that D is a mean without; known once it has arrived.
        ends: step at which the round under way ends; None between that and the beginning of the next one.
        launched: step at which D has set out, until it has been merged into θ; None with a ``Delay``, which never does that.
        ended: step at which the last round ended.
    """

    def __init__(self, t: int) -> None:
        self.θ: dict[nn.Parameter, Tensor] = {}
        self.D: list[Tensor] | Buffer | None = None
        self.e: list[Tensor] | None = None
        self.A: Message | None = None
        self.sent = 0
        self.left_out: tuple[int, ...] = ()
        self.ends: int | None = None
        self.launched: int | None = None
        self.ended = t

    @property
    def x(self) -> list[Tensor]:
        """This worker's parameters."""
        return [p.detach() for p in self.θ]

    def displacement(self) -> list[Tensor]:
        """Δ = θ − x."""
        return list(torch._foreach_sub(list(self.θ.values()), self.x))

    def fold(self) -> None:
        """x ← θ."""
        if self.θ:
            torch._foreach_copy_(self.x, list(self.θ.values()))

    def drain(self, *, counted: bool = True) -> None:
        """Wait for D."""
        if self.A is not None:
            self.A.wait(counted=counted)
            self.left_out = self.A.left_out

    def state_dict(self, numbers: Mapping[nn.Parameter, int]) -> dict[str, Any]:
        """Everything, once D has been drained. Parameters are told by their numbers."""
        tensors = self.D.buckets if isinstance(self.D, Buffer) else self.D
        return {
            "theta": {numbers[p]: θ_p.clone() for p, θ_p in self.θ.items()},
            "message": None if tensors is None else [t.clone() for t in tensors],
            "dropped": None if self.e is None else [t.clone() for t in self.e],
            "sent": self.sent,
            "left_out": list(self.left_out),
            "clock": (self.ends, self.launched, self.ended),
        }

    def load_state_dict(self, state: Mapping[str, Any], D: Buffer | None) -> None:
        """Continue with these values of θ, whose parameters are there, and with what was in flight, in D if it is given."""
        for θ_p, value in zip(self.θ.values(), state["theta"].values(), strict=True):
            θ_p.copy_(value)
        self.sent, self.left_out = state["sent"], tuple(state["left_out"])
        self.ends, self.launched, self.ended = state["clock"]
        self.D, self.A, self.e = None, None, None
        if state["message"] is not None:
            tensors = D.buckets if D is not None else [torch.empty_like(θ_p) for θ_p in self.about()]
            for t, value in zip(tensors, state["message"], strict=True):
                t.copy_(value)
            self.D = D if D is not None else tensors

        if state["dropped"] is not None:
            self.e = [torch.empty_like(θ_p).copy_(t) for θ_p, t in zip(self.about(), state["dropped"], strict=True)]

    def arrived(self) -> list[Tensor]:
        """D, once it has been drained, as a list."""
        if not isinstance(self.D, Buffer):
            assert self.D is not None
            return self.D
        D = [torch.empty_like(θ_p) for θ_p in self.about()]
        self.D.copy_to(D, keep=False)
        return D

    def about(self) -> list[Tensor]:
        """The outer parameters that D is about."""
        return list(self.θ.values())[: self.sent]
