"""What the asynchronous algorithms have in common that have a server: it is in shards, one with each worker."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.asynchronous import Asynchronous
from lightning_cocod.algorithms.options import whole
from lightning_cocod.comm.lane import lane_for
from lightning_cocod.comm.shard_service import Owner, ShardService
from lightning_cocod.comm.turn import Turn


class OnShards(Asynchronous):
    """Each worker owns a shard of what the server has, and serves it from threads of its own; see ``ShardService``.

    A worker that is lost takes its shard along, so all others raise PeerLost, which names it: faults of others are survived
    by gossip, not by servers.

    Args:
        model: the module that is trained.
        optimizer: one or several.
        max_staleness: the most by which a worker may be ahead of the slowest, in its own exchanges with the server since all
            last met; a faster one waits. None for any. A worker that has come to a meeting keeps nobody waiting.
        **shared: see ``Asynchronous``.

    Raises:
        ValueError: ``max_staleness`` below 1: all would wait for each other.
    """

    may_skip_steps: ClassVar[bool] = False
    in_step: ClassVar[bool] = True
    sends_own_gradients: ClassVar[bool] = True
    outlives: ClassVar[bool] = False
    may_leave_out: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        max_staleness: int | None = None,
        **shared: Any,
    ) -> None:
        self.service: ShardService | None = None
        super().__init__(model, optimizer, **shared)
        if self.compression is not None:
            raise ValueError(f"{self.name} sends everything whole: leave compression out")
        self.max_staleness = None if max_staleness is None else whole("max_staleness", max_staleness, least=1)
        self.clock = 0
        """Exchanges with the server since all workers last met."""
        self.turn = Turn(lane_for(self.comm.device))
        """Held while this worker's shards are read or moved."""

    # The verbs

    def start(self, *, broadcast: bool = True) -> None:
        """The server begins where all workers are."""
        super().start(broadcast=broadcast)
        self.release()
        self.clock = 0
        owners = self._make_owners()
        if owners:
            if self.comm.world_size > 1:  # what they own, and how they serve it, is the same on all
                self.comm.who(False, self.subject(f"options {zlib.crc32(self._options().encode()):x}", counted=False))
            self.service = ShardService(self.comm, owners, self.name)
            self.service.start()

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Nobody is waited for."""

    def release(self) -> None:
        """The service ends. A peer that still trains takes this worker for lost, unless all have met before."""
        super().release()
        if self.service is not None:
            self.service.close()
            self.service = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from such a cut. Collective after ``start``."""
        with self.meeting():
            super().load_state_dict(state)
            self._load(state)

    # For the algorithms

    @abstractmethod
    def _options(self) -> str:
        """What must be the same on all workers."""

    @abstractmethod
    def _make_owners(self) -> list[Owner]:
        """Of what this worker serves; the server has the value of x."""

    @abstractmethod
    def _settle(self) -> None:
        """Wait for what this worker has asked. What has come stays where it is."""

    @abstractmethod
    def _read_server(self) -> None:
        """x ← what the server has. Collective, at rest."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Continue from ``_state()``, at rest."""

    def _next_exchange(self) -> int:
        """The number of the exchange that may begin now; a worker that is too far ahead waits first."""
        assert self.service is not None
        self.comm.check()
        self.clock += 1
        if self.max_staleness is not None:
            waited = self.service.clocks.wait(self.clock, self.max_staleness, self.comm.check)
            self.comm.ledger.add(skew=waited)
        return self.clock

    # Inside

    def _pending_correction(self) -> Callable[[], None] | None:
        return None if self.service is None else self._read_server

    @contextmanager
    def _rest(self, all_paused: Callable[[], None]) -> Iterator[None]:
        """All that has been asked is answered, on all workers, and nothing is asked before all have left."""
        assert self.service is not None
        self._settle()
        self.service.wait(self.service.rest(), counted=False)
        all_paused()
        self.service.clocks.reset()
        self.clock = 0
        yield
        all_paused()

    def _leave(self) -> None:
        if self.service is not None:
            self.service.leave()
