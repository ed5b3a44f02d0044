"""Small images kept decoded in memory, and augmented a whole batch at a time."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset


class ImageArray(Dataset[tuple[Tensor, Tensor]]):
    """A data set over images in one uint8 tensor; a batch costs a few tensor operations and no decoding.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        mean: per channel, of pixels scaled to [0, 1].
        std: per channel, of pixels scaled to [0, 1].
        pad: augment by random crops of the image padded by this many pixels; 0 for none.
        flip: augment by mirroring every other image, at random.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        pad: int = 0,
        flip: bool = False,
    ):
        self.images, self.labels = images, labels
        self.mean = 255 * torch.tensor(mean).view(-1, 1, 1)
        self.std = 255 * torch.tensor(std).view(-1, 1, 1)
        self.pad, self.flip = pad, flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A batch, asked for by PyTorch's loader: normalised float images [N, C, H, W] and labels [N]."""
        index = torch.as_tensor(indices)
        images = self.images[index]
        if self.pad:
            images = random_crop(images, self.pad)
        if self.flip:
            images = random_flip(images)
        return images.float().sub_(self.mean).div_(self.std), self.labels[index]


def as_is(batch: Any) -> Any:
    """The collate function for `ImageArray`, whose batches come ready."""
    return batch


def random_crop(images: Tensor, pad: int) -> Tensor:
    """Shift each of the images [N, C, H, W] by up to `pad` pixels in both directions, filling with zeros."""
    count, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    rows = torch.randint(2 * pad + 1, (count, 1)) + torch.arange(height)
    columns = torch.randint(2 * pad + 1, (count, 1)) + torch.arange(width)
    each = torch.arange(count).view(-1, 1, 1)
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def random_flip(images: Tensor) -> Tensor:
    """Mirror each of the images [N, C, H, W] left to right with probability one half."""
    flips = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(flips, images.flip(-1), images)
