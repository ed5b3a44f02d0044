"""Scikit-learn's handwritten digits: real images that need no download."""

import torch
from sklearn.datasets import load_digits

from lightning_cocod.workloads.datamodule import ImageDataModule, Splits, at_least, fraction
from lightning_cocod.workloads.image_array import ImageArray
from lightning_cocod.workloads.splits import stratified_split

MEAN, STD = (0.287,), (0.354,)


class DigitsDataModule(ImageDataModule):
    """1797 grey images of 8×8 pixels in 10 classes, shifted by up to `shift` pixels in training.

    Args:
        batch_size: images per rank and step.
        num_workers: loader processes per rank.
        val_fraction: share of the images held out for validation.
        test_fraction: share of the images held out for the test.
        shift: augmentation in pixels; 0 for none.
        seed: of the split into parts, which is the same in every run with the same seed.
    """

    num_classes, in_channels, image_size = 10, 1, 8

    def __init__(
        self,
        batch_size: int = 32,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        shift: int = 1,
        seed: int = 0,
    ):
        super().__init__(batch_size, num_workers)
        self.val_fraction = fraction("data.val_fraction", val_fraction)
        self.test_fraction = fraction("data.test_fraction", test_fraction)
        fraction("data.val_fraction + data.test_fraction", val_fraction + test_fraction)
        self.shift, self.seed = at_least(0, "data.shift", shift), seed

    def load(self) -> Splits:
        """Split the images that come with scikit-learn."""
        digits = load_digits()
        images = torch.from_numpy(digits.images * 15).to(torch.uint8).unsqueeze(1)  # grey values 0…16 to 0…240
        labels = torch.from_numpy(digits.target).long()
        rest, test = stratified_split(labels, self.test_fraction, self.seed)
        share_of_rest = self.val_fraction / (1 - self.test_fraction)
        train, val = (rest[part] for part in stratified_split(labels[rest], share_of_rest, self.seed))

        def part(index: torch.Tensor, pad: int = 0) -> ImageArray:
            return ImageArray(images[index], labels[index], MEAN, STD, pad=pad)

        return Splits(part(train, self.shift), part(val) if len(val) else None, part(test))
