"""Speed over slow links: `cocod-bench` on links of given rates on this machine, and one table of it all.

    python recipes/speed.py --out speed --rates 200 --ranks 2,4                    # ResNet-18, period 8
    python recipes/speed.py --out speed --rates 500 --ranks 2,4 --period 4
    python recipes/speed.py --out speed --rates 50                                 # a transfer longer than a round
    python recipes/speed.py --out speed --rates 1000 --workload vgg16              # one tensor of 411 MB
    python recipes/speed.py --out speed --rates 1000 --loopback --workload resnet18_64 --contenders all  # and neighbours
    python recipes/speed.py --out speed --rates none --workload tiny --rounds 200  # a step's own cost
    python recipes/speed.py --out speed --rates none --workload resnet20 --batch-size 32  # that of longer steps

docs/benchmarks.md has the figures of such runs, each with its whole command. All need the rights that `netlab.py` needs.
Every rank has a link of its own to a switch; with ``--loopback`` all of them share one rate for both directions. Runs land
in folders of their own below ``--out``, whose `table.md` and plots join all runs that lie there. Whatever else is given
goes to `cocod-bench` (see its ``--help``).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import Lab, Link, Ranks, SharedLoopback
from netlab import mbit, orderly

BENCH = [sys.executable, "-m", "lightning_cocod.cli.bench.main"]


def network(ranks: int, rate: float | None, loopback: bool) -> Ranks:
    """Links of one rate."""
    return SharedLoopback(ranks, rate) if loopback else Lab([Link(rate, rate)] * ranks)


def measure(lab: Ranks, rate: float | None, options: Sequence[str], out: Path) -> int:
    """One run of the benchmark; the worst rank's exit code."""
    told = [] if rate is None else ["--link-rate", f"{rate:g}"]
    with TemporaryDirectory(prefix="cocod-bench-") as scratch, lab:  # leaving the lab kills ranks: they clean nothing up
        command = [*BENCH, *options, *told, "--out", str(out)]
        ranks = lab.run(command, env={"TMPDIR": scratch}, stdin=subprocess.DEVNULL)
        return max(abs(process.wait()) for process in ranks)


def by_rate(run: Path) -> tuple[float, str]:
    """The order of runs in a table."""
    return json.loads((run / "run.json").read_text())["link_rate"] or math.inf, run.name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rates", default="200", metavar="MBIT,...", help="of the links; none is no limit (200)")
    parser.add_argument("--ranks", default="2", metavar="N,...", help="how many (2)")
    parser.add_argument("--loopback", action="store_true", help="one loopback of that rate, shared by all ranks")
    parser.add_argument("--out", type=Path, required=True, help="folder for all runs")
    options, others = parser.parse_known_args()
    try:
        settings = list(product(map(int, options.ranks.split(",")), map(mbit, options.rates.split(","))))
        labs = [network(ranks, rate, options.loopback) for ranks, rate in settings]
    except ValueError as error:
        parser.error(str(error))
    worst = 0
    with orderly():
        for lab, (ranks, rate) in zip(labs, settings, strict=True):
            kind = [word for word in (f"{ranks}x", "loopback" if options.loopback else "", *others) if word]
            name = "-".join([f"{rate:g}" if rate else "none", *(word.strip("-") for word in kind)]).replace("/", "_")
            worst = max(worst, measure(lab, rate, others, options.out / name))
        if runs := sorted((file.parent for file in options.out.glob("*/run.json")), key=by_rate):
            worst = max(worst, subprocess.run([*BENCH, "report", *runs, "--out", str(options.out)]).returncode)
    sys.exit(worst)


if __name__ == "__main__":
    main()
