"""A four-rank job under random faults, restarted by torchrun from its last checkpoint.

    python recipes/soak.py --minutes 20 --every 60 --seed 0

Storms, in which faults come at random, alternate with calms, in which none does, so that both see the same machine. A fault
is one of

* kill: a rank is killed (-9);
* stop: a rank is suspended for good; its peers notice when its heartbeat stays away for ``timeout`` (4 s);
* outage: a rank is suspended for 3 s, less than the timeout, and comes back, as after an outage of its link.

Reported are the faults survived, the steps that had to be done again, the seconds that a fault of each kind costs, and the
throughput kept: steps per second in storms over those in calms. A step that is done again must give the same weights as
before, bit for bit; the weights are compared at every step. Each step computes for 20 ms and sleeps while doing so, so that
four ranks fit on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

RANKS, PERIOD, CHECKPOINT_EVERY, STEP, TIMEOUT, OUTAGE = 4, 4, 50, 0.02, 4.0, 3.0
KINDS = ("kill", "stop", "outage")
PATIENCE = 240.0  # seconds after which a job that makes no progress has not survived


# The job


def train(folder: Path) -> None:
    """One rank, as torchrun starts it, again after every fault."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_cocod import CoCoDStrategy

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(32, 64),
                torch.nn.BatchNorm1d(64),
                torch.nn.ReLU(),
                torch.nn.Dropout(0.1),
                torch.nn.Linear(64, 1),
            )

        def training_step(self, batch, _):
            time.sleep(STEP)
            x, y = batch
            return torch.nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    class Progress(L.Callback):
        """A line for every step: which, and a digest of this rank's weights."""

        def on_train_start(self, trainer, module):
            rank = trainer.global_rank
            self.lines = (folder / f"steps-{rank}.txt").open("a", buffering=1)
            (folder / f"pid-{rank}").write_text(str(os.getpid()))

        def on_train_batch_end(self, trainer, module, *_):
            flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
            digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
            self.lines.write(f"{trainer.global_step} {digest}\n")
            if (folder / "enough").exists():
                trainer.should_stop = True

    torch.set_num_threads(1)
    L.seed_everything(int(os.environ["RANK"]), verbose=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 32, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    checkpoint = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=CHECKPOINT_EVERY, save_last=True, save_top_k=0)
    trainer = L.Trainer(
        strategy=CoCoDStrategy(period=PERIOD, timeout=TIMEOUT),
        accelerator="cpu",
        devices=RANKS,
        max_epochs=-1,
        logger=False,
        callbacks=[Progress(), checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=16, shuffle=True), ckpt_path="last")


# The weather


