"""torchft's LocalSGD, DiLoCo and Streaming DiLoCo: one replica group for each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.optim import Optimizer

from lightning_cocod.cli.bench.contenders.local import by_itself

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job

DELAY = 2  # steps for which a fragment of Streaming DiLoCo is on its way


class _Entered(L.Callback):
    """Trains inside torchft's context manager, which hooks into the optimizer."""

    def __init__(self, make: Callable[[Optimizer], AbstractContextManager[Any]]) -> None:
        self._make = make

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        self._inside = self._make(optimizer)
        self._inside.__enter__()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._inside.__exit__(None, None, None)


def _fit(job: Job, make: Callable[[Any, Optimizer], AbstractContextManager[Any]]) -> None:
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    patience, address, ranks = timedelta(seconds=job.plan.limit), job.own_address, job.seat.ranks
    lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=ranks) if job.seat.rank == 0 else None
    if lighthouse is not None:
        job.store.set("lighthouse", f"http://{address}:{lighthouse.address().rpartition(':')[2]}")
    own = TCPStore(address, 0, is_master=True, wait_for_workers=False)  # of this replica group
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=job.module.load_state_dict,
        state_dict=job.module.state_dict,
        min_replica_size=ranks,
        use_async_quorum=False,
        timeout=patience,
        quorum_timeout=patience,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=own.port,
        lighthouse_addr=job.store.get("lighthouse").decode(),
        replica_id=f"rank {job.seat.rank}",
        hostname=address,
        init_sync=False,  # the seed is the same everywhere
    )
    try:
        job.fit(by_itself(), _Entered(lambda optimizer: make(manager, optimizer)))
        job.store.set(f"{job.seat.rank} has ended", "")
        job.store.wait([f"{rank} has ended" for rank in range(ranks)])
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def local_sgd(job: Job) -> None:
    """A blocking mean of the parameters once a period."""

    def make(manager: Any, optimizer: Optimizer) -> AbstractContextManager[Any]:
        from torchft.local_sgd import LocalSGD

        inside: AbstractContextManager[Any] = LocalSGD(manager, job.module.model, optimizer, sync_every=job.plan.period)
        return inside

    _fit(job, make)


def diloco(job: Job) -> None:
    """A blocking mean of the movement of a period, taken by an outer optimizer."""
    _diloco(job, [job.module.model], delay=0)


def streaming_diloco(job: Job) -> None:
    """The same in two fragments, each on its way while training goes on for two steps."""
    _diloco(job, halves(job.module.model), delay=max(0, min(DELAY, job.plan.period // 2 - 1)))


def _diloco(job: Job, fragments: list[nn.Module], delay: int) -> None:
    def make(manager: Any, optimizer: Optimizer) -> AbstractContextManager[Any]:
        from torchft.local_sgd import DiLoCo

        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
        inside: AbstractContextManager[Any] = DiLoCo(
            manager, fragments, optimizer, outer, sync_every=job.plan.period, fragment_sync_delay=delay
        )
        return inside

    _fit(job, make)


def halves(model: nn.Module) -> list[nn.Module]:
    """The modules that have parameters of their own, in two lists of about as many parameters.

    Raises:
        ValueError: there is one such module only.
    """
    owners = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    sizes = [sum(p.numel() for p in m.parameters(recurse=False)) for m in owners]
    if len(owners) < 2:
        raise ValueError("a model of one module cannot be cut into two fragments")
    cut = min(range(1, len(owners)), key=lambda c: abs(sum(sizes[:c]) - sum(sizes[c:])))
    return [nn.ModuleList(owners[:cut]), nn.ModuleList(owners[cut:])]
