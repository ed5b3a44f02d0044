"""A-PSGD: an asynchronous parameter server, in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.arrival_server import ArrivalServer
from lightning_cocod.algorithms.on_shards import OnShards
from lightning_cocod.algorithms.options import flag, nothing_in_common
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.comm import NonFiniteMessage
from lightning_cocod.comm.norms import finite
from lightning_cocod.comm.shard_service import Owner
from lightning_cocod.comm.thread import Handle

T = TypeVar("T")


class APSGD(OnShards):
    r"""Asynchronous SGD with a parameter server (Dean et al., NeurIPS 2012), each worker being the server of a shard.

    W is the server's, U the user's optimizer's update, on the shard that a worker owns. No step waits for another worker::

        worker:  x_i ← Pull W ;  Push g(x_i) ;  …
        owner:   W ← W + U(g)                       for each g that arrives, in the order of arrival

    A push brings back W, its own update included. With ``overlap`` the next gradient is computed meanwhile, at the weights
    that the push before has brought: one more gradient of the worker's own lies between a gradient and its base. An owner
    tells the version of its shard with each pull, so the staleness of a gradient is known when it is applied: the number of
    gradients that have been since its pull. ``metrics()`` has those of this worker's shard, of all workers' gradients.

    The optimizer must be element-wise (SGD, Adam, RMSprop, …; it is tried out). It steps once for each gradient, so its
    momentum is the server's. Options of its groups, such as rates, are those of the pushing worker when it pushes. Clipping
    is of the worker's own gradient. A parameter without a gradient does not step. ``optimizer.state`` is empty meanwhile:
    ``optimizer_state`` has it whole, ``finish`` puts it back. The model that is evaluated and saved is W, of which all
    workers have the same at a meeting: it has all gradients that were pushed before.

    The loss of a worker ends the run on all others, with PeerLost: its shard is gone. Memory beyond the parameters,
    gradients and optimizer, whose state is N times smaller: a copy of the parameters, two shards of them, and another shard
    for each other worker.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters, without one in common.
        overlap: False waits for what a push brings back before the next forward.
        max_staleness: the most by which a worker may be ahead of the slowest, in steps of its own since all last met: a
            faster one waits. None for any.
        elementwise: see ``SSGD``.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, … (see ``Algorithm``). With "raise" a worker whose
            gradient is not finite raises; with "skip" that goes to no shard, and the worker has W like after any push. What
            its forward has written into buffers stays.

    Raises:
        ValueError: an option out of range, ``compression``, or optimizers with parameters in common.

    In a plain loop call ``a_psgd.step()`` after ``backward()``. ``start`` raises TypeError for an optimizer that needs whole
    tensors. A gradient scaler is refused. One worker trains plainly.
    """

    name: ClassVar[str] = "a_psgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        overlap: bool = True,
        max_staleness: int | None = None,
        elementwise: bool = False,
        **shared: Any,
    ) -> None:
        self.servers: dict[Optimizer, ArrivalServer] = {}
        super().__init__(model, optimizer, when=as_when(1, 0), max_staleness=max_staleness, **shared)
        self.overlap, self.elementwise = flag("overlap", overlap), flag("elementwise", elementwise)
        nothing_in_common(self.name, self.optimizers, "its server would have two values of it")
        self.skipped = 0
        """Gradients of this worker that were not finite, and have gone nowhere."""
        self._due: list[ArrivalServer] = []
        self._asked: dict[ArrivalServer, Handle[list[int]]] = {}
        self._load_hooks: list[Any] = []

    # The verbs

    def make_server(self, optimizer: Optimizer) -> ArrivalServer:
        """Of this worker's shard."""
        return ArrivalServer(optimizer, self.comm, self.turn, self.staleness, elementwise=self.elementwise)

    def _make_owners(self) -> list[Owner]:
        if self.comm.world_size == 1:
            return []
        self._due, self._asked = [], {}
        self.servers = {opt: self.make_server(opt) for opt in self.optimizers}
        for server in self.servers.values():
            load: Any = server.optimizer.register_load_state_dict_post_hook
            self._load_hooks.append(load(lambda _, server=server: server.replace_state()))
        return list(self.servers.values())

    def release(self) -> None:
        """The service ends, and no hook is left."""
        super().release()
        for hook in self._load_hooks:
            hook.remove()
        self._load_hooks = []

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Remember who steps.

        Raises:
            RuntimeError: parameters have joined the optimizer, of which the server knows nothing.
        """
        for server in self._of(optimizer):
            if server.is_outdated:
                raise RuntimeError(
                    f"parameters have joined the optimizer, and the server of {self.name} has not: let them join before "
                    "training starts, or between finish() and start() on all ranks"
                )
            if server not in self._due:
                self._due.append(server)

    def step(self, update: Callable[[], T] | None = None, *, scaler: torch.amp.GradScaler | None = None) -> T | None:
        """Push g, pull W. The user's optimizer moves nothing.

        Raises:
            NonFiniteMessage: this worker's gradient, unless that is to be skipped.
        """
        if update is not None:
            due, self._due = self._due, []
            if due:
                clock = self._next_exchange()
                for server in due:
                    self._push(server, clock)
        return super().step(update, scaler=scaler)

    def pull(self) -> None:
        """x ← W as it is now. Not collective; a push brings W as well."""
        self._settle()
        for number, server in enumerate(self.servers.values()):
            assert self.service is not None
            self._asked.pop(server, None)
            server.take_in(self.service.wait(self.service.show(number, server.outbox, clock=self.clock)))

    def finish(self) -> None:
        """The model is W, and the optimizers have their states."""
        if not self._started:
            return
        with self.meeting():
            for optimizer, server in self.servers.items():
                optimizer.state = server.whole_state(self.subject("optimizer", counted=False))
            super().finish()
        self.servers, self._asked = {}, {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole. Collective. Empty once communication has failed: nobody can put the shards together."""
        server = self.servers.get(optimizer)
        if server is None:
            return super().optimizer_state(optimizer)
        failed = self.comm.failed
        together = nullcontext() if failed else self.meeting()
        with together, server.shown_whole(self.subject("optimizer", counted=False), failed=failed):
            return super().optimizer_state(optimizer)

    # Inside

    def _options(self) -> str:
        return repr([(server.layout.fingerprint, type(opt).__name__) for opt, server in self.servers.items()])

    def _of(self, optimizer: Optimizer | None) -> list[ArrivalServer]:
        return [server for opt, server in self.servers.items() if optimizer is None or opt is optimizer]

    def _push(self, server: ArrivalServer, clock: int) -> None:
        assert self.service is not None
        number = list(self.servers.values()).index(server)
        base = server.base
        self._take_in(server)  # what the push before has brought; g was computed at what had come before that
        told = [server.options(), server.fill()]
        fit = finite(server.g.buckets)
        if not fit and not self.skip_nonfinite:
            raise NonFiniteMessage(f"rank {self.comm.rank} has NaN or infinity in its gradient at its step {self.t}")
        self.skipped += not fit
        self._asked[server] = self.service.ask(number, server.outbox, base, told, clock=clock, fit=fit)
        for p in server.x:
            p.grad = None
        if not self.overlap:
            self._take_in(server)

    def _take_in(self, server: ArrivalServer) -> None:
        """x ← W as it has come, if something has been asked."""
        if (asked := self._asked.pop(server, None)) is not None:
            assert self.service is not None
            server.take_in(self.service.wait(asked))

    def _settle(self) -> None:
        for asked in self._asked.values():
            assert self.service is not None
            self.service.wait(asked, counted=False)

    def _read_server(self) -> None:
        for server in self.servers.values():
            server.pull(self.subject("model", counted=False)).wait(counted=False)

    def _state(self) -> dict[str, Any]:
        """Each server's, and what has come and is not in x yet."""
        return {
            "servers": [
                {
                    **server.state_dict(),
                    "come": (asked.wait(), [flat.clone() for flat in server.g.buckets])
                    if (asked := self._asked.get(server)) is not None
                    else None,
                }
                for server in self.servers.values()
            ]
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._asked = {}
        for server, of_server in zip(self.servers.values(), state["servers"], strict=True):
            with self.turn:
                server.load_state_dict(of_server)
            if of_server["come"] is not None:
                versions, buckets = of_server["come"]
                for flat, value in zip(server.g.buckets, buckets, strict=True):
                    flat.copy_(value)
                self._asked[server] = Handle.of(versions)

    def _why_explicit(self) -> str | None:
        return "the server steps" if self.servers else super()._why_explicit()
