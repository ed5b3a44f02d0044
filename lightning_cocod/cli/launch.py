"""Starting the ranks of a job: fresh processes, so that nothing of one job reaches the next."""

import signal
import tempfile
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_cocod.cli.failure import first_failure
from lightning_cocod.cli.job import Config, fresh_rank
from lightning_cocod.cli.quiet import quiet_launcher
from lightning_cocod.workloads import InputError


class RankError(Exception):
    """A rank failed; the message is its traceback or what ended it."""


def launch(config: Config, ranks: int) -> dict[str, Any]:
    """Train `config` on `ranks` new processes of this machine and wait for them; none is left in any case.

    Returns:
        Rank 0's summary.

    Raises:
        InputError: a rank found the user's input wrong.
        RankError: a rank failed otherwise.
        torch.distributed.elastic.multiprocessing.SignalException: this process was told to stop.
    """
    quiet_launcher()
    print(f"starting {ranks} rank{'s' if ranks > 1 else ''} ...", flush=True)
    with tempfile.TemporaryDirectory() as failures:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="spawn",  # a fork would inherit this process's threads' locks
            logs_specs=DefaultLogsSpecs(log_dir=failures),  # by default it leaves a folder in /tmp
        )
        try:
            summaries: dict[int, dict[str, Any]] = elastic_launch(settings, fresh_rank)(config, failures)
        except ChildFailedError as error:
            rank, ended = error.get_first_failure()
            failure = first_failure(Path(failures), rank)
            if failure is None:
                raise RankError(f"rank {rank} was ended by {_name(ended.exitcode)}, without an exception") from None
            if failure.expected:
                raise InputError(failure.text) from None
            raise RankError(f"rank {failure.rank} failed first:\n{failure.text.rstrip()}") from None
    return summaries[0]


def _name(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
