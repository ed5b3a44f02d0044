"""Push and pull of codes: what is dropped stays with whoever has dropped it, and who has nothing to say sends nothing.

As in ``shards``, worker j owns the j-th part of every bucket. A push brings the workers' codes of a shard to its owner, a
pull the owners' codes to all. To receive, everybody has to know who sends. Either that is known anyhow (``Senders.known``),
or a byte from each tells it, bucket by bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cocod.comm.buckets import Buffer, Layout, real
from lightning_cocod.comm.collectives import Collective
from lightning_cocod.comm.compressed import Compression
from lightning_cocod.comm.errors import transport
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.parts import fingerprint
from lightning_cocod.comm.ring import IN_FLIGHT, Leg
from lightning_cocod.comm.shards import Push, Rows, order_of_sum


class Senders(Protocol):
    """Who sends a bucket."""

    def known(self, bucket: int) -> Sequence[bool] | None:
        """For each worker, whether it does, if all know that; else None."""

    def sends(self, bucket: int, values: Tensor) -> bool:
        """Whether this worker does, given what it would send. Asked where others do not know."""


class CodeRows:
    """Memory for codes, a row for each worker, and for who sends them. One for all messages of an algorithm."""

    def __init__(self) -> None:
        self._memory: list[dict[tuple[str, torch.device], Tensor]] = [{} for _ in range(IN_FLIGHT)]

    def get(self, what: str, bucket: int, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Of this shape, for a bucket."""
        memory, key, size = self._memory[bucket % IN_FLIGHT], (what, device), shape[0] * shape[1]
        if key not in memory or memory[key].numel() < size:
            memory[key] = torch.zeros(size, dtype=torch.uint8, device=device)
        return memory[key][:size].view(shape)


class Coding(NamedTuple):
    """How one direction is encoded. The communication thread's."""

    how: Compression
    senders: Senders
    rows: CodeRows


