"""A server that steps whenever a gradient arrives, whoever has sent it and whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cocod.algorithms.elementwise import twin
from lightning_cocod.algorithms.server import Server
from lightning_cocod.algorithms.staleness import Staleness
from lightning_cocod.comm import Group
from lightning_cocod.comm.buckets import in_memory_order, in_the_order_of
from lightning_cocod.comm.shard_service import Outbox, Question
from lightning_cocod.comm.turn import Turn


class ArrivalServer(Server):
    """W ← W + U(g) for this worker's shard, gradient by gradient in the order of arrival.

    U is that of the user's optimizer, with the options that the groups of the *pushing* worker's had when it pushed: they
    travel with the gradient, as far as they are numbers, texts or tuples of them. A twin of the optimizer steps, in whatever
    thread a gradient comes by, while the user's has no state. Each step makes a version of the shard.

    Args:
        optimizer: element-wise.
        comm: of all ranks.
        turn: held while W, or what belongs to it, is read or moved.
        staleness: of each gradient that is applied, told the number of those applied since its worker had the shard.
        elementwise: see ``Server``.
    """

    def __init__(
        self, optimizer: Optimizer, comm: Group, turn: Turn, staleness: Staleness, *, elementwise: bool = False
    ) -> None:
        super().__init__(optimizer, comm, elementwise=elementwise)
        self.read_x()
        self._own_options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._twin = twin(optimizer, [{**group} for group in optimizer.param_groups])
        self._twin.state = self.state
        self.turn, self.staleness = turn, staleness
        self.version = 0
        """Gradients that have been applied to this shard."""
        self.nbytes = sum(W.nbytes for W in self.W)
        # For the worker's side
        self.outbox = Outbox(self.g.buckets, comm.rank, comm.world_size)
        self.base = [0] * comm.world_size
        """The version of each shard of x."""

    # The owner

    def like_shard(self) -> list[Tensor]:
        """As W."""
        return [torch.empty_like(W) for W in self.W]

    def answer(self, question: Question, content: list[Tensor]) -> int:
        """W ← W + U(g) ; content ← W."""
        with self.turn:
            self.staleness.add([self.version - question.base])
            self.correct(question, content)
            self._update(question.told, content)
            self.version += 1
            return self._show(question.worker, content)

    def show(self, worker: int, content: list[Tensor]) -> int:
        """content ← W."""
        with self.turn:
            return self._show(worker, content)

    def correct(self, question: Question, g: list[Tensor]) -> None:
        """What is done to a gradient before the step: nothing."""

    def _show(self, worker: int, content: list[Tensor]) -> int:
        for out, W in zip(content, self.W, strict=True):
            out.copy_(W)
        self.pulled(worker)
        return self.version

    def pulled(self, worker: int) -> None:
        """A worker gets W as it is."""

    def _update(self, told: Any, content: list[Tensor]) -> None:
        options, absent = told
        for part, gradient in zip(self.parts, self.of_parts(content), strict=True):
            part.p.grad = None if part.number in absent else gradient
        self._twin.param_groups = [
            {**own, **_as(own, theirs), "params": params}
            for own, theirs, params in zip(self._own_options, options, self._groups, strict=False)  # one may have come
        ]
        self._twin.step()

    # The worker

    @torch.no_grad()
    def fill(self) -> list[int]:
        """g ← the gradients. Returns the numbers of the parameters that have none.

        Raises:
            TypeError: a sparse gradient.
        """
        absent = []
        for number, p in enumerate(self.x):
            if p.grad is not None and p.grad.is_sparse:
                raise TypeError("sparse gradients cannot be pushed to a sharded server: use sparse=False")
            flat = None if p.grad is None else in_memory_order(in_the_order_of(p, p.grad))
            for cut in self.cuts[number]:
                self.put(number, cut, None if flat is None else flat[cut.start : cut.stop])
            if flat is None:
                absent.append(number)
        return absent

    def options(self) -> list[dict[str, Any]]:
        """Of the groups as they are now, all that can be told."""
        return [
            {key: _plain(value) for key, value in group.items() if key != "params" and _can_be_told(value)}
            for group in self.optimizer.param_groups
        ]

    @torch.no_grad()
    def take_in(self, versions: Sequence[int]) -> None:
        """x ← what has come in place of g."""
        self.g.copy_to([p.detach() for p in self.x])
        self.base = list(versions)

    # States

    def replace_state(self) -> None:
        """The optimizer has loaded another state."""
        with self.turn:
            super().replace_state()
            self._twin.state = self.state

    def state_dict(self) -> dict[str, Any]:
        """This worker's shard of W, its version, and the versions of x. The optimizer's state is not here."""
        return {"W": [W.clone() for W in self.W], "version": self.version, "base": list(self.base)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""
        for W, value in zip(self.W, state["W"], strict=True):
            W.copy_(value)
        self.version, self.base = state["version"], list(state["base"])


def _can_be_told(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(map(_can_be_told, value))
    return isinstance(value, bool | int | float | str | np.generic | None)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.generic):
        return value.item()
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


def _as(own: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Options as they have been told, of the types that this worker's have."""
    return {key: _like(own.get(key), value) for key, value in told.items()}


def _like(own: Any, value: Any) -> Any:
    if isinstance(own, Tensor):
        return torch.full_like(own, value)
    if isinstance(value, list):
        each = own if isinstance(own, tuple | list) and len(own) == len(value) else [None] * len(value)
        made = [_like(o, v) for o, v in zip(each, value, strict=True)]
        return tuple(made) if isinstance(own, tuple) else made
    return value
