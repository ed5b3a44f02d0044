"""What recipes share that train ResNet-20 on CIFAR-10: decoded images, the strategy of a name, a quiet trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.optim import Optimizer

from lightning_cocod.strategies import STRATEGIES
from lightning_cocod.workloads import CIFAR10DataModule, ImageClassifier, ImageDataModule, resnet20
from lightning_cocod.workloads.cifar10 import MEAN, STD
from lightning_cocod.workloads.datamodule import Splits
from lightning_cocod.workloads.image_array import ImageArray
from lightning_cocod.workloads.schedules import cosine
from lightning_cocod.workloads.splits import stratified_split

KNOWN = {cls.registered_name: cls for cls in STRATEGIES}


def decode(data: Path, folder: Path) -> Path:
    """Decode all images once for all jobs, unless an earlier run has left them in this folder. The file.

    Raises:
        InputError: there are no images of CIFAR-10.
    """
    source = hashlib.sha256(str(data.resolve()).encode()).hexdigest()
    cache = folder / f"images-{source[:8]}.pt"
    if not cache.exists():
        splits: Any = CIFAR10DataModule(data, augment=False).splits()
        tensors = (splits.train.images, splits.train.labels, splits.test.images, splits.test.labels)
        torch.save(tensors, cache.with_suffix(".part"))
        cache.with_suffix(".part").rename(cache)  # whole or not at all
    return cache


class Decoded(ImageDataModule):
    """The images of a cache: trains on a part, shows a part of the test images in validation, and tests on all of them.

    Parts are the same whenever they are as large, and have equally many images of every class.

    Args:
        cache: the file.
        batch_size: images per rank and step.
        test_images: in validation.
        images: in training; all by default.
    """

    num_classes, in_channels, image_size = 10, 3, 32

    def __init__(self, cache: str | Path, batch_size: int, test_images: int, images: int | None = None) -> None:
        super().__init__(batch_size, num_workers=0)
        self.cache, self.test_images, self.images = cache, test_images, images

    def load(self) -> Splits:
        """Read them.

        Raises:
            ValueError: there are not so many.
        """
        images, labels, test_images, test_labels = torch.load(self.cache, mmap=True)
        kept = part(labels, len(labels) if self.images is None else self.images)
        shown = part(test_labels, self.test_images)
        return Splits(
            ImageArray(images[kept], labels[kept], MEAN, STD, pad=4, flip=True),
            ImageArray(test_images[shown], test_labels[shown], MEAN, STD),
            ImageArray(test_images, test_labels, MEAN, STD),
        )


def part(labels: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of so many, each class in proportion.

    Raises:
        ValueError: there is no such part.
    """
    _, some = stratified_split(labels, count / len(labels), seed=0)
    if len(some) != count:
        raise ValueError(f"of {len(labels)} images {count} cannot be taken with equally many of every class")
    return some


def strategy(name: str, **options: Any) -> Strategy:
    """Lightning's DDP or a strategy of this package.

    Raises:
        ValueError: nobody has that name, or an option is refused.
        TypeError: it has no such option.
    """
    if name == "ddp":
        if options:
            raise TypeError(f"ddp has no options here, got {', '.join(options)}")
        return DDPStrategy(process_group_backend="gloo")
    if name not in KNOWN:
        raise ValueError(f"there is no strategy {name!r}: choose from {', '.join(['ddp', *KNOWN])}")
    return KNOWN[name](**options)


def classifier(optimizer: Callable[..., Optimizer], warmup_fraction: float) -> ImageClassifier:
    """ResNet-20, trained with a warm-up and half a cosine to zero."""

    def schedule(made: Optimizer, steps: int) -> Any:
        return cosine(made, steps, warmup_fraction)

    return ImageClassifier(resnet20(), 10, optimizer, schedule)


def trainer(**options: Any) -> L.Trainer:
    """One that trains on the CPU and writes nothing."""
    return L.Trainer(
        accelerator="cpu",
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
