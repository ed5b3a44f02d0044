"""The trace: what each thread of each rank did in a few rounds."""

import _thread
import json
import threading
from contextlib import nullcontext

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from support.ranks import run_ranks
from support.toys import STRATEGIES, Toy, TwoOptimizers, dataset, loader, parameters, trainer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cocod import (
    ADPSGDStrategy,
    APSGDStrategy,
    CoCoD,
    CoCoDStrategy,
    CommunicationTrace,
    DCASGDStrategy,
    EAMSGDStrategy,
    LocalSGD,
    LocalSGDStrategy,
    PeerLost,
)
from lightning_cocod.comm import carrying
from lightning_cocod.comm import tracer as tracing
from lightning_cocod.comm.compressed import Compression
from lightning_cocod.comm.correction import Correction
from lightning_cocod.comm.lane import HostLane
from lightning_cocod.comm.tracer import Recorder, Span, Tracer
from lightning_cocod.telemetry import chrome
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
        for row in {event["tid"] for event in spans}:
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
    """Each round's transfer begins before the first forward of its round, and ends after the second backward."""

    def __init__(self, period=4):
        self.period, self.backwards, self.begun = period, 0, 0
        self.changed = threading.Condition()

    def __enter__(self):
        self.run, carrying.run = carrying.run, self.held
        return self

    def __exit__(self, *_):
        carrying.run = self.run

    def held(self, collective, *rest):
        if isinstance(collective, Correction):
            with self.changed:
                due = self.begun * self.period + 2
                self.begun += 1
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.backwards >= due, LIMIT)
        return self.run(collective, *rest)

    def on_train_batch_start(self, trainer, module, batch, index):
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun > self.backwards // self.period, LIMIT)

    def on_after_backward(self, trainer, module):
        with self.changed:
            self.backwards += 1
            self.changed.notify_all()


def fit(rank, world, strategy, path, module=Toy, callbacks=(), trace=None):
    """Returns the weights; without a path there is no trace."""
    L.seed_everything(1, verbose=False)
    traces = [] if path is None else [CommunicationTrace(path, **(trace or {"start_step": 4}))]
    model = module()
    trainer(strategy, world, callbacks=[*callbacks, *traces], max_steps=22).fit(model, loader(384))  # in one epoch
    return parameters(model)


def gated(rank, world, path, trace):
    with Gate() as gate:
        fit(rank, world, "cocod", path, callbacks=[gate], trace=trace)


@pytest.mark.parametrize(("start", "first", "launches"), [(0, 0, [0, 4, 8]), (3, 4, [4, 8, 12])])
def test_a_round_of_cocod_travels_while_the_next_is_computed(start, first, launches, tmp_path):
    run_ranks(gated, 2, tmp_path / "trace.json", {"rounds": 3, "start_step": start}, init=False)
    told, spans = read(tmp_path / "trace.json")
    assert told == {"complete": True, **{f"rank {r}": f"steps {first} to {first + 12}, 3 of 3 rounds" for r in range(2)}}
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json"]
    for rank in range(2):
        launched, transfers, waits = (about(spans, rank, name) for name in ("launch", "transfer", "wait"))
        assert [len(of(spans, rank, name)) for name in sorted(COMPUTING)] == [12, 12, 12]
        merges = {event["args"]["step"]: event for event in of(spans, rank, "merge")}
        assert list(merges) == ([] if start == 0 else [first]) + [s + 4 for s in launches]
        assert [e["args"]["message"] for e in of(spans, rank, "round")] == [f"round at step {s}" for s in launches]
        for step in launches:
            message = f"round at step {step}"
            transfer, wait = transfers[message], waits[message]
            assert launched[message]["ts"] <= transfer["ts"]
            assert end(transfer) <= end(wait) + LEAST
            assert inside(wait, merges[step + 4])
            assert not overlap(transfer, merges[step]) if step in merges and step != first else True
            hiding = [e for e in of(spans, rank, *COMPUTING) if overlap(e, transfer)]
            assert {e["name"] for e in hiding} == COMPUTING
            assert all(inside(e, transfer) for e in hiding[:4])  # two passes


