"""A server whose gradients come as codes in most steps, and whole in some."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.background_server import BackgroundServer
from lightning_cocod.algorithms.outgoing import Cut, copy_alike
from lightning_cocod.algorithms.skipping import Never, Sending
from lightning_cocod.comm import Group, Message, Subject
from lightning_cocod.comm.buckets import summed_in
from lightning_cocod.comm.coded_shards import CodeRows, Coding
from lightning_cocod.comm.compressed import Compression
from lightning_cocod.comm.gate import Gate


class CodedServer(BackgroundServer):
    """G ← Σ_j w_j C(p_j), p_i ← g_i + e_i ; e_i ← p_i − C(p_i). In a step that is ``whole``, G ← Σ_j w_j g_j, and e rests.

    What is frozen, and has no gradient, rests, and what is pushed of it moves nothing: its e is put aside, and 0 sent.

    Memory beyond that of a ``BackgroundServer``: a copy of the gradients in float32 or wider, for e, and e of what rests.

    Args:
        optimizer: element-wise.
        comm: sends.
        shared: parameters that other optimizers have as well.
        compression: C.
        elementwise: see ``Server``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        comm: Group,
        shared: Set[nn.Parameter] = frozenset(),
        *,
        compression: Compression,
        elementwise: bool = False,
    ) -> None:
        super().__init__(optimizer, comm, shared, elementwise=elementwise)
        self.e = self.layout.buffer(summed=True)
        torch._foreach_zero_(self.e.buckets)
        self._into = {True: self.into, False: self.views(self.e)}
        self._aside: dict[int, list[Tensor]] = {}  # e of what rests, piece by piece
        self._coding = Coding(compression, Sending(Never(), list(range(comm.world_size)), comm.rank), CodeRows())
        self.whole = True
        """Whether the step's gradients travel as they are."""
        self.steps = 0
        """Of this optimizer so far, as another one may step more often."""

    def begin(self, subject: Subject) -> None:
        """What is filled from now on is g, or p."""
        self.into, self.steps = self._into[self.whole], self.steps + 1
        super().begin(subject)

    @torch.no_grad()
    def take(self, number: int, *, free: bool = True) -> None:
        """A parameter's gradient is complete. Where there is none, and it is frozen, e is put aside."""
        if not self.whole:
            if self.x[number].grad is None and not self.x[number].requires_grad:
                self._put_aside(number)
            else:
                self._put_back([number])
        super().take(number, free=free)

    def _put_aside(self, number: int) -> None:
        places = [self.into[cut.bucket][cut.piece] for cut in self.cuts[number]]
        if number not in self._aside:
            self._aside[number] = [place.clone() for place in places]
        for place in places:  # every time: a code of zeros need not be zeros
            place.zero_()

    def _put_back(self, numbers: Iterable[int]) -> None:
        for number in self._aside.keys() & set(numbers):
            for cut, e in zip(self.cuts[number], self._aside.pop(number), strict=True):
                self._into[False][cut.bucket][cut.piece].copy_(e)

    def put(self, number: int, cut: Cut, values: Tensor | None) -> None:
        """g, or p ← e + g."""
        if self.whole:
            super().put(number, cut, values)
        elif values is not None:
            self.into[cut.bucket][cut.piece].add_(values)

    def send(self, gate: Gate, subject: Subject) -> Message:
        """Values, or codes."""
        if self.whole:
            return super().send(gate, subject)
        return self.comm.coded_push_(self.e, self.G, self._coding, gate, subject)

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """e of every parameter, once no push is under way."""
        self._put_back(self._aside)
        e = [torch.empty_like(p, dtype=summed_in(p.dtype)) for p in self.x]
        self.e.copy_to(e, keep=False)
        return dict(zip(self.x, e, strict=True))

    def continue_from(self, older: CodedServer, residuals: dict[nn.Parameter, Tensor]) -> None:
        """Go on where another one was, and with 0 of parameters that are new."""
        e = [residuals.get(p, torch.zeros_like(p, dtype=summed_in(p.dtype))) for p in self.x]
        self.e.copy_(e, keep=False)
        self.steps = older.steps

    def state_dict(self) -> dict[str, Any]:
        """Adds e, and the number of steps."""
        state = super().state_dict()  # the last push has arrived
        self._put_back(self._aside)
        return {**state, "e": [flat.clone() for flat in self.e.buckets], "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""
        super().load_state_dict(state)
        self.steps = state["steps"]
        self._aside.clear()
        copy_alike(self.e.buckets, state["e"])
