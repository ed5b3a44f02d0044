"""Ranks as processes of this machine, forked from one that has imported everything: a job begins within a second."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_processes = multiprocessing.get_context("forkserver")
FOREIGN = ("SLURM_", "TORCHELASTIC_")  # of a launcher that has started this program and not its ranks


def run(
    ranks: int,
    target: Callable[[Any, Callable[[Any], None]], None],
    job: Any,
    hear: Callable[[Any], None],
    *,
    log: Path,
    limit: float,
    imports: Sequence[str],
) -> None:
    """Run ``target(job, say)`` on every rank, with one thread each; what a rank says is given to ``hear`` here.

    Args:
        ranks: how many.
        target: a function of a module, with a job that can be pickled.
        hear: called in this process, while the ranks run.
        log: file for what they print.
        limit: seconds after which the job has failed.
        imports: modules that the first job imports for all. They must be installed or on PYTHONPATH: one that is only
            on this process's path is imported by every rank.

    Raises:
        RuntimeError: a rank has failed, or the limit is over. None is left running.
    """
    _processes.set_forkserver_preload(list(imports))
    log.unlink(missing_ok=True)
    ears, mouth = _processes.Pipe(duplex=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    told = [({**place, "LOCAL_RANK": str(rank)}, log, target, job, mouth) for rank in range(ranks)]
    # As daemons they end with this process, if it ends by itself.
    started = [_processes.Process(target=_rank, args=each, daemon=True) for each in told]
    deadline = time.monotonic() + limit
    try:
        for process in started:
            process.start()
        mouth.close()
        while True:
            running = [process.sentinel for process in started if process.exitcode is None]
            if not wait([ears, *running], max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"was not done within {limit:g} s (--limit)")
            if codes := [process.exitcode for process in started if process.exitcode]:
                raise RuntimeError(f"failed with exit code {codes[0]}: see {log}")
            if ears.poll():
                try:
                    hear(ears.recv())
                except EOFError:  # all have ended, or are about to
                    break
        for process in started:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"failed with exit code {process.exitcode}: see {log}")
    finally:
        for process in started:
            if process.pid is not None:
                process.kill()
                process.join()


def _rank(place: dict[str, str], log: Path, target: Callable[..., None], job: Any, mouth: Any) -> None:
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ.update(place, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    target(job, mouth.send)
