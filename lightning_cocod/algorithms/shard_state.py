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
    mine = [(part.number, part.start, part.stop, _on_host(state[part.p])) for part in parts if state.get(part.p)]
    of_parameter = defaultdict(list)
    for theirs in _exchange(mine, comm, subject):
        for number, *part in theirs:
            of_parameter[number].append(part)
    whole: defaultdict[Tensor, Any] = defaultdict(dict)
    for number, held_parts in of_parameter.items():
        for key in dict.fromkeys(key for _, _, (held, _) in held_parts for key in held):
            whole[x[number]][key] = _together(x[number], key, held_parts)
    return whole


def _together(p: nn.Parameter, key: str, held_parts: Any) -> Any:
    """One entry of the parts' states: put together where each has as much as the part, else the first."""
    found = [(start, stop, held[key], key in on_host) for start, stop, (held, on_host) in held_parts if key in held]
    if p.dim() == 0 or not all(isinstance(v, Tensor) and v.shape == (stop - start,) for start, stop, v, _ in found):
        _, _, value, on_host = found[0]
        return value.to(p.device) if isinstance(value, Tensor) and not on_host else value
    whole = torch.empty_strided(p.size(), p.stride(), dtype=found[0][2].dtype, device=p.device).zero_()
    for start, stop, value, _ in found:
        in_memory_order(whole)[start:stop] = value.to(p.device)
    return whole


def _on_host(held: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The state of a part, and which tensors of it lie in host memory, as counters of steps do wherever the part lies."""
    return dict(held), [key for key, value in held.items() if isinstance(value, Tensor) and value.device.type == "cpu"]


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
