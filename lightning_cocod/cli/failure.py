"""How a rank's exception reaches the process that launched it."""

import json
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import lightning as L

from lightning_cocod.comm import PeerLost
from lightning_cocod.workloads import InputError


class Failure(NamedTuple):
    """An exception in a rank."""

    told: bool  # only of another rank's: the one that failed first is another one
    at: float  # seconds since the epoch
    rank: int
    text: str  # the one line of an `InputError`, the traceback of anything else
    expected: bool  # the user's input is to blame


class RecordFailure(L.Callback):
    """Writes a rank's first exception into a folder at once, before tearing down makes other ranks fail as well."""

    def __init__(self, folder: Path, rank: int):
        self.file, self.rank = folder / f"{rank}.json", rank

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Lightning's call when training fails."""
        self.record(exception)

    def record(self, exception: BaseException) -> None:
        """Write, unless an earlier exception is there."""
        if self.file.exists() or not isinstance(exception, Exception):
            return
        told, expected = isinstance(exception, PeerLost), isinstance(exception, InputError)
        text = str(exception) if expected else "".join(traceback.format_exception(exception))
        partial = self.file.with_suffix(".part")
        partial.write_text(json.dumps(Failure(told, time.time(), self.rank, text, expected)))
        partial.rename(self.file)  # the reader sees a whole file or none


def first_failure(folder: Path, first_ended: int) -> Failure | None:
    """The earliest exception that ranks recorded in `folder`, one of their own if there is one.

    None if the rank that ended first was killed without one.
    """
    failures = sorted(Failure(*json.loads(file.read_text())) for file in folder.glob("*.json"))
    return failures[0] if first_ended in {failure.rank for failure in failures} else None
