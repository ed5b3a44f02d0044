"""Draws docs/trace.svg: what two ranks on a slow link do in two rounds, under CoCoD-SGD and under its blocking twin.

    python recipes/trace_picture.py                              # two ranks, 200 Mbit/s: needs root, see netlab.py
    python recipes/trace_picture.py --rate 50 --folder traces    # keeps the traces, for https://ui.perfetto.dev
    python recipes/trace_picture.py --draw a.json b.json         # draws traces that there are

Both panels have the same scale of time. Two ranks on one machine share its processors: times of computation are not those of
two machines.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab import Lab, Link

PICTURE = Path(__file__).parent.parent / "docs" / "trace.svg"
STRATEGIES, RANKS, PERIOD, ROUNDS, START, LIMIT = ("cocod", "local_sgd"), 2, 4, 2, 4, 600.0

# A job


def train(strategy: str, path: str, batch_size: int) -> None:
    """One rank, a few rounds."""
    import lightning as L
    import torch

    from lightning_cocod import CoCoDStrategy, CommunicationTrace, LocalSGDStrategy
    from lightning_cocod.workloads.models import resnet18

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet18()

        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            return torch.nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    length = (START + PERIOD * ROUNDS + 1) * batch_size * RANKS
    data = torch.utils.data.TensorDataset(torch.randn(length, 3, 32, 32), torch.randint(10, (length,)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=RANKS,
        strategy={"cocod": CoCoDStrategy, "local_sgd": LocalSGDStrategy}[strategy](period=PERIOD),
        callbacks=[CommunicationTrace(path, rounds=ROUNDS, start_step=START)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size))


def run(folder: Path, rate: float, batch_size: int) -> list[Path]:
    """The traces, one a strategy.

    Raises:
        NotPermitted: no slow links here.
        RuntimeError: a rank has failed.
    """
    paths = [folder / f"{strategy}.json" for strategy in STRATEGIES]
    with Lab([Link(rate, rate)] * RANKS) as lab:
        for strategy, path in zip(STRATEGIES, paths, strict=True):
            command = [sys.executable, __file__, "--rank", strategy, str(path.resolve()), str(batch_size)]
            codes = [process.wait(LIMIT) for process in lab.run(command)]
            if any(codes):
                raise RuntimeError(f"the ranks of {strategy} ended with {codes}")
    return paths


# A picture

LEFT, WIDTH, ROW, GAP = 150, 760, 20, 12
GREY = "#6b7280"
COLOURS = {
    "forward": "#9cc3e6",
    "backward": "#1f6fb4",
    "step": "#7a5ba8",
    "merge": "#d6a11d",
    "wait": "#c8502d",
    "headers": "#c9ccd1",
    "transfer": "#3a8a4d",
    "encode": "#b7dcbf",
    "decode": "#b7dcbf",
}
"""In the order in which they are drawn, the inner over the outer."""
LEGEND = {
    **{name: name for name in COLOURS},
    "wait": "wait (exposed)",
    "headers": "headers (skew)",
    "encode": "encode, decode",
}
FINEST = 0.4  # pixels: what is narrower is not drawn


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = GREY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    shape = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"'
    return f"{shape}><title>{title}</title></rect>" if title else f"{shape}/>"


def draw(traces: dict[str, list[dict[str, Any]]]) -> str:
    """The events of each trace, as a picture."""
    whole = max(event["ts"] + event["dur"] for events in traces.values() for event in events)
    tick = next(t for t in (50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 20000) if whole / 1e3 / t <= 12)
    scale, y = WIDTH / whole, 58.0
    parts = []
    x = float(LEFT)
    for name, words in LEGEND.items():
        if name != "decode":
            parts += [box(x, 14, 12, 12, COLOURS[name]), text(x + 16, 24, words)]
            x += 32 + 6.2 * len(words)
    for title, events in traces.items():
        parts.append(text(LEFT, y - 8, title, colour="#111827"))
        top = y
        for rank in sorted({event["pid"] for event in events}):
            for row, thread in enumerate(("training", "communication")):
                parts.append(text(LEFT - 10, y + 14, f"rank {rank}, {thread}", "end"))
                parts.append(box(LEFT, y, WIDTH, ROW, "#f5f6f7"))
                for name, colour in COLOURS.items():
                    for event in events:
                        width = event["dur"] * scale
                        if (event["pid"], event["tid"], event["name"]) == (rank, row, name) and width >= FINEST:
                            message = event["args"].get("message")
                            what = f"{name}{f', {message}' if message else ''}: {event['dur'] / 1e3:.1f} ms"
                            edge = 0.3 if width > 2 else 0.0  # so that neighbours are told apart
                            parts.append(box(LEFT + event["ts"] * scale, y, width - edge, ROW, colour, what))
                y += ROW + 2
            y += GAP - 2
        for number in range(int(whole / 1e3 / tick) + 1):
            x = LEFT + number * tick * 1e3 * scale
            parts.append(
                f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y - GAP + 4}" stroke="#d1d5db" stroke-width="0.6"/>'
            )
            parts.append(text(x, y + 4, f"{number * tick}", "middle"))
        parts.append(text(LEFT + WIDTH + 8, y + 4, "ms"))
        y += 42
    view = f'viewBox="0 0 {LEFT + WIDTH + 40} {y - 24:.0f}" font-family="sans-serif" font-size="12"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {view}>\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def events_of(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=200.0, help="of each rank's link, in Mbit/s (200)")
    parser.add_argument("--batch-size", type=int, default=16, help="of a rank (16)")
    parser.add_argument("--folder", type=Path, help="where the traces stay; they do not by default")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="what is drawn (docs/trace.svg)")
    parser.add_argument("--draw", type=Path, nargs="+", metavar="TRACE", help="draw these instead of running anything")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        strategy, path, batch_size = options.rank
        return train(strategy, path, int(batch_size))
    if options.draw:
        traces = {path.stem: events_of(path) for path in options.draw}
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.folder or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            paths = run(folder, options.rate, options.batch_size)
            traces = {f"{p.stem}, ResNet-18, k = {PERIOD}, {options.rate:g} Mbit/s": events_of(p) for p in paths}
    options.picture.write_text(draw(traces))
    print(options.picture)


if __name__ == "__main__":
    main()
