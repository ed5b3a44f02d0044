"""The file of a trace: the ranks' recordings in the format that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_cocod.comm.tracer import Span

_ROWS = "training", "communication", "communication in the node", "questions to owners", "gossip"  # the first two always
_MICROSECONDS = 1e6


@dataclass
class Part:
    """What one rank has recorded.

    Attributes:
        rank: whose it is.
        asked: rounds that it was to record.
        rounds: rounds that it has recorded.
        steps: optimizer steps before the first and after the last one recorded; None if it has not come to the first.
        spans: of all its threads, in seconds of its host's clock.
        host: what has that clock.
    """

    rank: int
    asked: int
    rounds: int = 0
    steps: tuple[int, int] | None = None
    spans: list[Span] = field(default_factory=list)
    host: str = field(default_factory=lambda: host())

    def __str__(self) -> str:
        where = "nothing" if self.steps is None else f"steps {self.steps[0]} to {self.steps[1]}"
        return f"{where}, {self.rounds} of {self.asked} rounds"


def host() -> str:
    """What processes with a common monotonic clock have in common: the boot of their system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def write(path: Path, parts: Sequence[Part]) -> None:
    """Write the trace of these ranks.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(parts)))


def document(parts: Sequence[Part]) -> dict[str, Any]:
    """The trace of these ranks: ``traceEvents`` in microseconds since the first one, and in ``otherData`` what it is of."""
    shifts = {part.rank: shift(parts[0], part) for part in parts}
    spans = [(part.rank, shifts[part.rank] or 0.0, span) for part in parts for span in part.spans]
    zero = min((span.start + by for _, by, span in spans), default=0.0)
    others = sorted({span.row for *_, span in spans} - set(_ROWS))  # a thread that nobody has named here is shown as well
    rows = {row: number for number, row in enumerate([*_ROWS, *others])}
    events = [_event(rank, by - zero, span, rows[span.row]) for rank, by, span in spans]
    events.sort(key=lambda event: (event["pid"], event["tid"], event["ts"], -event["dur"]))  # the outer before the inner
    return {
        "traceEvents": [label for part in parts for label in _labels(part, rows)] + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "complete": all(part.rounds == part.asked for part in parts),
            **{f"rank {part.rank}": str(part) for part in parts},
            **{f"clock of rank {r}": "not aligned: no common message" for r, by in shifts.items() if by is None},
        },
    }


def shift(first: Part, part: Part) -> float | None:
    """Seconds to add to the times of a part, to see it on the clock of the first.

    Ranks of one host have one clock. Those of another are moved so that the last header of a message has come at the same
    moment everywhere, in the median over the messages of both: true but for the latency of the link. None without any.
    """
    if part.host == first.host:
        return 0.0
    ours, theirs = _announcements(first), _announcements(part)
    common = ours.keys() & theirs.keys()
    return statistics.median(ours[m] - theirs[m] for m in common) if common else None


def _announcements(part: Part) -> dict[str, float]:
    """When the last header of each message between all ranks had come."""
    return {s.about["message"]: s.end for s in part.spans if (s.name, s.row) == ("headers", "communication")}


def _event(rank: int, by: float, span: Span, row: int) -> dict[str, Any]:
    start, end = (round((moment + by) * _MICROSECONDS, 3) for moment in (span.start, span.end))
    place = {"ts": start, "dur": round(end - start, 3), "pid": rank, "tid": row}
    return {"name": span.name, "cat": span.row, "ph": "X", **place, "args": span.about}


def _labels(part: Part, rows: dict[str, int]) -> list[dict[str, Any]]:
    rank, seen = part.rank, {*_ROWS[:2], *(span.row for span in part.spans)}
    shown = {row: number for row, number in rows.items() if row in seen}

    def label(what: str, row: int, **args: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "ts": 0, "dur": 0, "pid": rank, "tid": row, "args": args}

    names = [label("thread_name", number, name=row) for row, number in shown.items()]
    order = [label("thread_sort_index", number, sort_index=number) for number in shown.values()]
    process = label("process_name", 0, name=f"rank {rank}"), label("process_sort_index", 0, sort_index=rank)
    return [*process, *names, *order]
