"""How soon all is over after a rank is lost.

    python recipes/losses.py

Two ranks train under each launcher; one is killed (-9), is stopped for good (SIGSTOP, with a ``timeout`` of 4 s), or leaves
without a word and with the exit code 0. Prints the seconds from the loss to the end of each rank and of the launcher, and
the launcher's exit code. Fails if anybody needs more than ten seconds, or if the exit code is 0; under popen rank 0 is the
script itself, and how a script leaves is its own affair.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset

from lightning_cocod import CoCoDStrategy

LAUNCHERS, LIMIT, TIMEOUT, SOON = ("popen", "spawn", "torchrun"), 60.0, 4.0, 10.0
LOSSES = ("killed", "stopped", "leaves")


class Model(L.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layer = torch.nn.Linear(32, 2)

    def on_train_start(self):
        (self.folder / f"pid-{self.global_rank}").write_text(str(os.getpid()))

    def training_step(self, batch, _):
        time.sleep(0.02)
        if (self.folder / f"leave-{self.global_rank}").exists():
            os._exit(0)
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(folder: Path, start_method: str) -> None:
    """Both ranks."""
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = CoCoDStrategy(timeout=TIMEOUT, start_method=start_method)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=-1, **options)
    trainer.fit(Model(folder), torch.utils.data.DataLoader(RandomDataset(32, 6400), batch_size=4))


def lose(launcher: str, rank: int, how: str) -> tuple[dict[str, float], int | None]:
    """Seconds to the ends, and the launcher's exit code."""
    with tempfile.TemporaryDirectory(prefix="losses-") as name:
        folder, command = Path(name), [sys.executable]
        if launcher == "torchrun":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [__file__, name, "popen" if launcher == "torchrun" else launcher]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        files = [folder / f"pid-{r}" for r in range(2)]
        begun = time.monotonic()
        while not all(file.exists() and file.read_text() for file in files):
            if process.poll() is not None or time.monotonic() - begun > LIMIT:
                raise SystemExit(f"{launcher}: the ranks did not begin to train")
            time.sleep(0.1)
        pids = [int(file.read_text()) for file in files]
        time.sleep(1.0)
        lost, ends = time.monotonic(), {}
        if how == "leaves":
            (folder / f"leave-{rank}").touch()
        else:
            os.kill(pids[rank], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        while len(ends) < 3 and time.monotonic() - lost < LIMIT:
            over = {f"rank {r}": not lives(pid) for r, pid in enumerate(pids)} | {"launcher": process.poll() is not None}
            for who in (who for who, is_over in over.items() if is_over and who not in ends):
                ends[who] = time.monotonic() - lost
            time.sleep(0.02)
        for pid in (*pids, process.pid):
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        return ends, process.poll()


def lives(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def main() -> None:
    if len(sys.argv) > 1:
        return train(Path(sys.argv[1]), sys.argv[2])
    well = True
    for launcher in LAUNCHERS:
        for rank in range(2):
            for how in LOSSES:
                ends, code = lose(launcher, rank, how)
                figures = ", ".join(f"{who} {after:.1f} s" for who, after in sorted(ends.items()))
                print(f"{launcher:9s} rank {rank} {how:8s} {figures}; exit code {code}", flush=True)
                excused = (launcher, rank, how) == ("popen", 0, "leaves")
                well &= len(ends) == 3 and max(ends.values()) <= SOON and (code != 0 or excused)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
