"""Models, data modules and the classifier: shapes, splits, and what happens to wrong input."""

import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from support.ranks import run_ranks
from torchvision.datasets import CIFAR10

from lightning_cocod import workloads
from lightning_cocod.workloads import (
    CIFAR10DataModule,
    DigitsDataModule,
    ImageClassifier,
    ImageFolderDataModule,
    InputError,
    SyntheticDataModule,
    schedules,
)
from lightning_cocod.workloads.image_array import ImageArray, random_crop, random_flip
from lightning_cocod.workloads.splits import stratified_split


def images(root: Path, splits=("train", "test"), classes=("cat", "dog"), count=6, size=40, suffix="png") -> Path:
    """A tree of images whose red channel tells their class and whose green channel tells their number."""
    for split in splits:
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.zeros((size, size, 3), dtype=np.uint8)
                pixels[..., 0], pixels[..., 1] = 20 * label, i
                Image.fromarray(pixels).save(folder / f"{i}.{suffix}")
    return root


def zipped(root: Path) -> Path:
    return Path(shutil.make_archive(str(root), "zip", root))


# Models


@pytest.mark.parametrize(
    ("name", "classes", "channels", "size", "parameters"),
    [
        ("resnet20", 10, 3, 32, 269_722),
        ("resnet20", 10, 1, 8, 269_434),
        ("resnet18", 10, 3, 32, 11_173_962),
        ("resnet18", 100, 1, 32, 11_218_980),
        ("resnet50", 1000, 3, 224, 25_557_032),
        ("resnet50", 10, 1, 224, 23_522_250),
        ("vgg16", 10, 3, 32, 134_301_514),
        ("vgg16", 10, 1, 64, 134_300_362),
    ],
)
def test_model_shapes_and_parameters(name, classes, channels, size, parameters):
    with torch.device("meta"):
        model = getattr(workloads, name)(num_classes=classes, in_channels=channels)
        logits = model(torch.zeros(2, channels, size, size))
    assert logits.shape == (2, classes)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_resnet20_option_a_shortcut_starts_new_channels_at_zero():
    from lightning_cocod.workloads.resnet20 import Block

    block = Block(16, 32, stride=2).eval()
    for conv in (block.conv1, block.conv2):
        torch.nn.init.zeros_(conv.weight)
    x = torch.rand(1, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert not out[:, 16:].any()


# Arrays and splits


def test_a_batch_at_once_equals_image_by_image():
    pixels = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    data = ImageArray(pixels, torch.arange(5), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    batch, labels = data.__getitems__([4, 0, 2])
    assert labels.tolist() == [4, 0, 2]
    for row, i in enumerate([4, 0, 2]):
        torch.testing.assert_close(batch[row], data[i][0])
    expected = (pixels[4, 1].float() / 255 - 0.4) / 0.3
    torch.testing.assert_close(batch[0, 1], expected)


def test_random_crop_shifts_and_random_flip_mirrors():
    picture = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5).repeat(64, 1, 1, 1)
    padded = torch.nn.functional.pad(picture[:1], (2, 2, 2, 2))
    windows = [padded[0, 0, y : y + 5, x : x + 5] for y in range(5) for x in range(5)]
    cropped = random_crop(picture, 2)
    assert all(any(torch.equal(image[0], window) for window in windows) for image in cropped)
    assert len({tuple(image.flatten().tolist()) for image in cropped}) > 5
    flipped = random_flip(picture)
    mirrored = [torch.equal(image, picture[0].flip(-1)) for image in flipped]
    assert 0 < sum(mirrored) < 64
    assert all(m or torch.equal(image, picture[0]) for m, image in zip(mirrored, flipped, strict=True))


def test_stratified_split_is_disjoint_proportional_and_fixed_by_its_seed():
    labels = torch.tensor([0] * 20 + [1] * 10 + [2] * 30)
    kept, held = stratified_split(labels, 0.3, seed=1)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(60))
    assert torch.bincount(labels[held]).tolist() == [6, 3, 9]
    assert torch.equal(held, stratified_split(labels, 0.3, seed=1)[1])
    assert not torch.equal(held, stratified_split(labels, 0.3, seed=2)[1])


# Data modules


def test_digits():
    data = DigitsDataModule(batch_size=100)
    train, val, test = data.splits()
    assert len(train) + len(val) + len(test) == 1797
    batch, labels = next(iter(data.train_dataloader()))
    assert batch.shape == (100, data.in_channels, data.image_size, data.image_size)
    assert labels.max() < data.num_classes
    assert sum(len(labels) for _, labels in data.train_dataloader()) == len(train)  # the last, smaller batch is kept
    everything = torch.cat([part.images for part in (train, val, test)]).float() / 255
    assert everything.mean().item() == pytest.approx(0.287, abs=0.001)
    assert everything.std().item() == pytest.approx(0.354, abs=0.001)


def test_nothing_held_out_skips_validation():
    data = DigitsDataModule(val_fraction=0)
    assert data.splits().val is None
    assert data.val_dataloader() == []


