"""CIFAR-10, from torchvision's files or from images in folders."""

import os
from pathlib import Path

import torch
from torchvision.datasets import CIFAR10

from lightning_cocod.workloads.datamodule import ImageDataModule, Splits, fraction
from lightning_cocod.workloads.errors import InputError
from lightning_cocod.workloads.image_array import ImageArray
from lightning_cocod.workloads.image_folder import ImageFolderDataModule
from lightning_cocod.workloads.splits import stratified_split

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCHES = CIFAR10.base_folder  # the folder that torchvision reads and downloads


class CIFAR10DataModule(ImageDataModule):
    """60 000 colour images of 32×32 pixels in 10 classes; training varies them by crops (padding 4) and flips.

    `root` is one of: a folder with torchvision's `cifar-10-batches-py/`; a folder or a .zip archive with
    `train/<class>/<image>` and `test/<class>/<image>`; with `download`, any folder, into which torchvision's files are
    fetched if they are not there.

    Args:
        root: where the images are.
        batch_size: images per rank and step.
        num_workers: loader processes per rank; the images lie decoded in memory, so one process is enough.
        download: fetch what is missing (170 MB).
        val_fraction: share of the training images held out for validation. With 0 all of them train, and validation shows
            the test images, as the learning curves of papers do.
        augment: vary the training images at random.
        seed: of the images held out.

    Raises:
        InputError: an option is out of range, or `root` holds nothing of the above; later, an image cannot be decoded.
    """

    num_classes, in_channels, image_size = 10, 3, 32

    def __init__(
        self,
        root: str | os.PathLike[str] = "data",
        batch_size: int = 128,
        num_workers: int = 0,
        download: bool = False,
        val_fraction: float = 0.0,
        augment: bool = True,
        seed: int = 0,
    ):
        super().__init__(batch_size, num_workers)
        self.root = Path(root).expanduser()
        self.download, self.augment, self.seed = download, augment, seed
        self.val_fraction = fraction("data.val_fraction", val_fraction)
        self._folder: ImageFolderDataModule | None = None
        if (self.root / BATCHES).is_dir():
            return
        if self.root.is_file() or (self.root.is_dir() and not download):
            self._folder = self._images()
        elif not download:
            raise InputError(
                f"data.root={root} does not exist: name the folder or .zip of CIFAR-10, or set data.download=true"
            )

    def _images(self) -> ImageFolderDataModule:
        images = ImageFolderDataModule(
            self.root,
            self.image_size,
            self.batch_size,
            self.num_workers,
            val_fraction=self.val_fraction,
            augment=self.augment,
            seed=self.seed,
        )
        images.mean, images.std = MEAN, STD
        if images.num_classes != self.num_classes:
            raise InputError(f"{self.root} has {images.num_classes} classes, CIFAR-10 has 10: use data=imagefolder for it")
        return images

    def prepare_data(self) -> None:
        """Download, in one process per machine."""
        if self.download and self._folder is None:
            CIFAR10(str(self.root), download=True)

    def load(self) -> Splits:
        """Read all images into memory and hold some out."""
        splits = self._read() if self._folder is None else self._folder.load()
        return splits._replace(val=splits.test) if splits.val is None else splits

    def _read(self) -> Splits:
        images, labels = self._batches(train=True)
        train, val = stratified_split(labels, self.val_fraction, self.seed)
        return Splits(
            ImageArray(images[train], labels[train], MEAN, STD, pad=4 if self.augment else 0, flip=self.augment),
            ImageArray(images[val], labels[val], MEAN, STD) if len(val) else None,
            ImageArray(*self._batches(train=False), MEAN, STD),
        )

    def _batches(self, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            data = CIFAR10(str(self.root), train=train)
        except RuntimeError as error:
            raise InputError(f"{self.root / BATCHES} is incomplete or damaged: set data.download=true") from error
        return torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets)