def test_the_communication_thread_shows_the_way_of_a_message(tmp_path):
    run_ranks(fit, 2, "cocod", tmp_path / "trace.json", init=False)
    _, spans = read(tmp_path / "trace.json")
    for rank in range(2):
        (message, *_), transfers, headers = (of(spans, rank, name) for name in ("round", "transfer", "headers"))
        ours = [e for e in spans if e["pid"] == rank and e["tid"] == 1 and e is not message and inside(e, message)]
        buckets = [e for e in ours if e["name"] in ("encode", "reduce", "decode")]
        assert [e["name"] for e in ours if e not in buckets] == ["look", "headers", "transfer"]
        assert end(headers[0]) <= transfers[0]["ts"] + LEAST
        encoded, reduced, decoded = (of(buckets, rank, name) for name in ("encode", "reduce", "decode"))
        assert len(decoded) == 2 * len(reduced) > 0  # round a ring of two a bucket comes in two parts
        assert not encoded  # and sets out from where it lies
        assert all(inside(e, transfers[0]) for e in buckets)
        assert message["args"]["bytes"] == sum(p.numel() * 4 for p in Toy().parameters())


def coded(rank, world, path):
    """What the codec does is recorded as well."""

    class Look(Callback):
        def on_train_start(self, trainer, *_):
            self.comm = trainer.strategy.algorithm.comm

    look, encode = Look(), Compression.encode

    def seen(*args):
        with look.comm.tracer.span("code"):
            encode(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compression, "encode", seen)
        fit(rank, world, CoCoDStrategy(compression="int8"), path, callbacks=[look])


def test_codes_are_made_where_the_trace_says(tmp_path):
    run_ranks(coded, 2, tmp_path / "trace.json", init=False)
    _, spans = read(tmp_path / "trace.json")
    for rank in range(2):
        transfers, encoded, decoded = (of(spans, rank, name) for name in ("transfer", "encode", "decode"))
        codes = [code for code in of(spans, rank, "code") if any(inside(code, transfer) for transfer in transfers)]
        assert len(encoded) >= len(transfers) == 3
        assert {sum(inside(code, e) for code in codes) for e in encoded} == {2}  # a part of the bucket for each rank
        rest = [code for code in codes if not any(inside(code, e) for e in encoded)]
        assert len(rest) == len(encoded)  # the mean of this rank's part
        assert all(any(inside(code, d) for d in decoded) for code in rest)


@pytest.mark.parametrize("strategy", [LocalSGDStrategy(), CoCoDStrategy(overlap=False)])
def test_what_blocks_is_seen_to_block(strategy, tmp_path):
    run_ranks(fit, 2, strategy, tmp_path / "trace.json", init=False)
    _, spans = read(tmp_path / "trace.json")
    for rank in range(2):
        transfers, computing = of(spans, rank, "transfer"), of(spans, rank, *COMPUTING)
        assert len(transfers) >= 3
        assert not [(t, c) for t in transfers for c in computing if overlap(t, c)]
        assert all(any(inside(t, w) for w in of(spans, rank, "merge")) for t in transfers)


# Ranks that are not in step


class Together(Callback):
    """All record before the first step; each makes so many before any goes on; of an exchange both hear in the first one."""

    def __init__(self, steps):
        self.steps, self.made = steps, 0

    def on_train_start(self, trainer, module):
        dist.barrier()

    def on_train_batch_end(self, trainer, *_):
        self.made += 1
        gossip = getattr(trainer.strategy.algorithm, "gossip", None)
        if gossip is not None and self.made == 1:
            with gossip._changed:
                assert gossip._changed.wait_for(lambda: gossip.exchanges, LIMIT)
        if self.made <= self.steps:
            dist.barrier()


def together(rank, world, strategy, path):
    return fit(rank, world, strategy, path, callbacks=[Together(4)], trace={"rounds": 4, "start_step": 0})


def trace_of(strategy, folder):
    """Of four steps of each rank, which then end well."""
    first, second = run_ranks(together, 2, strategy, folder / "trace.json", init=False)
    assert torch.equal(first, second)
    told, spans = read(folder / "trace.json")
    assert told == {"complete": True, **{f"rank {r}": "steps 0 to 4, 4 of 4 rounds" for r in range(2)}}
    assert [file.name for file in folder.iterdir()] == ["trace.json"]
    for rank in range(2):
        assert [len(of(spans, rank, name)) for name in sorted(COMPUTING)] == [4, 4, 4]
    return spans


@pytest.mark.parametrize(
    "strategy", [APSGDStrategy(), DCASGDStrategy(), EAMSGDStrategy(period=1)], ids=lambda strategy: strategy.registered_name
)
def test_questions_to_owners_of_shards_are_seen(strategy, tmp_path):
    spans = trace_of(strategy, tmp_path)
    for rank in range(2):
        transfers, waits = of(spans, rank, "transfer"), of(spans, rank, "wait")
        assert len(transfers) >= 3  # the last one may be under way
        assert {event["cat"] for event in transfers} == {"questions to owners"}
        assert {event["args"]["message"] for event in transfers} <= {event["args"]["message"] for event in waits}