def test_synthetic_is_fixed_by_its_seed():
    make = partial(SyntheticDataModule, shape=(2, 6, 6), classes=3, length=20, eval_length=5)
    one, same, other = (make(seed=seed).splits().train for seed in (1, 1, 2))
    assert torch.equal(one.images, same.images)
    assert not torch.equal(one.images, other.images)
    data = make(batch_size=4)
    assert (data.num_classes, data.in_channels, data.image_size) == (3, 2, 6)
    assert next(iter(data.test_dataloader()))[0].shape == (4, 2, 6, 6)


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("size", [32, 80])  # kept in memory, decoded by the loader
@pytest.mark.parametrize("workers", [0, 2])
def test_image_folder(tmp_path, archive, size, workers):
    root = images(tmp_path / "pets")
    data = ImageFolderDataModule(
        zipped(root) if archive else root, size, batch_size=2, num_workers=workers, val_fraction=1 / 3, augment=False
    )
    data = pickle.loads(pickle.dumps(data))  # as a spawned rank gets it
    assert (data.num_classes, data.in_channels, data.classes) == (2, 3, ["cat", "dog"])
    assert [len(part) for part in data.splits()] == [8, 4, 12]
    seen = [(batch, labels) for batch, labels in data.test_dataloader()]
    assert torch.cat([labels for _, labels in seen]).tolist() == [0] * 6 + [1] * 6
    pixels = torch.cat([batch for batch, _ in seen]) * torch.tensor(data.std).view(3, 1, 1) + torch.tensor(data.mean).view(
        3, 1, 1
    )
    assert pixels.shape == (12, 3, size, size)
    assert (pixels[:, 0, 0, 0] * 255).round().tolist() == [0] * 6 + [20] * 6
    assert (pixels[:, 1, 0, 0] * 255).round().tolist() == [*range(6), *range(6)]


def test_image_folder_augments_training_only(tmp_path):
    for size in (32, 80):
        data = ImageFolderDataModule(images(tmp_path / str(size)), size, num_workers=0)
        assert next(iter(data.train_dataloader()))[0].shape[1:] == (3, size, size)
        first, second = (next(iter(data.test_dataloader()))[0] for _ in range(2))
        assert torch.equal(first, second)


def test_image_folder_takes_val_for_test_and_grey_and_an_enclosing_folder(tmp_path):
    root = images(tmp_path / "enclosing" / "pets", splits=("train", "val"))
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    shutil.make_archive(str(tmp_path / "pets"), "zip", root.parent, "pets")
    for source in (root, root.parent, tmp_path / "pets.zip"):
        data = ImageFolderDataModule(source, 16, num_workers=0, in_channels=1)
        train, val, test = data.splits()
        assert (len(train), len(val)) == (12, 12)
        assert test is val
        assert train.images.shape == (12, 1, 16, 16)


def test_cifar10_from_images(tmp_path):
    root = images(tmp_path / "cifar", classes=[f"c{i}" for i in range(10)], count=4, size=32)
    for source in (root, zipped(root)):
        data = CIFAR10DataModule(source, batch_size=8, val_fraction=0.25)
        assert [len(part) for part in data.splits()] == [30, 10, 40]
        assert next(iter(data.train_dataloader()))[0].shape == (8, 3, 32, 32)


def test_cifar10_from_torchvision_files(tmp_path, monkeypatch):
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    for i, (name, _) in enumerate([*CIFAR10.train_list, *CIFAR10.test_list]):
        with (folder / name).open("wb") as file:
            pickle.dump({"data": np.full((10, 3072), i, dtype=np.uint8), "labels": list(range(10))}, file)
    with (folder / CIFAR10.meta["filename"]).open("wb") as file:
        pickle.dump({"label_names": [str(i) for i in range(10)]}, file)
    with pytest.raises(InputError, match="incomplete or damaged"):
        CIFAR10DataModule(tmp_path).splits()
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    train, val, test = CIFAR10DataModule(tmp_path, val_fraction=0.2).splits()
    assert (len(train), len(val), len(test)) == (40, 10, 10)
    assert (test.images == 5).all()


# Wrong input


def no_train(root):
    return images(root, splits=("test",))


def no_test(root):
    return images(root, splits=("train",))


def no_class_folders(root):
    return images(root).joinpath("train/cat/0.png").rename(root / "train/0.png").parent.parent


def class_only_in_test(root):
    images(root)
    (root / "test/cat").rename(root / "test/cow")
    return root


def empty(root):
    root.mkdir()
    return root


