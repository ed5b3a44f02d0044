"""The trace: what each thread of each rank did in a few rounds."""

import json
import threading
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, TwoOptimizers, dataset, loader, parameters, trainer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cocod import CoCoD, CoCoDStrategy, CommunicationTrace, LocalSGD, LocalSGDStrategy
from lightning_cocod.comm import collectives
from lightning_cocod.comm.lane import HostLane
from lightning_cocod.comm.tracer import Recorder, Span, Tracer
from lightning_cocod.telemetry.chrome import Part, document, shift

LIMIT = 30.0  # seconds for anything that waits; far above what is needed
LEAST = 1e-3  # microseconds: times are rounded to nanoseconds
COMPUTING = {"forward", "backward", "step"}


# Reading a trace


def read(path):
    """The file, checked as a whole, and its events."""
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        assert {"name", "ph", "ts", "dur", "pid", "tid", "args"} <= set(event)
        assert event["ph"] in "XM"
        assert event["dur"] >= 0
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    labels = {(e["pid"], e["tid"], e["name"]): e["args"].get("name") for e in content["traceEvents"] if e["ph"] == "M"}
    for rank in {event["pid"] for event in spans}:
        assert labels[rank, 0, "process_name"] == f"rank {rank}"
        assert [labels[rank, row, "thread_name"] for row in (0, 1)] == ["training", "communication"]
        for row in (0, 1):
            nest([event for event in spans if (event["pid"], event["tid"]) == (rank, row)])
    return content["otherData"], spans


def end(event):
    return event["ts"] + event["dur"]


def nest(events):
    """Of two events of a thread one is inside the other, or they have nothing in common."""
    outer = []
    for event in events:  # sorted by their beginning
        while outer and end(outer[-1]) <= event["ts"] + LEAST:
            outer.pop()
        assert not outer or end(event) <= end(outer[-1]) + LEAST, (outer[-1], event)
        outer.append(event)


def of(spans, rank, *names):
    return [event for event in spans if event["pid"] == rank and event["name"] in names]


def overlap(one, other):
    return min(end(one), end(other)) - max(one["ts"], other["ts"]) > LEAST


def inside(inner, outer):
    return outer["ts"] - LEAST <= inner["ts"] and end(inner) <= end(outer) + LEAST


def about(spans, rank, name):
    """By message."""
    return {event["args"]["message"]: event for event in of(spans, rank, name)}


# What is in it


class Gate(Callback):
    """Holds the transfer of each round until the second backward after its launch: it cannot but overlap."""

    def __init__(self):
        self.open, self.batches = threading.Event(), 0
        self.finish = collectives.finish

    def __enter__(self):
        collectives.finish = self.hold
        return self

    def __exit__(self, *_):
        collectives.finish = self.finish

    def hold(self, *args):
        self.finish(*args)
        assert self.open.wait(LIMIT)

    def on_train_batch_start(self, trainer, module, batch, index):
        if (index % 4) == 0:
            self.open.clear() if index else None

    def on_after_backward(self, trainer, module):
        self.batches += 1
        self.open.set() if self.batches % 4 == 2 else None

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        pass


def fit(rank, world, strategy, path, module=Toy, **options):
    """Returns the weights; without a path there is no trace."""
    L.seed_everything(1, verbose=False)
    callbacks = [*options.pop("callbacks", [])]
    if path is not None:
        trace = {name: options.pop(name) for name in ("rounds", "start_step") if name in options}
        callbacks.append(CommunicationTrace(path, **trace))
    model = module()
    trainer(strategy, world, callbacks=callbacks, **{"max_epochs": 4, **options}).fit(model, loader())
    return parameters(model)