class Job:
    """The job as seen from outside: its progress, and its ranks to be hurt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.furthest = 0
        self._read = 0
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["--max-restarts=100000", __file__, "--job", str(folder)]
        log = (folder / "log.txt").open("w")
        self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def reached(self) -> int:
        """The furthest step of rank 0 so far."""
        path = self.folder / "steps-0.txt"
        if path.exists():
            with path.open() as file:
                file.seek(self._read)
                lines = file.read().rpartition("\n")[0]  # the last one may still be written
            self._read += len(lines) + bool(lines)
            self.furthest = max([self.furthest, *(int(line.split()[0]) for line in lines.splitlines())])
        return self.furthest

    def pids(self) -> list[int]:
        """Of the ranks that train, or trained last."""
        return [int((self.folder / f"pid-{rank}").read_text() or 0) for rank in range(RANKS)]

    def wait(self, done: Callable[[], bool]) -> None:
        """Until it is so."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            if self.process.poll() is not None:
                raise SystemExit(f"the job ended with exit code {self.process.returncode}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise SystemExit(f"no progress beyond step {self.furthest} for {PATIENCE:g} s:\n{self.log()}")
            time.sleep(0.1)

    def wait_beyond(self, step: int) -> None:
        """Until the job has got further than that."""
        self.wait(lambda: self.reached() > step)

    def survive(self, kind: str, rank: int) -> float:
        """Hurt a rank; seconds until the job does steps that it has not done before."""
        before, begun = self.pids(), time.monotonic()
        os.kill(before[rank], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "outage":
            time.sleep(OUTAGE)
            os.kill(before[rank], signal.SIGCONT)
            self.wait_beyond(self.reached() + 2 * PERIOD)
        else:  # the others go on to the end of their round before they notice
            self.wait(lambda: not set(self.pids()) & set(before))
            self.wait_beyond(self.reached())
        return time.monotonic() - begun

    def end(self) -> int:
        """Let it stop by itself; its exit code. Nothing of it may be left."""
        (self.folder / "enough").touch()
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the job did not end:\n{self.log()}") from None
        if left := self.left():
            raise SystemExit(f"processes {left} of the job are left after its end")
        return code

    def left(self) -> list[int]:
        """Processes of the job that live."""
        mine = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):  # it ended meanwhile, or is somebody else's
                    mine += [int(entry.name)] if str(self.folder) in (entry / "cmdline").read_text() else []
        return mine

    def kill(self) -> None:
        """Whatever is left of it."""
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log(self) -> str:
        """The end of what the job has printed."""
        return (self.folder / "log.txt").read_text()[-3000:]

    def steps(self, rank: int) -> list[tuple[int, str]]:
        """Every step of a rank, in the order in which they were done, and a digest of its weights after it."""
        lines = (self.folder / f"steps-{rank}.txt").read_text().splitlines()
        return [(int(step), digest) for step, digest in (line.split() for line in lines if line.count(" ") == 1)]


def soak(job: Job, minutes: float, every: float, seed: int) -> dict[str, Any]:
    """Storms of four times ``every`` seconds, calms of one, until the time is over."""
    choose = random.Random(seed)
    costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    storm, calm = [0.0, 0], [0.0, 0]
    job.wait_beyond(2 * CHECKPOINT_EVERY)
    began = time.monotonic()
    while time.monotonic() - began < 60 * minutes:
        at, step = time.monotonic(), job.reached()
        while time.monotonic() - at < 4 * every:
            time.sleep(choose.expovariate(1 / every))
            kind, rank, reached = choose.choice(KINDS), choose.randrange(RANKS), job.reached()
            costs[kind].append(job.survive(kind, rank))
            now = time.monotonic() - began
            print(f"{now:6.0f} s  {kind} of rank {rank} at step {reached}: {costs[kind][-1]:.1f} s", flush=True)
        storm = [storm[0] + time.monotonic() - at, storm[1] + job.reached() - step]
        at, step = time.monotonic(), job.reached()
        time.sleep(every)
        calm = [calm[0] + time.monotonic() - at, calm[1] + job.reached() - step]
    return {"costs": costs, "storm": storm, "calm": calm, "exit code": job.end(), **compare(job)}


def compare(job: Job) -> dict[str, int]:
    """Steps of rank 0 that were done again; of all ranks', how many, and how many of them gave other weights."""
    again, different = [0] * RANKS, 0
    for rank in range(RANKS):
        seen: dict[int, str] = {}
        for step, digest in job.steps(rank):
            again[rank] += step in seen
            different += seen.setdefault(step, digest) != digest
    return {"again": again[0], "compared": sum(again), "different": different}


def report(result: dict[str, Any]) -> bool:
    """Print the figures. Returns whether all is well."""
    costs, storm, calm = result["costs"], result["storm"], result["calm"]
    faults = sum(map(len, costs.values()))
    quick, slow = calm[1] / calm[0], storm[1] / storm[0]
    print(f"\n{faults} faults survived in {storm[0] / 60:.1f} min of storm; {calm[0] / 60:.1f} min of calm between")
    for kind in KINDS:
        if costs[kind]:
            print(f"  {kind:7s} {len(costs[kind]):3d}, median cost {statistics.median(costs[kind]):.1f} s")
    print(f"throughput kept: {100 * slow / quick:.1f} % ({slow:.1f} against {quick:.1f} steps/s)")
    print(f"work lost: {result['again']} steps done again, {100 * result['again'] / max(1, storm[1]):.1f} % of the storm's")
    print(f"weights after steps done again, all ranks: {result['compared']} compared, {result['different']} differ")
    print(f"the job ended with exit code {result['exit code']} and left no process")
    return result["exit code"] == 0 and result["different"] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="how long")
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds from one recovery to the next fault")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        return train(options.job)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        job = Job(Path(folder))
        try:
            result = soak(job, options.minutes, options.every, options.seed)
        finally:
            job.kill()
    if options.json:
        options.json.write_text(json.dumps(result))
    sys.exit(0 if report(result) else 1)


if __name__ == "__main__":
    main()
