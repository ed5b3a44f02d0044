"""Tensors that are lent to a message until it has arrived, in place of a copy of them."""

from __future__ import annotations

from torch import Tensor

from lightning_cocod.comm.buckets import Layout, weigh


class Lent:
    """What a ``Buffer`` of the layout would hold, as the tensors' own memory.

    Args:
        layout: theirs. The tensors are dense.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pieces: list[list[Tensor | None]] = [[None] * len(layout.parts(bucket)) for bucket in range(len(layout))]
        """Of every bucket; None for zeros. They rest from when they are here."""

    def contents(self, bucket: int) -> list[Tensor]:
        """Of a bucket, without zeros."""
        return [piece for piece in self.pieces[bucket] if piece is not None]

    def weighed(self, bucket: int, w: float, out: Tensor) -> None:
        """out ← w times the bucket."""
        end = 0
        for part, piece in zip(self.layout.parts(bucket), self.pieces[bucket], strict=True):
            place, end = out[part.offset : part.end], part.end
            if piece is None:
                place.zero_()
            else:
                weigh(piece, w, place)
        out[end:].zero_()  # padding
