"""Images sorted into folders by class, in a directory tree or a .zip archive."""

import os
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_cocod.workloads.datamodule import ImageDataModule, ImageSet, Splits, at_least, fraction
from lightning_cocod.workloads.errors import InputError
from lightning_cocod.workloads.image_array import ImageArray
from lightning_cocod.workloads.image_files import ImageFiles, image_tree, open_files
from lightning_cocod.workloads.splits import stratified_split

SMALL = 64  # up to this many pixels a side, decoding costs more than training, and the decoded images fit in memory
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFolderDataModule(ImageDataModule):
    """The layout of torchvision's `ImageFolder`: `train/<class>/<image>`, and `val/`, `test/` or both likewise.

    Without `val/`, a share of `train/` is held out; without `test/`, `val/` is the test set too. Images of up to 64
    pixels a side are decoded once and kept in memory (augmentation: a random crop after padding by an eighth, and a flip);
    larger ones are decoded by the loader (a random resized crop and a flip).

    Args:
        root: folder or .zip archive.
        image_size: the side to which images are scaled and cropped, in pixels.
        batch_size: images per rank and step.
        num_workers: loader processes per rank.
        in_channels: 3 for colour, 1 for grey.
        val_fraction: share of `train/` held out if there is no `val/`.
        augment: vary the training images at random.
        seed: of the images held out.

    Raises:
        InputError: an option is out of range; `root` is missing, empty or laid out otherwise; later, an image is
            damaged.
    """

    mean, std = MEAN, STD

    def __init__(
        self,
        root: str | os.PathLike[str],
        image_size: int = 224,
        batch_size: int = 32,
        num_workers: int = 2,
        in_channels: int = 3,
        val_fraction: float = 0.1,
        augment: bool = True,
        seed: int = 0,
    ):
        super().__init__(batch_size, num_workers)
        if in_channels not in (1, 3):
            raise InputError(f"data.in_channels must be 1 (grey) or 3 (colour), got {in_channels!r}")
        self.in_channels = in_channels
        self.image_size = at_least(1, "data.image_size", image_size)
        self.val_fraction = fraction("data.val_fraction", val_fraction)
        self.augment, self.seed = augment, seed
        self._files = open_files(root)
        self._tree = image_tree(self._files)
        if "val" not in self._tree and "test" not in self._tree:
            raise InputError(f"{self._files.root} has neither test/ nor val/ beside train/: add test/<class>/<image>")
        self.classes = sorted(self._tree["train"])
        self.num_classes = len(self.classes)

    def load(self) -> Splits:
        """Sort the files into training, validation and test, and decode them if they are small."""
        names, labels = self._listed("train")
        if "val" in self._tree:
            held_out: ImageSet | None = self._dataset(*self._listed("val"))
        else:
            train, val = stratified_split(labels, self.val_fraction, self.seed)
            held_out = self._dataset([names[i] for i in val], labels[val]) if len(val) else None
            names, labels = [names[i] for i in train], labels[train]
        test = self._dataset(*self._listed("test")) if "test" in self._tree else held_out
        assert test is not None  # the constructor saw val/ or test/
        return Splits(self._dataset(names, labels, train=True), held_out, test)

    def _listed(self, split: str) -> tuple[list[str], Tensor]:
        tree = self._tree[split]
        names = [name for label in self.classes for name in tree.get(label, [])]
        labels = [i for i, label in enumerate(self.classes) for _ in tree.get(label, [])]
        return names, torch.tensor(labels)

    def _dataset(self, names: list[str], labels: Tensor, train: bool = False) -> ImageSet:
        size, channels, augment = self.image_size, self.in_channels, train and self.augment
        mean, std = self.mean[:channels], self.std[:channels]
        if size <= SMALL:
            images = decode(self._files, names, size, channels)
            return ImageArray(images, labels, mean, std, pad=size // 8 if augment else 0, flip=augment)
        vary = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
        centre = [v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)]
        convert = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
        return LazyImages(self._files, names, labels, channels, v2.Compose((vary if augment else centre) + convert))


class LazyImages(Dataset[tuple[Tensor, Tensor]]):
    """A data set that decodes an image each time it is asked for."""

    def __init__(self, files: ImageFiles, names: list[str], labels: Tensor, channels: int, transform: Any):
        self.files, self.names, self.labels, self.channels, self.transform = files, names, labels, channels, transform

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.files.image(self.names[index], self.channels)), self.labels[index]


def decode(files: ImageFiles, names: list[str], size: int, channels: int) -> Tensor:
    """All named images, scaled and cropped to `size` pixels a side: uint8 [N, channels, size, size]."""
    images = torch.empty(len(names), size, size, channels, dtype=torch.uint8)
    pixels = images.numpy()
    for i, name in enumerate(names):
        image = files.image(name, channels)
        if image.size != (size, size):
            image = _square(image, size)
        pixels[i] = np.asarray(image).reshape(size, size, channels)
    return images.permute(0, 3, 1, 2).contiguous()


def _square(image: Image.Image, size: int) -> Image.Image:
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
