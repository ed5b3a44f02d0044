"""Speed over slow links: `cocod-bench` on links of given rates on this machine, and one table of it all.

    python recipes/speed.py --out speed --rates 200 --ranks 2,4                    # ResNet-18, period 8
    python recipes/speed.py --out speed --rates 500 --ranks 2,4 --period 4
    python recipes/speed.py --out speed --rates 50 --ranks 2                       # a transfer longer than a round
    python recipes/speed.py --out speed --rates 1000 --loopback --workload resnet18_64 --contenders all  # the peers' work
    python recipes/speed.py --out speed --rates none --workload tiny --rounds 200  # a strategy's own cost; so does resnet18
    python recipes/speed.py --out speed --rates 200 --workload gpt                 # and vgg16, huge

Each of these is a row of the targets, and needs the rights that `netlab.py` needs. Every rank has a link of its own to a
switch; with ``--loopback`` all of them share one rate for both directions. Runs land in folders of their own below
``--out``, whose `table.md` and plots join all runs that lie there. Whatever else is given goes to `cocod-bench --help`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab import Lab, Link, NotPermitted, Ranks, SharedLoopback
from netlab import mbit

BENCH = [sys.executable, "-m", "lightning_cocod.cli.bench.main"]


def network(ranks: int, rate: float | None, loopback: bool) -> Ranks:
    """Links of one rate."""
    return SharedLoopback(ranks, rate) if loopback else Lab([Link(rate, rate)] * ranks)


def measure(lab: Ranks, rate: float | None, options: Sequence[str], out: Path) -> int:
    """One run of the benchmark; the worst rank's exit code."""
    told = [] if rate is None else ["--link-rate", f"{rate:g}"]
    with lab:
        ranks = lab.run([*BENCH, *options, *told, "--out", str(out)], stdin=subprocess.DEVNULL)
        return max(abs(process.wait()) for process in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rates", default="200", metavar="MBIT,...", help="of the links; none is no limit (200)")
    parser.add_argument("--ranks", default="2", metavar="N,...", help="how many (2)")
    parser.add_argument("--loopback", action="store_true", help="one loopback of that rate, shared by all ranks")
    parser.add_argument("--out", type=Path, required=True, help="folder for all runs")
    options, others = parser.parse_known_args()
    try:
        rates, numbers = [mbit(word) for word in options.rates.split(",")], [int(word) for word in options.ranks.split(",")]
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    worst = 0
    for ranks in numbers:
        for rate in rates:
            kind = [word for word in (f"{ranks}x", "loopback" if options.loopback else "", *others) if word]
            out = options.out / "-".join([f"{rate:g}" if rate else "none", *(word.strip("-") for word in kind)]).replace(
                "/", "_"
            )
            try:
                worst = max(worst, measure(network(ranks, rate, options.loopback), rate, others, out))
            except NotPermitted as error:
                raise SystemExit(f"no lab here: {error}") from None
    runs = sorted(str(file.parent) for file in options.out.glob("*/run.json"))
    if runs:
        subprocess.run([*BENCH, "report", *runs, "--out", str(options.out)], check=True, env=os.environ)
    sys.exit(worst)


if __name__ == "__main__":
    main()
