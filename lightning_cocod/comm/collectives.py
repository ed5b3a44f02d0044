"""What a message does to tensors, bucket by bucket: fill a scratch bucket, let the transport reduce it, empty it again.

Everything here runs in the communication thread. Scratch memory is allocated once and kept: pages that are new every round
cost more than the arithmetic on them. Sums of bfloat16 and float16 are float32 from the first product to the result, which
is rounded once; they travel as float32 too, since the transport adds in the dtype that it carries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cocod.comm.buckets import Layout
from lightning_cocod.comm.cargo import Cargo
from lightning_cocod.comm.errors import transport
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.norms import RunningNorm, finite, norm
from lightning_cocod.comm.ring import Leg, Ring
from lightning_cocod.comm.tracer import Tracer

Memory = dict[tuple[torch.dtype, torch.device], Tensor]
"""Scratch memory for one bucket; grows on first use."""

_SUM = dist.AllreduceOptions()  # adds up, by default


class Operation(ABC):
    """What a message does: a collective, or several one after the other.

    Attributes:
        layout: of what this worker puts into the message.
        weight: of this worker's part; 0 while it is left out: then it is never looked at, only the result arrives.
    """

    layout: Layout
    weight: float

    @property
    def fingerprint(self) -> int:
        """What all workers must have alike."""
        return self.layout.fingerprint

    @property
    def nbytes(self) -> int:
        """Size of this worker's part."""
        return self.layout.nbytes

    def weigh(self, rank: int, weights: Sequence[float]) -> None:
        """Take other weights than those it was made with: some workers are left out."""
        self.weight = weights[rank]

    def late_flags(self) -> int | None:
        """Of a second header, once all has been sent, about what could not be known before; None if there is none."""
        return None

    @abstractmethod
    def contents(self, bucket: int) -> list[Tensor]:
        """What this worker puts into the message, as it lies in memory; looked at for NaN and infinity."""

    def size(self) -> Tensor:
        """Euclidean norm of its contents now: a number on their device, NaN or infinite if they are."""
        return norm(self._everything())

    def is_finite(self, size: Tensor) -> bool:
        """Whether its contents are finite, given their norm, which alone may overflow."""
        return finite(self._everything(), size)

    def _everything(self) -> list[Tensor]:
        return [t for bucket in range(len(self.layout)) for t in self.contents(bucket)]

    @abstractmethod
    def stages(self, tracer: Tracer) -> Iterator[Collective]:
        """The collectives. What stands between two of them is done when the first is, before the second begins."""

    @abstractmethod
    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """Bytes that this worker sends and receives."""

    def uncompressed(self, rank: int, world_size: int) -> int:
        """Bytes that it would send without a codec."""
        return self.traffic(rank, world_size)[0]

    def distance(self) -> Tensor | None:
        """Norm of the difference between the result and what this worker put in, if that is measured."""
        return None


class Collective(Operation):
    """One operation of the transport on all buckets of the layout.

    Attributes:
        sums: whether values are added up, and so travel in the dtype in which that is done.
        leg: what it is where there is a ring, if it can go round one.
        gate: before each bucket, if some are still being computed when the message sets out.
        repeats: whether the transport gets a bucket several times. Then their order must not depend on gates.
    """

    sums: ClassVar[bool] = True
    leg: ClassVar[Leg | None] = None
    gate: Gate | None = None
    repeats: bool = False

    def order(self) -> Sequence[int]:
        """In which the buckets travel, the same on all workers."""
        return range(len(self.layout))

    def stages(self, tracer: Tracer) -> Iterator[Collective]:
        """Itself."""
        yield self

    @abstractmethod
    def fill(self, bucket: int, scratch: Tensor) -> None:
        """Write this worker's part."""

    @abstractmethod
    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Hand the bucket to the transport; None where no worker sends anything."""

    def proceed(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """What the transport does next with a bucket that has come back; None where it is the result."""
        return None

    @abstractmethod
    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Take the result."""

    def scratch(self, bucket: int, memory: Memory) -> Tensor:
        """For a bucket."""
        return self.layout.scratch(bucket, memory, summed=self.sums)

    def put_in(self, bucket: int, memory: Memory) -> Tensor:
        """A scratch bucket with this worker's part, which is zero while it is left out."""
        scratch = self.scratch(bucket, memory)
        if self.weight:
            self.fill(bucket, scratch)
        else:
            scratch.zero_()  # not 0·x: that is NaN where x is
        return scratch

    def cargo(self, bucket: int, turn: int, ring: Ring, memory: Sequence[Memory], tracer: Tracer) -> Cargo:
        """What goes round a ring: a scratch bucket that is filled, and drained in the end, if nothing else.

        Args:
            bucket: its number.
            turn: which of the memories it has.
            ring: where it goes.
            memory: for scratch, of all buckets at work.
            tracer: told what takes time.
        """
        with tracer.span("encode"):
            cargo = ring.filled(self.put_in(bucket, memory[turn]))
        cargo.unload = partial(self.drain, bucket, cargo.memory)
        return cargo


