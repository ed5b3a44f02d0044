"""Averages inside a node: the workers of one machine agree often, those of different machines every now and then."""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lightning_cocod.algorithms.gradients import average_gradients
from lightning_cocod.algorithms.options import whole
from lightning_cocod.comm import Group, Subject

if TYPE_CHECKING:
    from lightning_cocod.algorithms.base import Algorithm

_log = logging.getLogger(__name__)

Sizes = int | Sequence[int]
"""Ranks of a node: of each, or of one after the other."""


class NodeAverage:
    r"""Workers of one node average among themselves, blocking. The rounds of all workers are what they are without it.

    V is the node of worker i, v_j = w_j / Σ_{l ∈ V} w_l, and t_0 the step at which the round under way has begun::

        h = 1:    every step:                  g_i ← Σ_{j ∈ V} v_j g_j          # before the optimizer's step
        h > 1:    t = t_0 + h, t_0 + 2h, …     x_i ← Σ_{j ∈ V} v_j x_j          # after it
                  t = t_0 + k, the end:        the same, before anything is merged or sent

    so that with h = 1 the replicas of a node are the same and it acts as one worker, with the weight Σ_{j ∈ V} w_j and the
    mean of the gradients; and with any h a node has one replica where a round begins, and reports one. With h = 1 and a
    codec the parameters are averaged at the end of a round as well: what the codec drops differs between workers.

    Synchronous steps average over all workers, so that nothing is left to do. The optimizer's state stays local, and with
    h = 1 the same within a node. Messages go through a group and a thread of their own (``Communicator.within``): they do
    not wait for one between nodes that is in flight.

    Args:
        algorithm: whose rounds these are.
        every: h ≥ 1.
        nodes: the ranks of each node.
    """

    def __init__(self, algorithm: Algorithm, every: int, nodes: Sequence[Sequence[int]]) -> None:
        self.every = every
        self.nodes = nodes
        self.ranks = next(node for node in nodes if algorithm.comm.rank in node)
        """Of this worker's node."""
        self._algorithm = algorithm
        self._group: Group | None = None

    def start(self) -> None:
        """Connect. Collective: every rank of the run calls it, alone on its node or not."""
        algorithm = self._algorithm
        digest = zlib.crc32(repr([len(node) for node in self.nodes]).encode())
        algorithm.comm.who(False, algorithm.subject(f"nodes ({digest:x})", counted=False))  # all must see the same nodes
        self._group = algorithm.comm.within(self.nodes)

    def before_step(self, optimizers: Sequence[Optimizer]) -> None:
        """g ← Σ_{j ∈ V} v_j g_j."""
        if self.every == 1 and len(self.ranks) > 1:
            group, subject = self._about("gradients in the node", self._algorithm.weighing.of_step)
            left_out = average_gradients(optimizers, group, subject.weights[group.rank], subject)
            self._algorithm.repair_buffers(left_out, group)

    def after_step(self) -> None:
        """x ← Σ_{j ∈ V} v_j x_j where it is time."""
        if len(self.ranks) > 1 and self._is_due():
            group, subject = self._about("node", self._algorithm.weighing.of_round)
            x = [p.detach() for p in self._algorithm._parameters()]
            mean = group.mean_(x, subject.weights[group.rank], subject)
            mean.wait()
            self._algorithm.repair(mean.left_out, group)

    def _is_due(self) -> bool:
        algorithm, rounds = self._algorithm, self._algorithm.rounds
        if rounds.ends is None or rounds.length is None or algorithm.when.synchronous(algorithm.t - 1):
            return False
        ends = algorithm.t >= rounds.ends
        if self.every == 1:
            return ends and algorithm.compression is not None
        return ends or (algorithm.t - (rounds.ends - rounds.length)) % self.every == 0

    def _about(self, kind: str, weights: Sequence[float]) -> tuple[Group, Subject]:
        assert self._group is not None  # connected in start
        own = [weights[rank] for rank in self.ranks]
        return self._group, self._algorithm.subject(kind, weights=[w / math.fsum(own) for w in own])


def node_average(algorithm: Algorithm, intra_node: int | None, ranks_per_node: Sizes | None) -> NodeAverage | None:
    """What averages inside the nodes, if anything does and there is more than one rank in one of them.

    Args:
        algorithm: whose rounds these are.
        intra_node: h.
        ranks_per_node: their sizes; by default what the launcher says of this one (``LOCAL_WORLD_SIZE``).

    Raises:
        ValueError: a number out of range, or not known; ranks that do not fill the nodes.
    """
    if intra_node is None:
        if ranks_per_node is not None:
            raise ValueError("ranks_per_node is for intra_node=: give both or neither")
        return None
    every = whole("intra_node", intra_node, least=1)
    nodes = division(algorithm.comm.world_size, ranks_per_node)
    if all(len(node) == 1 for node in nodes):
        if algorithm.comm.world_size > 1 and algorithm.comm.rank == 0:
            _log.warning("intra_node=%d has nothing to do: every node has one rank", every)
        return None
    return NodeAverage(algorithm, every, nodes)


def division(world_size: int, ranks_per_node: Sizes | None) -> list[range]:
    """The ranks of each node: the first of them on the first node, and so on.

    Raises:
        ValueError: see ``node_average``.
    """
    if ranks_per_node is None and world_size > 1:
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not local.isdecimal() or int(local) < 1:
            raise ValueError(
                "intra_node needs to know which ranks share a node: start with torchrun, or give ranks_per_node="
            )
        ranks_per_node = int(local)
    if isinstance(ranks_per_node, Sequence) and not isinstance(ranks_per_node, str):
        sizes = [whole("ranks_per_node", size, least=1) for size in ranks_per_node]
    else:
        size = whole("ranks_per_node", 1 if ranks_per_node is None else ranks_per_node, least=1)
        sizes = [size] * (world_size // size)
    if world_size == 1:  # as where options are only looked at
        return [range(1)]
    if sum(sizes) != world_size:
        raise ValueError(f"{world_size} ranks do not fill nodes of {ranks_per_node} ranks: set ranks_per_node=")
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
