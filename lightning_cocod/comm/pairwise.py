"""What two workers tell each other in an exchange, and what each makes of it: the difference by which it moves.

Worker i moves by (y_i − s_i)/2, where s_i is what the other one takes i's snapshot for, and y_i what i takes the other's
for. Both are what has been *decoded*, on both sides, so y_i = s_j and y_j = s_i, and the two differences are each other's
negative bit for bit: a pair's sum is conserved exactly, up to the rounding of the two additions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_cocod.comm.buckets import Buffer, Layout, real
from lightning_cocod.compression import Codec
from lightning_cocod.compression.seeds import seed_of


class Wire(ABC):
    """What travels along one edge.

    Attributes:
        outgoing: in host memory, what the other one is sent.
        incoming: in host memory, where what it sends goes.
    """

    outgoing: list[Tensor]
    incoming: list[Tensor]

    @abstractmethod
    def encode(self, s: Buffer) -> bool:
        """outgoing ← what tells of the snapshot s, which is finite. Returns whether that is, too."""

    @abstractmethod
    def difference_(self, s: Buffer) -> None:
        """s ← (y − s)/2, of what has been sent and what has come."""


class Host:
    """Copies of tensors in host memory: the tensors themselves on the CPU, pinned memory beside a device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = list(tensors)
        self.tensors = [t if t.device.type == "cpu" else torch.empty_like(t, device="cpu").pin_memory() for t in tensors]

    def load(self) -> None:
        """From the device; the host, in this thread, waits for that."""
        self._copy(self.tensors, self._device)
        for device in {t.device for t in self._device if t.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def store(self) -> None:
        """To the device."""
        self._copy(self._device, self.tensors)

    def _copy(self, to: list[Tensor], source: list[Tensor]) -> None:
        for t, o in zip(to, source, strict=True):
            if t is not o:
                t.copy_(o, non_blocking=True)


class Plain(Wire):
    """The snapshots themselves. One for all edges of a worker, which has one exchange at a time.

    Args:
        s: in which snapshots are taken.
    """

    def __init__(self, s: Buffer) -> None:
        self._y = s.layout.buffer()
        self._out, self._in = Host(s.buckets), Host(self._y.buckets)
        self.outgoing, self.incoming = self._out.tensors, self._in.tensors

    def encode(self, s: Buffer) -> bool:
        """As it is."""
        self._out.load()
        return True

    @torch.no_grad()
    def difference_(self, s: Buffer) -> None:
        """Bucket by bucket."""
        self._in.store()
        for mine, theirs in zip(s.buckets, self._y.buckets, strict=True):
            torch.sub(theirs, mine, out=mine).mul_(0.5)


class Coding:
    """A codec with the memory that it works in. One for all edges of a worker, which has one exchange at a time.

    Args:
        codec: any.
        layout: of the snapshots.
        seed: of codecs that round or choose at random.
    """

    def __init__(self, codec: Codec, layout: Layout, seed: int) -> None:
        self.codec, self.layout, self.seed = codec, layout, seed
        devices = [layout.kind(j)[1] for j in range(len(layout))]
        self.sent, self.received = (
            [torch.zeros(codec.nbytes(n), dtype=torch.uint8, device=d) for n, d in zip(layout.sizes(), devices, strict=True)]
            for _ in range(2)
        )
        self.sent_scales, self.received_scales = (torch.zeros(len(layout), dtype=torch.float64) for _ in range(2))
        self._memory: list[dict[tuple[torch.dtype, torch.device], Tensor]] = [{}, {}]
        self._generators: dict[torch.device, torch.Generator] = {}

    def scratch(self, which: int, bucket: int) -> Tensor:
        """One of two buckets' worth of memory, as real numbers."""
        return real(self.layout.scratch(bucket, self._memory[which], summed=True))

    def encode(self, u: Tensor, bucket: int, seed: Sequence[int]) -> None:
        """sent ← the code of u."""
        generator = None
        if self.codec.stochastic:
            generator = self._generators.setdefault(u.device, torch.Generator(u.device))
            generator.manual_seed(seed_of((self.seed, bucket, *seed)))
        self.codec.encode(u, self.sent[bucket], generator)

    def decode(self, code: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """out ← β C(u)."""
        self.codec.decode(code, out)
        return out.mul_(scale.item())


class Coded(Wire):
    r"""Codes of how far the snapshots are from a base θ of the edge, which is the same on both sides bit for bit.

    With u_i = s_i − θ, worker i sends C(u_i) and one number β_i for each bucket, and both sides take::

        q_i = β_i C(u_i)     β_i = ⟨u_i, C(u_i)⟩ / ‖C(u_i)‖²
        s_i ← s_i + (q_j − q_i)/2
        θ   ← θ + (q_i + q_j)/2

    which is the merge (y − s)/2 of the decoded snapshots θ + q. As both the worker and the base move, what is left of u_i is
    u_i − q_i: what the codec drops stays, is part of the next code, and needs no residual. β makes q the projection of u
    upon C(u), so ‖u − q‖ ≤ ‖u‖ whatever the codec: it is 1 for one that is a contraction by a projection (top-k, random-k,
    scaled signs), and about 1/(1 + ω) for an unbiased one of variance ω‖u‖², which would otherwise drive the workers apart
    where ω > 1. That is why codes of differences to a base, and not of the snapshots: those have errors of the size of the
    weights, however close the workers are.

    Memory: one copy of the parameters for each edge, in float32 at least.

    Args:
        coding: shared by the edges of a worker.
        base: θ, the same on both sides. It is this edge's from now on.
        edge: for random numbers: (active, passive, this one).
    """

    def __init__(self, coding: Coding, base: Buffer, edge: tuple[int, int, int]) -> None:
        self._coding, self._base, self._edge = coding, base, edge
        self._exchanges = 0
        self._out, self._in = Host(coding.sent), Host(coding.received)
        self.outgoing = [*self._out.tensors, coding.sent_scales]
        self.incoming = [*self._in.tensors, coding.received_scales]

    @torch.no_grad()
    def encode(self, s: Buffer) -> bool:
        """C(u) and β, which is not finite where C(u) or a square of it is not."""
        coding = self._coding
        active, passive, me = self._edge
        seed = (active, passive, self._exchanges, -1 if coding.codec.draws_alike else me)
        for j, (mine, base) in enumerate(zip(s.buckets, self._base.buckets, strict=True)):
            u, q = coding.scratch(0, j), coding.scratch(1, j)
            torch.sub(real(mine), real(base), out=u) if mine.dtype == base.dtype else u.copy_(real(mine)).sub_(real(base))
            coding.encode(u, j, seed)
            coding.codec.decode(coding.sent[j], q)
            size = torch.dot(q, q).double()
            coding.sent_scales[j] = torch.where(size == 0, 0.0, torch.dot(u, q).double() / size)
        self._out.load()
        return bool(coding.sent_scales.isfinite().all())

    @torch.no_grad()
    def difference_(self, s: Buffer) -> None:
        """θ moves as well."""
        coding = self._coding
        self._in.store()
        for j, (mine, base) in enumerate(zip(s.buckets, self._base.buckets, strict=True)):
            own = coding.decode(coding.sent[j], coding.sent_scales[j], coding.scratch(0, j))
            other = coding.decode(coding.received[j], coding.received_scales[j], coding.scratch(1, j))
            real(mine).copy_(other.sub(own).mul_(0.5))
            real(base).add_(own.add_(other), alpha=0.5)
        self._exchanges += 1