@pytest.mark.parametrize("compression", [None, "int8"])
def test_exchanges_of_neighbours_are_seen(compression, tmp_path):
    spans = trace_of(ADPSGDStrategy(compression=compression), tmp_path)
    values = sum(p.numel() for p in Toy().parameters())
    for rank in range(2):
        for whole in (exchanges := of(spans, rank, "exchange")):
            assert whole["cat"] == "gossip"
            assert whole["args"]["peer"] == 1 - rank
            assert whole["args"]["bytes"] == 4 * values if compression is None else whole["args"]["bytes"] < 4 * values
            parts = [e for e in spans if (e["pid"], e["cat"]) == (rank, "gossip") and e is not whole and inside(e, whole)]
            assert [e["name"] for e in parts] == ["look", "encode", "transfer", "decode", "merge"]
            assert parts[2]["args"]["message"] == whole["args"]["message"]
        assert 1 <= len(exchanges) <= len(of(spans, rank, "snapshot"))
        folds, merges = of(spans, rank, "fold"), [e for e in of(spans, rank, "merge") if e["cat"] == "training"]
        assert sum(event["args"]["exchanges"] for event in folds) >= 1
        assert all(any(inside(fold, merge) for merge in merges) for fold in folds)


# That it changes nothing


CODED = CoCoDStrategy(compression="int8")


@pytest.mark.parametrize("strategy", [*STRATEGIES, pytest.param(CODED, id="int8")])
def test_a_run_is_the_same_with_and_without_a_trace(strategy, tmp_path):
    traced = run_ranks(fit, 2, strategy, tmp_path / "trace.json", init=False)
    plain = run_ranks(fit, 2, strategy, None, init=False)
    assert all(torch.equal(a, b) for a, b in zip(traced, plain, strict=True))
    _, spans = read(tmp_path / "trace.json")
    names = {event["name"] for event in spans}
    assert COMPUTING | {"merge", "wait", "headers", "transfer", "decode"} <= names
    assert ("encode" in names) is (strategy != "cocod")  # whose snapshots set out from where they lie


def nothing_is_left(rank, world, path):
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            algorithm = trainer.strategy.algorithm
            names = {"after_step", "before_step", "finish", "step"} & set(vars(algorithm))
            names |= {"training_step", "backward"} & set(vars(trainer.strategy))
            seen.append((len(names), type(algorithm.comm.tracer)))

    fit(rank, world, "cocod", path, callbacks=[Look()], trace={"rounds": 2, "start_step": 3})
    return seen


def test_the_algorithm_is_itself_again_after_the_last_round(tmp_path):
    seen = run_ranks(nothing_is_left, 2, tmp_path / "trace.json", init=False)[0]
    assert seen == [(6, Tracer)] * 3 + [(6, Recorder)] * 8 + [(0, Tracer)] * 11


def test_without_a_recorder_a_span_is_nothing():
    tracer = Tracer()
    assert tracer.span("a") is tracer.span("b", message="c") is tracer.frame("d")


# Other loops


def test_manual_optimization_shows_its_passes_inside_the_training_step(tmp_path):
    run_ranks(fit, 2, "cocod", tmp_path / "trace.json", TwoOptimizers, (), {"start_step": 0}, init=False)
    _, spans = read(tmp_path / "trace.json")
    steps, inner = of(spans, 0, "training_step"), of(spans, 0, "backward", "step")
    assert len(steps) == 12
    assert {e["name"] for e in inner} == {"backward", "step"}
    assert all(any(inside(e, step) for step in steps) for e in inner)


def plain(rank, world, algorithm, path, steps=20, fails_at=None, **trace):
    torch.manual_seed(1)
    model = Toy().net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = dataset()
    batches = DataLoader(data, 8, sampler=DistributedSampler(data, world, rank))
    step = 0
    with algorithm(model, optimizer, period=2) as running:
        with nullcontext() if path is None else CommunicationTrace(path, **trace).of(running):
            while step < steps:
                for x, y in batches:
                    optimizer.zero_grad()
                    (model(x) - y).pow(2).mean().backward()
                    optimizer.step()
                    step += 1
                    if step == fails_at:
                        dist.barrier()  # whoever hears of the other's failure before has traced less
                        raise ArithmeticError("on purpose")
        with running.consensus():
            model(data[:4][0])
    return parameters(model)