class Coded:
    """Codes on their way, in either direction.

    Args:
        layout: of the values.
        coding: of the direction.
        rank: of this worker.
        world_size: number of workers.
        step: of training; the random numbers of codecs depend on it.
    """

    def __init__(self, layout: Layout, coding: Coding, rank: int, world_size: int, step: int) -> None:
        self.how, senders, self.rows = coding
        self.rank, self.n, self.step = rank, world_size, step
        self._senders, self._asked = senders, set[int]()
        self._known = [senders.known(bucket) for bucket in range(len(layout))]
        self.of: dict[int, list[int]] = {}
        """Who sends a bucket, once it is known."""
        self.repeats = None in self._known
        self.fingerprint = layout.fingerprint ^ fingerprint(self.how.codec) ^ _digest(self._known)
        """Of the layout, the codec, and who is known to send: all workers must know the same."""
        self.code_sizes = [self.how.codec.nbytes(n // world_size) for n in layout.sizes()]
        """Bytes of the code of a shard of each bucket."""
        self.sent = self.received = 0

    def ask(self, bucket: int, values: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """A byte from each to all, where it is not known who sends."""
        known = self._known[bucket]
        if known is not None:
            self.of[bucket] = [rank for rank, sends in enumerate(known) if sends]
            return None
        self._asked.add(bucket)
        self.sent, self.received = self.sent + self.n - 1, self.received + self.n - 1
        mine = self.rows.get("mine", bucket, (1, 1), values.device).fill_(int(self._senders.sends(bucket, values)))
        with transport:
            return group._allgather_base(self.rows.get("all", bucket, (self.n, 1), values.device), mine)

    def answered(self, bucket: int, device: torch.device) -> bool:
        """Whether it was the answer that has come."""
        if bucket not in self._asked:
            return False
        self._asked.remove(bucket)
        self.of[bucket] = self.rows.get("all", bucket, (self.n, 1), device).flatten().nonzero().flatten().tolist()
        return True

    def encode(self, bucket: int, shard: int, values: Tensor, code: Tensor, decoded: Tensor, encoder: int) -> None:
        """code ← C(v) ; v ← v − C(v). A codec that draws does so for the shard and the encoder."""
        self.how.encode(values, code, (self.step, bucket, shard), encoder)
        values.sub_(self.how.decode(code, decoded))

    def exchange(self, bucket: int, sent: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Row j of what is sent to worker j; from every sender a row."""
        senders, size = self.of[bucket], self.code_sizes[bucket]
        if not senders:
            return None
        sends = self.rank in senders
        self.sent += size * (self.n - 1) * sends
        self.received += size * (len(senders) - sends)
        from_each = [] if len(senders) == self.n else [int(rank in senders) for rank in range(self.n)]
        to_each = [] if len(senders) == self.n else [int(sends)] * self.n
        with transport:
            return group.alltoall_base(self.arrived(bucket, sent.device), sent if sends else sent[:0], from_each, to_each)

    def arrived(self, bucket: int, device: torch.device) -> Tensor:
        """A code from every sender."""
        return self.rows.get("arrived", bucket, (len(self.of[bucket]), self.code_sizes[bucket]), device)


class CodedPush(Push):
    """c_i = C(p_i) ; s ← Σ_i w_i c_i, added up by the owner of a shard ; p_i ← p_i − c_i.

    In the order of a ``Push``. Where a worker does not send a bucket, c_i = 0. As in a ``Push`` it is told at the end
    whether all was finite, with which p is lost: nobody can be left out.

    Args:
        p: this worker's part, in float32 at least; what it drops.
        s: this worker's shard of each bucket.
        weights: w of all workers.
        coded: see there.
        gate: opened for each bucket.
    """

    leg: ClassVar[Leg | None] = None  # codes are not added up on their way

    def __init__(self, p: Buffer, s: Sequence[Tensor], weights: Sequence[float], coded: Coded, gate: Gate) -> None:
        super().__init__(p, s, weights, coded.rank, Rows(), gate)
        self._p, self._coded, self._weights = p.buckets, coded, list(weights)
        self.repeats = coded.repeats

    @property
    def fingerprint(self) -> int:
        """The layout's, the codec's and the senders'."""
        return self._coded.fingerprint

    @property
    def nbytes(self) -> int:
        """Of this worker's codes."""
        return sum(self._coded.code_sizes) * self._n

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """Nothing: p is where it is."""
        self._size.add([self._p[bucket]])

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Every shard's code to its owner, once it is known who sends."""
        return self._coded.ask(bucket, real(self._p[bucket]), group) or self._send(bucket, scratch, group)

    def proceed(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """What was waiting for that."""
        return self._send(bucket, scratch, group) if self._coded.answered(bucket, scratch.device) else None

    def _send(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        coded = self._coded
        sent = coded.rows.get("sent", bucket, (self._n, coded.code_sizes[bucket]), scratch.device)
        if coded.rank in coded.of[bucket]:
            rows = zip(real(self._p[bucket]).view(self._n, -1), sent, real(scratch).view(self._n, -1), strict=True)
            for shard, (values, code, decoded) in enumerate(rows):
                coded.encode(bucket, shard, values, code, decoded, coded.rank)
        return coded.exchange(bucket, sent, group)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Decode and add up."""
        s, coded = real(self._s[bucket]).zero_(), self._coded
        c = real(scratch)[: s.numel()]
        codes = dict(zip(coded.of[bucket], coded.arrived(bucket, s.device), strict=True))
        for rank in order_of_sum(coded.rank, self._n):
            if rank in codes:
                s.add_(coded.how.decode(codes[rank], c).mul_(self._weights[rank]))

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """What has been handed over."""
        return self._coded.sent, self._coded.received

    def uncompressed(self, rank: int, world_size: int) -> int:
        """That of a push of all values."""
        return super().traffic(rank, world_size)[0]


class CodedPull(Collective):
    """x ← C(q_j) of all owners, shard by shard ; q_j ← q_j − C(q_j). Where an owner does not send, x ← 0.

    Args:
        q: this worker's shard of each bucket, in float32 at least; what it drops.
        x: tensors of the layout.
        layout: theirs.
        coded: see there.
    """

    weight = 1.0

    def __init__(self, q: Sequence[Tensor], x: Sequence[Tensor], layout: Layout, coded: Coded) -> None:
        self.layout, self._q, self._coded = layout, q, coded
        self._pieces = layout.pieces(x, keep=False)
        self.repeats = coded.repeats

    @property
    def fingerprint(self) -> int:
        """The layout's, the codec's and the senders'."""
        return self._coded.fingerprint

    @property
    def nbytes(self) -> int:
        """Of this worker's codes."""
        return sum(self._coded.code_sizes)

    def contents(self, bucket: int) -> list[Tensor]:
        """q."""
        return [self._q[bucket]]

    def fill(self, bucket: int, scratch: Tensor) -> None:
        """Nothing: q is where it is."""

    def launch(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """The code of this worker's shard to all, once it is known who sends."""
        return self._coded.ask(bucket, real(self._q[bucket]), group) or self._send(bucket, scratch, group)

    def proceed(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """What was waiting for that."""
        return self._send(bucket, scratch, group) if self._coded.answered(bucket, scratch.device) else None

    def _send(self, bucket: int, scratch: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        coded, q = self._coded, real(self._q[bucket])
        sent = coded.rows.get("sent", bucket, (coded.n, coded.code_sizes[bucket]), scratch.device)
        if coded.rank in coded.of[bucket]:
            encoder = coded.n  # other draws than in this worker's push, of which q already is made
            coded.encode(bucket, coded.rank, q, sent[0], real(scratch)[: q.numel()], encoder)
            sent[1:] = sent[0]
        return coded.exchange(bucket, sent, group)

    def drain(self, bucket: int, scratch: Tensor) -> None:
        """Decode all shards, and copy the pieces out."""
        coded, shards = self._coded, real(scratch).view(self._coded.n, -1)
        if len(coded.of[bucket]) < coded.n:
            shards.zero_()
        for rank, code in zip(coded.of[bucket], coded.arrived(bucket, scratch.device), strict=True):
            coded.how.decode(code, shards[rank])
        pieces = self._pieces[bucket]
        torch._foreach_copy_(pieces, self.layout.cut(bucket, scratch, pieces))

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """What has been handed over."""
        return self._coded.sent, self._coded.received

    def uncompressed(self, rank: int, world_size: int) -> int:
        """That of a pull of all values."""
        return sum(q.numel() * q.element_size() for q in self._q) * (world_size - 1)


def _digest(known: Sequence[Sequence[bool] | None]) -> int:
    whose = repr([None if senders is None else list(map(bool, senders)) for senders in known])
    return int.from_bytes(hashlib.sha256(whose.encode()).digest()[:7], "big")
