"""What some of the ranks, or all, can do together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cocod.comm.buckets import Buffer, Layout
from lightning_cocod.comm.channel import Channel, Home
from lightning_cocod.comm.coded_shards import Coded, CodedPull, CodedPush, Coding
from lightning_cocod.comm.collectives import Broadcast, Mean, Operation
from lightning_cocod.comm.correction import Correction
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.lent import Lent
from lightning_cocod.comm.message import Message, Subject
from lightning_cocod.comm.mixing import Matrix
from lightning_cocod.comm.neighbours import Neighbours
from lightning_cocod.comm.parts import FromBase, FromZero, How, Parts
from lightning_cocod.comm.shards import Pull, Push, Rows
from lightning_cocod.comm.thread import Handle


class Group(Channel):
    """Some of the ranks, seen from one of them. All methods are for the training thread; see ``Channel``."""

    def __init__(self, home: Home, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(home, rank, ranks)
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def mean_(
        self,
        tensors: Sequence[Tensor],
        weight: float,
        subject: Subject,
        *,
        measured: bool = False,
        relative_to: Tensor | None = None,
        fit: bool | None = None,
    ) -> Message:
        """x ← Σ_j w_j x_j in place, w_j being each worker's own ``weight``. The tensors must rest until it is done.

        With ``measured`` the message's numbers are the size, ‖x‖ before unless it is given as ``relative_to``, and the
        distance, ‖mean - x‖. This worker's part is ``fit`` if it is finite; telling so spares the look, and lets NaN and
        infinity travel like other values.
        """
        mean = Mean(tensors, self.layout(tensors), weight, measured=measured)
        return self._submit(subject, mean, fit=fit, relative_to=relative_to)

    def correction_(
        self,
        snapshot: Buffer,
        subject: Subject,
        *,
        own: float = 1.0,
        size: Tensor | None = None,
        relative_to: Tensor | None = None,
    ) -> Message:
        """S ← Σ_j w_j S_j - a S in place, w as in the subject, of sum 1, and a being ``own``. Its numbers are the size, ‖S‖
        before unless it is given as ``relative_to``, and the distance, ‖Σ_j w_j S_j - S‖.

        Where this worker is left out, S ← Σ_j w_j S_j, and there are no numbers. ``size`` is ‖S‖ where it is known.
        """
        correction = Correction(snapshot, subject.weights, self.rank, own)
        return self._submit(subject, correction, size=size, relative_to=relative_to)

    def mix_(
        self, snapshot: Buffer, W: Matrix, rows: Rows, subject: Subject, *, kept: float = 0.0, size: Tensor | None = None
    ) -> Message:
        """S_i ← Σ_{j≠i} W_ij (S_j − S_i) + a S_i in place, a being ``kept``. Its numbers are the size, ‖S‖ before, and the
        distance, the norm of the sum.

        Only those j send to i for which W_ij is not 0. W is the same on all ranks. Where one's S is not finite and is to be
        skipped, S ← 0 on all. ``size`` is ‖S‖ where it is known.
        """
        return self._submit(subject, Neighbours(snapshot, W, self.rank, kept, rows), size=size)

    def compressed_correction_(
        self,
        snapshot: Buffer,
        base: Buffer,
        x: Sequence[nn.Parameter],
        how: How,
        subject: Subject,
        *,
        size: Tensor | None = None,
    ) -> Message:
        """S ← m - c and θ ← θ + m in place, with c = C(S - θ) and m = Σ_j w_j c_j, w as in the subject, C being how they
        are compressed. All three are about x.

        The base θ, in float32 at least, is and stays the same on all workers. Its numbers are the size, ‖S‖ before, and the
        distance, ‖θ - S‖ with the new θ. Where this worker is left out, S ← θ. ``size`` is ‖S‖ where it is known.
        """
        return self._submit(subject, self._compressed(FromBase(snapshot, base), x, how, subject), size=size)

    def compressed_mean_(
        self,
        parts: Buffer,
        residual: Sequence[Tensor],
        x: Sequence[nn.Parameter],
        how: How,
        subject: Subject,
        *,
        own: float = 0.0,
        relative_to: Tensor | None = None,
    ) -> Message:
        """D ← m - a c and R ← D - c in place, with c = C(D), m = Σ_j w_j c_j, w as in the subject, and a = ``own``. C is how
        they are compressed, and all are about x.

        Its numbers are the size, ‖D‖ before unless it is given as ``relative_to``, and the distance, ‖m - D‖. Where this
        worker is left out, D ← m and R ← 0.
        """
        mean = self._compressed(FromZero(parts, residual, own), x, how, subject)
        return self._submit(subject, mean, relative_to=relative_to)

    def _compressed(self, parts: Parts, x: Sequence[nn.Parameter], how: How, subject: Subject) -> Operation:
        return how.mean(parts, x, subject.weights, self.rank, subject.step)

    def broadcast_(self, tensors: Sequence[Tensor], subject: Subject, *, source: int = 0, wanted: bool = True) -> Message:
        """x ← x of the source, in place, on the ranks that want it."""
        return self._submit(subject, Broadcast(tensors, self.layout(tensors), source, wanted=wanted), fit=True)

    def do(self, work: Callable[[], None], subject: Subject) -> Handle[Any]:
        """Let the communication thread do something that no other rank is needed for, after what it has been told before and
        what this thread has done so far. What is waited for is a mark of the lane, at its end.
        """
        thread, departed = self._working(), self.lane.mark()

        def done() -> Any:
            with self.lane.working(), torch.no_grad():
                self.lane.follow(departed)
                work()
                return self.lane.mark()

        return self._send(thread, done, str(subject))

    def gate(self, layout: Layout) -> Gate:
        """Of the buckets of a push, or a pull."""
        return Gate(len(layout), self.lane)

    def push_(self, g: Buffer | Lent, s: Sequence[Tensor], rows: Rows, gate: Gate, subject: Subject) -> Message:
        """s ← Σ_j w_j g_j, of every bucket this worker's shard, w as in the subject.

        It sets out at once, and each bucket once its gate is open; then g must rest, and lent tensors be held until the push
        has been waited for: a device may still read them. Its layout has this group's size as
        its ``multiple``. Raises NonFiniteMessage, when it is waited for, on all workers if one's g is not finite.
        """
        return self._submit(subject, Push(g, s, subject.weights, self.rank, rows, gate), fit=True)

    def pull_(
        self,
        s: Sequence[Tensor],
        x: Sequence[Tensor],
        layout: Layout,
        rows: Rows,
        subject: Subject,
        arrived: Gate | None = None,
    ) -> Message:
        """x ← the shards s of all workers, of every bucket of their layout, as they are pushed to.

        The gate, if there is one, opens for each bucket as it is there (``Message.wait_for``). s and x must rest until it is
        done; where it fails x is undefined, as values may land in it byte by byte.
        A shard that is not finite is an error whatever the subject says: nobody else has it.
        """
        return self._submit(replace(subject, skip=False), Pull(s, x, layout, self.rank, rows, arrived))

    def coded_push_(self, p: Buffer, s: Sequence[Tensor], coding: Coding, gate: Gate, subject: Subject) -> Message:
        """s ← Σ_j w_j c_j, of every bucket this worker's shard, w as in the subject; p_i ← p_i − c_i.

        c_i = C(p_i), or 0 where this worker does not send a bucket. Otherwise as ``push_``; but where some worker's p is not
        finite, that is an error whatever the subject says: the others' are what they have dropped by then.
        """
        coded = Coded(p.layout, coding, self.rank, self.world_size, subject.step)
        return self._submit(replace(subject, skip=False), CodedPush(p, s, subject.weights, coded, gate), fit=True)

    def coded_pull_(
        self, q: Sequence[Tensor], x: Sequence[Tensor], layout: Layout, coding: Coding, subject: Subject
    ) -> Message:
        """x ← C(q_j) of all workers j, of every bucket their shards; q_j ← q_j − C(q_j). 0 where a worker sends nothing."""
        coded = Coded(layout, coding, self.rank, self.world_size, subject.step)
        return self._submit(replace(subject, skip=False), CodedPull(q, x, layout, coded))

    def layout(self, tensors: Sequence[Tensor], *, whole: bool = False) -> Layout:
        """The layout of these tensors; made once for equal shapes. Buckets that travel ``whole`` are not cut into parts."""
        key = whole, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)  # a superset of what it depends on
        if key not in self._layouts:
            self._layouts[key] = Layout(tensors) if whole else Layout(tensors, among=self.world_size)
        return self._layouts[key]