@pytest.mark.parametrize("algorithm", [CoCoD, LocalSGD])
def test_a_plain_loop_is_traced_alike(algorithm, tmp_path):
    traced = run_ranks(plain, 2, algorithm, tmp_path / "trace.json")
    assert all(map(torch.equal, traced, run_ranks(plain, 2, algorithm, None)))
    told, spans = read(tmp_path / "trace.json")
    assert told["complete"]
    for rank in range(2):
        training = [e for e in spans if (e["pid"], e["tid"]) == (rank, 0) and e["name"] not in ("launch", "wait")]
        assert [e["name"] for e in training] == ["merge", *(2 * ["forward", "backward", "step"] + ["merge"]) * 3]


# Runs that end early


@pytest.mark.parametrize(("start", "holds"), [(16, "steps 16 to 22, 1 of 3 rounds"), (50, "nothing, 0 of 3 rounds")])
def test_a_run_that_ends_before_the_trace_says_so(start, holds, tmp_path):
    run_ranks(fit, 2, "cocod", tmp_path / "trace.json", Toy, (), {"start_step": start}, init=False)
    told, spans = read(tmp_path / "trace.json")
    assert told == {"complete": False, "rank 0": holds, "rank 1": holds}
    assert bool(spans) is (start == 16)
    if spans:
        assert {e["args"]["message"] for e in of(spans, 0, "wait")} >= {"round at step 16", "finish at step 22"}


class Fails(Toy):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 18:
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("start", [12, 2])
def test_a_run_that_fails_leaves_the_files_of_the_ranks(start, tmp_path):
    expect = {0: "error", 1: "error"}
    run_ranks(fit, 2, "cocod", tmp_path / "trace.json", Fails, (), {"start_step": start}, init=False, expect=expect)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]
    told, spans = read(tmp_path / "trace.rank1.json")
    assert told == (
        {"complete": False, "rank 1": "steps 12 to 18, 1 of 3 rounds"}
        if start == 12
        else {"complete": True, "rank 1": "steps 4 to 16, 3 of 3 rounds"}
    )
    assert {e["pid"] for e in spans} == {1}
    assert {e["pid"] for e in read(tmp_path / "trace.rank0.json")[1]} == {0}


def test_a_plain_loop_that_fails_does_so_too(tmp_path):
    arguments = CoCoD, tmp_path / "trace.json", 20, 13
    run_ranks(plain, 2, *arguments, expect={0: "error", 1: "error"})
    told, _ = read(tmp_path / "trace.rank0.json")
    assert told == {"complete": False, "rank 0": "steps 10 to 13, 1 of 3 rounds"}


def full(*_):
    raise OSError("the disk is full")


def wrong(*_):
    raise ValueError("a row is missing")


def cannot_write(rank, world, path):
    says = pytest.warns(UserWarning, match="the trace could not be written: the disk is full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chrome, "write", full)
        with says, pytest.raises((ArithmeticError, PeerLost)) as raised:
            fit(rank, world, "cocod", path, Fails, trace={"start_step": 12})
    return str(raised.value)


def trains_on(rank, world, path, write, says):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chrome, "write", write)
        with pytest.warns(UserWarning, match=f"the trace could not be written: {says}"):
            return fit(rank, world, "cocod", path)


@pytest.mark.parametrize(("write", "says"), [(full, "the disk is full"), (wrong, "a row is missing")])
def test_a_trace_that_cannot_be_written_ends_no_training(write, says, tmp_path):
    first, second = run_ranks(trains_on, 2, tmp_path / "trace.json", write, says, init=False)
    assert torch.equal(first, second)


def two(rank, world, path):
    other = CommunicationTrace(path.with_name("other.json"), start_step=12)
    with pytest.raises(ValueError, match="there is a trace of this run already"):
        fit(rank, world, "cocod", path, callbacks=[other])


def test_two_traces_of_one_run_are_refused_before_it_begins(tmp_path):
    run_ranks(two, 2, tmp_path / "trace.json", init=False, leftovers_ok=True)


def resumed(rank, world, folder):
    options = {"max_steps": 12, "enable_checkpointing": False}
    run = trainer("cocod", world, **options)
    run.fit(Toy(), loader(384))
    run.save_checkpoint(folder / "at12.ckpt")
    trace = CommunicationTrace(folder / "trace.json", rounds=2, start_step=0)
    trainer("cocod", world, callbacks=[trace], max_steps=22).fit(Toy(), loader(384), ckpt_path=folder / "at12.ckpt")


def test_a_trace_of_a_resumed_run_has_its_steps(tmp_path):
    run_ranks(resumed, 2, tmp_path, init=False)
    told, _ = read(tmp_path / "trace.json")
    assert told["rank 0"].startswith("steps 12 to ")


