"""Where ranks have different numbers of steps, they decide together where they meet: nothing is agreed as a step.

All ranks come to the same meetings in the same order: before each validation, after it, and at the end of each epoch. A
meeting begins with the same questions whatever a rank has come for, so a rank may also come because it has heard, in a
heartbeat, that somebody wishes to stop or to save. It comes at the end of its next step, and finds the others at theirs or
at the meeting for which they have come before it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_cocod.strategies.quiet import REQUEUE, SIGTERM, STOP, QuietLoop

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_cocod.comm.wishes import Wishes


class Meetings(QuietLoop):
    """As ``QuietLoop``, for ranks that are not in step.

    Args:
        trainer: whose loop.
        wishes: of the ranks.
        ask_all: see ``QuietLoop``.
        meeting: the algorithm's: a rank that is bound to others' steps does not wait for one that waits for it here.
    """

    _agreement: Wishes

    def __init__(
        self,
        trainer: pl.Trainer,
        wishes: Wishes,
        ask_all: Callable[[str, bool], bool],
        meeting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(trainer, wishes, ask_all)
        self._meeting = meeting

    @property
    def in_training_step(self) -> bool:
        """Whether the user's ``training_step`` runs."""
        return self._in_training_step

    def meet(self) -> None:
        """All ranks are here, and nobody goes on to what it has come for before all wishes have been seen to.

        Raises:
            SIGTERMException: somebody has received SIGTERM.
        """
        while self._hear_wishes():
            pass

    def decide_together(self) -> None:
        """As ``QuietLoop.decide_together``."""
        with self._meeting():
            super().decide_together()
        self._agreement.granted([STOP])

    def _hear_wishes(self) -> bool:
        """Returns whether there was one that all ranks have seen to; whoever came for it has gone back to training."""
        trainer = self._trainer
        self.decide_together()
        if trainer.received_sigterm:
            raise SIGTERMException
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]  # a parallel strategy's
        if not isinstance(environment, SLURMEnvironment) or not self._any(REQUEUE, REQUEUE in self._agreement.wishes):
            return False
        self._agreement.granted([REQUEUE])
        self._save_and_requeue()
        return True

    @override
    def _on_batch_end(self) -> None:
        """A stop of this rank's own, in whichever hook of the batch, is one: others hear of it."""
        if self._due == SIGTERM:
            self.meet()
        elif self._due == STOP:
            self._trainer.should_stop = True
        elif self._trainer.should_stop:
            self._agreement.request(STOP)

    @override
    def _requeue_if_due(self) -> None:
        if self._due == REQUEUE:
            self._due = None
            self._hear_wishes()

    @override
    def _decided(self, name: str, now: bool, wanted: bool) -> bool:
        """A time limit is reached by whoever sees it first."""
        return now
