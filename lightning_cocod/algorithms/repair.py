"""A mean was taken without some ranks, whose part was not finite. They have got the mean; this is what it does not bring."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Adagrad, Optimizer

from lightning_cocod.comm import Group, Subject

_log = logging.getLogger(__name__)


def restore(tensors: Sequence[Tensor], comm: Group, left_out: Sequence[int], subject: Subject) -> None:
    """x ← x of the first rank that is sound, on the ranks that were left out; the others keep theirs. Blocking.

    A copy of one rank's, not a mean: it is exact in every dtype, and buffers that belong together stay together.
    """
    if tensors:
        sound = min(set(range(comm.world_size)) - set(left_out))
        comm.broadcast_(tensors, subject, source=sound, wanted=comm.rank in left_out).wait()


def forget(optimizers: Sequence[Optimizer]) -> None:
    """The optimizers' states become those of optimizers that have never stepped. Learning rates and groups stay."""
    for optimizer in optimizers:
        optimizer.state.clear()  # made anew in the next step
        if isinstance(optimizer, Adagrad):  # the only one of torch's that makes its state when it is made
            optimizer.state.update(Adagrad(optimizer.param_groups, **optimizer.defaults).state)


def tell(comm: Group, left_out: Sequence[int], step: int, consequence: str) -> None:
    """One line in the log of rank 0, or of the first of these ranks."""
    if comm.rank == 0:
        names = ", ".join(str(comm.ranks[number]) for number in left_out)
        ranks = f"rank {names} was" if len(left_out) == 1 else f"ranks {names} were"
        _log.warning("%s not finite at step %d: %s", ranks, step, consequence)
