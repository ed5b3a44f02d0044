"""AD-PSGD: every worker goes on with its own steps, and is averaged with one neighbour at a time meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.asynchronous import Asynchronous
from lightning_cocod.algorithms.options import whole
from lightning_cocod.algorithms.staleness import Staleness
from lightning_cocod.algorithms.when import Every
from lightning_cocod.comm import PeerLost
from lightning_cocod.comm.gossip import Gossip
from lightning_cocod.comm.parts import fingerprint
from lightning_cocod.comm.topology import as_topology
from lightning_cocod.compression import Codec, as_compression

T = TypeVar("T")


class ADPSGD(Asynchronous):
    r"""AD-PSGD (Lian, Zhang, Zhang, Liu; ICML 2018; arXiv 1710.06952).

    U is the update of the user's optimizer, whose state stays local. At any worker i, and at any time, one of::

        step:         x_i ← x_i + U(g(x_i))
        exchange:     X ← X W         # i and a neighbour j: x_i, x_j ← (x_i + x_j)/2 ; the others unchanged

    A worker's thread exchanges while the worker computes. x_i is what forward and backward read and rests meanwhile; what
    exchanges add to it is collected in c_i, and the paper's x_i is the master z_i = x_i + c_i::

        exchange:     s ← x + c  ;  swap s for the neighbour's y  ;  c ← c + (y − s)/2
        step:         x ← x + U(g(x))  ;  x ← x + c  ;  c ← 0

    So a gradient is applied to a master that may have been merged since it was read, and a merge is that of snapshots that
    may have made steps since: the staleness that the algorithm allows. Σ z_i is changed by steps only. The consensus model
    is the mean of the z_i. With one worker it is the optimizer itself.

    Even ranks ask, odd ranks answer (``comm.topology``), so that no circle of workers can wait for each other. Memory beyond
    the parameters: c, s and y; with ``compression`` c, s, codes, and a base for each neighbour (``comm.pairwise``).

    In a plain loop, ``algorithm.step()`` takes the place of ``optimizer.step()``::

        with ADPSGD(model, optimizer) as a:
            for x, y in batches:
                loss(model(x), y).backward()
                a.step()
                optimizer.zero_grad()
            with a.consensus():     # all workers, at the same point
                evaluate(model)

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        topology: who is averaged with whom: "ring" (distance 1), "exponential" (1 and 1 + 2^i), "random" (across the two
            sides), or a list of edges, pairs of an even and an odd rank that connect all of them. Once the workers have
            regrouped, other ranks have these numbers, and a list gives way to a ring.
        every: a worker asks at most once in so many of its steps.
        compression: a codec of what is exchanged, contractive or unbiased, or its name (docs/compression.md).
        max_staleness: steps after which a worker waits for the exchange in flight; None to go on for as long as it takes.
        seed: of a random topology and of codecs that draw.
        **shared: ``communicator``, ``timeout``, … (see ``Algorithm``). A neighbour counts as lost after a silence of
            ``timeout`` seconds in an exchange that it has asked for, and of twice as many in one that it answers.

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "ad_psgd"
    brings_closer: ClassVar[str] = "More neighbours (topology=) help with both"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        topology: str | Iterable[Sequence[int]] = "ring",
        *,
        every: int = 1,
        compression: str | Codec | None = None,
        max_staleness: int | None = None,
        seed: int = 0,
        **shared: Any,
    ) -> None:
        codec = as_compression(compression)
        if codec is not None and not isinstance(codec, Codec):
            raise ValueError(f"{self.name} sends codes to one neighbour, and {compression!r} is no codec: choose one")
        self.every = whole("every", every, least=1)
        self.max_staleness = None if max_staleness is None else whole("max_staleness", max_staleness, least=1)
        self.seed = whole("seed", seed, least=0)
        super().__init__(model, optimizer, when=Every(self.every), **shared)
        self._edges = topology
        waits = self.comm.members is not None and self.comm.members.is_waiting  # it is not known yet how many they are
        self.topology = as_topology("ring" if waits else topology, self.comm.world_size, self.seed)
        self.codec = codec
        self.gradient_staleness = Staleness()
        """Merges into this worker's master between the reading of a gradient's weights and its application."""
        self.gossip = self._gossip()

    def _begin(self) -> None:
        """z_i ← x_i, c_i ← 0, and the exchanges begin."""
        self.x = self._parameters()
        members = self.comm.members
        edges = "ring" if members is not None and members.generation and not isinstance(self._edges, str) else self._edges
        self.topology = as_topology(edges, self.comm.world_size, self.seed)
        self.gossip = self._gossip()
        self.comm.who(False, self.subject(f"options {self.gossip.fingerprint:x}", counted=False))  # the same on all
        base = [p.detach().clone() for p in self.x] if self.codec is not None else None
        if base and self.comm.world_size > 1:
            self.comm.broadcast_(base, self.subject("base", counted=False)).wait()
        self.gossip.start(self.comm.connect_timeout, base, self.comm.losses.check)

    def _fingerprint(self) -> str:
        codec = None if self.codec is None else f"{fingerprint(self.codec):x}"
        return f"{super()._fingerprint()} {self._edges if isinstance(self._edges, str) else 'ring'} {codec}"

    def step(self, update: Callable[[], T] | None = None, *, scaler: torch.amp.GradScaler | None = None) -> T | None:
        """x ← x + U, in one piece for whoever takes a snapshot."""
        if update is None:
            return super().step(scaler=scaler)
        with self.gossip.moving():
            return super().step(update)

    def after_step(self) -> None:
        """x ← x + c ; c ← 0."""
        super().after_step()
        self.gossip.stepped()
        ages = self.gossip.fold()
        self.staleness.add(ages)
        self.gradient_staleness.add([len(ages)])

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Parameters that have joined an optimizer since the last one are in the exchanges from here on."""
        with super().consensus():
            yield
        if self._started and not self._resting and self._parameters() != self.x:
            with self.meeting():
                self._leave()
                self._all_paused()  # before nobody looks for the others any more, none of them closes
            if self._parameters() != self.x:  # the workers have not regrouped meanwhile, after which all is new anyway
                self.release()
                self._begin()

    def _leave(self) -> None:
        self.gossip.fold()
        self.gossip.leave()

    def release(self) -> None:
        """End the exchanges of this worker, whatever the others do."""
        self.gossip.close(goodbye=isinstance(self.comm.losses.error, PeerLost))  # then it is not this one that is lost

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """c as it was. Collective after ``start``: nobody exchanges with a worker that has yet to load its own."""
        with self.meeting():
            super().load_state_dict(state)
            self.gossip.set_correction(state["c"])

    def metrics(self, since: Any = None) -> dict[str, float]:
        """Adds the exchanges of this worker, and how many of them a gradient has missed."""
        missed = self.gradient_staleness.metrics("algo/gradient_staleness")
        missed["algo/gradient_staleness"] = missed.pop("algo/gradient_staleness_steps")  # these are merges, not steps
        return {**super().metrics(since), **missed, "algo/exchanges": float(self.gossip.exchanges)}

    def measured(self) -> tuple[int, float] | None:
        """Of this worker's last exchange: the step of its snapshot, and ‖mean of the two − s‖/‖s‖."""
        return self.gossip.distance

    def _pending_correction(self) -> Callable[[], None] | None:
        return None if self.comm.world_size == 1 else self.gossip.add_correction

    def _rest(self, all_paused: Callable[[], None]) -> AbstractContextManager[None]:
        return self.gossip.quiet(all_paused)

    def _state(self) -> dict[str, Any]:
        c = self.gossip.correction()
        return {"c": c if self._started else [torch.zeros_like(value) for value in c]}  # finish() has put it into x

    def _gossip(self) -> Gossip:
        return Gossip(
            self.x,
            self.topology,
            self.comm.rank,
            self.comm.ledger,
            every=self.every,
            most=self.max_staleness,
            codec=self.codec,
            seed=self.seed,
            patience=self.comm.timeout,
            tracer=lambda: self.comm.tracer,
        )
