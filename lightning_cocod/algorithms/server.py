"""A server without a process of its own: each worker owns a shard of the parameters, and runs the optimizer on it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.elementwise import WHOLE, refusal
from lightning_cocod.algorithms.first_use import FirstUse
from lightning_cocod.algorithms.outgoing import Outgoing
from lightning_cocod.algorithms.shard_state import Part, cut, gather
from lightning_cocod.comm import Group, Message, Subject
from lightning_cocod.comm.buckets import in_memory_order
from lightning_cocod.comm.gate import Gate

_log = logging.getLogger(__name__)


class Server(Outgoing):
    """One optimizer's parameters x, cut into shards.

    Of each bucket this worker owns a part. While the optimizer steps, and while its gradients are clipped before, it sees
    those parts in place of the parameters (``enter``, ``leave``), and its state is theirs. At all other times it is the
    user's as it was, but for its state, which is kept here.

    Memory: shards of x, gradient and state, and where gradients are copied a copy of x for them.

    Args:
        optimizer: element-wise.
        comm: sends.
        shared: parameters that other optimizers move too: their gradients are kept for those.
        elementwise: whether the optimizer is known to be, whatever trying it out says.

    Raises:
        TypeError: an optimizer that needs whole tensors; parameters with gaps in their memory.
    """

    def __init__(
        self, optimizer: Optimizer, comm: Group, shared: Set[nn.Parameter] = frozenset(), *, elementwise: bool = False
    ) -> None:
        if (why_not := refusal(optimizer, elementwise=elementwise)) is not None:
            hint = ", or elementwise=True if it is one" if why_not.startswith(WHOLE) else ""
            raise TypeError(
                f"{type(optimizer).__name__} {why_not}; use an element-wise optimizer such as SGD or AdamW{hint}"
            )
        super().__init__(optimizer, comm, shared)
        self.W = [torch.zeros_like(shard) for shard in self.G]
        """This worker's shards of x."""
        self.parts, self._where = self._cut()
        self._gradients = self.of_parts(self.G)
        self._groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for part in self.parts:
            self._groups[self.group_of[part.number]].append(part.p)
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._unserved: dict[Tensor, Any] = {}  # whole, of parameters that are not in x: frozen from the start
        self._take_state()
        self.is_serving = False
        """Whether the optimizer has parts in place of parameters."""
        self._users: list[list[nn.Parameter]] = []

    def _cut(self) -> tuple[list[Part], list[tuple[int, int, int]]]:
        """This worker's parts of every parameter, views of W; and where in which bucket's shard they lie."""
        parts, places = [], []
        for bucket, W in enumerate(self.W):
            for piece in self.layout.shares(bucket, self.comm.world_size)[self.comm.rank]:
                weights = W[piece.offset : piece.end]
                p = nn.Parameter(weights.view(()) if self.x[piece.index].dim() == 0 else weights)
                parts.append(Part(piece.index, piece.start, piece.stop, p))
                places.append((bucket, piece.offset, piece.end))
        return parts, places

    def of_parts(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Of something that is cut into shards as x is, what belongs to each part: views of these, shaped as the part."""
        places = zip(self.parts, self._where, strict=True)
        return [shards[bucket][begin:end].view(part.p.shape) for part, (bucket, begin, end) in places]

    @torch.no_grad()
    def read_x(self) -> None:
        """W ← x."""
        self.g.copy_(self.x)
        for W, own in zip(self.W, self.own(self.g), strict=True):
            W.copy_(own)
        for flat in self.g.buckets:
            flat.zero_()

    def replace_state(self) -> None:
        """The optimizer has loaded another state, which may be none."""
        self.state.clear()
        self._unserved.clear()
        self._take_state()

    def _take_state(self) -> None:
        """What the optimizer has for whole parameters, at first or as somebody has written it, is cut."""
        held, served = self.optimizer.state, set(self.x)
        for part in self.parts:
            if whole := held.get(self.x[part.number]):
                self.state[part.p] = cut(whole, self.x[part.number], part)
        self._unserved.update((p, whole) for p, whole in held.items() if p not in served)
        self.optimizer.state = defaultdict(dict)

    def members(self) -> list[nn.Parameter]:
        """The optimizer's parameters, which are the user's."""
        groups = self._users if self.is_serving else [group["params"] for group in self.optimizer.param_groups]
        return [p for group in groups for p in group]

    # The optimizer

    @torch.no_grad()
    def copy_parts(self) -> None:
        """The parts are what the parameters are, whoever has written those since the last pull."""
        x = [in_memory_order(self.x[part.number])[part.start : part.stop].view(part.p.shape) for part in self.parts]
        if x:
            torch._foreach_copy_([part.p for part in self.parts], x)

    def enter(self, present: Sequence[bool] | None = None) -> None:
        """The optimizer has the parts, with their gradients; none where no worker had one."""
        if self.is_serving:  # and has not stepped
            self.leave()
        if self.optimizer.state:
            self._take_state()
        for part, gradient in zip(self.parts, self._gradients, strict=True):
            part.p.requires_grad_(self.x[part.number].requires_grad)
            part.p.grad = gradient if present is None or present[part.number] else None
        self._hand_over()

    def _hand_over(self) -> None:
        self._users = [group["params"] for group in self.optimizer.param_groups]
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = self._groups[number] if number < len(self._groups) else []  # a group that has just come
        self.optimizer.state, self.is_serving = self.state, True

    def leave(self) -> None:
        """It has the parameters again."""
        self.is_serving = False
        self.state, self.optimizer.state = self.optimizer.state, defaultdict(dict)
        for group, params in zip(self.optimizer.param_groups, self._users, strict=True):
            group["params"] = params

    @contextmanager
    def shown(self, state: defaultdict[Tensor, Any]) -> Iterator[None]:
        """Inside, the optimizer has the parameters, with this state of whole ones."""
        serving = self.is_serving
        if serving:
            self.leave()
        self.optimizer.state = state
        try:
            yield
        finally:
            self.optimizer.state = defaultdict(dict)
            if serving:
                self._hand_over()

    @contextmanager
    def shown_whole(self, subject: Subject, *, failed: bool) -> Iterator[None]:
        """Inside, the optimizer has the parameters and its whole state. Collective.

        Args:
            subject: of the message in which the shards travel.
            failed: whether communication has: nobody can put the shards together, and the state is empty.
        """
        if failed:
            _log.warning(
                "communication has failed, and the state of %s is in shards: none of it is saved",
                type(self.optimizer).__name__,
            )
        with self.shown(defaultdict(dict) if failed else self.whole_state(subject)):
            yield

    def pull(self, subject: Subject, into: Sequence[Tensor] | None = None, arrived: Gate | None = None) -> Message:
        """x ← async W, the shards of all workers; or something else like x. The gate opens for each bucket that is there."""
        return self.comm.pull_(self.W, [p.detach() for p in into or self.x], self.layout, self.rows, subject, arrived)

    def pull_behind(self, subject: Subject, uses: FirstUse) -> Message:
        """x ← async W, and whoever uses a parameter waits for the buckets in which it comes."""
        arrived = self.comm.gate(self.layout)
        pull = self.pull(subject, arrived=arrived)
        buckets = [sorted({cut.bucket for cut in cuts}, reverse=True) for cuts in self.cuts]

        def wait(number: int) -> None:
            for bucket in buckets[number]:
                pull.wait_for(bucket, arrived)

        uses.watch(self.x, wait)
        return pull

    def whole_state(self, subject: Subject) -> defaultdict[Tensor, Any]:
        """The optimizer's state as if it had stepped whole parameters. Collective."""
        whole = gather(self.parts, self.state, self.x, self.comm, subject)
        whole.update(self._unserved)
        return whole
