"""Error feedback: what a code has dropped is part of the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cocod.comm import Communicator, Message, Subject
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.parts import How


class Residuals:
    r"""e, what the others have not been told of.

    For displacements and gradients, which have no base to be told from (for models see ``SharedBase``)::

        p_i ← D_i + e_i ;  c_i ← C(p_i) ;  e_i ← p_i − c_i ;  D_i ← async C(Σ_j w_j c_j) − a c_i

    Memory: one copy of the parameters.

    Args:
        comm: sends.
        compression: how means come about.
    """

    def __init__(self, comm: Communicator, compression: How) -> None:
        self.comm, self.compression = comm, compression
        self.e: dict[nn.Parameter, Tensor] = {}

    def forget(self) -> None:
        """e ← 0."""
        self.e = {}

    def of(self, x: Sequence[nn.Parameter], like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """e of these parameters, which lies in memory as they do, or as others do; 0 of those that are new."""
        for p, form in zip(x, like or x, strict=True):
            if p not in self.e:
                self.e[p] = torch.empty_strided(form.size(), form.stride(), dtype=p.dtype, device=p.device).zero_()
        return [self.e[p] for p in x]

    @torch.no_grad()
    def mean_(
        self,
        D: Buffer,
        x: Sequence[nn.Parameter],
        subject: Subject,
        *,
        like: Sequence[Tensor] | None = None,
        own: float = 0.0,
        relative_to: Tensor | None = None,
    ) -> Message:
        """The above, with a = ``own``. D belongs to x; neither it nor e must be touched until the message has arrived."""
        e = self.of(x, like)
        D.add_(e)
        return self.comm.compressed_mean_(D, e, x, self.compression, subject, own=own, relative_to=relative_to)

    def state_dict(self, numbers: Mapping[nn.Parameter, int]) -> dict[int, Tensor]:
        """e, once no message is in flight."""
        return {numbers[p]: e.clone() for p, e in self.e.items() if p in numbers}

    def load_state_dict(self, state: Any, members: Sequence[nn.Parameter]) -> None:
        """Continue with e; without one, with 0."""
        self.e = {members[number]: e.to(members[number].device, copy=True) for number, e in (state or {}).items()}
