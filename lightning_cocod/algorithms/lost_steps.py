"""Steps made for nothing: those after the last round, where the model is what the end of a round has made of it."""

from __future__ import annotations

import logging

from lightning_cocod.algorithms.base import Algorithm

_log = logging.getLogger(__name__)


def warn_of_lost_steps(algorithm: Algorithm, *ended: int) -> None:
    """At the end of a run, in the log of rank 0.

    Args:
        algorithm: whose run it is.
        ended: step at which the last round ended that is in the model; where parts of it have rounds of their own, of each.
    """
    lost = sorted({algorithm.t - step for step in ended})
    if not algorithm.started or algorithm.comm.rank != 0 or not lost or lost[-1] == 0:
        return
    if len(ended) == 1:
        _log.warning(
            "the last %d steps are not in the model of %s, which is that of the end of a round: train a multiple of the "
            "period's steps",
            lost[0],
            algorithm.name,
        )
    else:
        _log.warning(
            "the last %d to %d steps are not in the model of %s: how many depends on the fragment; the fewest are missing "
            "after a multiple of the period's steps",
            lost[0],
            lost[-1],
            algorithm.name,
        )
