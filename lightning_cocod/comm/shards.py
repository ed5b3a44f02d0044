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

from lightning_cocod.comm.buckets import Buffer, Layout, summed_in
from lightning_cocod.comm.collectives import IN_FLIGHT, Collective
from lightning_cocod.comm.errors import transport
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.header import LACKING, NONFINITE
from lightning_cocod.comm.norms import finite, norms, total


class Rows:
    """Memory for parts of shards, a row from or for each worker. The communication thread's: one for all its messages."""

    def __init__(self) -> None:
        self._memory: list[dict[tuple[torch.dtype, torch.device], Tensor]] = [{} for _ in range(IN_FLIGHT)]

    def beside(self, bucket: int, sent: Tensor, times: int = 1) -> Tensor:
        """As much as is sent, or several times that."""
        memory, kind, size = self._memory[bucket % IN_FLIGHT], (sent.dtype, sent.device), times * sent.numel()
        if kind not in memory or memory[kind].numel() < size:
            memory[kind] = sent.new_empty(size)
        return memory[kind][:size]


class Push(Collective):
    """s ← Σ_i w_i g_i, added up by the owner of a shard in the order of ranks; s has the dtype of g.

    Values travel as they are, and are weighed where they are added up. Buckets set out as their gate opens, while others
    are still being computed. So whether g is finite is known only in the end, and told in a second header. Where workers
    that are not are to be left out, all is sent once more; they send zeros then.

    Args:
        g: this worker's part.
        s: this worker's shard of each bucket.
        weights: w of all workers.
        rank: of this one.
        rows: memory.
        gate: opened for each bucket.
    """

    gate: Gate

    def __init__(self, g: Buffer, s: Sequence[Tensor], weights: Sequence[float], rank: int, rows: Rows, gate: Gate) -> None:
        self.layout, self.gate = g.layout, gate
        self._g, self._s, self._rows = g.buckets, s, rows
        self.weigh(rank, weights)
        self._sizes: list[Tensor] = []

    def weigh(self, rank: int, weights: Sequence[float]) -> None:
        """One that is left out has weight 0."""
        self._weights, self.weight = list(weights), weights[rank]

    def contents(self, bucket: int) -> list[Tensor]:
        """g."""
        return [self._g[bucket]]

    def late_flags(self) -> int:
        """Whether g was finite, and all of it there."""
        sizes, self._sizes = self._sizes, []
        return (0 if finite(self._g, total(sizes)) else NONFINITE) | (LACKING if self.gate.lacking else 0)

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """g, in the dtype of the sum; where that is its own it is sent from where it is."""
        if scratch.dtype != self._g[bucket].dtype:
            scratch.copy_(self._g[bucket])
        self._sizes += norms([self._g[bucket]])

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Every shard to its owner."""
        as_it_is = self.weight and scratch.dtype == self._g[bucket].dtype
        sent = self._g[bucket] if as_it_is else scratch
        with transport:
            rows = self._rows.beside(bucket, sent)
            return group.alltoall_base(rows.view(torch.uint8), sent.view(torch.uint8), [], [])  # not every dtype

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Weigh and add up."""
        rows = self._rows.beside(bucket, scratch).view(len(self._weights), -1)
        (w, s), *others = [(w, row) for w, row in zip(self._weights, rows, strict=True) if w]
        s.mul_(w)
        for w, row in others:
            s.add_(row, alpha=w)
        self._s[bucket].copy_(s)

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """All but the own shard; as much comes in."""
        moved = sum(flat.numel() // world_size * summed_in(flat.dtype).itemsize for flat in self._g) * (world_size - 1)
        return moved, moved


class Pull(Collective):
    """x ← the shards of all owners.

    Over Gloo every owner sends a row to each worker: its all-gather takes twice as long, and twice the CPU time.

    Args:
        s: this worker's shard of each bucket.
        x: tensors of the layout.
        layout: theirs.
        rows: memory.
    """

    weight = 1.0
    sums: ClassVar[bool] = False

    def __init__(self, s: Sequence[Tensor], x: Sequence[Tensor], layout: Layout, rows: Rows) -> None:
        self.layout, self._s, self._rows = layout, s, rows
        self._pieces = layout.pieces(x, keep=False)

    def contents(self, bucket: int) -> list[Tensor]:
        """s."""
        return [self._s[bucket]]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """Nothing: s is where it is."""

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Every owner's shard to all."""
        s, all_ = self._s[bucket], scratch.view(torch.uint8)  # the transport does not know every dtype
        if dist.get_backend(group) == "nccl":
            with transport:
                return group._allgather_base(all_, s.view(torch.uint8))
        rows = self._rows.beside(bucket, scratch)
        rows.view(-1, s.numel()).copy_(s)
        with transport:
            return group.alltoall_base(all_, rows.view(torch.uint8), [], [])

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Copy the pieces out."""
        pieces = self._pieces[bucket]
        torch._foreach_copy_(pieces, self.layout.cut(bucket, scratch, pieces))

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """The own shard to all others, and theirs."""
        moved = sum(shard.numel() * shard.element_size() for shard in self._s) * (world_size - 1)
        return moved, moved
