"""Gradients on their way: each worker owns a shard of the parameters, and is sent what belongs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.gradients import trainable
from lightning_cocod.comm import Group, Message, Subject
from lightning_cocod.comm.buckets import Buffer, Layout, in_memory_order, in_the_order_of, is_dense
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.shards import Rows

Served = tuple[int, int, str, tuple[int, ...], tuple[int, ...] | None]
"""A parameter, and where in the buckets its values lie: number among the optimizers' members, parameter group, dtype, shape,
strides. A plain tuple, as it is part of checkpoints."""


class Cut(NamedTuple):
    """What of a parameter lies in a bucket: the number of its piece there, and which elements it is, in memory order."""

    bucket: int
    piece: int
    start: int
    stop: int


class Outgoing:
    """One optimizer's gradients. Their mean arrives in shards.

    Buckets hold parameters of one group and one dtype, the last registered first, as backward comes by them. They set out
    as they are filled, in this order.

    Args:
        optimizer: whose parameters x are.
        comm: sends.
        shared: parameters that other optimizers move too: their gradients are kept for those.
        summed: whether gradients in half precision are kept in float32.

    Raises:
        TypeError: parameters with gaps in their memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        comm: Group,
        shared: Set[nn.Parameter] = frozenset(),
        *,
        summed: bool = False,
    ) -> None:
        self.optimizer, self.comm = optimizer, comm
        groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.x = trainable([optimizer])[::-1]
        self.shared = {p for p in self.x if p in shared}
        if not all(map(is_dense, self.x)):
            raise TypeError("a parameter has gaps in its memory: make it contiguous before the optimizer is made")
        self.group_of = [groups[p] for p in self.x]
        """The number of each parameter's group."""
        self.layout = Layout(self.x, apart=self.group_of, multiple=comm.world_size)
        self.summed = summed
        self.G = self.layout.shard(comm.world_size, summed=summed)
        """This worker's shards of the mean."""
        self.rows = Rows()
        self.cuts: list[list[Cut]] = [[] for _ in self.x]
        """Every parameter's pieces."""
        for bucket in range(len(self.layout)):
            for number, piece in enumerate(self.layout.parts(bucket)):
                self.cuts[piece.index].append(Cut(bucket, number, piece.start, piece.stop))
        self.gate: Gate | None = None
        self.push: Message | None = None
        """Of this step's gradients, if it has begun."""
        self._waiting: list[int] = []
        self._taken: set[int] = set()
        self._absent: set[int] = set()

    @cached_property
    def g(self) -> Buffer:
        """This worker's gradients."""
        return self.layout.buffer(summed=self.summed)

    @cached_property
    def into(self) -> list[list[Tensor]]:
        """Where they are put, piece by piece of every bucket."""
        return self.views(self.g)

    def own(self, buffer: Buffer) -> list[Tensor]:
        """This worker's shards of a buffer."""
        return [flat.view(self.comm.world_size, -1)[self.comm.rank] for flat in buffer.buckets]

    def views(self, buffer: Buffer) -> list[list[Tensor]]:
        """Every piece of every bucket of a buffer."""
        return [
            [flat[piece.offset : piece.end] for piece in self.layout.parts(bucket)]
            for bucket, flat in enumerate(buffer.buckets)
        ]

    @property
    def is_outdated(self) -> bool:
        """Whether the optimizer moves parameters that are not in here."""
        return bool(self.missing())

    def members(self) -> list[nn.Parameter]:
        """The optimizer's parameters, which are the user's."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def missing(self) -> set[nn.Parameter]:
        """Those that are not in here."""
        return set(trainable([self.optimizer])).difference(self.x)

    def served(self, numbers: Mapping[nn.Parameter, int]) -> list[Served]:
        """x as it lies in the buckets: the same with two servers whose shards hold the same elements."""
        each = enumerate(zip(self.x, self.group_of, strict=True))
        return [(numbers[p], group, str(p.dtype), *self.layout.form(number)) for number, (p, group) in each]

    # A step

    def begin(self, subject: Subject) -> None:
        """G ← async Σ_j w_j g_j, w as in the subject; buckets set out as they are filled."""
        self.gate = self.comm.gate(self.layout)
        self._waiting = [len(self.layout.parts(bucket)) for bucket in range(len(self.layout))]
        self._taken, self._absent = set(), set()
        self.push = self.send(self.gate, subject)

    def send(self, gate: Gate, subject: Subject) -> Message:
        """What is filled from now on."""
        return self.comm.push_(self.g, self.G, self.rows, gate, subject)

    @torch.no_grad()
    def take(self, number: int, *, free: bool = True) -> None:
        """A parameter's gradient is complete, or zero where it has none. It may be freed, unless others share it."""
        p = self.x[number]
        assert self.gate is not None  # begun
        self._taken.add(number)
        if p.grad is not None and p.grad.is_sparse:
            raise TypeError("sparse gradients cannot be pushed to a sharded server: use sparse=False")
        value = self.value(number)
        flat = None if value is None else in_memory_order(in_the_order_of(p, value))
        for cut in self.cuts[number]:
            self.put(number, cut, None if flat is None else flat[cut.start : cut.stop])
            self._waiting[cut.bucket] -= 1
            if self._waiting[cut.bucket] == 0:
                self.gate.open(cut.bucket)
        if free and p not in self.shared:
            p.grad = None

    def value(self, number: int) -> Tensor | None:
        """What is sent of a parameter: its gradient."""
        return self.x[number].grad

    def put(self, number: int, cut: Cut, values: Tensor | None) -> None:
        """g ← these values of a parameter, or zero."""
        place = self.into[cut.bucket][cut.piece]
        place.zero_() if values is None else place.copy_(values)

    def is_taken(self, number: int) -> bool:
        """Whether a parameter's gradient is on its way."""
        return self.push is not None and number in self._taken

    def complete(self, *, free: bool = True) -> None:
        """Backward is over: what has no gradient gets none."""
        assert self.gate is not None  # begun
        rest = [number for number in range(len(self.x)) if number not in self._taken]
        self._absent.update(number for number in rest if self.x[number].grad is None)
        self.gate.lacking = bool(self._absent)
        for number in rest:
            self.take(number, free=free)

    def present(self, subject: Subject) -> list[bool]:
        """For each parameter, whether some worker has had a gradient. Collective."""
        counts = torch.ones(len(self.x), device=self.comm.device)
        counts[list(self._absent)] = 0
        self.comm.mean_([counts], 1.0, subject).wait()
        return [count > 0 for count in counts.tolist()]


def copy_alike(mine: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Buckets or shards of a state into those here.

    Raises:
        ValueError: they are of other sizes.
    """
    if [t.shape for t in mine] != [t.shape for t in values]:
        raise ValueError("a state's buckets are cut otherwise than here: continue with the version that has saved it")
    for tensor, value in zip(mine, values, strict=True):
        tensor.copy_(value)
