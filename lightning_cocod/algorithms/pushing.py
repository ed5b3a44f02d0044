"""Gradients that are pushed while backward runs, by hooks of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.gradients import trainable
from lightning_cocod.algorithms.options import flag
from lightning_cocod.algorithms.outgoing import Outgoing, Served
from lightning_cocod.algorithms.when import as_when


class Pushing(Algorithm, ABC):
    """What algorithms with an ``Outgoing`` for each optimizer have in common: when a gradient sets out.

    Pushes overlap backward where there is one optimizer, and one backward a step that is not under ``no_sync``.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        overlap: False pushes after backward: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: see ``Algorithm``.

    Raises:
        ValueError: an option out of range.
    """

    may_skip_steps: ClassVar[bool] = False
    has_rounds: ClassVar[bool] = False
    in_step: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        self.servers: dict[Optimizer, Any] = {}
        super().__init__(model, optimizer, when=as_when(1, 0), weights=weights, **shared)
        self.overlap = flag("overlap", overlap)
        self._hooks_of_servers: list[Any] = []
        self._accumulating = False

    @abstractmethod
    def make_server(self, optimizer: Optimizer, shared: set[nn.Parameter]) -> Outgoing:
        """For an optimizer, which has these parameters in common with others."""

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0."""
        super().start(broadcast=broadcast)
        if self.comm.world_size > 1:
            self._serve()

    def _serve(self) -> None:
        self.release()
        members = [p for opt in self.optimizers for p in dict.fromkeys(trainable([opt]))]
        shared = {p for p, count in Counter(members).items() if count > 1}
        self.servers = {opt: self.make_server(opt, shared) for opt in self.optimizers}
        if self.overlap and len(self.servers) == 1:
            for server in self.servers.values():
                for number, p in enumerate(server.x):
                    hook: Any = p.register_post_accumulate_grad_hook  # untyped in torch
                    self._hooks_of_servers.append(hook(partial(self._on_gradient, server, number)))

    def release(self) -> None:
        """No hook is left."""
        super().release()
        for hook in self._hooks_of_servers:
            hook.remove()
        self._hooks_of_servers = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up, and nothing is pushed."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _on_gradient(self, server: Outgoing, number: int, _: Tensor) -> None:
        """A parameter's gradient is complete, if backward is the last of the step: push it."""
        if self._accumulating or not self.one_backward_a_step or self.replica.is_aside:
            return
        if server.is_taken(number):
            raise RuntimeError(
                "a second backward in one step (or one pass that comes twice by a parameter, as re-entrant checkpointing "
                "does), and the gradients of the first are on their way: use overlap=False, or put all backwards but the "
                "last of a step under no_sync()"
            )
        if server.push is None:
            if server.is_outdated:  # before_step sees to it
                return
            self._begin(server)
        server.take(number, free=self.frees_gradients)

    def _begin(self, server: Outgoing) -> None:
        self.weighing.report_step()
        server.begin(self.subject("gradients"))

    def after_backward(self) -> None:
        """What has been begun does not keep other messages."""
        for server in self.servers.values():
            if server.push is not None:
                server.complete(free=self.frees_gradients)

    def _join(self) -> None:
        """Parameters that are new in the optimizers are served from now on.

        Raises:
            RuntimeError: they have gradients already, and others are on their way.
        """
        self.after_backward()
        if not any(server.is_outdated for server in self.servers.values()):
            return
        if all(server.push is None for server in self.servers.values()):
            self._renew()
        elif any(p.grad is not None for server in self.servers.values() for p in server.missing()):
            raise RuntimeError(
                "parameters have joined the optimizer between backward and step, and have gradients: "
                "let them join before backward"
            )  # without gradients they are served from the next step on

    def _renew(self) -> None:
        """New servers."""
        self.put_back_states()
        self._serve()

    def put_back_states(self) -> None:
        """The optimizers get what servers keep of theirs. Collective."""

    def served(self) -> list[list[Served]]:
        """Whose values lie where in the buckets of each server: part of a state that holds buckets or shards."""
        numbers = {p: number for number, p in enumerate(self._members())}
        return [server.served(numbers) for server in self._of(None)]

    def serve_as(self, served: Sequence[Sequence[Served]]) -> None:
        """Servers of the parameters that a state is of, whichever the optimizers move now. Collective.

        From then on all is as if these had been frozen and thawed in one run: what joins is served from the next step on.

        Raises:
            ValueError: a parameter is not what it is in the state.
        """
        if self.served() == served:
            return
        members, theirs = self._members(), {number for of_server in served for number, *_ in of_server}
        before = [p.requires_grad for p in members]
        for number, p in enumerate(members):
            p.requires_grad_(number in theirs)
        try:
            Pushing._renew(self)  # nothing is carried over: all of it is about to be loaded
        finally:
            for p, moves in zip(members, before, strict=True):
                p.requires_grad_(moves)
        for mine, of_server in zip(self.served(), served, strict=True):
            for here, there in zip_longest(mine, of_server):
                if here != there:
                    raise ValueError(
                        f"the state is of {_described(there)}, and here is {_described(here)} in its place: continue with "
                        "the same model and the same parameter groups"
                    )

    def _of(self, optimizer: Optimizer | None) -> list[Any]:
        """The server of an optimizer, or all."""
        return [server for opt, server in self.servers.items() if optimizer is None or opt is optimizer]

    def finish(self) -> None:
        """The model is x."""
        super().finish()
        self.put_back_states()
        self.release()
        self.servers = {}

    def _members(self) -> list[nn.Parameter]:
        """Those of the user, whatever the optimizers have."""
        served = [p for server in self.servers.values() for p in server.members()]
        return list(dict.fromkeys(served)) if self.servers else super()._members()

    def _pending_correction(self) -> Callable[[], None] | None:
        """There is none, but whether x is finite is asked where there is one. A push that has begun must not keep others."""
        self.after_backward()
        return None if self.comm.world_size == 1 else lambda: None


def _described(served: Served | None) -> str:
    if served is None:
        return "no parameter"
    number, group, dtype, shape, strides = served
    return f"parameter {number} (group {group}, {dtype}, shape {shape}, strides {strides})"
