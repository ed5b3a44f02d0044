"""Torch's default group: made for one process alone, and given up in mid-run."""

from __future__ import annotations

import ctypes
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store


def alone(store: Store, backend: str, timeout: float) -> None:
    """The default group is of this process alone."""
    part = PrefixStore(uuid.uuid4().hex, store)
    dist.init_process_group(backend, store=part, rank=0, world_size=1, timeout=timedelta(seconds=timeout))


def forget_default_group(*, somebody_is_lost: bool) -> None:
    """There is none any more, and no other group either.

    If somebody in it may be lost they are leaked: destroying them could wait for an operation.
    """
    if somebody_is_lost:
        for group in list(c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    dist.destroy_process_group()


def set_timeout(seconds: float, group: dist.ProcessGroup | None) -> None:
    """Of the collectives of a group."""
    set_it: Any = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # its name before torch 2.14
    set_it(timedelta(seconds=seconds), group)
