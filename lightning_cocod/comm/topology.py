"""Who exchanges with whom: bipartite graphs, in which one side asks and the other one answers. Pure arithmetic.

Even ranks are active: they ask, and wait for the answer. Odd ranks are passive: they only answer. Every edge joins the two
sides, so nobody who answers ever waits for somebody who asks, and no circle of workers can wait for each other.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

from lightning_cocod.options import whole

NAMES = ("ring", "exponential", "random")


def is_active(rank: int) -> bool:
    """Whether a rank asks."""
    return rank % 2 == 0


class Topology:
    """A connected bipartite graph over ranks, and the order in which an active rank goes through its neighbours.

    Args:
        world_size: N.
        edges: pairs of ranks; the direction does not matter, and saying one twice changes nothing.
        seed: neighbours are drawn at random, the same for the same seed; in turn without one.

    Attributes:
        edges: (active, passive), in ascending order.

    Raises:
        ValueError: an edge that is no pair, of an unknown rank, or between equals; a graph that is not connected.
    """

    def __init__(self, world_size: int, edges: Iterable[Sequence[int]], *, seed: int | None = None) -> None:
        self.world_size = whole("the number of ranks", world_size, least=1)
        self.edges = tuple(sorted({self._edge(edge) for edge in edges}))
        self._seed = seed
        self._neighbours: list[tuple[int, ...]] = []
        for rank in range(world_size):
            joined = {other for edge in self.edges if rank in edge for other in edge if other != rank}
            # Beginning with the next rank: in a ring of 2m ranks all active ones then ask different passive ones at once.
            self._neighbours.append(tuple(sorted(joined, key=lambda other: (other - rank) % world_size)))
        if unreached := set(range(world_size)) - self._reached():
            raise ValueError(f"topology must connect all ranks, but no path leads from rank 0 to rank {min(unreached)}")

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Of a rank, beginning with the next higher one."""
        return self._neighbours[rank]

    def partner(self, rank: int, exchange: int, among: Collection[int]) -> int | None:
        """Whom an active rank asks in its exchange number 0, 1, …: one ``among`` these; None if no neighbour is."""
        left = [other for other in self._neighbours[rank] if other in among]
        if not left:
            return None
        if self._seed is None:
            return left[exchange % len(left)]
        return random.Random(f"{self._seed} {rank} {exchange}").choice(left)

    def _edge(self, edge: Sequence[int]) -> tuple[int, int]:
        pair: list[int] = list(edge) if isinstance(edge, list | tuple) else []
        if len(pair) != 2 or not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in pair):
            raise ValueError(f"topology: an edge is a pair of ranks, got {edge!r}")
        if unknown := [rank for rank in pair if not 0 <= rank < self.world_size]:
            raise ValueError(f"topology: there is no rank {unknown[0]} among {self.world_size}, in edge {tuple(pair)}")
        if is_active(pair[0]) == is_active(pair[1]):
            raise ValueError(f"topology: edge {tuple(pair)} joins equals; one rank must be even, which asks, and one odd")
        return (pair[0], pair[1]) if is_active(pair[0]) else (pair[1], pair[0])

    def _reached(self) -> set[int]:
        reached, new = {0}, [0]
        while new:
            new = list({other for rank in new for other in self._neighbours[rank]} - reached)
            reached.update(new)
        return reached


def ring(world_size: int) -> Topology:
    """Each rank and the next. An odd number makes a path: the edge that would close the ring joins equals."""
    return Topology(world_size, _at_distances([1], world_size))


def exponential(world_size: int) -> Topology:
    """Ranks at distances 1 and 1 + 2^i, i ≥ 1, all of which are odd; of N ranks in a circle, less those between equals."""
    distances = [1, *(1 + 2**i for i in range(1, world_size.bit_length()))]
    return Topology(world_size, _at_distances(distances, world_size))


def at_random(world_size: int, seed: int = 0) -> Topology:
    """Every active rank and every passive one; whom an active rank asks is drawn."""
    edges = [(a, p) for a in range(0, world_size, 2) for p in range(1, world_size, 2)]
    return Topology(world_size, edges, seed=seed)


def as_topology(topology: str | Iterable[Sequence[int]], world_size: int, seed: int = 0) -> Topology:
    """What a user wrote: a name, or edges.

    Raises:
        ValueError: another name, or see ``Topology``.
    """
    if isinstance(topology, str):
        if topology not in NAMES:
            raise ValueError(f"topology must be {', '.join(map(repr, NAMES))} or a list of edges, got {topology!r}")
        if topology == "random":
            return at_random(world_size, seed)
        return ring(world_size) if topology == "ring" else exponential(world_size)
    if not isinstance(topology, Iterable):
        raise ValueError(f"topology must be {', '.join(map(repr, NAMES))} or a list of edges, got {topology!r}")
    return Topology(world_size, topology)


def _at_distances(distances: Iterable[int], world_size: int) -> list[tuple[int, int]]:
    pairs = [(rank, (rank + d) % world_size) for rank in range(world_size) for d in distances if d < world_size]
    return [(i, j) for i, j in pairs if is_active(i) != is_active(j)]
