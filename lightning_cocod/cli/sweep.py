"""The table over the jobs of a sweep."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_cocod.cli.summary import FILE, Summary, readable

CSV = "sweep.csv"
PLAIN_WIDTH = 120  # characters, in a pipe or file


class SweepTable(Callback):
    """Collects each job's summary.json when a sweep ends."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the jobs as a table and write it to sweep.csv in the sweep's folder; exit with 1 if a job failed."""
        folder = Path(config.hydra.sweep.dir)
        jobs = read_jobs(folder)
        write_csv(jobs, folder / CSV)
        console = Console()
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        console.print(sweep_table(jobs))
        for job in jobs:
            if "error" in job:
                print(f"failed:     {job['overrides']}: {job['error'].splitlines()[-1]}")
        print(f"results:    {(folder / CSV).absolute()}")
        if any("error" in job for job in jobs):
            sys.exit(1)


def read_jobs(folder: Path) -> list[Summary]:
    """The summaries below `folder` in the order of their job numbers."""
    files = sorted(folder.rglob(FILE), key=lambda file: (len(file.parent.name), file.parent.name))
    return [json.loads(file.read_text()) for file in files]


def write_csv(jobs: list[Summary], file: Path) -> None:
    """One line a job, with a header."""
    columns = list(dict.fromkeys(key for job in jobs for key in job))
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(jobs)


def sweep_table(jobs: list[Summary]) -> Table:
    """One row a job, named by the overrides that not all jobs share; columns that say the same of all jobs are left out."""
    overrides = [job["overrides"].split() for job in jobs]
    shared = set.intersection(*map(set, overrides)) if len(jobs) > 1 else set()
    rows = [readable(job) for job in jobs]
    labels = dict.fromkeys(label for row in rows for label in row)
    columns = [label for label in labels if len(jobs) == 1 or len({row.get(label) for row in rows}) > 1]
    table = Table(title=" ".join(["sweep", *sorted(shared)]), title_justify="left")
    table.add_column("job", overflow="fold")
    for label in columns:
        table.add_column(label, justify="right")
    for own, row in zip(overrides, rows, strict=True):
        table.add_row(" ".join(o for o in own if o not in shared), *(row.get(label, "–") for label in columns))
    return table
