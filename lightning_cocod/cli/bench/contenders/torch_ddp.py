"""DDP, with and without a hook that compresses gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_cocod.cli.bench.job import Job


class _Hooked(DDPStrategy):
    """Lightning registers hooks on CUDA only; this one does everywhere."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self._hook = hook

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, self._hook)


def ddp(job: Job) -> None:
    """As it comes."""
    job.fit(DDPStrategy())


def ddp_bf16(job: Job) -> None:
    """Gradients travel as bfloat16."""
    job.fit(_Hooked(bf16_compress_hook))


def ddp_fp16(job: Job) -> None:
    """Gradients travel as float16."""
    job.fit(_Hooked(fp16_compress_hook))
