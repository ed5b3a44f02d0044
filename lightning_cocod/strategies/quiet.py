"""Lightning's per-batch collectives, replaced: decisions that all ranks must take together are agreed as a step number.

Lightning broadcasts a stop flag on every batch, and so do ``max_time`` and a checkpoint's ``train_time_interval``. Each of
these locks the ranks in step, and a strategy that hides communication would hide nothing. Here a rank that wants something
says so in its heartbeat, and all ranks do it after the same optimizer step. SLURM's requeue signal, at which Lightning would
save inside the signal handler at whatever step each rank has reached, is such a wish too.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_cocod.comm.agreement import Agreement
from lightning_cocod.comm.wishes import Wishes
from lightning_cocod.strategies.replaced import Replaced, then

if TYPE_CHECKING:
    import lightning.pytorch as pl

STOP, SIGTERM, REQUEUE = "stop", "SIGTERM", "requeue"


class QuietLoop:
    """Takes the collectives out of the trainer's batches.

    Args:
        trainer: whose loop.
        agreement: among the ranks.
        ask_all: whether any rank wishes what is named; asked between epochs and after validations only.
    """

    def __init__(self, trainer: pl.Trainer, agreement: Agreement | Wishes, ask_all: Callable[[str, bool], bool]) -> None:
        self._trainer, self._agreement, self._any = trainer, agreement, ask_all
        self._due: str | None = None
        self._stopping = False
        self._tuning = False
        self._decide: Callable[[bool], bool] | None = None
        self._in_training_step = self._told = False
        self._requeue = trainer._signal_connector._slurm_sigusr_handler_fn

    def install(self, replaced: Replaced) -> None:
        """Replace methods of this trainer and its callbacks."""
        trainer = self._trainer
        epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
        replaced.method(batches, "advance", then(batches.advance, self._on_batch_end))
        replaced.method(batches, "_broadcast_sigterm_tensor", lambda: None)
        replaced.method(epochs, "on_advance_end", then(epochs.on_advance_end, self._on_epoch_end))
        replaced.method(trainer._signal_connector, "_sigterm_notifier_fn", self._on_sigterm)
        replaced.method(trainer._signal_connector, "_slurm_sigusr_handler_fn", self._on_requeue_signal)
        connector = trainer._logger_connector
        replaced.method(connector, "on_batch_end", then(self._requeue_if_due, connector.on_batch_end))
        for number, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]  # set by Trainer.__init__
            if isinstance(callback, Timer):
                self._replace_decision(replaced, callback, f"time limit {number}", wanted=True)
            elif isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
                self._replace_decision(replaced, callback, f"checkpoint {number}", wanted=False)  # it asks whether to skip

    def decision(self) -> Callable[[bool], bool] | None:
        """What replaces the next broadcast, if a callback is about to decide something on a batch. Good for one broadcast:
        those that follow belong to what has been decided, to a checkpoint's saving for example.
        """
        decide, self._decide = self._decide, None
        return decide

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """While a tuner runs the loop: it broadcasts its stops itself, and none of them may outlast its search as a wish."""
        self._tuning = True
        try:
            yield
        finally:
            self._tuning = False

    def on_batch_start(self) -> None:
        """A stop that was known before the batch was decided by all ranks together, at a validation for example."""
        self._stopping = self._trainer.should_stop
        self._due = None

    def on_step(self, step: int) -> None:
        """``step`` optimizer steps have been done: see what has been agreed for now."""
        self._due = self._agreement.reached(step)

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """The user's ``training_step`` runs."""
        self._in_training_step = True
        try:
            yield
        finally:
            self._in_training_step = False

    def on_reduction(self) -> None:
        """Lightning reduces something over the ranks. Inside a step that undoes what this class is for: say so, once."""
        if self._in_training_step and not self._told:
            self._told = True
            rank_zero_warn(
                "training_step reduces over all ranks (a metric with sync_dist=True and on_step=True?): a blocking "
                "collective in a step, behind which no communication can be hidden; log it with on_step=False, on_epoch=True"
            )

    def decide_together(self) -> None:
        """After a validation and after an epoch, outside of any step: a stop that one rank wants is everybody's."""
        trainer = self._trainer
        if not trainer.sanity_checking:
            trainer.should_stop = self._any(STOP, trainer.should_stop)
            sigterm = self._any(SIGTERM, self.sigterm_is_open or trainer.received_sigterm)
            trainer._signal_connector.received_sigterm = sigterm

    @property
    def sigterm_is_open(self) -> bool:
        """Whether this rank has received SIGTERM and no step has come at which all could stop."""
        return SIGTERM in self._agreement.wishes

    def _on_epoch_end(self) -> None:
        self.decide_together()
        if self._trainer.received_sigterm:
            raise SIGTERMException  # after the last epoch nobody else looks at it

    def _on_batch_end(self) -> None:
        """After all hooks of a batch: a stop that this rank alone has decided in it becomes a wish."""
        trainer = self._trainer
        if self._due == SIGTERM:
            trainer._signal_connector.received_sigterm = True
        if self._due == STOP or self._due_is("time limit"):
            trainer.should_stop = self._stopping = True
        elif trainer.should_stop and not (self._stopping or self._tuning):
            trainer.should_stop = False
            self._agreement.request(STOP)

    def _requeue_if_due(self) -> None:
        """After all hooks of a batch and before it counts as complete: a resume takes up exactly such a checkpoint."""
        if self._due == REQUEUE:
            self._due = None  # a validation's batches end here too
            self._save_and_requeue()

    def _save_and_requeue(self) -> None:
        environment = self._trainer.strategy.cluster_environment  # type: ignore[attr-defined]  # a parallel strategy's
        assert isinstance(environment, SLURMEnvironment)
        self._requeue(environment.requeue_signal, None)  # type: ignore[arg-type]  # it looks at neither

    def _due_is(self, what: str) -> bool:
        return self._due is not None and self._due.startswith(what)

    def _replace_decision(self, replaced: Replaced, callback: Timer | ModelCheckpoint, name: str, *, wanted: bool) -> None:
        """The first ``strategy.broadcast`` in the callback's batch hook answers with what has been agreed."""
        original = callback.on_train_batch_end

        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            self._decide = lambda now: self._decided(name, now, wanted)
            try:
                original(*args, **kwargs)
            finally:
                self._decide = None

        replaced.method(callback, "on_train_batch_end", on_train_batch_end)

    def _decided(self, name: str, now: bool, wanted: bool) -> bool:
        if self._due == name:
            return wanted
        if now is wanted:
            self._agreement.request(name)
        return not wanted

    def _on_sigterm(self, signum: int, _: object) -> None:
        """A wish in place of Lightning's broadcast, which would block inside the signal handler."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self.sigterm_is_open:
            launcher.kill(signal.Signals(signum))
        rank_zero_info("Received SIGTERM: all ranks stop together after one of the next steps.")
        self._agreement.request(SIGTERM)

    def _on_requeue_signal(self, *_: Any) -> None:
        rank_zero_info("Received the requeue signal: all ranks save together after one of the next steps.")
        self._agreement.request(REQUEUE)


def sigterm_without_broadcast(trainer: pl.Trainer, replaced: Replaced) -> None:
    """Outside of a fit there are no steps to agree on: SIGTERM ends this rank at its next batch, and its peers are told."""
    connector = trainer._signal_connector

    def on_sigterm(signum: int, _: object) -> None:
        if (launcher := trainer.strategy.launcher) is not None and not connector.received_sigterm:
            launcher.kill(signal.Signals(signum))
        connector.received_sigterm = True

    replaced.method(connector, "_sigterm_notifier_fn", on_sigterm)
