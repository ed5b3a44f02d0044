"""Lightning's calendar for ranks that share epochs: what is said in batches or steps of a rank is counted over all of them.

A rank's place in an epoch is the number of its next batch. It validates, as all do, when that lies beyond the place of a
validation; a schedule of the learning rate has made as many steps as it would have on a rank in step. All ranks meet at the
same places in the same order (meetings.py): where an epoch begins, at each validation, and where a rank has no more batches
or is to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_cocod.strategies.meetings import Meetings
from lightning_cocod.strategies.replaced import Replaced, then
from lightning_cocod.strategies.saving_together import save_together

if TYPE_CHECKING:
    import lightning.pytorch as pl


class SharedCalendar:
    """Of one fit.

    Args:
        trainer: in a fit.
        workers: N.
    """

    def __init__(self, trainer: pl.Trainer, workers: int) -> None:
        self._trainer, self._n = trainer, workers
        self._fit, self._loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._meetings: Meetings | None = None
        self._max_steps = -1
        self._share = 0  # batches of an epoch that a rank would have among equal ones
        self._total = 0  # of all ranks together
        self._shorter: tuple[int, int] | None = None  # number and batches of the last epoch, if it is shorter
        self._interval: float = math.inf  # from validation to validation, in batches of a rank among equal ones
        self.epoch = -1
        """Number of the epoch that has begun."""
        self.next: float = 0
        """Number of this rank's next batch in it; infinite where it has none."""
        self._crossed = 0  # validations in it, but for the one at its end
        self._closed = False  # whether this rank has been at the last meeting in it
        self._base = self._steps = 0  # of schedules: those that they had made when it began, and make in it
        self.position = 0
        """Steps that schedules have made."""
        self._was_validating = False  # when the checkpoint was saved that this run resumes
        self._has_gone_on = False  # since then

    def install(self, meetings: Meetings, reopen: Callable[[], None], replaced: Replaced) -> None:
        """Replace methods of the trainer's loops.

        Args:
            meetings: of the ranks.
            reopen: called whenever Lightning has set up the data.
            replaced: puts them back.
        """
        self._meetings = meetings
        trainer, fit, loop = self._trainer, self._fit, self._loop
        advance, end_batch, end_epoch, schedule = (
            loop.advance,
            loop.on_advance_end,
            fit.on_advance_end,
            loop.update_lr_schedulers,
        )
        self._max_steps = loop.max_steps
        replaced.method(loop, "max_steps", -1)  # it would be this rank's own steps
        replaced.method(fit, "max_epochs", fit.max_epochs)

        def advance_or_end(fetcher: Any) -> None:
            try:
                advance(fetcher)
            except StopIteration:  # the others have had all that was left of a resumed epoch, or the user skips the rest
                loop.batch_progress.is_last_batch, self._has_gone_on = True, True

        def validate_and_end_batch(fetcher: Any) -> None:
            while self._crosses():
                self._validate()
            end_batch(fetcher)

        def end_epoch_together() -> None:
            if trainer.should_stop:
                loop.batch_progress.is_last_batch = True  # for all, wherever each has been
            end_epoch()

        def update_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if interval != "step":
                if self.limit == self._total:  # max_steps may end training before an epoch does
                    schedule(interval, update_plateau_schedulers)
            elif not update_plateau_schedulers and not loop._should_accumulate():
                self._follow_schedules()

        replaced.method(fit, "setup_data", then(fit.setup_data, reopen))
        replaced.method(fit, "on_advance_end", end_epoch_together)
        replaced.method(loop, "advance", advance_or_end)
        replaced.method(loop, "on_advance_end", validate_and_end_batch)
        replaced.method(loop, "update_lr_schedulers", update_schedulers)
        replaced.method(loop, "_should_check_val_fx", self._closes)
        save_together(trainer, replaced)

    def measure(self, limits: Sequence[float] | None, there_are: int) -> None:
        """The data has been set up, with the length of an equal share; from here on it has none.

        Args:
            limits: Lightning's, in batches of a rank.
            there_are: batches of the whole data set.
        """
        assert limits is not None
        self._share = int(limits[0])
        self._total = min(there_are, self._share * self._n)
        assert self._trainer.val_check_batch is not None  # validation by time is refused
        self._interval = self._trainer.val_check_batch
        if self._max_steps > 0:
            self._turn_into_epochs(self._max_steps)
        self._fit.max_batches = self._trainer.val_check_batch = math.inf

    def _turn_into_epochs(self, steps: int) -> None:
        """Steps of a rank in step, in which the N ranks have so many batches together."""
        accumulated = self._n * self._trainer.accumulate_grad_batches
        of_epoch = math.ceil(self._total / accumulated)
        epochs = math.ceil(steps / of_epoch)
        if self._fit.max_epochs in (None, -1) or epochs <= self._fit.max_epochs:
            self._fit.max_epochs = epochs
            self._shorter = epochs - 1, min(self._total, (steps - (epochs - 1) * of_epoch) * accumulated)

    @property
    def is_running(self) -> bool:
        """Whether the data has been measured."""
        return self._total > 0

    @property
    def limit(self) -> int:
        """Batches of this epoch, of all ranks together."""
        return self._shorter[1] if self._shorter is not None and self.epoch == self._shorter[0] else self._total

    @property
    def origin(self) -> int:
        """The number of its first batch, counted over the whole run."""
        return self.epoch * self._total

    def begin(self, epoch: int) -> None:
        """An epoch begins."""
        self.epoch, self.next, self._crossed, self._closed = epoch, 0, 0, False
        self._base, self._steps = self._base + self._steps, 0

    def go_on(self, following: float) -> None:
        """A batch begins, after which comes that of this number."""
        self.next, self._has_gone_on = following, True

    # Meetings

    def _crosses(self) -> bool:
        """Whether this rank's next batch lies beyond the place of the next validation. Then all ranks meet."""
        place = (self._crossed + 1) * self._interval
        if self._resumes or self._closed or not self._loop._should_check_val_epoch():
            return False
        if place > self._share or place * self._n >= self.limit or self.next < place * self._n:
            return False
        self._meet()  # where all may save: what is to come has not taken place
        self._crossed += 1
        return True

    def _closes(self, _: Any) -> bool:
        """Whether to validate after this rank's last batch of the epoch. Then all ranks meet, be it or not."""
        validates = self._loop._should_check_val_epoch()
        if self._resumes:
            return self._was_validating and validates
        if self._closed or not (self._loop.batch_progress.is_last_batch or self._stops):
            return False
        self._meet()
        self._closed = True
        return validates and (self._ends_with_validation or self._stops)

    @property
    def _resumes(self) -> bool:
        """Lightning asks how the batch has ended that was the last one before the checkpoint."""
        return self._loop.restarting and not self._has_gone_on

    @property
    def _ends_with_validation(self) -> bool:
        last = self._share // self._interval * self._interval * self._n
        return bool(last >= self._total if self.limit == self._total else self.limit % (self._interval * self._n) == 0)

    @property
    def _stops(self) -> bool:
        return self._trainer.should_stop and self._fit._can_stop_early

    def _meet(self) -> None:
        assert self._meetings is not None
        self._meetings.meet()

    def _validate(self) -> None:
        """In mid-epoch, as Lightning does it."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        first = connector._first_loop_iter
        trainer.validating = True
        if not self._loop._should_accumulate():
            call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        self._loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter = first
        if trainer.received_sigterm:
            raise SIGTERMException  # here, where all are: some have no batch any more before which they would look at it
        self._closed = self._stops  # all ranks know, and leave the epoch

    # Schedules

    def _follow_schedules(self) -> None:
        """Schedules by steps are at this rank's place: N · accumulated batches of all ranks are one of their steps."""
        accumulated = self._trainer.accumulate_grad_batches
        self._steps = math.ceil(self.limit / (self._n * accumulated))
        ended = math.isinf(self.next) or self._loop.batch_progress.is_last_batch
        place = self._steps if ended else int(self.next) // (self._n * accumulated)
        while self.position < self._base + place:
            self.position += 1
            self._step_schedules(min((self.position - self._base) * accumulated, self._share))

    def _step_schedules(self, batches: int) -> None:
        """A step of a rank in step, after so many batches of its epoch."""
        trainer, progress = self._trainer, self._loop.scheduler_progress
        if not trainer.lightning_module.automatic_optimization:
            return
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau and batches % config.frequency == 0:
                progress.increment_ready()
                call._call_lightning_module_hook(trainer, "lr_scheduler_step", config.scheduler, None)
                progress.increment_completed()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks."""
        return {
            "epoch": self.epoch,
            "limit": self.limit,
            "crossed": self._crossed,
            "closed": self._closed,
            "validating": self._trainer.validating,
            "base": self._base,
            "steps": math.ceil(self.limit / (self._n * self._trainer.accumulate_grad_batches)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After ``begin``."""
        self._base = state["base"]
        if state["epoch"] == self.epoch:
            self._crossed, self._closed, self._was_validating = state["crossed"], state["closed"], state["validating"]
        else:
            self._base += state["steps"]
