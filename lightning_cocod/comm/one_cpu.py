"""A thread beside training computes on one CPU.

OpenMP gives every new thread a team of its own, with as many workers as there are CPUs or as ``OMP_NUM_THREADS`` says,
whatever ``torch.set_num_threads`` has been told in the training thread. They would take training's CPUs, and spin on them
while they wait for one another.
"""

from __future__ import annotations

import threading

import torch

_one_at_a_time = threading.Lock()


def compute_on_one_cpu() -> None:
    """Said by the thread itself, before it computes anything. All others have what they had."""
    with _one_at_a_time:
        others = torch.get_num_threads()
        torch.set_num_threads(1)
        # torch has noted 1 for all threads that are still to come as well, and nobody but another thread can take that back.
        another = threading.Thread(target=torch.set_num_threads, args=(others,), name="number of threads")
        another.start()
        another.join()
