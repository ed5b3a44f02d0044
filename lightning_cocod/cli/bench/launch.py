"""Starting the ranks on this machine, where no launcher has."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

from lightning_cocod.cli.bench.host import free_port


def launch(command: Sequence[str], ranks: int) -> int:
    """Run the command as every rank and wait for all. When one fails, the others are ended.

    Returns:
        The exit code of the rank that failed first, or 0.
    """
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **there, "WORLD_SIZE": str(ranks)}
    running = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(ranks)]
    try:
        while any(process.poll() is None for process in running):
            if failed := next((process.returncode for process in running if process.returncode), 0):
                return failed
            time.sleep(0.1)
        return next((process.returncode for process in running if process.returncode), 0)
    finally:
        for process in running:
            process.terminate()  # it ends what it has started
        for process in running:
            process.wait()
