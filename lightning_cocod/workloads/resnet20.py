"""The CIFAR ResNet-20 of He et al. 2016: 6n + 2 layers with n = 3, shortcuts without parameters (option A)."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.new_channels = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] to [N, C', H/stride, W/stride]."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))  # option A: new channels start at zero
        return F.relu(out + shortcut)


class CifarResNet(nn.Module):
    """Three stages of `n` blocks with 16, 32 and 64 channels, then the mean over the image and one linear layer."""

    def __init__(self, n: int, num_classes: int, in_channels: int):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        blocks, channels = [], 16
        for width in (16, 32, 64):
            for _ in range(n):
                blocks.append(Block(channels, width, stride=1 if width == channels else 2))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] to logits [N, classes]."""
        out: Tensor = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(out.mean(dim=(2, 3)))  # type: ignore[no-any-return]  # a module's call is untyped


def resnet20(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """The CIFAR ResNet-20 (0.27 M parameters): little to send, for small images from 4×4 pixels on."""
    return CifarResNet(3, num_classes, in_channels)
