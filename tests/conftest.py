"""Settings of the whole suite: what tests can import, one thread, no network, and no process left at the end."""

import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

# pytest does this by itself in its default import mode; said here so that `support` is found in every mode.
if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, here)

from support import pool

os.environ["WANDB_MODE"] = "offline"
# torch's store looks the name of every connection's other end up (::ffff:127.0.0.1, which no hosts file has), and answers
# nobody meanwhile. A name server that now and then stays silent would cost 5 s each time, longer than tests' deadlines.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs ignore it, and so would the ranks of tests
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
hypothesis.settings.register_profile("no_clock", deadline=None)
hypothesis.settings.load_profile("no_clock")


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _no_worker_outlives_the_session():
    yield
    pool.close()
    assert pool.running() == []
