"""Saving and loading: Lightning's file, and each rank's part beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_cocod.comm import Communicator, Subject
from lightning_cocod.comm.errors import first_line
from lightning_cocod.strategies import parts
from lightning_cocod.strategies.own_state import OwnState

KEY = "lightning_cocod"
"""Under which a checkpoint says where its ranks' parts are."""
_ELSEWHERE = "none, but a strategy of lightning_cocod: without it training goes on from the consensus model"
"""Lightning asks for the callbacks whose state a checkpoint holds: under another strategy, for this one."""


class CheckpointFailed(RuntimeError):
    """A rank could not write its part of a checkpoint. The checkpoint does not exist; an earlier one of its name does."""


class Checkpoints:
    """Checkpoints of one run. Its methods are collective.

    Args:
        communicator: of the ranks.
        algorithm: registered name; a part is good for the same algorithm only.
        tidies: whether this rank removes what is no longer needed: one on each machine, which may have a disk of its own.
        late: whether a checkpoint may be written after ``save``: the parts of the one before stay until the next saving.
    """

    def __init__(self, communicator: Communicator, algorithm: str, *, tidies: bool, late: bool) -> None:
        self._comm, self._algorithm, self._tidies, self._late = communicator, algorithm, tidies, late
        self._before: dict[str, str] = {}  # path to key

    def save(
        self, checkpoint: dict[str, Any], part: dict[str, Any], path: str | Path, write: Callable[[dict[str, Any]], None]
    ) -> None:
        """Every rank's part, then the checkpoint.

        Args:
            checkpoint: Lightning's.
            part: this rank's.
            path: of the checkpoint.
            write: writes the checkpoint if this is rank 0.

        Raises:
            CheckpointFailed: a rank could not write; raised on every rank.
        """
        comm = self._comm
        key = self._same(parts.new_key(path))
        where = {"parts": key, "world_size": comm.world_size, "algorithm": self._algorithm}
        callbacks = {**checkpoint["callbacks"], _ELSEWHERE: {}}
        try:
            self._together("its part of", path, lambda: parts.write(part, path, key, comm.rank))
            self._together("the file of", path, lambda: write({**checkpoint, KEY: where, "callbacks": callbacks}))
        except CheckpointFailed:
            if self._tidies and not self._late:  # late, the failure may be that of an earlier writing
                parts.remove_one(path, key)
            raise
        before = self._before.get(str(path))
        if self._tidies and (before is not None or not self._late):  # late, what is there may be all that there is
            parts.remove(path, but={key, before or key})
        if self._late:
            self._before[str(path)] = key

    @staticmethod
    def silence(checkpoint: dict[str, Any]) -> None:
        """Take out the notice that is meant for other strategies."""
        checkpoint.get("callbacks", {}).pop(_ELSEWHERE, None)

    def load(self, checkpoint: dict[str, Any], path: str | Path, weights_only: bool | None) -> OwnState | None:
        """This rank's part. None, with a notice, where every rank has to go on from the consensus model."""
        where = checkpoint.get(KEY)
        part, why = None, None
        if where is None:
            why = "it holds nothing of single ranks"
        elif where["world_size"] != self._comm.world_size:
            why = f"it was saved by {where['world_size']} ranks, there are {self._comm.world_size}"
        elif where["algorithm"] != self._algorithm:
            why = f"it was saved by {where['algorithm']}, this is {self._algorithm}"
        else:
            part = parts.read(path, where["parts"], self._comm.rank, weights_only)
            if missing := self._comm.who(part is None, self._subject("part missing?")):
                why = f"{parts.FOLDER}/{where['parts']} beside it lacks the part of rank {', '.join(map(str, missing))}"
        if why is None and part is not None:
            return OwnState(part)
        rank_zero_warn(f"{path}: {why}; training goes on from its consensus model, not exactly where each rank was.")
        return None

    def _same(self, key: str) -> str:
        """Rank 0's."""
        if self._comm.world_size == 1:
            return key
        letters = torch.tensor(list(key.encode()), dtype=torch.uint8, device=self._comm.device)
        self._comm.broadcast_([letters], self._subject("name of the parts")).wait()
        return bytes(letters.tolist()).decode()

    def _together(self, what: str, path: str | Path, do: Callable[[], None]) -> None:
        """All ranks do it, and all know whether all could."""
        error: Exception | None = None
        try:
            do()
        except Exception as failure:
            error = failure
        failed = self._comm.who(error is not None, self._subject("could not write?"))
        if error is not None:
            raise CheckpointFailed(
                f"rank {self._comm.rank} could not write {what} {path}, what was there before is intact: {first_line(error)}"
            ) from error
        if failed:
            ranks = ", ".join(map(str, failed))
            raise CheckpointFailed(f"rank {ranks} could not write {what} {path}, what was there before is intact")

    def _subject(self, question: str) -> Subject:
        return Subject(self._algorithm, question, step=0, counted=False)
