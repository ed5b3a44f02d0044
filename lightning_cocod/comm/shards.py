"""Push and pull: of every bucket each worker owns a shard. Gradients go to the owners, parameters come back from them.

Worker j of N owns the j-th of N equal parts of every bucket (whose ends are padded for that). An all-reduce is a push
and a pull, and costs what both cost together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_cocod.comm.buckets import Buffer, Layout, summed_in
from lightning_cocod.comm.cargo import Cargo, Gathered
from lightning_cocod.comm.collectives import Collective, Memory
from lightning_cocod.comm.errors import transport
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.header import LACKING, NONFINITE
from lightning_cocod.comm.lent import Lent
from lightning_cocod.comm.norms import RunningNorm, finite
from lightning_cocod.comm.places import Places
from lightning_cocod.comm.ring import IN_FLIGHT, Leg, Ring
from lightning_cocod.comm.tracer import Tracer


class Rows:
    """What the messages of a server, which take turns, need again: memory for parts of shards, a row from or for each
    worker, which is the communication thread's; and the places of its pulls.
    """

    def __init__(self) -> None:
        self._memory: list[Memory] = [{} for _ in range(IN_FLIGHT)]
        self._places: Places | None = None

    def places(self, s: Sequence[Tensor], x: Sequence[Tensor], layout: Layout, rank: int) -> Places:
        """Those of the last pull, if they are of this one too."""
        if self._places is None or not self._places.are_of(s, x, layout):
            self._places = Places(s, x, layout, rank)
        return self._places

    def beside(self, bucket: int, sent: Tensor, times: int = 1) -> Tensor:
        """As much as is sent, or several times that."""
        memory, kind, size = self._memory[bucket % IN_FLIGHT], (sent.dtype, sent.device), times * sent.numel()
        if kind not in memory or memory[kind].numel() < size:
            memory[kind] = sent.new_empty(size)
        return memory[kind][:size]


def for_others(flat: Tensor, rank: int, world_size: int) -> tuple[Tensor, list[int]]:
    """What of a bucket goes to, or comes from, others, and the bytes of it that are each worker's.

    One's own row need not travel. It is among the others only where those would not lie side by side without it.
    """
    shard = flat.numel() // world_size
    nbytes = [shard * flat.element_size()] * world_size
    if 0 < rank < world_size - 1:
        return flat, nbytes
    nbytes[rank] = 0
    return (flat[shard:] if rank == 0 else flat[:-shard]), nbytes


def order_of_sum(rank: int, n: int) -> list[int]:
    """Whose parts of a worker's shard come first in a sum that goes round a ring: from the worker after it on."""
    return [(rank + step) % n for step in range(1, n + 1)]


class Push(Collective):
    """s ← Σ_i w_i g_i, added up in the dtype of sums; s has the dtype of g.

    They are added up on their way round a ring or, where there is none, by the owner of a shard, in the same order. Buckets
    set out as their gate opens, while others are still being computed. So whether g is finite is known only in the end, and
    told in a second header. Where workers that are not are to be left out, all is sent once more; they send zeros then.
    Over NCCL as well it is an all-to-all, which carries as many bytes as a reduce-scatter, whose order of sums nobody knows.

    Args:
        g: this worker's part.
        s: this worker's shard of each bucket.
        weights: w of all workers.
        rank: of this one.
        rows: memory.
        gate: opened for each bucket.
    """

    gate: Gate
    leg: ClassVar[Leg | None] = Leg.REDUCE_SCATTER

    def __init__(
        self, g: Buffer | Lent, s: Sequence[Tensor], weights: Sequence[float], rank: int, rows: Rows, gate: Gate
    ) -> None:
        self.layout, self.gate = g.layout, gate
        self._g, self._s, self._rows, self._rank = g, s, rows, rank
        self.weigh(rank, weights)
        self._size = RunningNorm()

    def weigh(self, rank: int, weights: Sequence[float]) -> None:
        """One that is left out has weight 0."""
        self._n, self.weight = len(weights), weights[rank]

    def contents(self, bucket: int) -> list[Tensor]:
        """g."""
        return self._g.contents(bucket)

    def late_flags(self) -> int:
        """Whether g was finite, and all of it there."""
        size, self._size = self._size, RunningNorm()
        return (0 if finite(self._everything(), size.value()) else NONFINITE) | (LACKING if self.gate.lacking else 0)

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """w_i g_i."""
        self._g.weighed(bucket, self.weight, scratch)
        self._size.add([scratch])  # while it is in the cache: as finite as g is, or it is looked at closely

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Every shard to its owner."""
        leaving, nbytes = for_others(scratch, self._rank, self._n)
        arriving = self._rows.beside(bucket, leaving)
        with transport:  # which does not know every dtype
            return group.alltoall_base(arriving.view(torch.uint8), leaving.view(torch.uint8), nbytes, nbytes)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Add up."""
        own = scratch.view(self._n, -1)[self._rank]
        arrived, _ = for_others(scratch, self._rank, self._n)
        rows = list(self._rows.beside(bucket, arrived).view(-1, own.numel()))
        if len(rows) < self._n:
            rows.insert(self._rank, own)
        first, *others = (rows[rank] for rank in order_of_sum(self._rank, self._n))
        for row in others:
            first.add_(row)
        self._s[bucket].copy_(first)

    def cargo(self, bucket: int, turn: int, ring: Ring, memory: Sequence[Memory], tracer: Tracer) -> Cargo:
        """A scratch bucket; the sum of what is this worker's comes to lie in s."""
        with tracer.span("encode"):
            return ring.filled(self.put_in(bucket, memory[turn]), self._s[bucket])

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """All but the own shard; as much comes in."""
        moved = sum(shard.numel() * summed_in(shard.dtype).itemsize for shard in self._s) * (world_size - 1)
        return moved, moved


