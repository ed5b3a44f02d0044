"""What all data modules of images share: three loaders, checked options, known shapes."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_cocod.workloads.errors import InputError
from lightning_cocod.workloads.image_array import ImageArray, as_is

ImageSet = Dataset[tuple[torch.Tensor, torch.Tensor]]


class Splits(NamedTuple):
    """The parts of a data set."""

    train: ImageSet
    val: ImageSet | None  # None: nothing is held out, and validation is skipped
    test: ImageSet


class ImageDataModule(L.LightningDataModule, ABC):
    """Loaders of (images [N, C, H, W], labels [N]) for training, validation and test.

    A subclass sets `num_classes`, `in_channels` and `image_size` (pixels, square) in its constructor, so that a model
    can be made before any data is read, and reads the data in `load`. The last batch of an epoch may be smaller than
    the others; Lightning's distributed sampler pads the epoch, so that all ranks have equally many batches.

    Args:
        batch_size: images per rank and step.
        num_workers: loader processes per rank; 0 loads in the training process.
    """

    num_classes: int
    in_channels: int
    image_size: int

    def __init__(self, batch_size: int, num_workers: int):
        super().__init__()
        self.batch_size = at_least(1, "data.batch_size", batch_size)
        self.num_workers = at_least(0, "data.num_workers", num_workers)
        self._splits: Splits | None = None

    @abstractmethod
    def load(self) -> Splits:
        """Read the data; called once in every rank."""

    def setup(self, stage: str) -> None:
        """Lightning's call to read the data."""
        self.splits()

    def splits(self) -> Splits:
        """The data sets, read on first use."""
        if self._splits is None:
            self._splits = self.load()
        return self._splits

    def train_dataloader(self) -> Any:
        """Shuffled and augmented."""
        return self._loader(self.splits().train, shuffle=True)

    def val_dataloader(self) -> Any:
        """In order, not augmented; none if nothing is held out."""
        val = self.splits().val
        return [] if val is None else self._loader(val)

    def test_dataloader(self) -> Any:
        """In order, not augmented."""
        return self._loader(self.splits().test)

    def _loader(self, dataset: ImageSet, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=as_is if isinstance(dataset, ImageArray) else default_collate,
        )


def at_least(smallest: int, name: str, value: int) -> int:
    """`value`, or an `InputError` naming the option if it is no integer of at least `smallest`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise InputError(f"{name} must be an integer of at least {smallest}, got {value!r}")
    return value


def fraction(name: str, value: float) -> float:
    """`value`, or an `InputError` naming the option if it does not lie in [0, 1)."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{name} must be a fraction in [0, 1), got {value!r}")
    return value
