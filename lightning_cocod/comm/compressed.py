"""Means of compressed parts: every worker sends a code of its part, and all decode the same mean.

Codes cannot be added up on their way. So worker j owns the j-th shard of every bucket: all send it their codes of that
shard, it takes the mean, encodes that, and sends the code to all. Each worker sends 2 (N - 1) / N codes of a bucket, as many
as values in an all-reduce. What the encoding of the mean drops, the owner counts as not sent by itself: it divides it by its
weight and keeps it with what its own code has dropped. So the weighted sum of what the workers count as sent is the mean
that all have decoded, to rounding, and nobody needs memory for the mean's errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cocod.comm.buckets import real
from lightning_cocod.comm.collectives import Collective
from lightning_cocod.comm.errors import transport
from lightning_cocod.comm.parts import How, MeanOfParts, Parts
from lightning_cocod.comm.ring import IN_FLIGHT
from lightning_cocod.compression import Codec, Identity, PowerSGD, as_compression
from lightning_cocod.compression.seeds import seed_of


class Codes(NamedTuple):
    """Memory for one bucket at work.

    Attributes:
        sent: a row for each worker, the code of its shard of this worker's part.
        received: a row from each worker, first the codes of this worker's shard, then those of the means of all shards.
        mean: the code of the mean of this worker's shard.
        own: c, what the others take this worker's part for. As long as the bucket.
        spare: as long; the same for all buckets at work.
    """

    sent: Tensor
    received: Tensor
    mean: Tensor
    own: Tensor
    spare: Tensor


class Compression(How):
    """A codec, and the memory that it works in, which is the communication thread's.

    Args:
        codec: what it drops is sent later, so a contraction, or one that needs just that (see ``Codec``).

    Raises:
        ValueError: another codec.
    """

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        if not (codec.contraction or codec.needs_feedback):
            raise ValueError(
                f"compression={codec!r}: what it drops, and is sent later, would grow without bound; use unbiased=False, or "
                "a smaller block where it rounds at random"
            )
        self.codec = codec
        self._memory: list[dict[tuple[int, torch.dtype, torch.device, int], Codes]] = [{} for _ in range(IN_FLIGHT)]
        self._spare: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def mean(
        self, parts: Parts, x: Sequence[nn.Parameter], weights: Sequence[float], rank: int, step: int
    ) -> CompressedMean:
        """That of codes."""
        return CompressedMean(parts, self, weights, rank, step)

    def memory(self, bucket: int, part: Tensor, world_size: int) -> Codes:
        """For a bucket of the size of this part."""
        slot, key = self._memory[bucket % IN_FLIGHT], (part.numel(), part.dtype, part.device, world_size)
        if key not in slot:
            row = self.codec.nbytes(shard_size(part.numel(), world_size))
            sent, received = (torch.zeros(world_size, row, dtype=torch.uint8, device=part.device) for _ in range(2))
            slot[key] = Codes(sent, received, torch.zeros_like(sent[0]), torch.empty_like(part), self._spare_for(part))
        return slot[key]

    def _spare_for(self, part: Tensor) -> Tensor:
        kind = part.dtype, part.device
        if kind not in self._spare or self._spare[kind].numel() < part.numel():
            self._spare[kind] = torch.empty_like(part)
        return self._spare[kind][: part.numel()]

    def encode(self, values: Tensor, code: Tensor, shard: Sequence[int], encoder: int) -> None:
        """code ← C(values). The random numbers, if there are any, depend on the shard and, mostly, on who encodes it."""
        generator, seed = None, (*shard, 0 if self.codec.draws_alike else encoder)
        if self.codec.stochastic:
            if values.device not in self._generators:
                self._generators[values.device] = torch.Generator(values.device)
            generator = self._generators[values.device].manual_seed(seed_of(seed))
        self.codec.encode(values, code[: self.codec.nbytes(values.numel())], generator)

    def decode(self, code: Tensor, out: Tensor) -> Tensor:
        """out ← the values of a code."""
        self.codec.decode(code[: self.codec.nbytes(out.numel())], out)
        return out


def shard_size(n: int, world_size: int) -> int:
    """Elements of all shards but the last, which may have fewer."""
    return -(-n // world_size)


def codes(whose: str, compression: str | Codec | PowerSGD | None) -> Compression:
    """What is chosen for messages that are no means of all workers, and so cannot be PowerSGD's. None: whole values.

    Raises:
        ValueError: no codec.
    """
    chosen = Identity() if compression is None else as_compression(compression)
    if not isinstance(chosen, Codec):
        raise ValueError(f"{whose} sends codes, and {compression!r} is no codec: choose one such as 'sign' or 'int8'")
    return Compression(chosen)


class CompressedMean(MeanOfParts, Collective):
    """The protocol. The random numbers of codecs depend on the step of training."""

    def __init__(self, parts: Parts, how: Compression, weights: Sequence[float], rank: int, step: int) -> None:
        super().__init__(parts, how.codec, weights, rank)
        self._how, self._step = how, step
        self._gathering: set[int] = set()  # buckets whose means are being gathered

    @property
    def nbytes(self) -> int:
        """Of this worker's codes."""
        return sum(len(self._weights) * self._row(n) for n in self.layout.sizes())

    def _row(self, n: int) -> int:
        return self._how.codec.nbytes(shard_size(n, len(self._weights)))

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """Its shards to all the others, and the mean of its own; as much comes back."""
        moved = 2 * (world_size - 1) * sum(self._row(n) for n in self.layout.sizes())
        return moved, moved

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """p."""
        self.parts.fill(bucket, scratch)

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Every shard's code to its owner."""
        part, world_size = real(scratch), len(self._weights)
        codes = self._how.memory(bucket, part, world_size)
        for shard, (values, own) in enumerate(zip(self._shards(part), self._shards(codes.own), strict=True)):
            self._how.encode(values, codes.sent[shard], (self._step, bucket, shard), self._rank)
            self._how.decode(codes.sent[shard], own)
        with transport:
            return group.alltoall_base(codes.received, codes.sent, [], [])  # a row for each

    def proceed(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """The mean of this worker's shard; its code to all."""
        if bucket in self._gathering:
            self._gathering.discard(bucket)
            return None
        self._gathering.add(bucket)
        part = real(scratch)
        codes = self._how.memory(bucket, part, len(self._weights))
        mean, spare, own = (self._shards(t)[self._rank] for t in (part, codes.spare, codes.own))
        mean.zero_()
        for code, weight in zip(codes.received, self._weights, strict=True):
            if weight:
                mean.add_(self._how.decode(code, spare), alpha=weight)
        self._how.encode(mean, codes.mean, (self._step, bucket, self._rank), len(self._weights))
        if self.weight:  # one that is left out has nothing of its own to keep it with
            dropped = mean.sub_(self._how.decode(codes.mean, spare))
            own.sub_(dropped, alpha=1 / self.weight)
        with transport:
            return group._allgather_base(codes.received.view(-1), codes.mean)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Decode the means of all shards."""
        part = real(scratch)
        codes = self._how.memory(bucket, part, len(self._weights))
        for code, values in zip(codes.received, self._shards(part), strict=True):
            self._how.decode(code, values)
        c, spare = (torch.view_as_complex(t.view(-1, 2)) if scratch.is_complex() else t for t in codes[3:])
        self.parts.take(bucket, scratch, c if self.weight else None, spare)

    def _shards(self, flat: Tensor) -> list[Tensor]:
        size, n = shard_size(flat.numel(), len(self._weights)), flat.numel()
        return [flat[min(n, j * size) : min(n, (j + 1) * size)] for j in range(len(self._weights))]
