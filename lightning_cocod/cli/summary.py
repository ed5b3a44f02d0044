"""What a job reached: as data for summary.json, and as a table."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, WandbLogger
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_cocod import CommunicationMonitor
from lightning_cocod.cli.build import Run

FILE = "summary.json"
Summary = dict[str, Any]
METRICS = (
    "train/loss",
    "train/acc",
    "val/loss",
    "val/acc",
    "test/loss",
    "test/acc",
    "throughput/samples_per_sec",
    "throughput/step_ms",
    "comm/hidden_fraction",
    "comm/exposed_ms",
    "comm/busy_ms",
    "comm/sent_bytes",
)


def summarise(cfg: DictConfig, run: Run, metrics: Mapping[str, float], seconds: float) -> Summary:
    """The result of a job, on rank 0; values are None where nothing was measured.

    Args:
        cfg: the job's configuration.
        run: its objects, after training.
        metrics: what the last epoch and the test reached.
        seconds: how long training took, validation included.
    """
    trainer = run.trainer
    measured = {**metrics}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by Trainer.__init__
        if isinstance(callback, CommunicationMonitor):
            measured.update(callback.summary)
    summary: Summary = {
        "name": cfg.name,
        "ranks": trainer.world_size,
        "period": cfg.strategy.get("period"),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": seconds,
        **{key: measured.get(key) for key in METRICS},
    }
    summary.update(csv=None, wandb=None, wandb_url=None)
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            summary["csv"] = str(Path(logger.log_dir, logger.experiment.NAME_METRICS_FILE))
        elif isinstance(logger, WandbLogger):
            summary["wandb"] = str(Path(logger.experiment.dir).parent)
            if not logger.experiment.offline:
                summary["wandb_url"] = logger.experiment.url
    checkpoint = trainer.checkpoint_callback
    summary["checkpoint"] = getattr(checkpoint, "best_model_path", None) or None
    return summary


def save_summary(summary: Summary, folder: Path) -> None:
    """Write summary.json."""
    (folder / FILE).write_text(json.dumps(summary, indent=2) + "\n")


def readable(summary: Summary) -> dict[str, str]:
    """What of a summary belongs into a table, label to text."""
    if "error" in summary:
        return {"failed": "yes"}
    texts = {
        "test accuracy": _format(summary["test/acc"], lambda x: f"{x:.2%}"),
        "test loss": _format(summary["test/loss"], lambda x: f"{x:.4f}"),
        "samples/s": _format(summary["throughput/samples_per_sec"], lambda x: f"{x:,.0f}"),
        "comm. hidden": _format(summary["comm/hidden_fraction"], lambda x: f"{x:.1%}"),
        "sent per rank": _format(summary["comm/sent_bytes"], lambda x: f"{x / 1e6:,.1f} MB"),
        "period": _format(summary["period"], str),
        "ranks": str(summary["ranks"]),
        "steps": str(summary["steps"]),
        "seconds": f"{summary['seconds']:.1f}",
    }
    return texts


def print_summary(summary: Summary, folder: Path) -> None:
    """Print the table, and how to look into the run."""
    title = summary["name"]
    table = Table(title=title, show_header=False, title_justify="left", min_width=len(title))
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, text in readable(summary).items():
        table.add_row(label, text)
    Console().print(table)
    for label, text in where(summary, folder).items():
        print(f"{label + ':':<12}{text}")  # not through rich, which would break long paths


def where(summary: Summary, folder: Path) -> dict[str, str]:
    """Where the results lie, and the commands that open them."""
    lines = {"results": str(folder)}
    if summary["csv"]:
        lines["metrics"] = summary["csv"]
    if summary["checkpoint"]:
        lines["checkpoint"] = summary["checkpoint"]
    if summary["wandb_url"]:
        lines["W&B"] = summary["wandb_url"]
    elif summary["wandb"]:
        lines["charts"] = f"wandb leet {summary['wandb']}"
        lines["upload"] = f"wandb sync {summary['wandb']}"
    return lines


def _format(value: Any, text: Callable[[Any], str]) -> str:
    return "–" if value is None else text(value)
