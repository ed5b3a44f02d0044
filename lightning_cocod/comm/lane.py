"""Where the communication thread's device work runs, and how the training thread's work is ordered against it.

A mark is a point in the work of a device. On the CPU work is done when the call returns, so a mark is a time and following
it costs nothing. On CUDA a mark is an event: following it makes the current stream wait on the device, never the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor


class Lane(Protocol):
    """Order between the training thread and the communication thread on one kind of device."""

    def mark(self) -> Any:
        """A mark at the end of the work issued so far by this thread."""

    def follow(self, mark: Any) -> None:
        """Later work of this thread comes after the mark."""

    def working(self) -> AbstractContextManager[object]:
        """The communication thread issues its device work inside this context."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Whoever drops these tensors of another thread, their memory rests until this thread's work so far is done."""

    def seconds(self, start: Any, end: Any) -> float | None:
        """Time from mark to mark; None while the device has not reached the end."""


class HostLane:
    """The CPU: marks are times."""

    def mark(self) -> float:
        """The time now."""
        return time.perf_counter()

    def follow(self, mark: float) -> None:
        """Nothing to wait for."""

    def working(self) -> AbstractContextManager[object]:
        """No context needed."""
        return nullcontext()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """It is done."""

    def seconds(self, start: float, end: float) -> float | None:
        """The difference."""
        return end - start


class CudaLane:
    """A CUDA device: the communication thread has its own stream, marks are events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here

    def mark(self) -> torch.cuda.Event:
        """An event recorded on this thread's current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # nor here
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        """This thread's current stream waits for the event; the host does not."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    @contextmanager
    def working(self) -> Iterator[None]:
        """The communication stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """What the allocator is told."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Device time between the events, without waiting for either."""
        if not (start.query() and end.query()):  # type: ignore[no-untyped-call]  # nor here
            return None
        return float(start.elapsed_time(end)) / 1e3


def lane_for(device: torch.device) -> Lane:
    """The lane of a device."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
