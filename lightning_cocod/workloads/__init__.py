"""The models and data that `cocod-train` and the recipes train."""

from lightning_cocod.workloads.cifar10 import CIFAR10DataModule
from lightning_cocod.workloads.classifier import ImageClassifier
from lightning_cocod.workloads.datamodule import ImageDataModule
from lightning_cocod.workloads.digits import DigitsDataModule
from lightning_cocod.workloads.errors import InputError
from lightning_cocod.workloads.gpt import gpt
from lightning_cocod.workloads.image_folder import ImageFolderDataModule
from lightning_cocod.workloads.models import resnet18, resnet50, vgg16
from lightning_cocod.workloads.resnet20 import resnet20
from lightning_cocod.workloads.synthetic import SyntheticDataModule

__all__ = [
    "CIFAR10DataModule",
    "DigitsDataModule",
    "ImageClassifier",
    "ImageDataModule",
    "ImageFolderDataModule",
    "InputError",
    "SyntheticDataModule",
    "gpt",
    "resnet18",
    "resnet20",
    "resnet50",
    "vgg16",
]
