"""What threads beside training compute takes one CPU, and leaves training its own.

In processes of their own: OpenMP reads its variables once, and the suite runs on one thread.
"""

import os
import subprocess
import sys

import pytest
from support.ranks import run_ranks

from lightning_cocod.comm import Communicator, Subject

LIMIT = 120.0
TEAM = 3

SETTING = """
import os, threading, torch
from lightning_cocod.comm.one_cpu import compute_on_one_cpu

torch.set_num_threads({team})
x = torch.randn(1 << 21)
x.mul_(2.0)

def workers():  # of OpenMP's
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def in_a_thread(*before):
    said = []
    def work():
        for thing in before:
            thing()
        already = workers()
        x.mul_(2.0), torch.dot(x, x), torch.linalg.vector_norm(x)
        said.append((torch.get_num_threads(), workers() - already))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return said[0]
"""


def run(script):
    env = {**os.environ, "OMP_NUM_THREADS": str(TEAM), "MKL_NUM_THREADS": str(TEAM)}
    program = [sys.executable, "-c", SETTING.format(team=TEAM) + script]
    return subprocess.run(program, env=env, timeout=LIMIT, capture_output=True, text=True, check=True)


def test_a_thread_that_says_so_has_no_team_and_the_others_keep_theirs():
    script = "print(in_a_thread(compute_on_one_cpu), in_a_thread(), torch.get_num_threads())"
    assert run(script).stdout.strip() == f"(1, 0) ({TEAM}, {TEAM - 1}) {TEAM}"  # the second is the control


def test_threads_that_say_so_at_the_same_time_leave_the_number_as_it_was():
    script = """
for _ in range(50):
    threads = [threading.Thread(target=compute_on_one_cpu) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(in_a_thread()[0], torch.get_num_threads())
"""
    assert run(script).stdout.split() == [str(TEAM)] * 2


def numbers(rank, n):
    """Of threads that the communication thread of all ranks, and that of a node, compute with."""
    import torch

    torch.set_num_threads(2)
    try:
        comm = Communicator()
        comm.start()
        said = []
        for group in (comm, comm.within([list(range(n))])):
            group.do(lambda: said.append(torch.get_num_threads()), Subject("test", "a look", 0)).wait()
        comm.close()
        return said, torch.get_num_threads()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("n", [2])
def test_the_communication_threads_compute_on_one(n):
    assert run_ranks(numbers, n, timeout=LIMIT) == [([1, 1], 2)] * n
