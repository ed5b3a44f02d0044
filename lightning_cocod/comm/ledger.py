"""The ledger: seconds and bytes of communication, and how much of it training noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Totals:
    """Running totals since the start, in seconds and bytes.

    Attributes:
        busy: time the link worked: from the last header of a message to its end.
        exposed: time the training thread waited for the link.
        skew: time the training thread waited for slower peers, before the last header of a message had come.
        sent: bytes handed to the transport.
        received: bytes taken from the transport.
        raw: bytes the same messages have uncompressed.
        messages: number of messages.
    """

    busy: float = 0.0
    exposed: float = 0.0
    skew: float = 0.0
    sent: int = 0
    received: int = 0
    raw: int = 0
    messages: int = 0

    def __sub__(self, other: Totals) -> Totals:
        return Totals(**{name: value - getattr(other, name) for name, value in vars(self).items()})

    @property
    def hidden_fraction(self) -> float | None:
        """1 - exposed/busy, in [0, 1]; None where the link did not work at all: there was nothing to hide."""
        return None if self.busy <= 0 else min(1.0, max(0.0, 1.0 - self.exposed / self.busy))


@dataclass(frozen=True)
class Reading:
    """All counters at one moment.

    Attributes:
        seconds: on this host's clock.
        steps: optimizer steps attempted.
        samples: that all ranks have trained on, as far as this one knows; 0 where nobody counts.
        totals: of communication.
    """

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    totals: Totals = field(default_factory=Totals)

    def since(self, begun: Reading) -> dict[str, float]:
        """``comm/…`` and ``throughput/…`` of the metric vocabulary over the time since another reading.

        Without ``comm/hidden_fraction`` where nothing was communicated, and without samples where nobody counts them.
        """
        seconds, steps = self.seconds - begun.seconds, max(1, self.steps - begun.steps)
        spent, total = self.totals - begun.totals, self.totals
        hidden, counted = spent.hidden_fraction, self.samples > 0 and seconds > 0
        return {
            **({} if hidden is None else {"comm/hidden_fraction": hidden}),
            "comm/exposed_ms": 1e3 * spent.exposed / steps,
            "comm/busy_ms": 1e3 * spent.busy / steps,
            "comm/skew_ms": 1e3 * spent.skew / steps,
            "comm/sent_bytes": float(total.sent),
            "comm/received_bytes": float(total.received),
            "comm/compression_ratio": total.raw / total.sent if total.sent else 1.0,
            "throughput/step_ms": 1e3 * seconds / steps,
            **({"throughput/samples_per_sec": (self.samples - begun.samples) / seconds} if counted else {}),
        }


class Ledger:
    """Thread-safe totals. Times that a device has still to finish measuring are added once they are known."""

    def __init__(self) -> None:
        self._totals = Totals()
        self._lock = threading.Lock()
        self._unsettled: list[tuple[str, Callable[[], float | None]]] = []

    def add(self, **amounts: float) -> None:
        """Add amounts to the totals of the same names."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._totals, name, getattr(self._totals, name) + amount)

    def add_when_known(self, name: str, seconds: Callable[[], float | None]) -> None:
        """Add ``seconds()`` to a total as soon as it returns a number; None means that the device is not there yet."""
        with self._lock:
            self._unsettled.append((name, seconds))
            self._settle()  # here as well: without a reader the list would grow for the whole run

    def totals(self) -> Totals:
        """A copy of the totals now. Never blocks on a device."""
        with self._lock:
            self._settle()
            return Totals(**vars(self._totals))

    def _settle(self) -> None:
        waiting = []
        for name, seconds in self._unsettled:
            value = seconds()
            if value is None:
                waiting.append((name, seconds))
            else:
                setattr(self._totals, name, getattr(self._totals, name) + value)
        self._unsettled = waiting
