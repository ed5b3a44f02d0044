"""What becomes of memory that has been freed, in processes of their own: it depends on all that has been freed before."""

import platform
import subprocess
import sys

import pytest

FREED = """
import sys
import torch
from lightning_cocod.algorithms.heap import keep_freed_memory

def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "kept":
    keep_freed_memory()
torch.ones(2**18)  # what a first use takes
before = resident()
blocks = [torch.ones(2**18) for _ in range(48)]  # of a MiB
taken = resident() - before
del blocks
print(taken, resident() - before)
"""


def freed(how):
    found = subprocess.run([sys.executable, "-c", FREED, how], capture_output=True, text=True, timeout=120, check=True)
    return map(float, found.stdout.split())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_up_to_62_mib_of_freed_memory_stay_with_the_process_and_do_not_otherwise(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    taken, left = freed("kept")
    assert 40 < taken < 60
    assert left > 40
    taken, left = freed("given back")
    assert 40 < taken < 60
    assert left < 10