def test_a_trace_that_cannot_be_written_does_not_hide_why_the_run_failed(tmp_path):
    told = run_ranks(cannot_write, 2, tmp_path / "trace.json", init=False, leftovers_ok=True)
    assert told[1] == "on purpose"
    assert "ArithmeticError" in told[0]


# The file


def test_the_ranks_of_other_hosts_are_aligned_by_their_headers():
    def part(rank, host, ahead):
        def headers(step):
            return Span("headers", "communication", step + ahead, step + ahead + 0.5, {"message": f"round at step {step}"})

        return Part(rank, 2, 2, (4, 12), [headers(4), headers(8)], host)

    here, there = part(0, "a", 0.0), part(1, "b", -100.0)
    assert shift(here, there) == 100.0
    assert shift(here, part(1, "a", -3.0)) == 0.0  # one clock: what differs has happened
    starts = [e["ts"] for e in document([here, there])["traceEvents"] if e["ph"] == "X"]
    assert starts == [0.0, 4e6, 0.0, 4e6]
    silent = Part(1, 2, 0, None, [], "b")
    assert shift(here, silent) is None
    told = document([here, silent])["otherData"]
    assert told["clock of rank 1"] == "not aligned: no common message"
    assert told["complete"] is False


def test_what_hooks_do_in_a_thread_of_autograd_s_has_a_row_of_its_own():
    recorder, is_done = Recorder(HostLane()), threading.Event()

    def hook():
        with recorder.span("launch"):
            pass
        is_done.set()

    _thread.start_new_thread(hook, ())  # as autograd begins it: not by way of ``threading``
    assert is_done.wait(10)
    with recorder.span("backward"):
        pass
    assert [(span.name, span.row) for span in recorder.close()] == [("launch", "autograd"), ("backward", "training")]


def test_a_row_that_nobody_has_named_comes_after_the_others():
    rows = "training", "another", "gossip", "communication"
    spans = [Span("a", row, 0.0, 1.0, {}) for row in rows]
    events = document([Part(0, 1, 1, (0, 1), spans)])["traceEvents"]
    labels = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [labels[number] for number in sorted(labels)] == ["training", "communication", "gossip", "another"]
    assert all(labels[event["tid"]] == event["cat"] for event in events if event["ph"] == "X")


def test_what_is_open_when_it_is_closed_is_left_out_as_a_whole():
    recorder = Recorder(HostLane())
    with recorder.span("done"), recorder.frame("empty"):
        pass
    with recorder.span("open"):
        with recorder.span("inside"):
            pass
        assert [span.name for span in recorder.close()] == ["done"]
    with recorder.span("late"):
        pass
    assert [span.name for span in recorder.close()] == ["done"]


class LateLane(HostLane):
    """A device that is behind: it has come to the marks before ``reached`` only."""

    reached = float("inf")

    def seconds(self, start, end):
        return end - start if max(start, end) < self.reached else None


def test_what_the_device_has_not_come_to_is_left_out_as_a_whole(monkeypatch):
    monkeypatch.setattr(tracing, "_PATIENCE", 0.0)
    lane = LateLane()
    recorder = Recorder(lane)
    with recorder.span("outer"), recorder.span("inner"):
        pass
    with recorder.span("outer, late"):
        with recorder.span("inner, in time"):
            pass
        lane.reached = lane.mark()
    assert [span.name for span in recorder.close()] == ["inner", "outer"]


# Arguments


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"rounds": 1.5}, "rounds must be a whole number of at least 1, got 1.5"),
        ({"start_step": -1}, "start_step must be a whole number of at least 0, got -1"),
        ({"start_step": True}, "start_step must be a whole number of at least 0, got True"),
        ({"path": None}, "path must be that of the file to write, got None"),
        ({"path": "/"}, "path must be that of the file to write, got the folder /"),
        ({"path": ""}, "path must be that of the file to write, got ''"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(options, says):
    with pytest.raises((ValueError, TypeError)) as raised:
        CommunicationTrace(**options)
    assert str(raised.value) == says


def test_other_strategies_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"^CommunicationTrace needs a strategy of this package, not Single"):
        fit(0, 1, "auto", tmp_path / "trace.json")


def test_an_algorithm_that_is_not_in_use_is_refused(tmp_path):
    model = Toy().net
    idle = CoCoD(model, torch.optim.SGD(model.parameters(), lr=0.1))
    refused = pytest.raises(RuntimeError, match=r"^trace a CoCoD inside its own block, which starts it$")
    with refused, CommunicationTrace(tmp_path / "trace.json").of(idle):
        pass
