"""The parts of a checkpoint that belong to single ranks, in files of their own.

A checkpoint ``DIR/NAME.ckpt`` is a file of Lightning's, written by rank 0, that any environment can load. What each rank
needs besides in order to continue lies in ``DIR/.ranks/KEY/rank-R.pt``, written by that rank: nothing passes through
another rank's memory. KEY is new with every saving and is recorded in the checkpoint, so writing the checkpoint is what
makes the parts valid, all at once; until then an earlier checkpoint of that name and its parts are untouched.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_cocod.comm.errors import first_line
from lightning_cocod.strategies.checkpoint_io import digest, write_whole

FOLDER = ".ranks"


def new_key(path: str | Path) -> str:
    """A name for the parts of one saving to this path."""
    return f"{_prefix(path)}{uuid.uuid4().hex[:12]}"


def write(part: dict[str, Any], path: str | Path, key: str, rank: int) -> None:
    """Write a rank's part of the checkpoint at ``path``.

    Raises:
        OSError: it could not be written.
    """
    files, place = _place(path, key, rank)
    files.makedirs(os.path.dirname(place), exist_ok=True)
    if isinstance(files, LocalFileSystem):
        write_whole(part, place)
    else:
        with files.open(place, "wb") as file:
            torch.save(part, file)


def read(path: str | Path, key: str, rank: int, weights_only: bool | None = None) -> dict[str, Any] | None:
    """A rank's part of the checkpoint at ``path``; None if it is not there.

    Raises:
        RuntimeError: it is there and cannot be read; one line names the file.
    """
    files, place = _place(os.path.realpath(path) if os.path.islink(path) else path, key, rank)  # last.ckpt may be a link
    if not files.exists(place):
        return None
    try:
        with files.open(place, "rb") as file:
            part: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        raise RuntimeError(
            f"{place} cannot be read ({first_line(error)}): resume from another checkpoint, or remove the folder that it is "
            "in to go on from the consensus model"
        ) from error
    return part


def remove(path: str | Path, *, but: Collection[str] = ()) -> None:
    """Remove the parts of all savings to this path, but for these keys. Several ranks may do it at a time."""
    _remove(path, lambda key: key.startswith(_prefix(path)) and key not in but)


def remove_one(path: str | Path, key: str) -> None:
    """Remove the parts of one saving to this path."""
    _remove(path, lambda other: other == key)


def _remove(path: str | Path, unwanted: Callable[[str], bool]) -> None:
    files, folder = _folder(path)
    try:
        entries = files.ls(folder, detail=False)
    except FileNotFoundError:
        return
    for entry in entries:
        if unwanted(os.path.basename(entry.rstrip("/"))):
            with suppress(FileNotFoundError):
                files.rm(entry, recursive=True)
    with suppress(OSError):  # it holds parts of other checkpoints
        files.rmdir(folder)


def _folder(path: str | Path) -> tuple[AbstractFileSystem, str]:
    files, place = url_to_fs(str(path))
    return files, os.path.join(os.path.dirname(place), FOLDER)


def _place(path: str | Path, key: str, rank: int) -> tuple[AbstractFileSystem, str]:
    files, folder = _folder(path)
    return files, os.path.join(folder, key, f"rank-{rank}.pt")


def _prefix(path: str | Path) -> str:
    return digest(os.path.basename(str(path))) + "-"
