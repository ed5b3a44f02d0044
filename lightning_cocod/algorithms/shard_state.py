"""An optimizer's state, cut into shards and put together again."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_cocod.comm import Group, Subject
from lightning_cocod.comm.buckets import in_memory_order, in_the_order_of


class Part(NamedTuple):
    """Elements [start, stop) of a parameter, in memory order, that this worker owns; ``p`` is what the optimizer sees."""

    number: int
    start: int
    stop: int
    p: nn.Parameter


def cut(state: Mapping[str, Any], whole: nn.Parameter, part: Part) -> dict[str, Any]:
    """What belongs to a part of a parameter: of its tensors as large as that, the same elements; all else."""
    return {key: _cut(value, whole, part) for key, value in state.items()}


def _cut(value: Any, whole: nn.Parameter, part: Part) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape != whole.shape or whole.dim() == 0:
        return value.clone()
    return in_memory_order(in_the_order_of(whole, value))[part.start : part.stop].clone()


@torch.no_grad()
def gather(
    parts: Sequence[Part], state: Mapping[Tensor, Any], x: Sequence[nn.Parameter], comm: Group, subject: Subject
) -> defaultdict[Tensor, Any]:
    """The state of whole parameters, on every worker. Collective."""
    mine = [(part.number, part.start, part.stop, dict(state[part.p])) for part in parts if state.get(part.p)]
    whole: defaultdict[Tensor, Any] = defaultdict(dict)
    for theirs in _exchange(mine, comm, subject):
        for number, start, stop, held in theirs:
            p = x[number]
            found = whole[p]
            for key, value in held.items():
                if isinstance(value, Tensor) and p.dim() > 0 and value.shape == (stop - start,):
                    if key not in found:
                        found[key] = torch.empty_strided(p.size(), p.stride(), dtype=value.dtype, device=p.device).zero_()
                    in_memory_order(found[key])[start:stop] = value.to(p.device)
                else:
                    found.setdefault(key, value)
    return whole


def _exchange(mine: Any, comm: Group, subject: Subject) -> list[Any]:
    """What every worker has, in the order of ranks."""
    written = io.BytesIO()
    torch.save(mine, written)
    content = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8).to(comm.device)
    read = []
    for rank in range(comm.world_size):
        size = torch.tensor([content.numel()], device=comm.device)
        comm.broadcast_([size], subject, source=rank).wait()
        theirs = content if rank == comm.rank else torch.empty(int(size), dtype=torch.uint8, device=comm.device)
        comm.broadcast_([theirs], subject, source=rank).wait()
        read.append(torch.load(io.BytesIO(theirs.cpu().numpy().tobytes()), map_location="cpu", weights_only=True))
    return read