def no_archive(root):
    root.write_text("no archive")
    return root


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root, "does not exist"),
        (empty, "holds no images"),
        (no_train, "has no train/ folder"),
        (no_test, "neither test/ nor val/"),
        (no_class_folders, "lies in no class folder"),
        (class_only_in_test, "test/cow is a class without images in train/cow"),
        (no_archive, "not a readable .zip"),
    ],
)
def test_wrong_image_folder_is_named(tmp_path, make, message):
    root = make(tmp_path / "pets")
    with pytest.raises(InputError, match=message) as caught:
        ImageFolderDataModule(root)
    assert str(root) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_cifar10_is_named(tmp_path):
    with pytest.raises(InputError, match=r"data\.download=true"):
        CIFAR10DataModule(tmp_path / "none")
    with pytest.raises(InputError, match="has 2 classes"):
        CIFAR10DataModule(images(tmp_path / "pets"))


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x89PNG\r\n\x1a\n broken"])
@pytest.mark.parametrize("archive", [False, True])
def test_damaged_image_is_named(tmp_path, junk, archive):
    root = images(tmp_path / "pets")
    (root / "train/dog/3.png").write_bytes(junk)
    with pytest.raises(InputError, match=r"train/dog/3\.png is not a readable image") as caught:
        ImageFolderDataModule(zipped(root) if archive else root, 32).splits()
    assert "\n" not in str(caught.value)


def test_truncated_image_is_named_by_a_loader_worker(tmp_path):
    root = images(tmp_path / "pets", suffix="jpg")
    file = root / "train/dog/3.jpg"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"train/dog/3\.jpg is not a readable image") as caught:
        for _ in ImageFolderDataModule(root, 80, num_workers=1, val_fraction=0).train_dataloader():
            pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DigitsDataModule(batch_size=0), r"data\.batch_size"),
        (lambda: DigitsDataModule(batch_size=2.5), r"data\.batch_size"),
        (lambda: DigitsDataModule(num_workers=-1), r"data\.num_workers"),
        (lambda: DigitsDataModule(val_fraction=1.0), r"data\.val_fraction"),
        (lambda: DigitsDataModule(val_fraction=0.6, test_fraction=0.6), r"data\.val_fraction \+ data\.test_fraction"),
        (lambda: SyntheticDataModule(shape=(3, 8, 4)), r"data\.shape"),
        (lambda: SyntheticDataModule(classes=1), r"data\.classes"),
        (lambda: ImageFolderDataModule(".", in_channels=2), r"data\.in_channels"),
        (lambda: ImageClassifier(torch.nn.Identity(), 2, torch.optim.SGD, label_smoothing=1.0), "label_smoothing"),
        (lambda: schedules.cosine(sgd(), 10, warmup_fraction=1.0), "warmup_fraction"),
        (lambda: schedules.step_decay(sgd(), 10, milestones=[5]), "milestones"),
        (lambda: schedules.constant(sgd(), 10, warmup_steps=-1), "warmup_steps"),
    ],
)
def test_option_out_of_range_is_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


# Schedules and training


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(schedule, steps: int) -> list[float]:
    optimizer = sgd()
    scheduler = schedule(optimizer, steps)
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return result


def test_schedules():
    assert rates(schedules.constant, 3) == [1, 1, 1]
    assert rates(partial(schedules.constant, warmup_steps=1), 3) == [0.5, 1, 1]
    assert rates(schedules.step_decay, 8) == pytest.approx([1] * 4 + [0.1] * 2 + [0.01] * 2)
    cosine = rates(partial(schedules.cosine, warmup_fraction=0.2, final_fraction=0.5), 10)
    assert cosine[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert cosine[6] == pytest.approx(0.75)
    assert cosine[2:] == sorted(cosine[2:], reverse=True)


def test_training_learns_and_logs_epoch_means(tmp_path):
    L.seed_everything(0)
    data = SyntheticDataModule(shape=(1, 8, 8), classes=3, length=60, eval_length=30, batch_size=16)
    module = ImageClassifier(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)),
        data.num_classes,
        partial(torch.optim.SGD, lr=0.1),
        schedules.cosine,
    )
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    logged = trainer.callback_metrics
    assert {"train/loss", "train/acc", "val/loss", "val/acc", "train/loss_step"} <= logged.keys()
    images, labels = data.splits().val.__getitems__(list(range(30)))
    with torch.no_grad():
        logits = module.eval()(images)
    assert logged["val/loss"].item() == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert logged["val/acc"].item() == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert trainer.test(module, data, verbose=False)[0]["test/acc"] > 0.9
    checkpoint = os.path.join(tmp_path, "last.ckpt")
    trainer.save_checkpoint(checkpoint)
    assert torch.load(checkpoint, weights_only=True)["hyper_parameters"] == {"num_classes": 3, "label_smoothing": 0.0}


def untrained(rank: int, world_size: int) -> dict[str, float]:
    L.seed_everything(0)
    data = SyntheticDataModule(shape=(1, 8, 8), classes=3, length=8, eval_length=60, batch_size=16)
    module = ImageClassifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)), 3, sgd_for)
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    return trainer.validate(module, data, verbose=False)[0]


def test_logged_means_do_not_depend_on_the_number_of_ranks():
    (alone,) = run_ranks(untrained, 1, init=False)
    for measured in run_ranks(untrained, 2, init=False):
        assert measured == pytest.approx(alone, rel=1e-5)


def test_a_schedule_in_a_run_without_end_is_refused():
    data = SyntheticDataModule(shape=(1, 8, 8), classes=2, length=8)
    module = ImageClassifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)), 2, sgd_for, schedules.cosine)
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with pytest.raises(InputError, match=r"trainer\.max_epochs"):
        trainer.fit(module, data)


def sgd_for(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
