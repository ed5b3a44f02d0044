"""Image files in a folder or in a .zip, read the same way."""

import io
import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from pathlib import Path, PurePosixPath

from PIL import Image, UnidentifiedImageError

from lightning_cocod.workloads.errors import InputError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
Tree = dict[str, dict[str, list[str]]]  # split → class → names of files


class ImageFiles(ABC):
    """The files below a root, named by their relative path with forward slashes."""

    def __init__(self, root: Path):
        self.root = root

    @abstractmethod
    def names(self) -> list[str]:
        """All files, in no particular order."""

    @abstractmethod
    def _bytes(self, name: str) -> bytes: ...

    def image(self, name: str, channels: int) -> Image.Image:
        """Decode one image to 3 channels (RGB) or 1 (grey).

        Raises:
            InputError: the file cannot be read or is no image; names it.
        """
        try:
            with Image.open(io.BytesIO(self._bytes(name))) as image:
                decoded: Image.Image = image.convert("RGB" if channels == 3 else "L")
                return decoded
        # What Pillow and zipfile raise for damaged files; SyntaxError is Pillow's for a broken PNG.
        except (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            zipfile.BadZipFile,
            zlib.error,
            Image.DecompressionBombError,
        ) as error:
            reason = "unknown format" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
            raise InputError(f"{self.root / name} is not a readable image ({reason}): replace or delete it") from error


class FolderFiles(ImageFiles):
    """Files in a directory tree."""

    def names(self) -> list[str]:
        """All files below the root, links followed."""
        return [
            Path(folder, file).relative_to(self.root).as_posix()
            for folder, _, files in os.walk(self.root, followlinks=True)
            for file in files
        ]

    def _bytes(self, name: str) -> bytes:
        return (self.root / name).read_bytes()


class ZipFiles(ImageFiles):
    """Files in an archive; every process opens it for itself, since a fork would share the position in an open file."""

    def __init__(self, root: Path):
        super().__init__(root)
        self._opened: tuple[int, zipfile.ZipFile] | None = None

    def names(self) -> list[str]:
        """All files in the archive."""
        return [name for name in self._archive().namelist() if not name.endswith("/")]

    def _bytes(self, name: str) -> bytes:
        return self._archive().read(name)

    def _archive(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = os.getpid(), zipfile.ZipFile(self.root)
            except zipfile.BadZipFile as error:
                raise InputError(f"{self.root} is not a readable .zip archive ({error}): fetch it again") from error
        return self._opened[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}


def open_files(root: str | os.PathLike[str]) -> ImageFiles:
    """The files of a folder or .zip archive.

    Raises:
        InputError: there is nothing at `root`, or a file that is no archive.
    """
    path = Path(root).expanduser()
    if path.is_dir():
        return FolderFiles(path)
    if path.is_file():
        return ZipFiles(path)
    raise InputError(f"data.root={root} does not exist: give a folder or .zip archive with train/<class>/<image>")


def image_tree(files: ImageFiles) -> Tree:
    """Sort image files into split and class by their first two folders, below one enclosing folder at most.

    Raises:
        InputError: no images, no train/ folder, images outside a class folder, or a class that train/ lacks.
    """
    paths = [PurePosixPath(name).parts for name in sorted(files.names())]
    paths = [p for p in paths if PurePosixPath(p[-1]).suffix.lower() in SUFFIXES and not p[-1].startswith(".")]
    paths = [p for p in paths if p[0] != "__MACOSX"]
    layout = "expected train/<class>/<image> and test/ or val/ likewise"
    if not paths:
        raise InputError(f"{files.root} holds no images: {layout}")
    top = {p[0] for p in paths}
    depth = 0
    if "train" not in top and len(top) == 1 and any(len(p) > 2 and p[1] == "train" for p in paths):
        depth = 1
    tree: Tree = defaultdict(lambda: defaultdict(list))
    for parts in paths:
        if len(parts) <= depth + 1 or parts[depth] not in ("train", "val", "test"):
            continue
        if len(parts) == depth + 2:
            raise InputError(f"{files.root / '/'.join(parts)} lies in no class folder: {layout}")
        tree[parts[depth]][parts[depth + 1]].append("/".join(parts))
    if "train" not in tree:
        raise InputError(f"{files.root} has no train/ folder with images: {layout}")
    for split in tree:
        if unknown := sorted(set(tree[split]) - set(tree["train"])):
            raise InputError(f"{files.root}: {split}/{unknown[0]} is a class without images in train/{unknown[0]}")
    return {split: dict(classes) for split, classes in tree.items()}
