"""Who can be measured. A contender is a function of the job: it makes whatever it needs and calls `job.fit`.

Libraries that a contender needs are imported when it trains, so what is not installed costs its row and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch.strategies import StrategyRegistry

from lightning_cocod import strategies
from lightning_cocod.cli.bench.contenders import hivemind, local, ours, torch_ddp, torchft, transport
from lightning_cocod.cli.bench.plan import CEILING, PLAIN

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job

Contender = Callable[["Job"], None]


def contenders() -> dict[str, Contender]:
    """All of them by name; every strategy of the package is one."""
    return {
        CEILING: local.alone,
        PLAIN: local.plain,
        "transport": transport.transport,
        "bare": transport.bare,
        **own(),
        "ssgd_overlap_pull": ours.contender(strategies.SSGDStrategy, overlap_pull=True),
        "ddp": torch_ddp.ddp,
        "ddp_plain": torch_ddp.ddp,
        "ddp_bf16": torch_ddp.ddp_bf16,
        "ddp_fp16": torch_ddp.ddp_fp16,
        "torch_post_local_sgd": local.torch_post_local_sgd,
        "torchft_local_sgd": torchft.local_sgd,
        "torchft_diloco": torchft.diloco,
        "torchft_streaming_diloco": torchft.streaming_diloco,
        "hivemind": hivemind.hivemind,
    }


def own() -> dict[str, Contender]:
    """The strategies of this package, and whatever else of their kind is registered with Lightning now.

    Not those that would start ranks themselves, by another method than that of the command line.
    """
    return {
        name: ours.contender(entry["strategy"], **entry["init_params"])
        for name, entry in StrategyRegistry.items()
        if isinstance(entry["strategy"], type)
        and issubclass(entry["strategy"], strategies.AlgorithmStrategy)
        and entry["init_params"].get("start_method", "popen") == "popen"
    }
