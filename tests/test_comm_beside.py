"""What threads beside training compute takes one CPU, and leaves training its own."""

import os
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from test_comm_thread import eventually

from lightning_cocod.algorithms import ADPSGD, APSGD
from lightning_cocod.comm import Communicator, Subject, gossip, shard_service
from lightning_cocod.comm.beside import beside_training

LIMIT = 120.0
TEAM = 3

IN_A_PROCESS = f"""
import os, threading, torch
from lightning_cocod.comm.beside import beside_training

torch.set_num_threads({TEAM})
x = torch.randn(1 << 21)

def compute():
    there = set(os.listdir("/proc/self/task"))
    x.mul_(2.0), torch.dot(x, x), torch.linalg.vector_norm(x)
    said.append((torch.get_num_threads(), len(set(os.listdir("/proc/self/task")) - there)))

said = []
compute()
beside_training(compute, "beside").join()
ordinary = threading.Thread(target=compute)
ordinary.start()
ordinary.join()
print(said, torch.get_num_threads())
"""


def test_a_thread_beside_training_has_no_team_and_the_others_have_theirs():
    # In a process of its own: OpenMP reads its variables once, and the suite has it on one thread.
    env = {**os.environ, "OMP_NUM_THREADS": str(TEAM), "MKL_NUM_THREADS": str(TEAM)}
    program = [sys.executable, "-c", IN_A_PROCESS]
    done = subprocess.run(program, env=env, timeout=LIMIT, capture_output=True, text=True, check=True)
    team = TEAM, TEAM - 1  # OpenMP's workers are threads as well
    assert done.stdout.strip() == f"{[team, (1, 0), team]} {TEAM}"


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_many_of_them_leave_the_number_as_it_was(two_threads):
    said = []

    def work():
        said.append(torch.get_num_threads())

    for thread in [beside_training(work, f"beside {number}") for number in range(50)]:
        thread.join()
    later = threading.Thread(target=work)
    later.start()
    later.join()
    assert said == [1] * 50 + [2]
    assert torch.get_num_threads() == 2


def numbers(rank, n):
    """Of threads that every kind of thread beside training computes with."""
    torch.set_num_threads(2)
    said = {}

    def noting(what, finite):
        def noted(*args):
            if threading.current_thread() is not threading.main_thread():
                said.setdefault(what, set()).add(torch.get_num_threads())
            return finite(*args)

        return noted

    try:
        comm = Communicator()
        comm.start()
        for what, group in {"all": comm, "node": comm.within([list(range(n))])}.items():
            group.do(noting(what, lambda: None), Subject("test", "a look", 0)).wait()
        comm.close()
        for algorithm, module in ((ADPSGD, gossip), (APSGD, shard_service)):
            model = torch.nn.Linear(4, 3)
            with mock.patch.object(module, "finite", noting(algorithm.name, module.finite)):
                a = algorithm(model, torch.optim.SGD(model.parameters(), lr=0.01))
                a.start()
                for _ in range(5):
                    model(torch.ones(2, 4)).sum().backward()
                    a.step()
                assert eventually(lambda name=algorithm.name: name in said)
                dist.barrier()
                a.finish()
                a.close()
        return said, torch.get_num_threads()
    finally:
        torch.set_num_threads(1)


def test_the_threads_of_messages_of_gossip_and_of_owners_are_such():
    kinds = {"all": {1}, "node": {1}, ADPSGD.name: {1}, APSGD.name: {1}}
    assert run_ranks(numbers, 2, timeout=LIMIT) == [(kinds, 2)] * 2
