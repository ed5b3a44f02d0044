"""The helper for multi-rank tests, tested: what it returns, and that it sees everything that goes wrong."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from support import pool
from support.faults import not_in_shared_memory
from support.ranks import RankDied, RankFailed, RankTimeout, free_port, run_ranks, run_ranks_raw

pytestmark = pytest.mark.timeout(120)
FOREVER = 3600


def gathered(rank, world_size, tensor):
    total = tensor * (rank + 1)
    dist.all_reduce(total)
    return rank, world_size, total


def pid(rank, world_size):
    return os.getpid()


def draws(rank, world_size):
    return random.random(), np.random.rand(), torch.rand(()).item(), torch.get_num_threads(), torch.get_default_dtype()


def raises_on(rank, world_size, bad):
    if rank == bad:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()


def hangs_on(rank, world_size, bad):
    if rank == bad:
        time.sleep(FOREVER)
    return rank


def exits_on(rank, world_size, bad, code):
    if rank == bad:
        os._exit(code)
    return rank


def killed_on(rank, world_size, bad):
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER)


def leaves_thread(rank, world_size):
    threading.Thread(target=time.sleep, args=(FOREVER,), name="forgotten", daemon=True).start()
    return rank


def leaves_ending_thread(rank, world_size):
    threading.Thread(target=time.sleep, args=(0.05,)).start()


def leaves_group(rank, world_size):
    dist.new_group([0, 1])


def leaves_process(rank, world_size):
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"]).pid


def returns_unpicklable(rank, world_size):
    return lambda: None


def fails_to_connect(rank, world_size):
    if rank == 0:
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    else:
        dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=False)


def changes_surroundings(rank, world_size, directory):
    os.environ["LEAKED"] = "yes"
    os.environ.pop("RANK")
    os.chdir(directory)
    torch.set_default_dtype(torch.float64)


def surroundings(rank, world_size):
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LEAKED", "FROM_TEST"
    return [os.environ.get(name) for name in names], os.getcwd()


def makes_worlds(rank, world_size, ports):
    """Each at a port of its own: rank 1 would find the store of the last one, where rank 0 has yet to close it."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    assert TorchElasticEnvironment.detect()
    assert not dist.is_initialized()
    totals = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("gloo")
        totals.append(gathered(rank, world_size, torch.ones(()))[2].item())
        dist.barrier()
        dist.destroy_process_group()
    return totals


