"""How a message's buckets are carried out, in the communication thread: filled, sent on their way, waited for and drained.

Some at a time: one is filled or drained while another one travels. Scratch memory is allocated once and kept: pages that are
new every round cost more than the arithmetic on them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cocod.comm.cargo import Cargo
from lightning_cocod.comm.collectives import Collective, Memory, Operation
from lightning_cocod.comm.gate import Gate, Wait
from lightning_cocod.comm.ring import IN_FLIGHT, Leg, Ring
from lightning_cocod.comm.tracer import Tracer
from lightning_cocod.comm.waiting import finish


def new_scratch() -> list[Memory]:
    """For one thread's messages: for each bucket at work."""
    return [{} for _ in range(IN_FLIGHT)]


@torch.no_grad()
def run(
    operation: Operation,
    group: dist.ProcessGroup,
    ring: Ring | None,
    scratch: Sequence[Memory],
    over: threading.Event,
    tracer: Tracer,
) -> list[Wait]:
    """All stages, until communication is ``over``; sums round a ring if there is one.

    Returns:
        When there was nothing to do, as the next bucket had not been computed.
    """
    waits: list[Wait] = []
    for stage in operation.stages(tracer):
        if ring is not None and stage.leg is not None:
            waits += _go_round(stage, stage.leg, ring, scratch, over, tracer)
        else:
            waits += _carry_out(stage, group, scratch, over, tracer)
    return waits


def _go_round(
    collective: Collective, leg: Leg, ring: Ring, scratch: Sequence[Memory], over: threading.Event, tracer: Tracer
) -> list[Wait]:
    """All buckets, in their order."""
    order, gate = collective.order(), collective.gate
    waits: list[Wait] = []

    def buckets() -> Iterator[Cargo]:
        for place, bucket in enumerate(order):
            if gate is not None:
                waits.append(_pass(gate, bucket, over, tracer))
            yield collective.cargo(bucket, place % IN_FLIGHT, ring, scratch, tracer)

    is_there = None if gate is None else lambda place: gate.is_open(order[place])
    travelled = ring.travel(leg, buckets(), len(order), over, is_there)
    for _ in order:
        with tracer.span("reduce"):
            cargo = next(travelled)
        if cargo.unload is not None:
            with tracer.span("decode"):
                cargo.unload()
    return waits


def _pass(gate: Gate, bucket: int, over: threading.Event, tracer: Tracer) -> Wait:
    with tracer.span("await"):
        return gate.wait(bucket, over)


def _carry_out(
    collective: Collective, group: dist.ProcessGroup, scratch: Sequence[Memory], over: threading.Event, tracer: Tracer
) -> list[Wait]:
    """All buckets, in their order, ``IN_FLIGHT`` of them at a time."""
    at_work: deque[tuple[int, int, Tensor, dist.Work]] = deque()
    gate = collective.gate
    waits: list[Wait] = []

    def finish_oldest() -> None:
        place, bucket, memory, work = at_work.popleft()
        with tracer.span("reduce"):
            finish(work, group, over)
        with tracer.span("decode"):
            following = collective.proceed(bucket, memory, group)
            if following is None:
                collective.drain(bucket, memory)
            else:
                at_work.append((place, bucket, memory, following))

    def memory_is_in_use(place: int) -> bool:
        # Buckets that nobody sends are not at work: how many others are does not tell.
        return any(earlier <= place - IN_FLIGHT for earlier, *_ in at_work)

    for place, bucket in enumerate(collective.order()):
        while at_work and (memory_is_in_use(place) or not (collective.repeats or gate is None or gate.is_open(bucket))):
            finish_oldest()
        if gate is not None:
            for *_, work in () if gate.is_open(bucket) else at_work:
                finish(work, group, over)
            waits.append(_pass(gate, bucket, over, tracer))
        with tracer.span("encode"):
            memory = collective.put_in(bucket, scratch[place % IN_FLIGHT])
            launched = collective.launch(bucket, memory, group)  # codes are made here
        if launched is None:
            collective.drain(bucket, memory)
        else:
            at_work.append((place, bucket, memory, launched))
    while at_work:
        finish_oldest()
    return waits
