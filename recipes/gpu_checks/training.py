"""Small models and the plain loop that most checks train them in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpu_checks.library import Algorithm, options
from gpu_checks.rank import Rank

PERIOD = 4


def image_net(rank: Rank) -> nn.Module:
    """34 MB of parameters on a GPU, next to nothing on a CPU."""
    width, depth, hidden = (64, 6, 2048) if rank.cuda else (8, 1, 16)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64 * width, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*layers, *head).to(rank.device).to(memory_format=torch.channels_last)


def images(rank: Rank, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    """Batches of this rank's own."""
    torch.manual_seed(100 + rank.rank)
    size = size if rank.cuda else 4
    drawn = [(torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))) for _ in range(8)]
    return [(x.to(rank.device), y.to(rank.device)) for x, y in drawn]


def flat(module: nn.Module) -> Tensor:
    """All parameters and buffers as one vector."""
    return torch.cat([t.detach().reshape(-1).clone() for t in module.state_dict().values()])


@dataclass
class Run:
    """How a run ended."""

    before: Tensor
    """The replica before ``finish``."""
    end: Tensor
    seconds: float
    metrics: dict[str, float]
    t: int


def train(
    rank: Rank,
    algorithm: type[Algorithm],
    *,
    steps: int = 24,
    half: bool = False,
    size: int = 64,
    spoil: Callable[[int, nn.Module], object] | None = None,
    **wanted: Any,
) -> Run:
    """A run in a plain loop.

    Args:
        rank: this one.
        algorithm: which.
        steps: how many.
        half: under autocast in float16, with a gradient scaler.
        size: of a batch.
        spoil: is given the step and the model between forward and backward.
        **wanted: options, for an algorithm that has them.
    """
    net, batches = image_net(rank), images(rank, size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    kind = rank.device.type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, enabled=half)
    with algorithm(net, optimizer, **options(algorithm, {"period": PERIOD, **wanted})) as running:
        rank.synchronize()
        begun = time.perf_counter()
        for step in range(steps):
            x, y = batches[step % len(batches)]
            with torch.autocast(kind, torch.float16, enabled=half):
                loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            if spoil is not None:
                spoil(step, net)
            scaler.scale(loss).backward()
            running.step(scaler=scaler if half else None)
        rank.synchronize()
        seconds, metrics, t, before = time.perf_counter() - begun, running.metrics(), running.t, flat(net)
    return Run(before, flat(net), seconds, metrics, t)
