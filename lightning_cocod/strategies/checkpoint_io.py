"""Checkpoint files that are whole or not there."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import TorchCheckpointIO
from typing_extensions import override


class WholeFileIO(TorchCheckpointIO):
    """Writes a local checkpoint beside its place and renames it, so that a crash or a full disk leaves the previous one.

    Lightning writes to the system's temporary folder, which is often another disk, and copies from there. Remote file
    systems show an object once it is complete; they are Lightning's.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        file_system, place = url_to_fs(str(path))
        if storage_options is not None or not isinstance(file_system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(place), exist_ok=True)
        write_whole(checkpoint, place)


def write_whole(content: Any, place: str) -> None:
    """Save to a local file, on the disk by the time it has its name.

    Raises:
        OSError: it could not be written; what had that name before is still there.
    """
    folder, name = os.path.split(place)
    aside = os.path.join(folder, f".{digest(name)}.part")  # always the same: what a crash has left is written over
    try:
        with open(aside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, place)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch complains of the position in the file
        raise


def digest(name: str) -> str:
    """Stands for a file in names beside it: Lightning takes every name with "last" in it for a last checkpoint."""
    return hashlib.sha256(name.encode()).hexdigest()[:12]
