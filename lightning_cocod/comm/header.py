"""The header of a message: what a worker is about to reduce. All workers must be about to reduce the same."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_cocod.comm.errors import MessageMismatch, NonFiniteMessage, transport
from lightning_cocod.comm.waiting import finish

_NAME = 24
_FORMAT = struct.Struct(f"<{_NAME}s{_NAME}sqqqqqqqd")
NONFINITE = 1
"""Flag of a worker whose message holds NaN or infinity, or must not be used for another reason."""
LACKING = 4
"""Flag of a worker that has not computed all that its message is about."""
WISH = 2
"""Flag of a worker that wishes what it asks about."""


class Pace(NamedTuple):
    """How fast a worker computes; nothing where nobody asks.

    Attributes:
        batches: that it has begun to train on.
        speed: samples per second of its own work, waiting for others left out; 0 while it is unknown.
    """

    batches: int = 0
    speed: float = 0.0


@dataclass(frozen=True)
class Header:
    """What one worker announces.

    Attributes:
        algorithm: registered name of the algorithm.
        kind: what the message is for, for example ``round``, ``gradients``, ``consensus``.
        step: optimizer steps attempted so far.
        layout: fingerprint of the buckets' layout (shapes, strides, dtypes, order).
        nbytes: size of the message.
        weights: digest of all workers' weights.
        flags: what may differ between workers without being a mismatch.
        samples: that this worker has trained on so far; differs between workers.
        pace: of this worker; differs between workers.
    """

    algorithm: str
    kind: str
    step: int
    layout: int
    nbytes: int
    weights: int = 0
    flags: int = 0
    samples: int = 0
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        for name in (self.algorithm, self.kind):
            if len(name.encode()) > _NAME:
                raise ValueError(f"{name!r} is too long for a header: at most {_NAME} bytes")

    def pack(self) -> bytes:
        """The header as bytes."""
        names = self.algorithm.encode(), self.kind.encode()
        numbers = self.step, self.layout, self.nbytes, self.weights, self.flags, self.samples
        return _FORMAT.pack(*names, *numbers, *self.pace)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """A header from its bytes."""
        algorithm, kind, *numbers, batches, speed = _FORMAT.unpack(data)
        header = cls(algorithm.rstrip(b"\0").decode(), kind.rstrip(b"\0").decode(), *numbers)
        return replace(header, pace=Pace(batches, speed))

    @property
    def _agreed(self) -> tuple[object, ...]:
        return self.algorithm, self.kind, self.step, self.layout, self.nbytes, self.weights

    def __str__(self) -> str:
        what = f"{self.nbytes} bytes, layout {self.layout:x}, weights {self.weights:x}"
        return f"{self.algorithm}/{self.kind} at step {self.step} ({what})"


def size_of(world_size: int) -> int:
    """Bytes that each worker sends, and receives, for one exchange of headers."""
    return _FORMAT.size * (world_size - 1)


def exchange(mine: Header, rank: int, ranks: Sequence[int], gather: Callable[[bytes], list[bytes]]) -> list[Header]:
    """Wait for every worker's header and compare.

    Args:
        mine: this worker's.
        rank: this worker.
        ranks: that exchange headers, in their order.
        gather: makes of every worker's bytes, which are as many, those of all of them in the order of ranks.

    Returns:
        The headers in the order of ranks.

    Raises:
        MessageMismatch: two workers announce different messages. Raised on every worker, before anything is reduced.
    """
    headers = [Header.unpack(theirs) for theirs in gather(mine.pack())]
    for other, header in zip(ranks, headers, strict=True):
        if header._agreed != mine._agreed:
            raise MessageMismatch(
                f"workers are out of step: rank {rank} sends {mine}, rank {other} sends {header}; every rank needs the "
                "same model, the same options, weights included, and the same number of batches"
            )
    return headers


def gather_over(group: dist.ProcessGroup, over: threading.Event, mine: bytes) -> list[bytes]:
    """Every worker's bytes, over Gloo. Nobody waits any longer once communication is ``over``."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = [torch.empty_like(sent) for _ in range(group.size())]
    with transport:
        work = dist.all_gather(everyone, sent, group=group, async_op=True)
    assert work is not None  # every rank is a member of the group
    finish(work, group, over)
    return [theirs.numpy().tobytes() for theirs in everyone]


def unfit(headers: list[Header], ranks: Sequence[int], *, skip: bool) -> tuple[int, ...]:
    """Whose message is not finite, for the others to go on without them, counted as the headers are.

    Args:
        headers: of all ranks.
        ranks: which these are in the run.
        skip: whether that is wanted.

    Raises:
        NonFiniteMessage: there are some and it is not wanted, or there are no others.
    """
    broken = tuple(number for number, header in enumerate(headers) if header.flags & NONFINITE)
    if broken and not (skip and len(broken) < len(headers)):
        message, whose = headers[broken[0]], ", ".join(str(ranks[number]) for number in broken)
        raise NonFiniteMessage(
            f"{message.algorithm}/{message.kind} at step {message.step}: NaN or infinity in the message of rank "
            f"{whose}; nobody applies it; lower the learning rate or clip gradients"
        )
    return broken
