"""Settings of the whole suite: what tests can import, one thread, no network, and no process left at the end."""

import os
import sys
from pathlib import Path

import pytest
import torch

# pytest does this by itself in its default import mode; said here so that `support` is found in every mode.
if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, here)

from support import pool

os.environ["WANDB_MODE"] = "offline"
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_worker_outlives_the_session():
    yield
    pool.close()
    assert pool.running() == []
