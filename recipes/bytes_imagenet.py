"""What a training on ImageNet adds up to, by the formulas."""

from __future__ import annotations

from typing import NamedTuple

import torch
from bytes_formulas import Case, sent

from lightning_cocod.workloads import resnet50

IMAGES, EPOCHS = 1_281_167, 90
RUNS = [
    Case("ssgd"),
    Case("dist_ef_sgd", {"compression": "sign"}),
    Case("flex_compress_sgd", {"compression": "topk", "server_compression": "sign"}),
    Case("compskip_dsgd", {"worker_skip": 2}),
    Case("compskip_dsgd", {"worker_skip": 2, "server_skip": 2}),
    Case("compskip_dsgd", {"compression": "topk", "worker_skip": 2}),
]
"""S-SGD, dist-EF-SGD, and what is to be compared with both."""
HEADER = (
    *("run", "a worker sends, TB", "all, TB", "all save beside `ssgd`, TB"),
    *("a worker saves beside `dist_ef_sgd`, GB", "all, GB"),
)


class Training(NamedTuple):
    """Of ResNet-50, for 90 epochs.

    Attributes:
        workers: N.
        batch: images a step of all workers.
    """

    workers: int
    batch: int

    @property
    def steps(self) -> int:
        """The last, smaller batch of an epoch is a step too."""
        return EPOCHS * -(-IMAGES // self.batch)

    @property
    def parameters(self) -> int:
        """Of ResNet-50 with 1000 classes."""
        with torch.device("meta"):
            return sum(p.numel() for p in resnet50().parameters())

    def __str__(self) -> str:
        what = f"ResNet-50, {self.parameters:,} parameters, {EPOCHS} epochs of {IMAGES:,} images"
        return f"{what}: {self.workers} workers, {self.batch} images a step, {self.steps:,} steps"

    def cells(self) -> list[list[str]]:
        """A line for each run. One TB is 10¹² bytes."""
        each = [self.steps * sent(case, self.workers, [(self.parameters,)]) for case in RUNS]
        ssgd, dist_ef = each[:2]
        return [
            [
                f"`{case}`",
                f"{mine / 1e12:.3f}",
                f"{self.workers * mine / 1e12:.2f}",
                "" if mine >= ssgd else f"{self.workers * (ssgd - mine) / 1e12:.1f}",
                "" if mine >= dist_ef else f"{(dist_ef - mine) / 1e9:.0f}",
                "" if mine >= dist_ef else f"{self.workers * (dist_ef - mine) / 1e9:.0f}",
            ]
            for case, mine in zip(RUNS, each, strict=True)
        ]
