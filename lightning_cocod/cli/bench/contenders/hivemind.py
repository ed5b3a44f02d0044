"""hivemind's optimizer with local updates: a mean of the parameters in the background, about once a period.

Its peers decide by the samples that all have trained on when an epoch, here a period, is over, and look for each other
first. It moves data through processes of its own, whose memory and CPU time are not this process's.
"""

from __future__ import annotations

import json
import multiprocessing
from typing import TYPE_CHECKING, Any

import lightning as L

from lightning_cocod.cli.bench.contenders.local import by_itself

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job

MATCHMAKING = 2.0  # seconds that peers wait for each other before an average


class _Replaced(L.Callback):
    """Trains with hivemind's optimizer around the module's own."""

    def __init__(self, job: Job, dht: Any) -> None:
        self._job, self._dht = job, dht

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from hivemind import Optimizer

        plan, ranks = self._job.plan, self._job.seat.ranks
        (own,) = trainer.optimizers
        self._optimizer = Optimizer(
            dht=self._dht,
            run_id="bench",
            optimizer=own,
            batch_size_per_step=plan.batch_size,
            target_batch_size=plan.batch_size * plan.period * ranks,
            use_local_updates=True,
            matchmaking_time=MATCHMAKING,
            averaging_timeout=plan.limit,
        )
        trainer.strategy.optimizers = [self._optimizer]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._optimizer.shutdown()


def hivemind(job: Job) -> None:
    """Rank 0 is whom the others ask for the way."""
    from hivemind import DHT

    multiprocessing.set_start_method("fork", force=True)  # as it needs; a process of the benchmark has another by default
    here = [f"/ip4/{job.own_address}/tcp/0"]
    first = job.seat.rank == 0
    peers = None if first else json.loads(job.store.get("peers"))
    dht = DHT(host_maddrs=here, announce_maddrs=None, initial_peers=peers, start=True)
    if first:
        job.store.set("peers", json.dumps([str(address) for address in dht.get_visible_maddrs()]))
    try:
        job.fit(by_itself(), _Replaced(job, dht))
        job.together()
    finally:
        dht.shutdown()
