"""One rank of one check: where it runs, what it finds, and the process that does it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


class Skipped(Exception):
    """The check cannot be made here."""


@dataclass(frozen=True)
class Check:
    """A check and what it needs.

    Attributes:
        run: called by every rank; what it finds wrong, and the figures, go to the rank's report.
        ranks: processes.
        cuda: whether it means anything on a GPU only.
        lightning: whether it needs Lightning. A Trainer then makes the process group.
        alone: whether it measures time or memory, and so wants the machine for itself.
        backend: of the process group; by default that with which several ranks can share a device.
        loses: the rank that kills itself on the way. Rank 0 must then end by itself, in failure, and name it.
        asynchronous: whether it is of the algorithms whose ranks are not in step.
        each: whether it takes an algorithm's name, and is a check of its own for each.
        limit: seconds.
    """

    run: Callable[..., None]
    ranks: int = 2
    cuda: bool = False
    lightning: bool = False
    alone: bool = False
    backend: str | None = None
    loses: int | None = None
    asynchronous: bool = False
    each: bool = False
    limit: float = 75.0


CHECKS: dict[str, Check] = {}


def check(**needs: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function, under its name."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        CHECKS[run.__name__] = Check(run, **needs)  # type: ignore[arg-type]
        return run

    return register


@dataclass
class Rank:
    """This process, as a check sees it."""

    device: torch.device
    rank: int
    world: int
    backend: str
    folder: Path
    """The same for all ranks; removed afterwards."""
    failed: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)
    skipped: str = ""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def expect(self, truth: object, what: str) -> None:
        """What must hold. The check goes on in any case, and finds what else does not."""
        if not truth:
            self.failed.append(f"not so: {what}")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """One strategy that raises does not hide the others."""
        try:
            yield
        except (Skipped, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            traceback.print_exc()
            self.failed.append(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's, in host memory."""
        gathered: list[Tensor] = [torch.empty(0)] * self.world
        dist.all_gather_object(gathered, tensor.detach().cpu())
        return gathered

    def same(self, tensor: Tensor) -> bool:
        """Whether all ranks have the same bits."""
        gathered = self.gather(tensor)
        return all(torch.equal(gathered[0], other) for other in gathered)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def main(name: str, device_type: str) -> None:
    """The whole life of a rank's process; its report is a file in the check's folder."""
    threading.Thread(target=_die_with, args=(int(os.environ["GPU_CHECK_PARENT"]),), daemon=True).start()
    name, _, algorithm = name.partition(":")
    check, number = CHECKS[name], int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    enough = device.type == "cuda" and torch.cuda.device_count() >= check.ranks
    backend = "nccl" if enough and check.ranks > 1 else (check.backend or "gloo")
    if device.type == "cpu":
        backend = "gloo"
    here = Rank(device, number, check.ranks, backend, Path(os.environ["GPU_CHECK_FOLDER"]))
    try:
        if not check.lightning:
            dist.init_process_group(backend)
        check.run(here, *([algorithm] if check.each else []))
    except Skipped as reason:
        here.skipped = str(reason)
    except BaseException as error:
        here.failed.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        raise
    finally:
        report = {"failed": here.failed, "figures": here.figures, "skipped": here.skipped}
        (here.folder / f"rank-{number}.json").write_text(json.dumps(report))
    if dist.is_initialized():
        dist.barrier()  # rank 0 keeps the store
        dist.destroy_process_group()
    sys.exit(bool(here.failed))


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)  # the rank is the leader of a group of its own
