"""How a global batch is shared among workers of different speeds. Pure arithmetic: all ranks compute the same."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

GAIN = 0.05
"""Of the time of a batch: for less the shares stay as they are, so that noise does not move them."""


def shares(speeds: Sequence[float], total: int) -> list[int]:
    """The whole numbers m_i ≥ 1 with Σ m_i = total for which the slowest worker, max m_i/s_i, is done soonest.

    Each sample goes to the worker who would be done soonest with one more; the lower rank where two are equal.

    Args:
        speeds: s_i, of every worker, in any scale.
        total: samples of a global batch.

    Raises:
        ValueError: fewer samples than workers, or a speed that is not positive.
    """
    if total < len(speeds) or not all(s > 0 for s in speeds):
        raise ValueError(f"{total} samples cannot be shared by workers of speeds {list(speeds)}: one each, speeds above 0")
    sizes = [1] * len(speeds)
    queue = [(2 / s, rank) for rank, s in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(total - len(speeds)):
        _, rank = queue[0]
        sizes[rank] += 1
        heapq.heapreplace(queue, ((sizes[rank] + 1) / speeds[rank], rank))
    return sizes


def improved(sizes: Sequence[int], speeds: Sequence[float], gain: float = GAIN) -> list[int] | None:
    """Shares of the same total with which a batch takes less time by more than ``gain`` of it; None where there are none."""
    better = shares(speeds, sum(sizes))
    return better if _seconds(better, speeds) < (1 - gain) * _seconds(sizes, speeds) else None


def _seconds(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    return max(m / s for m, s in zip(sizes, speeds, strict=True))


def totals(samples: int, batch: int, workers: int, *, drop_last: bool) -> list[int]:
    """How many samples each global batch of an epoch has: ``batch``, and what remains at the end is shared by the last two.

    As many batches as for equal workers, each with a sample for every worker. Where the last two have none, they are one.

    Raises:
        ValueError: fewer samples than workers.
    """
    full, rest = divmod(samples, batch)
    if rest == 0 or drop_last:
        return [batch] * full
    if samples < workers:
        raise ValueError(f"{samples} samples are too few for {workers} ranks: each needs one in every batch")
    if full == 0:
        return [rest]
    last = batch + rest
    return [batch] * (full - 1) + ([last] if last < 2 * workers else [(last + 1) // 2, last // 2])


class Plan:
    """From which batch on the ranks have which shares. Batches are counted over the whole run, from 0.

    Args:
        changes: number of the first batch, and the sizes from there on.
    """

    def __init__(self, changes: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._changes = [(first, list(sizes)) for first, sizes in changes]

    def sizes(self, batch: int) -> list[int]:
        """In this batch, if it is a full one."""
        return self._changes[max(0, bisect_right(self._changes, batch, key=lambda change: change[0]) - 1)][1]

    @property
    def latest(self) -> list[int]:
        """The sizes that have been decided on last."""
        return self._changes[-1][1]

    def change(self, first: int, sizes: Sequence[int]) -> None:
        """New sizes from this batch on; it comes after those of earlier changes, or is that of the last."""
        if first == self._changes[-1][0]:
            self._changes.pop()
        self._changes.append((first, list(sizes)))

    def state_dict(self) -> dict[str, Any]:
        """To be given to the constructor."""
        return {"changes": [(first, list(sizes)) for first, sizes in self._changes]}
