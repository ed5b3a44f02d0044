"""Means of compressed parts: every worker sends a code of its part, and all decode the same mean.

Codes cannot be added up on their way. So worker j owns the j-th shard of every bucket: all send it their codes of that
shard, it takes the mean, encodes that, and sends the code to all. Each worker sends 2 (N - 1) / N codes of a bucket, as many
as values in an all-reduce. What the encoding of the mean drops, the owner counts as not sent by itself: it divides it by its
weight and keeps it with what its own code has dropped. So the weighted sum of what the workers count as sent is the mean
that all have decoded, to rounding, and nobody needs memory for the mean's errors.
"""

from __future__ import annotations

import hashlib
import struct
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cocod.comm.buckets import Buffer, Layout
from lightning_cocod.comm.collectives import IN_FLIGHT, Collective, ring
from lightning_cocod.comm.errors import transport
from lightning_cocod.comm.norms import norms, total
from lightning_cocod.compression import Codec


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


class Compression:
    """A codec, and the memory that it works in. One for all messages of an algorithm; the communication thread's.

    Args:
        codec: what it drops is sent later, so a contraction, or one that needs just that (see ``Codec``).

    Raises:
        ValueError: another codec.
    """

    def __init__(self, codec: Codec) -> None:
        if not (codec.contraction or codec.needs_feedback):
            raise ValueError(
                f"compression={codec!r}: what it drops, and is sent later, would grow without bound; use unbiased=False, or "
                "a smaller block where it rounds at random"
            )
        self.codec = codec
        self._memory: list[dict[tuple[int, torch.dtype, torch.device, int], Codes]] = [{} for _ in range(IN_FLIGHT)]
        self._spare: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def fingerprint(self) -> int:
        """Of the codec and its options, which all workers must have alike."""
        name_and_options = repr((self.codec.name, sorted(vars(self.codec).items())))
        return int.from_bytes(hashlib.sha256(name_and_options.encode()).digest()[:7], "big")

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
            digest = hashlib.blake2b(struct.pack(f"{len(seed)}q", *seed), digest_size=7).digest()
            generator = self._generators[values.device].manual_seed(int.from_bytes(digest, "big"))
        self.codec.encode(values, code[: self.codec.nbytes(values.numel())], generator)

    def decode(self, code: Tensor, out: Tensor) -> Tensor:
        """out ← the values of a code."""
        self.codec.decode(code[: self.codec.nbytes(out.numel())], out)
        return out


def shard_size(n: int, world_size: int) -> int:
    """Elements of all shards but the last, which may have fewer."""
    return -(-n // world_size)


class CompressedMean(Collective):
    """The protocol. Subclasses have a part p for every bucket, and do something with the mean m and their own c.

    Args:
        layout: of the parts.
        how: codec and memory.
        weights: of all workers.
        rank: of this one.
        step: of training; the random numbers of codecs depend on it.
    """

    def __init__(self, layout: Layout, how: Compression, weights: Sequence[float], rank: int, step: int) -> None:
        self.layout, self._how, self._step = layout, how, step
        self.weigh(rank, weights)
        self._gathering: set[int] = set()  # buckets whose means are being gathered
        self._distances: list[Tensor] = []

    @property
    def fingerprint(self) -> int:
        """The layout's and the codec's."""
        return self.layout.fingerprint ^ self._how.fingerprint

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

    def uncompressed(self, rank: int, world_size: int) -> int:
        """That of a ring all-reduce."""
        return ring(self.layout.summed_nbytes, world_size)[0]

    def weigh(self, rank: int, weights: Sequence[float]) -> None:
        """A worker that is left out has weight 0."""
        self._rank, self._weights, self.weight = rank, list(weights), weights[rank]

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Every shard's code to its owner."""
        part, world_size = _real(scratch), len(self._weights)
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
        part = _real(scratch)
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
        part = _real(scratch)
        codes = self._how.memory(bucket, part, len(self._weights))
        for code, values in zip(codes.received, self._shards(part), strict=True):
            self._how.decode(code, values)
        self.take(bucket, scratch, *(torch.view_as_complex(t.view(-1, 2)) if scratch.is_complex() else t for t in codes[3:]))

    @abstractmethod
    def take(self, bucket: int, m: Tensor, c: Tensor, spare: Tensor) -> None:
        """What happens with the mean m and this worker's own c; the memory of all three is free to be used."""

    def _shards(self, flat: Tensor) -> list[Tensor]:
        size, n = shard_size(flat.numel(), len(self._weights)), flat.numel()
        return [flat[min(n, j * size) : min(n, (j + 1) * size)] for j in range(len(self._weights))]

    def _measure(self, difference: Tensor) -> None:
        self._distances += norms([difference])

    def distance(self) -> Tensor | None:
        """‖m - p‖."""
        return total(self._distances)


class FromBase(CompressedMean):
    """S ← m - c and θ ← θ + m, where p = S - θ.

    θ is the same on all workers bit for bit. S is this worker's model: what the codec drops stays in S - θ, and is part of
    the next p. A worker that is left out gets S ← θ.
    """

    def __init__(
        self, snapshot: Buffer, base: Buffer, how: Compression, weights: Sequence[float], rank: int, step: int
    ) -> None:
        super().__init__(snapshot.layout, how, weights, rank, step)
        self._S, self._θ = snapshot.buckets, base.buckets

    def contents(self, bucket: int) -> list[Tensor]:
        """S."""
        return [self._S[bucket]]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """p."""
        torch.sub(self._S[bucket], self._θ[bucket], out=scratch)

    def take(self, bucket: int, m: Tensor, c: Tensor, spare: Tensor) -> None:
        """θ moves to the mean of what all have sent."""
        S, θ = self._S[bucket], self._θ[bucket]
        θ.add_(m)
        if self.weight:
            self._measure(torch.sub(θ, S, out=spare))
            S.copy_(m.sub_(c))
        else:
            S.copy_(θ)


class FromZero(CompressedMean):
    """D ← m - a c and R ← p - c, where p = D.

    D is a displacement or a gradient, to which the R of the message before has been added. A worker that is left out gets
    D ← m and R ← 0.
    """

    def __init__(
        self,
        parts: Buffer,
        residual: Sequence[Tensor],
        how: Compression,
        weights: Sequence[float],
        rank: int,
        step: int,
        own: float,
    ) -> None:
        super().__init__(parts.layout, how, weights, rank, step)
        self._D, self._R, self._own = parts.buckets, parts.layout.pieces(residual, keep=False), own

    def contents(self, bucket: int) -> list[Tensor]:
        """D."""
        return [self._D[bucket]]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """p."""
        scratch.copy_(self._D[bucket])

    def take(self, bucket: int, m: Tensor, c: Tensor, spare: Tensor) -> None:
        """What has not been sent goes to R."""
        D, R = self._D[bucket], self._R[bucket]
        if not self.weight:
            torch._foreach_zero_(R)
            D.copy_(m)
            return
        self._measure(torch.sub(m, D, out=spare))
        torch._foreach_copy_(R, self.layout.cut(bucket, torch.sub(D, c, out=spare), R))
        D.copy_(m.sub_(c, alpha=self._own))


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