def gone(pid, patience=30.0):
    """Whether a process that nobody waits for ends: a zombie counts, since not every container reaps its orphans."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_come_in_rank_order_and_by_value(n):
    total = torch.arange(3.0) * sum(range(1, n + 1))
    for rank, (its_rank, its_size, its_total) in enumerate(run_ranks(gathered, n, torch.arange(3.0))):
        assert (its_rank, its_size) == (rank, n)
        assert torch.equal(its_total, total)
        assert not its_total.is_shared()


def test_the_same_workers_serve_the_next_call():
    assert run_ranks(pid, 2) == run_ranks(pid, 2)


def test_every_rank_starts_from_the_same_state():
    before = run_ranks(draws, 2)
    assert before[0] == before[1]
    assert before[0][3:] == (1, torch.float32)
    assert run_ranks(draws, 2) == before


def test_surroundings_come_from_the_test_and_do_not_leak(tmp_path, monkeypatch):
    run_ranks(changes_surroundings, 2, str(tmp_path))
    monkeypatch.setenv("FROM_TEST", "1")
    here = os.getcwd()
    assert run_ranks(surroundings, 2) == [([str(r), str(r), "2", None, "1"], here) for r in range(2)]
    monkeypatch.chdir(tmp_path)
    assert run_ranks(surroundings, 1)[0][1] == str(tmp_path)
    assert run_ranks(draws, 1)[0][4] == torch.float32


def test_without_a_world_group_the_function_can_make_its_own():
    assert run_ranks(makes_worlds, 2, [free_port(), free_port()], init=False) == [[3.0, 3.0], [3.0, 3.0]]


def test_an_exception_is_reported_with_its_traceback_and_the_workers_stay():
    pids = run_ranks(pid, 2)
    with pytest.raises(RankFailed, match="ValueError: rank 1 does not like this") as caught:
        run_ranks(raises_on, 2, 1)
    assert "in raises_on" in caught.value.tracebacks[1]
    assert set(caught.value.tracebacks) == {0, 1}, "rank 0 lost its peer in the barrier"
    assert run_ranks(pid, 2) == pids


def test_a_failed_start_of_the_world_does_not_reach_the_next_call():
    pids = run_ranks(pid, 2)
    assert run_ranks(fails_to_connect, 2, init=False, expect={0: "error"}) == [None, None]
    assert pids[0] not in run_ranks(pid, 2)


def test_a_hang_is_killed_and_shown_with_its_stack():
    pids = run_ranks(pid, 2)
    with pytest.raises(RankTimeout, match="in hangs_on") as caught:
        run_ranks(hangs_on, 2, 1, timeout=2)
    assert caught.value.ranks == [1]
    assert [o.status for o in caught.value.outcomes] == ["ok", "timeout"]
    assert not psutil.pid_exists(pids[1])
    assert run_ranks(gathered, 2, torch.ones(()))[1][2] == 3, "the killed worker is replaced"


def test_a_death_is_reported_with_its_exit_code():
    with pytest.raises(RankDied, match=r"rank 0 died \(exit code 7\)") as caught:
        run_ranks(exits_on, 2, 0, 7)
    assert caught.value.ranks == [0]
    assert run_ranks(exits_on, 2, 0, 7, expect={0: "died"}) == [None, 1]


def test_the_other_ranks_do_not_wait_for_the_time_limit_of_a_dead_one():
    outcomes = run_ranks_raw(killed_on, 2, 0, timeout=FOREVER, grace=0.5)  # or this suite would take an hour
    assert [o.status for o in outcomes] == ["died", "timeout"]
    assert outcomes[0].exitcode == -signal.SIGKILL
    assert "in killed_on" in outcomes[1].traceback


def test_an_expected_failure_that_does_not_come_is_a_failure():
    with pytest.raises(RankFailed, match="rank 0 ended well"):
        run_ranks(exits_on, 1, 1, 7, expect={0: "died"})


def test_a_left_over_thread_is_reported():
    with pytest.raises(RankFailed, match="left over after the function: thread 'forgotten'"):
        run_ranks(leaves_thread, 1)
    assert run_ranks(leaves_thread, 1, leftovers_ok=True) == [0]
    run_ranks(leaves_ending_thread, 1)


def test_a_left_over_group_is_reported():
    with pytest.raises(RankFailed, match=r"left over after the function: process group .* of ranks \[0, 1\]"):
        run_ranks(leaves_group, 2)


def test_a_left_over_process_is_reported_and_killed():
    with pytest.raises(RankFailed, match=r"left over after the function: process .*time.sleep"):
        run_ranks(leaves_process, 1)
    (child,) = run_ranks(leaves_process, 1, leftovers_ok=True)
    assert gone(child)


def test_a_result_or_a_function_that_cannot_travel_is_an_error():
    with pytest.raises(RankFailed, match="returns_unpicklable"):
        run_ranks(returns_unpicklable, 1)
    with pytest.raises(Exception, match="pickle"):
        run_ranks(lambda rank, world_size: None, 1)


def test_workers_die_with_the_process_that_started_them():
    script = "from support import pool; print(*[w.pid for w in pool.take(1)], flush=True); import os; os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,  # read to its end: the worker holds it open as long as it lives
        text=True,
        check=True,
        timeout=120,
    )
    assert gone(int(done.stdout))


def test_a_closed_pool_leaves_no_process_and_opens_again():
    run_ranks(pid, 1)
    assert pool.running()
    pool.close()
    assert pool.running() == []
    assert len(run_ranks(pid, 1)) == 1


def test_what_a_process_has_left_in_shared_memory_is_told_from_what_others_have():
    left = Path(f"/dev/shm/torch_{os.getpid()}_{os.getppid()}_1")
    left.touch()
    try:
        assert not not_in_shared_memory([os.getpid()])
        assert not_in_shared_memory([os.getppid()])
    finally:
        left.unlink()
    assert not_in_shared_memory([os.getpid()])
