"""Made-up images of any shape, to measure speed without a data set."""

from collections.abc import Sequence

import torch

from lightning_cocod.workloads.datamodule import ImageDataModule, Splits, at_least
from lightning_cocod.workloads.errors import InputError
from lightning_cocod.workloads.image_array import ImageArray


class SyntheticDataModule(ImageDataModule):
    """One random pattern per class under noise: easy to learn, and the same in every run with the same seed.

    Args:
        batch_size: images per rank and step.
        num_workers: loader processes per rank.
        shape: channels, height and width; height and width are equal.
        classes: how many patterns.
        length: training images over all ranks, kept in memory at a byte per pixel and channel.
        eval_length: images for validation, and again for the test.
        seed: of patterns, noise and labels.
    """

    def __init__(
        self,
        batch_size: int = 32,
        num_workers: int = 0,
        shape: Sequence[int] = (3, 32, 32),
        classes: int = 10,
        length: int = 2048,
        eval_length: int = 256,
        seed: int = 0,
    ):
        super().__init__(batch_size, num_workers)
        if len(shape) != 3 or shape[1] != shape[2] or any(not isinstance(n, int) or n < 1 for n in shape):
            raise InputError(f"data.shape must be [channels, size, size], each at least 1, got {list(shape)}")
        self.in_channels, self.image_size, _ = shape
        self.num_classes = at_least(2, "data.classes", classes)
        self.length = at_least(1, "data.length", length)
        self.eval_length = at_least(1, "data.eval_length", eval_length)
        self.seed = seed

    def load(self) -> Splits:
        """Draw all images."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.in_channels, self.image_size, self.image_size)
        patterns = torch.randint(64, 192, (self.num_classes, *shape), generator=generator, dtype=torch.uint8)

        def part(length: int) -> ImageArray:
            labels = torch.randint(self.num_classes, (length,), generator=generator)
            images = torch.randint(64, (length, *shape), generator=generator, dtype=torch.uint8)
            images += patterns[labels]
            return ImageArray(images, labels, [0.62] * self.in_channels, [0.16] * self.in_channels)

        return Splits(part(self.length), part(self.eval_length), part(self.eval_length))
