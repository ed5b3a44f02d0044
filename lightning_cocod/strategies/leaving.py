"""Leaving early: what a rank shows, and with which exit code its process ends, when a run is cut short."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException
from typing_extensions import override

from lightning_cocod.comm import CommunicationError, PeerLost

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_cocod.strategies.base import AlgorithmStrategy

_log = logging.getLogger(__name__)
IN_ORDER = 120.0
"""Seconds in which a rank that has failed leaves by itself."""
TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


def refuse_success(error: BaseException) -> None:
    """No run that was cut short ends with the exit code 0, which a launcher takes for finished."""
    if isinstance(error, SIGTERMException):
        error.code = TERMINATED
    elif isinstance(error, SystemExit):
        error.code = error.code or 1


def shorten(error: BaseException) -> None:
    """Where a rank was when it heard of another's end is of no use to anybody."""
    if isinstance(error, PeerLost):
        error.__traceback__, error.__cause__, error.__suppress_context__ = None, None, True


def show(error: BaseException, cause: BaseException, rank: int) -> None:
    """The original traceback comes first: now, before peers that are told of it show theirs."""
    if cause is not error:
        _log.error("[rank %d] %s", rank, cause)
    if isinstance(error, Exception) and not isinstance(error, CommunicationError):
        _log.error("[rank %d] %s", rank, "".join(traceback.format_exception(error)))


def conceal_ends(children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Lightning's observer looks at them every 5 s, and kills this process where one has ended with another code than 0. One
    that leaves in order, with a checkpoint to write perhaps, has some time for that.
    """
    until = time.monotonic() + seconds
    children[:] = [cast("subprocess.Popen[bytes]", _Concealed(child, until)) for child in children]


class _Concealed:
    """A child that seems to live until then."""

    def __init__(self, child: subprocess.Popen[bytes], until: float) -> None:
        self._child, self._until = child, until

    @property
    def returncode(self) -> int | None:
        return None if time.monotonic() < self._until else self._child.returncode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)


class LeaveFirst(Callback):
    """Comes before every other callback: one that reacts to an exception may block, and the peers must know by then."""

    def __init__(self, strategy: AlgorithmStrategy) -> None:
        self._strategy = strategy

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._strategy.leave(exception)


class Launcher(_MultiProcessingLauncher):
    """Lightning's, with which a rank's exception passes no hook of the trainer's, and Ctrl-C counts as success."""

    _strategy: AlgorithmStrategy

    @override
    def launch(self, function: Any, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessExitedException as error:
            if error.exit_code == TERMINATED:
                raise SIGTERMException from None
            raise

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, CommunicationError):  # torch shows the end of one process only, mostly the lost one's
                print(f"[rank {self._strategy.global_rank}] {error}", file=sys.stderr, flush=True)
            self._strategy.leave(error)
            self._strategy.teardown()
            if isinstance(error, KeyboardInterrupt):
                sys.exit(INTERRUPTED)
            raise
