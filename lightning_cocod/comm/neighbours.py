"""An exchange with neighbours only: each worker sends its snapshot to some others and weighs what comes from some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.collectives import Collective
from lightning_cocod.comm.errors import transport
from lightning_cocod.comm.mixing import Matrix, digest
from lightning_cocod.comm.norms import RunningNorm
from lightning_cocod.comm.shards import Rows


class Neighbours(Collective):
    """S_i ← Σ_{j≠i} W_ij (S_j − S_i) + a S_i: the snapshot becomes its own correction.

    Written with differences, it is exactly a S_i where all have the same. Values travel as they are, and are weighed where
    they arrive, in the order of ranks; halves in float32. Where some worker's snapshot is not finite nobody sends and
    nothing is mixed: S ← 0 everywhere.

    One operation of the transport has all edges of a bucket, with parts of no bytes between workers that are no neighbours.
    (Gloo's own peer messages cannot be waited for with patience: a wait that times out closes all connections.)

    Args:
        snapshot: S.
        W: of all workers, the same on each.
        rank: of this one.
        kept: a.
        rows: memory.
    """

    sums: ClassVar[bool] = True

    def __init__(self, snapshot: Buffer, W: Matrix, rank: int, kept: float, rows: Rows) -> None:
        self.layout, self.weight = snapshot.layout, 1.0
        self._S, self._W, self._rows, self._kept = snapshot.buckets, W, rows, kept
        others = [j for j in range(len(W)) if j != rank]
        self._senders = [(j, W[rank][j]) for j in others if W[rank][j]]
        self._receivers = [j for j in others if W[j][rank]]
        self._mixes = any(weight for i, row in enumerate(W) for j, weight in enumerate(row) if i != j)
        self._distance = RunningNorm()

    @property
    def fingerprint(self) -> int:
        """The layout's, and the matrix."""
        return self.layout.fingerprint ^ digest(self._W)

    def weigh(self, rank: int, weights: Sequence[float]) -> None:
        """Some are left out: nothing is mixed."""
        self._mixes, self._kept, self._senders, self._receivers = False, 0.0, [], []

    def contents(self, bucket: int) -> list[Tensor]:
        """The bucket itself."""
        return [self._S[bucket]]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """Nothing: S is sent from where it is."""

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """To all receivers, from all senders."""
        if not self._mixes:
            return None
        arriving, leaving = self._beside(bucket)
        size = leaving.element_size() * self._S[bucket].numel()
        senders, receivers = {j for j, _ in self._senders}, set(self._receivers)
        splits = [[size if j in those else 0 for j in range(len(self._W))] for those in (senders, receivers)]
        with transport:
            return group.alltoall_base(arriving.view(torch.uint8), leaving.view(torch.uint8), *splits)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Weigh and add up."""
        S = self._S[bucket]
        scratch.zero_()
        if self._mixes:
            own = S.to(scratch.dtype)
            rows = self._memory(bucket)[: len(self._senders)]
            for (_, weight), row in zip(self._senders, rows, strict=True):
                scratch.add_(row.to(scratch.dtype).sub_(own), alpha=weight)
        self._distance.add([scratch])
        S.copy_(scratch.add_(S, alpha=self._kept) if self._kept else scratch)

    def _memory(self, bucket: int) -> Tensor:
        """A row for each sender and then, if there are several, one for each receiver."""
        S, count = self._S[bucket], len(self._senders) + (len(self._receivers) if len(self._receivers) > 1 else 0)
        return self._rows.beside(bucket, S, count).view(count, S.numel())

    def _beside(self, bucket: int) -> tuple[Tensor, Tensor]:
        """What arrives, and what is sent: as often as there are receivers."""
        rows, S = self._memory(bucket), self._S[bucket]
        arriving, leaving = rows[: len(self._senders)], rows[len(self._senders) :]
        if len(self._receivers) == 1:
            return arriving.reshape(-1), S
        return arriving.reshape(-1), leaving.copy_(S.expand_as(leaving)).reshape(-1)

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """The snapshot to each receiver, and one from each sender."""
        return len(self._receivers) * self.layout.nbytes, len(self._senders) * self.layout.nbytes

    def distance(self) -> Tensor:
        """‖Σ_{j≠i} W_ij (S_j − S_i)‖."""
        return self._distance.value()