class AllReduce(Collective):
    """What comes back is what all workers have filled in, added up: by Gloo or NCCL, or round a ring."""

    leg: ClassVar[Leg | None] = Leg.ALL_REDUCE

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Sum over the workers. The group's own method: what torch wraps around it takes longer than handing over."""
        with transport:
            return group.allreduce([scratch], _SUM)

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """Those of a ring."""
        return ring(self.layout.summed_nbytes, world_size)


class _InPlace(Collective):
    """Reads and writes a list of tensors."""

    def __init__(self, tensors: Sequence[Tensor], layout: Layout) -> None:
        self.layout = layout
        self._pieces = layout.pieces(tensors, keep=False)  # gradients come and go

    def contents(self, bucket: int) -> list[Tensor]:
        """Views of the tensors."""
        return self._pieces[bucket]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """Copy the pieces in."""
        pieces = self._pieces[bucket]
        torch._foreach_copy_(self.layout.cut(bucket, scratch, pieces), pieces)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Copy the pieces out."""
        pieces = self._pieces[bucket]
        torch._foreach_copy_(pieces, self.layout.cut(bucket, scratch, pieces))


class Mean(_InPlace, AllReduce):
    """x ← Σ_j w_j x_j."""

    def __init__(self, tensors: Sequence[Tensor], layout: Layout, weight: float, *, measured: bool = False) -> None:
        super().__init__(tensors, layout)
        self.weight = weight
        self._distance = RunningNorm() if measured else None

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """w_i x_i."""
        super().fill(bucket, scratch)
        scratch.mul_(self.weight)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Copy the pieces out, having looked at how far they move."""
        if self._distance is not None:
            pieces = self._pieces[bucket]
            torch._foreach_sub_(pieces, self.layout.cut(bucket, scratch, pieces))  # in place: no new memory every round
            self._distance.add(pieces)
        super().drain(bucket, scratch)

    def distance(self) -> Tensor | None:
        """‖mean - x‖."""
        return None if self._distance is None else self._distance.value()


class Broadcast(_InPlace):
    """x ← x of the source, where it is wanted."""

    weight = 1.0

    def __init__(self, tensors: Sequence[Tensor], layout: Layout, source: int = 0, *, wanted: bool = True) -> None:
        super().__init__(tensors, layout)
        self._source, self._wanted = source, wanted

    sums: ClassVar[bool] = False

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """The source sends, the others receive."""
        as_bytes = scratch.view(torch.uint8)  # the transport does not know every dtype
        with transport:
            work = dist.broadcast(as_bytes, group_src=self._source, group=group, async_op=True)
        assert work is not None
        return work

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Copy the pieces out, or leave one's own as they are."""
        if self._wanted:
            super().drain(bucket, scratch)

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """The source sends a copy to everybody."""
        nbytes = self.layout.nbytes
        return ((world_size - 1) * nbytes, 0) if rank == self._source else (0, nbytes)


def ring(nbytes: int, world_size: int) -> tuple[int, int]:
    """Bytes that each worker sends and receives where so many are reduced, or gathered, in a ring."""
    moved = 2 * nbytes * (world_size - 1) // world_size
    return moved, moved
