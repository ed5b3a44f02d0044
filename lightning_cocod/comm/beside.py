"""Threads beside training compute on one CPU.

Training computes with a team of OpenMP's, and OpenMP would give each thread beside it one more team: as large, or, where the
first to compute is MKL, as ``OMP_NUM_THREADS`` or the number of CPUs says. They would take training's CPUs, and spin on them
while they wait for one another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def beside_training(work: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that has begun with this work, and computes on one CPU. All others have what they had."""
    team = torch.get_num_threads()  # asked, a thread takes the number that torch has noted, once and for all
    ready = threading.Event()

    def alone() -> None:
        torch.get_num_threads()  # or else it would, with the first thing that it computes
        torch.set_num_threads(1)
        ready.set()
        work()

    thread = threading.Thread(target=alone, name=name, daemon=True)
    thread.start()
    ready.wait()
    torch.set_num_threads(team)  # torch has noted 1, for all threads that are still to come
    return thread
