"""Speed of codecs beside a copy of the memory: one table for a terminal, and for a page.

    python recipes/codec_speed.py                                   # the codecs that have a target, on one core
    python recipes/codec_speed.py --only all --mib 1 8 64 --markdown speed.md --csv speed.csv
    python recipes/codec_speed.py --without-numba                   # where it is installed, as if it were not
    python recipes/codec_speed.py --device cuda --mib 8 64 256

The bandwidth of encode and decode is the bytes of the float32 input a second, whatever a code is long. The unit is the
memory's: that of `out.copy_(x)` for 64 MiB, which no cache holds. A copy of as many values as are encoded is a column of
its own: where they fit into a cache it is faster than 1. These four take turns; figures are medians of the repeats,
quartiles in brackets. On one thread of the CPU the seconds are those of the processor, so that others on the machine
disturb less; on CUDA each measurement ends with a synchronisation.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from table_and_plot import markdown

from lightning_cocod.compression import CODECS, Codec, Int4, Int8, compiled

TARGETS = {"sign": 1 / 2, "int8": 1 / 2, "int4": 1 / 2, "topk": 1 / 6}  # of the memory's copy, encode and decode each
MORE: list[Codec] = [Int8(stochastic=True), Int4(stochastic=True)]
LEAST = 0.005  # seconds of a measurement: clocks are coarse
MEMORY = 2**24  # values of the copy that is the unit


class Fraction(NamedTuple):
    """A bandwidth in that of the memory: the median, and the quartiles over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, memory: Sequence[float], times: Sequence[float]) -> Fraction:
        """From seconds a value, of each repeat."""
        ratios = sorted(unit / time for unit, time in zip(memory, times, strict=True))
        return cls(statistics.median(ratios), ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4])

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Row(NamedTuple):
    """What has been measured of a codec in one size."""

    codec: str
    mib: float
    memory: float  # GB/s
    copy: Fraction
    encode: Fraction
    decode: Fraction
    bytes: float  # of a value's code

    def cells(self) -> list[str]:
        measured = map(str, (self.copy, self.encode, self.decode))
        return [self.codec, f"{self.mib:g}", f"{self.memory:.1f}", *measured, f"{self.bytes:.3f}"]

    def numbers(self) -> list[object]:
        return [self.codec, self.mib, self.memory, *self.copy, *self.encode, *self.decode, self.bytes]


HEADER = ["codec", "MiB", "memory, GB/s", "copy", "encode", "decode", "bytes a value", "target"]
QUARTERS = ("", "_low", "_high")
MEASURED = ("copy", "encode", "decode")
COLUMNS = ["codec", "mib", "memory_gb_s", *(f"{what}{part}" for what in MEASURED for part in QUARTERS), "bytes"]


def seconds(job: Callable[[], object], calls: int, device: torch.device) -> float:
    """Of one call."""
    now = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    begun = now()
    for _ in range(calls):
        job()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (now() - begun) / calls


def measure(codec: Codec, mib: float, repeats: int, device: torch.device) -> Row:
    """One row: `repeats` turns of the memory's copy, a copy, encode and decode."""
    x = torch.randn(max(1, int(mib * 2**18)), device=device)
    n, out = x.numel(), torch.empty_like(x)
    much = torch.ones(2, MEMORY, device=device)
    code = torch.empty(codec.nbytes(n), dtype=torch.uint8, device=device)
    jobs = (
        lambda: much[0].copy_(much[1]),
        lambda: out.copy_(x),
        lambda: codec.encode(x, code),
        lambda: codec.decode(code, out),
    )
    for job in jobs:
        seconds(job, 1, device)  # first calls allocate and build tables
    calls = [max(1, int(LEAST / max(1e-7, seconds(job, 2, device)))) for job in jobs]
    values = (MEMORY, n, n, n)
    turns = [[seconds(job, k, device) / m for job, k, m in zip(jobs, calls, values, strict=True)] for _ in range(repeats)]
    memory, *taken = zip(*turns, strict=True)
    copy, encode, decode = (Fraction.of(memory, times) for times in taken)
    return Row(label(codec), mib, 4 / statistics.median(memory) / 1e9, copy, encode, decode, code.numel() / n)


def label(codec: Codec) -> str:
    """Its name, and what is not its default."""
    return f"{codec.name}, stochastic" if codec in MORE else codec.name


def verdict(row: Row) -> str:
    """Whether the row reaches its target, if there is one."""
    if row.codec not in TARGETS:
        return ""
    target = TARGETS[row.codec]
    missed = [name for name in ("encode", "decode") if getattr(row, name).median < target]
    return f"{target:.2f}: " + (f"{', '.join(missed)} below" if missed else "reached")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 8, 64], help="sizes of the float32 values (1 8 64)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (1)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda (cpu)")
    parser.add_argument("--repeats", type=int, default=25, help="turns (25)")
    parser.add_argument("--only", nargs="+", default=list(TARGETS), help=f"names of codecs, or all ({' '.join(TARGETS)})")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--csv", type=Path, help="file for the figures")
    parser.add_argument("--without-numba", action="store_true", help="torch's and NumPy's operations only")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only if name not in (*CODECS, "all")]:
        parser.error(f"--only: no codec {', '.join(unknown)}; there are {', '.join(CODECS)}")
    if min(options.mib) <= 0 or options.threads < 1 or options.repeats < 1:
        parser.error("--mib, --threads and --repeats must be positive")
    if options.without_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]  # importing it raises
        compiled.kernels.cache_clear()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    codecs = [*(kind() for kind in CODECS.values()), *MORE]
    chosen = [codec for codec in codecs if "all" in options.only or codec.name in options.only]
    rows = [measure(codec, mib, options.repeats, options.device) for codec in chosen for mib in options.mib]
    cells = [[*row.cells(), verdict(row)] for row in rows]
    loops = "compiled loops" if compiled.kernels() else "no compiled loops"
    title = f"On {options.device}, threads of the CPU: {options.threads}, repeats: {options.repeats}, {loops}"
    table = Table(*HEADER, title=title)
    for line in cells:
        table.add_row(*map(escape, line))
    Console().print(table)
    if options.markdown:
        options.markdown.write_text(markdown(HEADER, cells) + "\n", encoding="utf-8")
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *(row.numbers() for row in rows)])


if __name__ == "__main__":
    main()
