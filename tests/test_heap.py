"""What becomes of memory that has been freed, in processes of their own: it depends on all that has been freed before."""

import os
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
blocks = [torch.ones(2**18) for _ in range(100)]  # of a MiB
taken = resident() - before
del blocks
print(taken, resident() - before)
"""
THRESHOLDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
@pytest.mark.parametrize(
    ("how", "environment", "kept"),
    [("kept", {}, True), ("kept", {"MALLOC_TRIM_THRESHOLD_": "131072"}, False)],
)
def test_freed_memory_stays_with_the_process_unless_the_environment_has_it_otherwise(how, environment, kept):
    ours = {name: value for name, value in os.environ.items() if name not in THRESHOLDS}
    command = [sys.executable, "-c", FREED, how]
    found = subprocess.run(command, env={**ours, **environment}, capture_output=True, text=True, timeout=120, check=True)
    taken, left = map(float, found.stdout.split())
    assert 90 < taken < 110
    assert left > 90 if kept else left < 10
