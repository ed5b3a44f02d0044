"""A few rounds of every rank as a picture in time, to be opened in Perfetto."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.comm import Communicator
from lightning_cocod.options import whole
from lightning_cocod.strategies import AlgorithmStrategy
from lightning_cocod.telemetry import chrome
from lightning_cocod.telemetry.chrome import Part
from lightning_cocod.telemetry.passes import Passes
from lightning_cocod.telemetry.recording import Recording

if TYPE_CHECKING:
    import lightning.pytorch as pl


class CommunicationTrace(Callback):
    """Writes what the threads of every rank do in a few rounds, as a trace that https://ui.perfetto.dev and
    ``chrome://tracing`` open (docs/metrics.md says what is in it).

    Each rank writes a file of its own as soon as it has recorded its rounds (``trace.rank0.json``). When training has ended,
    outside of any step, these become the one file of all ranks. A run that ends early leaves what there is, and
    ``otherData`` in the file says what that is; one that ends by an exception leaves the files of the ranks.

    Args:
        path: of the file.
        rounds: how many rounds are recorded.
        start_step: optimizer steps before the first one. 0 records the start of training as well.

    Raises:
        TypeError: ``path`` is not one.
        ValueError: ``path`` is a folder, ``rounds`` is not a whole number of at least 1, or ``start_step`` of at least 0.
        MisconfigurationException: in ``fit``, under a strategy that is not of this package.

    Example::

        L.Trainer(strategy="cocod", callbacks=[CommunicationTrace("trace.json", rounds=3)])

    In a plain loop::

        with CoCoD(model, optimizer, period=4) as cocod, CommunicationTrace("trace.json").of(cocod):
            ...
    """

    def __init__(self, path: str | PathLike[str] = "trace.json", rounds: int = 3, start_step: int = 10) -> None:
        if not isinstance(path, str | PathLike) or not str(path):
            raise TypeError(f"path must be that of the file to write, got {path!r}")
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"path must be that of the file to write, got the folder {self.path}")
        self.rounds = whole("rounds", rounds, least=1)
        self.start_step = whole("start_step", start_step, least=0)
        self._recording: Recording | None = None

    @contextmanager
    def of(self, algorithm: Algorithm) -> Iterator[None]:
        """Trace a plain loop, the one inside. Collective: leaving it without an exception gathers the ranks' parts.

        Raises:
            RuntimeError: the algorithm is not in use.
            ValueError: it is being traced already.
            OSError: the path's folder cannot be made.
        """
        if not algorithm.started:
            raise RuntimeError(f"trace a {type(algorithm).__name__} inside its own block, which starts it")
        recording = self._record(algorithm)
        passes = Passes(algorithm, lambda: recording.recorder)
        recording.step_is_over = passes.end_step
        try:
            yield
        except BaseException:
            self._leave()
            raise
        else:
            self._join(algorithm.comm)
        finally:
            passes.remove()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, AlgorithmStrategy):
            raise MisconfigurationException(
                f"CommunicationTrace needs a strategy of this package, not {type(trainer.strategy).__name__}"
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, AlgorithmStrategy)
        recording = self._record(strategy.algorithm)
        # In manual optimization the training step steps the optimizers as well.
        recording.time(strategy, "training_step", "forward" if pl_module.automatic_optimization else "training_step")
        recording.time(strategy, "backward", "backward")
        recording.time(strategy.algorithm, "step", "step")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, AlgorithmStrategy)
        self._join(trainer.strategy.algorithm.comm)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave()  # a tuner's exit is neither an end nor an exception

    def _record(self, algorithm: Algorithm) -> Recording:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # better now than later
            raise OSError(f"CommunicationTrace cannot make the folder of {self.path}: {error}") from error
        self._recording = Recording(algorithm, self.rounds, self.start_step, on_end=self._write_own)
        return self._recording

    def _own_path(self, part: Part) -> Path:
        return self.path.with_suffix(f".rank{part.rank}{self.path.suffix}")

    def _write_own(self) -> None:
        assert self._recording is not None
        part = self._recording.part
        _write(self._own_path(part), [part])

    def _join(self, comm: Communicator) -> None:
        """One file instead of the ranks' own."""
        if (recording := self._recording) is None:
            return
        self._recording = None
        recording.close()
        part = recording.part
        parts = [part] * comm.world_size
        if comm.world_size > 1:
            with comm.named("the gathering of the trace"):
                dist.gather_object(part, parts if comm.rank == 0 else None)
        if comm.rank == 0 and not _write(self.path, parts):
            return
        self._own_path(part).unlink(missing_ok=True)
        if part.rounds < part.asked:
            rank_zero_warn(f"Training has ended before the end of the trace: {self.path} holds {part}.")
        else:
            rank_zero_info(f"Trace of {part}, {comm.world_size} ranks: {self.path} (open it in https://ui.perfetto.dev)")

    def _leave(self) -> None:
        """Training ends by an exception: nobody else is waited for, and nothing that happens here may hide it."""
        if (recording := self._recording) is None:
            return
        self._recording = None
        try:
            recording.close()
        except Exception as error:  # the one that ends training is to be seen
            warnings.warn(f"the trace of rank {recording.part.rank} has been lost: {error}", stacklevel=2)
            return
        _write(self._own_path(recording.part), [recording.part])


def _write(path: Path, parts: list[Part]) -> bool:
    """A trace that cannot be written ends no training. Returns whether it could."""
    try:
        chrome.write(path, parts)
    except Exception as error:  # whatever it is, training is worth more
        warnings.warn(f"the trace could not be written: {error}", stacklevel=2)
        return False
    return True
