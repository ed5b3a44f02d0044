"""A server whose workers are done with a gradient once it is complete: it is lent to the push, and not copied."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_cocod.algorithms.outgoing import Cut
from lightning_cocod.algorithms.server import Server
from lightning_cocod.comm import Message, Subject
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.lent import Lent


class LendingServer(Server):
    """The same sums, without a pass over memory and without room for a copy.

    A gradient must rest until the push has been waited for. Until then it is held here: on a GPU the push may still read it
    when the communication thread has let go of it.
    """

    _lent: Lent | None = None

    def send(self, gate: Gate, subject: Subject) -> Message:
        """What is lent from now on."""
        self._lent = Lent(self.layout)
        return self.comm.push_(self._lent, self.G, self.rows, gate, subject)

    def take(self, number: int, *, free: bool = True) -> None:
        """A gradient that stayed would be added to by the next backward."""
        assert free
        super().take(number, free=free)

    def put(self, number: int, cut: Cut, values: Tensor | None) -> None:
        """Lend."""
        assert self._lent is not None  # begun
        self._lent.pieces[cut.bucket][cut.piece] = values

    def enter(self, present: Sequence[bool] | None = None) -> None:
        """The push has arrived: what was lent is free."""
        self._lent = None
        super().enter(present)
