"""Torchvision's ResNet-18, ResNet-50 and VGG-16 with a free number of channels and classes."""

from torch import nn
from torchvision import models


def resnet18(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ResNet-18 with the stem for small images: 3×3, stride 1, no max-pooling (11.2 M parameters)."""
    model: nn.Module = models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def resnet50(num_classes: int = 1000, in_channels: int = 3) -> nn.Module:
    """ResNet-50 with the ImageNet stem: 7×7, stride 2, max-pooling (25.6 M parameters at 1000 classes)."""
    model: nn.Module = models.resnet50(num_classes=num_classes)
    if in_channels != 3:
        model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model


def vgg16(num_classes: int = 10, in_channels: int = 3, batch_norm: bool = False) -> nn.Module:
    """VGG-16 with its 4096-4096 classifier (134 M parameters): much to send for little computation.

    Works from 32×32 pixels on: adaptive pooling spreads the last feature map over the 7×7 that the classifier reads.
    """
    model: nn.Module = (models.vgg16_bn if batch_norm else models.vgg16)(num_classes=num_classes)
    if in_channels != 3:
        stem = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(stem.bias)  # type: ignore[arg-type]  # the stem has a bias
        features = model.features
        assert isinstance(features, nn.Sequential)
        features[0] = stem
    return model
