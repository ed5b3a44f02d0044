"""Who mixes what with whom: matrices W, of which worker i takes W_ij of what worker j has. Pure arithmetic.

Undirected graphs have symmetric, doubly stochastic matrices: rows and columns add up to 1, so the mean of what is mixed
stays what it is (Lian et al.; NeurIPS 2017; arXiv 1705.09056). Directed ones have column-stochastic matrices P: a worker
gives away all that it has, so the sum stays (Assran, Loizou, Ballas, Rabbat; ICML 2019; arXiv 1811.10792).
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Matrix = tuple[tuple[float, ...], ...]
"""Rows of numbers of at least 0."""
Graph = str | Sequence[Sequence[float]] | Mapping[int, Sequence[int]]
"""A name, a matrix or, where it is directed, the workers that each worker sends to."""

T = TypeVar("T")

_TOLERANCE = 1e-9  # of sums that are to be 1


def ring(n: int) -> Matrix:
    """A third of oneself and of each neighbour; of two workers a half, of one all."""
    return _circulant(n, {1, -1})


def exponential(n: int) -> Matrix:
    """Neighbours at the distances 1, 2, 4, … in both directions, all weighed alike."""
    return _circulant(n, {sign * hop for hop in _hops(n) for sign in (1, -1)})


def full(n: int) -> Matrix:
    """Everybody, J/N: one exchange is the mean."""
    return _circulant(n, range(1, n))


def directed_exponential(n: int) -> Matrix:
    """Worker i sends to i + 1, i + 2, i + 4, … and keeps as much as it sends to each. Regular: rows add up to 1, too."""
    return _circulant(n, _hops(n))


def one_peer(n: int) -> tuple[Matrix, ...]:
    """The same in turns: at exchange k worker i sends a half to i + 2^(k mod ⌈log₂ N⌉). Regular."""
    return tuple(_circulant(n, {hop}) for hop in _hops(n)) or (full(n),)


UNDIRECTED: dict[str, Callable[[int], Matrix]] = {"ring": ring, "exponential": exponential, "full": full}
DIRECTED: dict[str, Callable[[int], tuple[Matrix, ...]]] = {
    "one_peer": one_peer,
    "exponential": lambda n: (directed_exponential(n),),
    "full": lambda n: (full(n),),
}


def undirected(graph: Graph, n: int) -> tuple[Matrix, ...]:
    """W of a name or a user's matrix, in a cycle of one.

    For one worker a matrix of any size is checked and then not used: options are looked at before the ranks are known.

    Raises:
        ValueError: an unknown name; not square, of another size than n, or with numbers that are not finite or less than 0;
            not symmetric, rows that do not add up to 1, workers that are not connected, or that only swap what they have.
    """
    if not _is_matrix(graph):
        return (_named(graph, UNDIRECTED, "a matrix of weights")(n),)
    W = _rows(graph)
    for i, row in enumerate(W):
        for j, weight in enumerate(row):
            if abs(weight - W[j][i]) > _TOLERANCE:
                raise ValueError(f"graph must be symmetric: weight [{i}][{j}] is {weight}, [{j}][{i}] is {W[j][i]}")
    _add_up("row", W)
    edges = [[j for j, weight in enumerate(row) if weight] for row in W]
    _reachable(edges, W)
    if not _all_reached([[k for j in ends for k in edges[j]] for ends in edges]):
        raise ValueError("graph only swaps what workers have, and mixes nothing: give a worker a weight of its own")
    return (_of_size(W, n),)


def directed(graph: Graph, n: int) -> tuple[Matrix, ...]:
    """P of a name, of a user's matrix, or of the workers that each one sends to; in turns, one for each exchange.

    A worker that sends to d others keeps 1/(1 + d) and sends as much to each. Looked at as in ``undirected``.

    Raises:
        ValueError: an unknown name; not square, of another size than n, or with numbers that are not finite or less than 0;
            columns that do not add up to 1, a worker that keeps nothing, or one that does not reach all others.
    """
    if isinstance(graph, Mapping):
        P = _rows(_adjacent(graph))
    elif _is_matrix(graph):
        P = _rows(graph)
    else:
        return _named(graph, DIRECTED, "a matrix of weights, or the workers that each one sends to")(n)
    columns = tuple(zip(*P, strict=True))
    _add_up("column", columns)
    for i, row in enumerate(P):
        if not row[i]:
            raise ValueError(f"graph must leave each worker a part of what it has: weight [{i}][{i}] is 0")
    _reachable([[i for i, weight in enumerate(column) if weight] for column in columns], P)
    return (_of_size(P, n),)


def pushed(P: Matrix, w: Sequence[float]) -> list[float]:
    """P w, exactly w where all w are the same and rows add up to 1."""
    after = []
    for i, row in enumerate(P):
        others = math.fsum(p * (v - w[i]) for j, (p, v) in enumerate(zip(row, w, strict=True)) if j != i)
        after.append(w[i] * _about_one(math.fsum(row)) + others)
    return after


def is_regular(P: Matrix) -> bool:
    """Whether rows add up to 1, so that weights of 1 stay."""
    return all(_about_one(math.fsum(row)) == 1 for row in P)


def digest(W: Matrix) -> int:
    """By which workers see whether they mix alike."""
    return zlib.crc32(b"".join(struct.pack(f"{len(row)}d", *row) for row in W))


def _hops(n: int) -> list[int]:
    """1, 2, 4, … less than n."""
    return [1 << p for p in range((n - 1).bit_length())]


def _circulant(n: int, steps: Iterable[int]) -> Matrix:
    """Worker i sends to i + s for each of these s, and weighs all alike, itself included."""
    others = {s % n for s in steps} - {0}
    weight = 1 / (1 + len(others))
    return tuple(tuple(weight if i == j or (i - j) % n in others else 0.0 for j in range(n)) for i in range(n))


def _is_matrix(graph: object) -> bool:
    """Whether it is to be one: a list, a tensor or an array."""
    return hasattr(graph, "tolist") or (isinstance(graph, Sequence) and not isinstance(graph, str))


def _named(graph: object, known: Mapping[str, Callable[[int], T]], otherwise: str) -> Callable[[int], T]:
    if not isinstance(graph, str) or graph not in known:
        raise ValueError(f"graph must be {', '.join(map(repr, known))} or {otherwise}, got {graph!r}")
    return known[graph]


def _rows(matrix: Any) -> Matrix:
    listed = matrix.tolist() if hasattr(matrix, "tolist") else matrix
    rows = [tuple(row) if isinstance(row, Sequence) and not isinstance(row, str) else () for row in listed]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise ValueError(f"graph must be a square matrix, a row for each worker, got rows of {[len(row) for row in rows]}")
    for weight in (weight for row in rows for weight in row):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"graph must have numbers of at least 0, got {weight!r}")
    return tuple(tuple(map(float, row)) for row in rows)


def _adjacent(sends_to: Mapping[int, Sequence[int]]) -> list[list[float]]:
    n = len(sends_to)
    if set(sends_to) != set(range(n)):
        raise ValueError(f"graph must say of each worker, from 0 on, whom it sends to, got {sorted(map(str, sends_to))}")
    P = [[0.0] * n for _ in range(n)]
    for j, receivers in sends_to.items():
        if not set(receivers) <= set(range(n)):
            raise ValueError(f"graph has workers 0 to {n - 1}, but worker {j} sends to {list(receivers)}")
        whom = {j, *receivers}
        for i in whom:
            P[i][j] = 1 / len(whom)
    return P


def _add_up(what: str, lines: Matrix) -> None:
    for number, line in enumerate(lines):
        if abs(math.fsum(line) - 1) > _TOLERANCE:
            raise ValueError(f"graph must have {what}s that add up to 1: {what} {number} adds up to {math.fsum(line)}")


def _about_one(value: float) -> float:
    return 1.0 if abs(value - 1) <= _TOLERANCE else value


def _reachable(edges: Sequence[Sequence[int]], W: Matrix) -> None:
    backwards = [[i for i, ends in enumerate(edges) if j in ends] for j in range(len(W))]
    if not (_all_reached(edges) and _all_reached(backwards)):
        raise ValueError("graph must connect all workers: some never hear of others")


def _all_reached(edges: Sequence[Sequence[int]]) -> bool:
    """Whether there is a way from the first to all."""
    seen, ends = {0}, [0]
    while ends:
        new = set(edges[ends.pop()]) - seen
        seen |= new
        ends += new
    return len(seen) == len(edges)


def _of_size(W: Matrix, n: int) -> Matrix:
    if n == 1:
        return full(1)
    if len(W) != n:
        raise ValueError(f"graph is one of {len(W)} workers, there are {n}")
    return W