class Pull(Collective):
    """x ← the shards of all owners, the last bucket first: pushed as backward comes by, they come back as forward does.

    Over Gloo every owner sends a row to each worker: its all-gather takes twice as long, and twice the CPU time.

    Args:
        s: this worker's shard of each bucket.
        x: tensors of the layout.
        layout: theirs.
        rank: of this worker.
        rows: memory.
        arrived: a gate that is opened for each bucket as it is there.
    """

    weight = 1.0
    sums: ClassVar[bool] = False
    leg: ClassVar[Leg | None] = Leg.ALL_GATHER

    def __init__(
        self, s: Sequence[Tensor], x: Sequence[Tensor], layout: Layout, rank: int, rows: Rows, arrived: Gate | None = None
    ) -> None:
        self.layout, self._s, self._rank, self._rows, self._arrived = layout, s, rank, rows, arrived
        self._places = rows.places(s, x, layout, rank)

    def order(self) -> Sequence[int]:
        """That of forward."""
        return range(len(self.layout))[::-1]

    def contents(self, bucket: int) -> list[Tensor]:
        """s."""
        return [self._s[bucket]]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """s, where it lies in the bucket."""
        scratch.view(-1, self._s[bucket].numel())[self._rank].copy_(self._s[bucket])

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Every owner's shard to all."""
        s = self._s[bucket]
        if dist.get_backend(group) == "nccl":
            with transport:  # which does not know every dtype
                return group._allgather_base(scratch.view(torch.uint8), s.view(torch.uint8))
        arriving, nbytes = for_others(scratch, self._rank, scratch.numel() // s.numel())
        leaving, times = s, arriving.numel() // s.numel()
        if times > 1:
            leaving = self._rows.beside(bucket, s, times)
            leaving.view(times, -1).copy_(s)
        with transport:
            return group.alltoall_base(arriving.view(torch.uint8), leaving.view(torch.uint8), nbytes, nbytes)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Copy the pieces out."""
        pieces = self._places.pieces[bucket]
        torch._foreach_copy_(pieces, self.layout.cut(bucket, scratch, pieces))
        self._has_arrived(bucket)

    def _has_arrived(self, bucket: int) -> None:
        if self._arrived is not None:
            self._arrived.open(bucket)

    def cargo(self, bucket: int, turn: int, ring: Ring, memory: Sequence[Memory], tracer: Tracer) -> Cargo:
        """What is within one tensor lands there, this worker's shard sets out from s, and others lie in a scratch bucket."""
        if (landings := self._places.landings(bucket)) is None:
            return super().cargo(bucket, turn, ring, memory, tracer)
        at, rest = landings
        scratch = ring.parts(self.scratch(bucket, memory[turn]))
        parts = [at.get(shard, part) for shard, part in enumerate(scratch)]

        def unload() -> None:
            increment_version(part.values for shard, part in at.items() if shard != self._rank)  # as copying does
            if rest:
                torch._foreach_copy_([to for *_, to in rest], [parts[shard].values[values] for shard, values, _ in rest])
            self._has_arrived(bucket)

        cargo = Gathered([part.bytes for part in parts])
        cargo.unload = unload
        return cargo

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """The own shard to all others, and theirs."""
        moved = sum(shard.numel() * shard.element_size() for shard in self._s) * (world_size - 1)
        return moved, moved
