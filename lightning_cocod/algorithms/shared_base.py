"""The base of compressed rounds: a model that all workers agree on bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cocod.comm import Communicator, Message, Subject
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.parts import How


class SharedBase:
    r"""θ, from which the workers tell how far they are.

    Updates can be compressed, models cannot: worker i sends a code c_i of x_i - θ, and all add the mean of the codes to θ.
    With A the mean, as it was decoded, and all else as without compression::

        p_i ← x_i - θ ;  c_i ← C(p_i) ;  A ← async C(Σ_j w_j c_j)
        wait(A) ;  x_i ← x_i + (A - c_i) ;  θ ← θ + A

    What the codec drops stays in x_i - θ, part of the next p_i: there is no other residual. Memory: θ, in float32 at least.

    Args:
        comm: sends.
        compression: how means come about.
    """

    def __init__(self, comm: Communicator, compression: How) -> None:
        self.comm, self.compression = comm, compression
        self.θ: Buffer | None = None
        self._S: Buffer | None = None  # where rounds block
        self._known: list[nn.Parameter] = []  # of which θ is

    def forget(self) -> None:
        """θ begins anew."""
        self.θ, self._S, self._known = None, None, []

    @torch.no_grad()
    def take_in(self, x: Sequence[nn.Parameter], w: float, subject: Subject | None) -> tuple[int, ...]:
        """θ ← x for parameters that are new.

        Args:
            x: all parameters.
            w: this worker's weight.
            subject: of the mean that they become first; None where all workers have the same.

        Returns:
            The ranks that the mean is without.
        """
        if list(map(id, x)) == list(map(id, self._known)):
            return ()
        known = dict(zip(self._known, self._values(), strict=True))
        new = [p for p in x if p not in known]
        left_out: tuple[int, ...] = ()
        if new and subject is not None:
            mean = self.comm.mean_([p.detach() for p in new], w, subject)
            mean.wait()
            left_out = mean.left_out
        self.θ, self._known = self.comm.layout(x).buffer(summed=True), list(x)
        self.θ.copy_([known.get(p, p.detach()) for p in x], keep=False)
        return left_out

    def _values(self) -> list[Tensor]:
        """θ, parameter by parameter."""
        if self.θ is None:
            return []
        values = [
            torch.empty_strided(p.size(), p.stride(), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
            for p in self._known
        ]
        self.θ.copy_to(values, keep=False)
        return values

    def correction_(self, S: Buffer, subject: Subject, *, size: Tensor | None = None) -> Message:
        """S ← async A - c, where S is a snapshot of x; then θ ← θ + A."""
        assert self.θ is not None  # taken in before
        return self.comm.compressed_correction_(S, self.θ, self._known, self.compression, subject, size=size)

    def average_(self, x: Sequence[nn.Parameter], subject: Subject) -> Message:
        """x ← x + (A - c), waited for."""
        layout = self.comm.layout(x)
        if self._S is None or self._S.layout is not layout:
            self._S = layout.buffer()
        message = self.correction_(self._S, subject, size=self._S.take(x))
        message.wait()
        if self.comm.rank in message.left_out:
            self._S.copy_to(x)
        else:
            self._S.add_to(x)
        return message

    def state_dict(self) -> list[Tensor] | None:
        """θ, once no message is in flight."""
        return None if self.θ is None else [bucket.clone() for bucket in self.θ.buckets]

    def load_state_dict(self, state: Any, x: Sequence[nn.Parameter]) -> None:
        """Continue with θ. Without one it is taken in where the next round begins."""
        self.forget()
        if state is not None:
            self.θ, self._known = self.comm.layout(x).buffer(summed=True), list(x)
            for bucket, value in zip(self.θ.buckets, state, strict=True):
                bucket.copy_(value)
