"""Means of matrices by two thin factors, after PowerSGD: one message in which P, and with P known then Q, is added up.

The matrices are what the tensors of a layout are in memory, wherever its buckets cut them; the factors and what is no
matrix have buckets of their own. All workers decode the same P and Q, by multiplying and adding element by element: where a
product of matrices may be rounded to fewer bits, m would not be the mean of the c.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_cocod.comm.buckets import Layout, Piece, summed_in
from lightning_cocod.comm.collectives import Collective, Mean, ring
from lightning_cocod.comm.parts import How, MeanOfParts, Parts
from lightning_cocod.comm.tracer import Tracer
from lightning_cocod.compression import PowerSGD
from lightning_cocod.compression.powersgd import orthonormalise_, start_, warm_

LARGEST = 1e37
"""Norm beyond which a part counts as not finite: no product of it with unit vectors overflows."""


class Block(NamedTuple):
    """A part of a bucket, ``span``, that is some rows of a matrix, or a piece of one row."""

    matrix: int
    rows: slice
    columns: slice
    span: slice

    def of(self, flat: Tensor) -> Tensor:
        """The block in a bucket."""
        return flat[self.span].view(self.rows.stop - self.rows.start, -1)


class Whole(NamedTuple):
    """A part of a bucket, ``span``, that is a part of a tensor that travels as it is."""

    tensor: int
    part: slice
    span: slice


class Factors:
    """A layout in blocks, and memory for all that travels but Q. The communication thread's.

    Attributes:
        of: the numbers of the tensors that are matrices.
        P: m × r, of each.
        own: this worker's n × r, of each.
        whole: what travels as it is.
        first: layout of ``P`` and ``whole``.
        second: layout of ``own``.
        blocks: in each bucket.
        others: in each bucket.
    """

    def __init__(self, layout: Layout, chosen: PowerSGD) -> None:
        self.of: list[int] = []
        self.P: list[Tensor] = []
        self.own: list[Tensor] = []
        self.whole: list[Tensor] = []
        self.blocks: list[list[Block]] = [[] for _ in range(len(layout))]
        self.others: list[list[Whole]] = [[] for _ in range(len(layout))]
        for bucket, (blocks, others) in enumerate(zip(self.blocks, self.others, strict=True)):
            dtype, device = layout.kind(bucket)
            like = torch.empty(0, dtype=summed_in(dtype), device=device)
            for piece in layout.parts(bucket):
                m, n = layout.matrix(piece.index)
                low = chosen.saves(m, n) and not dtype.is_complex
                if piece.start == 0 and low:
                    self.of.append(piece.index)
                    self.P.append(chosen.factor(m, like))
                    self.own.append(chosen.factor(n, like))
                elif piece.start == 0:
                    self.whole.append(like.new_empty(m * n))
                if low:
                    blocks += _blocks(len(self.P) - 1, n, piece)
                else:
                    span = slice(piece.offset, piece.end)
                    others.append(Whole(len(self.whole) - 1, slice(piece.start, piece.stop), span))
        self.first, self.second = Layout([*self.P, *self.whole]), Layout(self.own)


def _blocks(matrix: int, n: int, piece: Piece) -> Iterator[Block]:
    """A piece of a matrix whose rows have n elements: all whole rows together, and what is left at both ends."""
    start, stop, offset = piece.start, piece.stop, piece.offset
    while start < stop:
        row, column = divmod(start, n)
        rows = 1 if column else max(1, (stop - start) // n)
        size = min(rows * n - column, stop - start)
        columns = slice(column, n if rows > 1 else column + size)
        yield Block(matrix, slice(row, row + rows), columns, slice(offset, offset + size))
        start, offset = start + size, offset + size


class LowRank(How):
    """PowerSGD, the Q of each parameter, and the memory that it works in, which is the communication thread's.

    Args:
        chosen: its options.
    """

    def __init__(self, chosen: PowerSGD) -> None:
        super().__init__()
        self.chosen = chosen
        self._factors: dict[Layout, Factors] = {}
        self._scratch: list[dict[tuple[torch.dtype, torch.device], Tensor]] = [{} for _ in range(3)]

    def mean(self, parts: Parts, x: Sequence[nn.Parameter], weights: Sequence[float], rank: int, step: int) -> LowRankMean:
        """That of low rank."""
        return LowRankMean(parts, x, self, weights, rank, step)

    def factors(self, layout: Layout) -> Factors:
        """Of this layout; made once."""
        if layout not in self._factors:
            self._factors[layout] = Factors(layout, self.chosen)
        return self._factors[layout]

    def scratch(self, layout: Layout, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
        """Three times a bucket of memory."""
        one, two, three = (layout.scratch(bucket, memory, summed=True) for memory in self._scratch)
        return one, two, three


class LowRankMean(MeanOfParts):
    """The protocol. Random columns of Q depend on the step of training."""

    def __init__(
        self, parts: Parts, x: Sequence[nn.Parameter], how: LowRank, weights: Sequence[float], rank: int, step: int
    ) -> None:
        super().__init__(parts, how.chosen, weights, rank)
        self._x, self._how, self._remembered, self._step = list(x), how, how.remembered, step

    @property
    def nbytes(self) -> int:
        """Of both factors, and of what travels as it is."""
        f = self._how.factors(self.layout)
        return f.first.nbytes + f.second.nbytes

    def traffic(self, rank: int, world_size: int) -> tuple[int, int]:
        """That of two ring all-reduces."""
        f = self._how.factors(self.layout)
        first, second = (ring(layout.summed_nbytes, world_size)[0] for layout in (f.first, f.second))
        return first + second, first + second

    def is_finite(self, size: Tensor) -> bool:
        """And no larger than ``LARGEST``."""
        return bool(size <= LARGEST)

    def stages(self, tracer: Tracer) -> Iterator[Collective]:
        """P ← Σ_j w_j M_j Q ;  P ← orth(P) ;  Q ← Σ_j w_j M_jᵀ P ;  m ← P Qᵀ ;  c ← P Q_jᵀ."""
        f = self._how.factors(self.layout)
        with tracer.span("encode"):
            Q = [self._of_before(number, own) for number, own in zip(f.of, f.own, strict=True)]
            if self.weight:
                self._project(f, Q)
        yield Mean([*f.P, *f.whole], f.first, self.weight)
        with tracer.span("encode"):
            for P in f.P:
                orthonormalise_(P)
            if self.weight:
                self._project_back(f)
            for mean, own in zip(Q, f.own, strict=True):
                mean.copy_(own)
        yield Mean(Q, f.second, self.weight)
        with tracer.span("decode"):
            self._decode(f, Q)
            for number, Q_p in zip(f.of, Q, strict=True):
                warm_(Q_p, self._seed(number))

    def _of_before(self, number: int, own: Tensor) -> Tensor:
        p = self._x[number]
        if p not in self._remembered or self._remembered[p].shape != own.shape:
            self._remembered[p] = torch.empty_like(own)
            start_(self._remembered[p], self._seed(number))
        return self._remembered[p]

    def _seed(self, number: int) -> tuple[int, int]:
        return self._step, number

    def _project(self, f: Factors, Q: Sequence[Tensor]) -> None:
        """P ← M Q, and what travels as it is."""
        for P in f.P:
            P.zero_()
        for bucket in range(len(self.layout)):
            p, *_ = self._how.scratch(self.layout, bucket)
            self.parts.fill(bucket, p)
            for block in f.blocks[bucket]:
                f.P[block.matrix][block.rows].addmm_(block.of(p), Q[block.matrix][block.columns])
            for other in f.others[bucket]:
                f.whole[other.tensor][other.part] = p[other.span]

    def _project_back(self, f: Factors) -> None:
        """Q_j ← Mᵀ P."""
        for own in f.own:
            own.zero_()
        for bucket in range(len(self.layout)):
            p, *_ = self._how.scratch(self.layout, bucket)
            self.parts.fill(bucket, p)
            for block in f.blocks[bucket]:
                f.own[block.matrix][block.columns].addmm_(block.of(p).t(), f.P[block.matrix][block.rows])

    def _decode(self, f: Factors, Q: Sequence[Tensor]) -> None:
        """m ← P Qᵀ ; c ← P Q_jᵀ ; of the rest m is the mean and c is p."""
        for bucket in range(len(self.layout)):
            m, c, spare = self._how.scratch(self.layout, bucket)
            if self.weight:
                self.parts.fill(bucket, c)
            for block in f.blocks[bucket]:
                P = f.P[block.matrix][block.rows]
                _multiply(P, Q[block.matrix][block.columns], block.of(m))
                if self.weight:
                    _multiply(P, f.own[block.matrix][block.columns], block.of(c))
            for other in f.others[bucket]:
                m[other.span] = f.whole[other.tensor][other.part]
            self.parts.take(bucket, m, c if self.weight else None, spare)


def _multiply(P: Tensor, Q: Tensor, out: Tensor) -> None:
    """out ← P Qᵀ, column after column."""
    out.zero_()
    for p, q in zip(P.unbind(1), Q.unbind(1), strict=True):
        out.addr_(p, q)
