"""cocod-bench: the order of trainings, figures from canned results, tables, the place of a rank, and real runs."""

import csv
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from ipaddress import ip_address
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import StrategyRegistry
from support.ranks import free_port, run_ranks
from support.slurm import become_a_task
from torch.distributed import TCPStore

from lightning_cocod import ADPSGDStrategy, CoCoDStrategy, strategies
from lightning_cocod.cli.bench import counters, main, plots, tables
from lightning_cocod.cli.bench import host as hosts
from lightning_cocod.cli.bench.contenders import contenders, own
from lightning_cocod.cli.bench.contenders.torchft import halves
from lightning_cocod.cli.bench.host import FOLLOWED, Host, errors
from lightning_cocod.cli.bench.job import Job, Seat
from lightning_cocod.cli.bench.plan import Plan, schedule
from lightning_cocod.cli.bench.statistics import Row, Setting, rows
from lightning_cocod.cli.bench.work import WORK, Training
from lightning_cocod.cli.ranks import started_by_launcher
from lightning_cocod.workloads import InputError

PLAN = Plan("tiny", ("none", "transport", "cocod", "ddp"), period=4, batch_size=2, repeats=3)


# The order


def test_every_contender_has_one_turn_in_every_repeat_in_changing_order():
    entries = schedule(PLAN)
    orders = [tuple(entry.contender for entry in entries if entry.repeat == repeat) for repeat in range(3)]
    assert [entry.repeat for entry in entries] == sorted(entry.repeat for entry in entries)
    assert all(Counter(order) == Counter(PLAN.contenders) for order in orders)
    assert len({schedule_of(seed) for seed in range(20)}) > 10  # the seed decides
    assert schedule_of(7) == schedule_of(7)
    assert len(set(orders)) > 1


def schedule_of(seed):
    return tuple(schedule(replace(PLAN, seed=seed)))


# Figures


def result(seconds, *, peak=100e6, sent=8e6, cpu=(0.0, 0.0, 0.0), machine=None, computing=1.0, **more):
    kinds = {kind: [0.75 * c, 0.25 * c] for kind, c in zip(counters.KINDS, (*cpu, 0.0), strict=True)}
    both = {"rounds": [seconds] * 3, "cpu": kinds, "machine": machine or 2 * sum(cpu), "sent": sent}
    return {**both, "peak": peak, "parameters": 10e6, "computing": computing, **more}


def run(**given):
    facts = {"ranks": 2, "cpus": 2, "device": "eth0", "own": ["cocod", "local_sgd"]}
    return {**vars(replace(PLAN, **given)), **facts}


WITH_PLAIN = run(contenders=("plain", *PLAN.contenders))


def trials(**contenders):
    """One trial for each contender and repeat; seconds of a round, or results of both ranks."""
    return [
        {"repeat": repeat, "contender": name, "ranks": [given] * 2 if isinstance(given, dict) else [result(given)] * 2}
        for name, all_given in contenders.items()
        for repeat, given in enumerate(all_given)
    ]


def of_ranks(count, **contenders):
    """One repeat."""
    given = trials(**{name: [value] for name, value in contenders.items()})
    return [{**trial, "ranks": trial["ranks"][:1] * count} for trial in given]


def by_name(made):
    return {row.contender: row for row in made}


def test_a_fraction_is_that_of_the_same_repeat():
    """The machine becomes twice as slow in the second repeat, and nobody's fraction changes."""
    made = by_name(rows(run(), trials(none=[1.0, 2.0, 1.0], cocod=[1.25, 2.5, 1.25], ddp=[4.0, 8.0, 5.0])))
    assert (made["cocod"].fraction, made["cocod"].least, made["cocod"].most) == (0.8, 0.8, 0.8)
    assert (made["ddp"].fraction, made["ddp"].least, made["ddp"].most) == (0.25, 0.2, 0.25)
    assert made["none"].step_ms == 250.0
    wrong = 1.0 / 1.25, 1.0 / 2.5  # of the ceiling's median instead
    assert max(wrong) - min(wrong) > 0.3


def test_by_cpu_time_a_slow_moment_of_the_machine_does_not_count():
    slow = {**result(3.0, computing=0.81)}
    made = by_name(rows(run(), trials(none=[result(1.0, computing=0.9)], cocod=[slow])))
    assert (made["cocod"].fraction, made["cocod"].by_cpu) == (pytest.approx(1 / 3), pytest.approx(0.9))


def test_one_slow_round_does_not_count_and_ranks_count_by_speed():
    slow = {**result(1.0), "rounds": [1.0, 1.0, 30.0]}
    given = [{"repeat": 0, "contender": "none", "ranks": [slow, {**result(3.0)}]}]
    assert by_name(rows(run(), given))["none"].step_ms == pytest.approx(1e3 / 4 / ((1 + 1 / 3) / 2))


def test_what_the_transport_leaves_is_the_limit():
    """It takes 0.1 s of CPU, of which 0.06 s in no thread, in a round of 2 s: 5 %, and what is lost beyond is ours."""
    transport = result(1.0, cpu=(0.04, 0.0, 0.0), machine=0.2)
    ddp, cocod = result(2.0, sent=32e6, computing=0.5), result(2.0, computing=0.9)
    made = by_name(rows(run(), trials(none=[1.9], cocod=[cocod], ddp=[ddp], transport=[transport])))
    assert made["cocod"].transport_percent == pytest.approx(5.0)
    assert made["cocod"].limit == pytest.approx(0.95)
    assert made["cocod"].target == pytest.approx(0.98 * 0.95)
    assert made["cocod"].by_cpu == pytest.approx(0.9 * 0.97)  # 3 % are interrupts, charged to training while it computes
    assert made["cocod"].own_percent == pytest.approx(7.7)
    assert made["ddp"].transport_percent == pytest.approx(20.0)  # four times the bytes
    assert made["ddp"].limit == pytest.approx(1.9 / 4)  # and so of the link
    assert (made["ddp"].target, made["ddp"].own_percent) == (None, None)
    assert made["transport"].fraction is None
    wasteful = by_name(rows(run(), trials(none=[1.9], cocod=[ddp], transport=[transport])))
    assert wasteful["cocod"].limit == pytest.approx(0.95)  # more bytes than needed are ours
    shared = result(1.0, cpu=(0.01, 0.0, 0.03), machine=0.4)
    four = by_name(rows({**run(), "ranks": 4}, of_ranks(4, none=1.9, cocod=2.0, transport=shared)))
    assert four["cocod"].limit == pytest.approx(0.9)  # four ranks on two CPUs: each has half of one


def test_a_machine_that_others_use_is_told():
    """They keep half a CPU busy; that is not the transport's."""
    none = result(2.0, cpu=(1.9, 0.0, 0.0), machine=2 * 1.9 + 1.0)
    transport = result(1.0, cpu=(0.01, 0.0, 0.03), machine=0.2 + 0.5)
    made = by_name(rows(run(), trials(none=[none], cocod=[2.0], transport=[transport])))
    assert made["none"].note == "rough: other processes kept 0.50 of 2 CPUs busy"
    assert made["cocod"].transport_percent == pytest.approx(5.0)
    alone = by_name(rows(run(), trials(none=[{**none, "machine": 2 * 1.9 + 0.01}])))
    assert alone["none"].note == ""


def test_a_link_that_is_too_slow_is_the_limit():
    made = by_name(rows(run(), trials(none=[1.0], cocod=[4.4], transport=[result(4.0, cpu=(0.0, 0.0, 0.1))])))
    assert made["cocod"].limit == pytest.approx(0.25)
    assert made["cocod"].target == pytest.approx(0.95 * 0.25)
    assert made["cocod"].fraction < made["cocod"].target


ON_THE_LINK = 8e6 * 8 * 1514 / 1448 / 200e6  # seconds of an all-reduce's bytes at 200 Mbit/s, in frames


@pytest.mark.parametrize(
    ("device", "rate", "seconds"),
    [
        ("eth0", 200.0, ON_THE_LINK),
        ("lo", 200.0, ON_THE_LINK),  # the counter has seen both ranks' bytes, and they share the rate
        ("eth0", 10.0, 4.0),
        ("eth0", None, 4.0),
    ],
)
def test_a_transport_that_is_slower_than_its_link_is_no_limit(device, rate, seconds):
    given = trials(none=[0.1], cocod=[4.4], transport=[result(4.0)])
    made = by_name(rows({**run(link_rate=rate), "device": device}, given))
    assert made["cocod"].limit == pytest.approx(0.1 / seconds)


@pytest.mark.parametrize(("ranks", "note"), [(1, ""), (2, "has sent nothing in the measured rounds: take more of them")])
def test_a_transport_that_has_sent_nothing_judges_nobody(ranks, note):
    given = of_ranks(ranks, none=1.0, cocod=1.25, transport=result(1.0, sent=0.0))
    made = by_name(rows({**run(), "ranks": ranks}, given))
    assert (made["cocod"].fraction, made["cocod"].limit, made["transport"].note) == (0.8, None, note)


def test_costs_are_those_of_a_step_and_a_rank():
    cocod = result(2.0, peak=112e6, cpu=(1.6, 0.2, 0.04), metrics={"comm/exposed_ms": 3.0})
    row = by_name(rows(run(), trials(none=[2.0], cocod=[cocod])))["cocod"]
    assert (row.peak_mb, row.peak_parameters) == (12.0, 1.2)
    assert (row.training_ms, row.communication_ms, row.exposed_ms) == pytest.approx((400.0, 50.0, 3.0))
    assert row.sent_mb == 2.0
    loopback = by_name(rows({**run(), "device": "lo"}, trials(none=[2.0], cocod=[cocod])))["cocod"]
    assert loopback.sent_mb == 1.0  # its counter has seen both ranks


def test_what_crashes_keeps_its_row():
    bad = {"error": "crashed: SIGABRT"}
    given = trials(none=[1.0, 1.0], cocod=[1.0, 1.0], ddp=[2.0])
    given += [{"repeat": 1, "contender": "ddp", "ranks": [{"error": FOLLOWED}, bad]}]
    given += [{"repeat": 0, "contender": "transport", "ranks": [bad, bad]}]
    made = by_name(rows(run(), given))
    assert (made["ddp"].repeats, made["ddp"].fraction, made["ddp"].note) == (1, 0.5, "crashed: SIGABRT")
    assert (made["transport"].repeats, made["transport"].step_ms) == (0, None)
    assert (made["cocod"].repeats, made["cocod"].note, made["cocod"].limit) == (2, "", None)
    assert errors([{"error": FOLLOWED}, {"error": FOLLOWED}]) == [FOLLOWED]


def test_who_has_sent_nothing_is_told():
    silent = {name: [result(1.0, sent=0.0)] for name in ("none", "plain")}
    made = by_name(rows(WITH_PLAIN, trials(**silent, ddp=[result(1.0, sent=1e4)], cocod=[result(1.0)])))
    assert [bool(made[name].note) for name in ("none", "plain", "ddp", "cocod")] == [False, False, True, False]


def test_who_trains_alone_has_no_limit_of_a_link():
    given = trials(none=[1.9], plain=[2.0], cocod=[2.0], transport=[result(1.0, cpu=(0.0, 0.0, 0.1))])
    made = by_name(rows(WITH_PLAIN, given))
    assert [made[name].limit is None for name in ("none", "plain", "cocod")] == [True, True, False]
    assert made["plain"].fraction == pytest.approx(0.95)


def test_without_the_ceiling_there_is_no_fraction():
    made = by_name(rows(run(), trials(none=[{"error": "ValueError: no"}], cocod=[1.0])))
    assert (made["cocod"].step_ms, made["cocod"].fraction) == (250.0, None)


# Tables and plots


@pytest.fixture
def made():
    given = trials(none=[1.0], cocod=[1.02], ddp=[{"error": "RuntimeError: a | b"}])
    return [*rows(run(link_rate=200.0), given), *rows(run(link_rate=50.0), given)]


def test_tables_hold_every_row(made, tmp_path):
    table, text = tables.save(made, tmp_path)
    with table.open() as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == [*Setting._fields, *Row._fields[1:]]
    assert [row["contender"] for row in read] == 2 * list(PLAN.contenders)
    assert float(read[2]["fraction"]) == pytest.approx(1 / 1.02)
    lines = text.read_text().splitlines()
    assert [line for line in lines if line.startswith("##")] == [
        "## tiny, batch 2, 2 ranks, 200 Mbit/s, period 4",
        "## tiny, batch 2, 2 ranks, 50 Mbit/s, period 4",
    ]
    cells = [line.replace("\\|", "").count("|") for line in lines if line.startswith("|")]
    assert cells == [len(tables.COLUMNS) + 1] * 12
    assert "RuntimeError: a \\| b" in text.read_text()
    assert "0.980 (0.980–0.980)" in tables.plain(made)


def test_what_a_table_without_the_transport_lacks_is_said(made):
    alone = [row for row in made if row.contender != "transport"]
    for text in (tables.plain, tables.markdown):
        assert "they need transport" not in text(made)
        assert text(alone).count("they need transport among the --contenders.\n") == 2  # once in each setting


def test_plots(made, tmp_path):
    pytest.importorskip("matplotlib")
    (path,) = plots.save(made, tmp_path)
    assert path.name == "tiny-2-ranks-period-4.svg"
    assert "cocod" in path.read_text()
    assert plots.save([row for row in made if row.contender == "none"], tmp_path) == []


def test_without_matplotlib_there_are_tables(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main.conclude(made, tmp_path)
    assert "pip install -e '.[bench]'" in capsys.readouterr().out
    assert (tmp_path / "table.md").exists()


def test_runs_are_joined(tmp_path, monkeypatch, capsys):
    for rate in (50.0, 200.0):
        folder = tmp_path / f"{rate:g}"
        folder.mkdir()
        (folder / main.RUN).write_text(json.dumps(run(link_rate=rate)))
        lines = [json.dumps(trial) for trial in trials(none=[1.0], cocod=[1.25])]
        (folder / main.TRIALS).write_text("\n".join([*lines, lines[0][:20]]))  # killed while it wrote
    main.report([str(tmp_path / "50"), str(tmp_path / "200"), "--out", str(tmp_path / "all")])
    assert (tmp_path / "all" / "table.md").read_text().count("| cocod | 312.50 | 0.800") == 2
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["cocod-bench", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert "has no run.json" in capsys.readouterr().err


def test_a_folder_that_is_no_runs_is_named(tmp_path):
    (tmp_path / main.RUN).write_text("{}")
    with pytest.raises(InputError, match="cannot be read as a run of cocod-bench: FileNotFoundError"):
        main.read(tmp_path)
    (tmp_path / main.TRIALS).write_text('{"contender": "none"}\n')
    with pytest.raises(InputError, match="cannot be read as a run of cocod-bench: KeyError"):
        main.read(tmp_path)
    with pytest.raises(InputError, match=r"run\.json: File exists"):
        main.make(tmp_path / main.RUN)


# What can be measured


def test_a_strategy_that_is_registered_later_is_a_contender(monkeypatch):
    class Later(CoCoDStrategy):
        registered_name = "later"

    registry = _StrategyRegistry(StrategyRegistry)
    monkeypatch.setattr("lightning_cocod.cli.bench.contenders.StrategyRegistry", registry)
    assert list(own()) == [strategy.registered_name for strategy in strategies.STRATEGIES]
    Later.register_strategies(registry)
    registry.register("shorter", Later, period=2)
    assert [name for name in own() if name not in StrategyRegistry] == ["later", "shorter"]  # not later_spawn and the like
    assert {"later", "shorter"} < set(main.plan_of(main.parse([])).contenders)
    made = []
    for name in ("later", "shorter"):
        contenders()[name](SimpleNamespace(plan=PLAN, fit=made.append))
    assert [strategy._make.keywords["period"] for strategy in made] == [PLAN.period, 2]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--contenders none,coco", "there is no 'coco'"),
        ("--period 0", "--period must be positive, got 0"),
        ("--repeats -1", "--repeats must be positive"),
        ("--limit inf", "--limit must be positive"),
        ("--link-rate nan", "--link-rate must be positive"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(line, says):
    with pytest.raises(InputError, match=says):
        main.plan_of(main.parse(line.split()))


def test_the_ceiling_is_always_there():
    assert main.plan_of(main.parse(["--contenders", "ddp"])).contenders == ("none", "ddp")


@pytest.mark.parametrize("name", ["tiny", "gpt", "resnet18"])
def test_a_workload_trains(name):
    module = Training(WORK[name], batch_size=2)
    (optimizer,) = [module.configure_optimizers()]
    before = module.training_step(module.batch, 0)
    before.backward()
    optimizer.step()
    assert math.isfinite(before.item())
    parameters = list(module.parameters())
    assert all(p.grad is not None for p in parameters)
    cut = [p for part in halves(module.model) for p in part.parameters()]
    assert {id(p) for p in cut} == {id(p) for p in parameters}
    assert len(cut) == len(parameters)


# The place of a rank


def placed_by_slurm(rank, ranks, folder):
    become_a_task(rank, ranks, folder)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME"):
        del os.environ[name]
    assert started_by_launcher()
    host = Host.of_one(PLAN, folder)
    host._leave()
    return list(host.local), host.ranks, host.leads, host._address, counters.device()


def test_a_task_of_slurm_is_a_rank(tmp_path):
    assert run_ranks(placed_by_slurm, 2, tmp_path, init=False) == [
        ([0], 2, True, "localhost", "lo"),
        ([1], 2, False, "localhost", "lo"),
    ]


HERE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
TASKS = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({**HERE}, "has not told this rank its place: .*MASTER_PORT expected, but not set"),
        (TASKS, "srun: .*--ntasks-per-node=2"),
        ({**HERE, "MASTER_PORT": "", "GLOO_SOCKET_IFNAME": "nowhere0"}, "there is no network device 'nowhere0'"),
    ],
)
def test_what_a_launcher_has_left_out_is_said_in_one_line(told, says, tmp_path, monkeypatch, capsys):
    for name in ("MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value or str(free_port()))
    monkeypatch.setattr(sys, "argv", ["cocod-bench", "--workload", "tiny", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert re.fullmatch(f"cocod-bench: .*{says}.*\n", capsys.readouterr().err)


def test_the_device_is_that_of_the_narrowest_route():
    def way(device, network, metric, mask):
        to, mask = (int.from_bytes(ip_address(text).packed, sys.byteorder) for text in (network, mask))
        return f"{device}\t{to:08X}\t00000000\t0001\t0\t0\t{metric}\t{mask:08X}\t0\t0\t0"

    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    ways = [
        way("far0", "0.0.0.0", 0, "0.0.0.0"),
        way("slow0", "10.77.0.0", 600, "255.255.255.0"),
        way("eth0", "10.77.0.0", 100, "255.255.255.0"),
        way("peer0", "10.77.0.9", 900, "255.255.255.255"),
    ]
    table = "\n".join([head, *ways])
    found = [counters.device_towards(address, table) for address in ("10.77.0.1", "10.77.0.9", "10.78.0.1")]
    assert found == ["eth0", "peer0", "far0"]
    with pytest.raises(ValueError, match="no route"):
        counters.device_towards("10.78.0.1", "\n".join([head, *ways[1:]]))


# Real runs


class Slow(L.Callback):
    def on_train_batch_start(self, *_):
        time.sleep(0.02)


def measured_at_own_speed(rank, ranks, port, folder):
    """One rank makes many times as many steps as the other."""
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    seat = Seat(rank, ranks, "127.0.0.1", port, number=0, free_port=int(os.environ["MASTER_PORT"]))
    os.environ.update(seat.environment())
    job = Job(replace(PLAN, rounds=3), seat, folder / f"{rank}.json")
    job.fit(ADPSGDStrategy(), *([Slow()] if rank else []))
    del store
    return len(json.loads((folder / f"{rank}.json").read_text())["rounds"])


def test_a_slow_rank_is_measured_as_long_as_a_fast_one(tmp_path):
    assert run_ranks(measured_at_own_speed, 2, free_port(), tmp_path, init=False) == [3, 3]


@pytest.fixture
def _started_here(monkeypatch):
    """What a run sets is put back."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Makes a library that does something when it is imported."""

    def make(name, does):
        folder = tmp_path / "path" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(does)
        monkeypatch.syspath_prepend(str(folder.parent))

    return make


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("_started_here")
def test_every_contender_trains(tmp_path, library):
    """Ranks that wait for each other, ranks that share their epochs, and who has no others."""
    for name in ("torchft", "hivemind"):
        library(name, f"raise ModuleNotFoundError('not here', name='{name}.something')")
    out = tmp_path / "out"
    options = "--workload tiny --batch-size 2 --period 2 --rounds 4 --repeats 1 --limit 100 --contenders all"
    main.measure([*options.split(), "--out", str(out)])
    made = main.read(out)
    assert [row.contender for row in made] == list(contenders())
    notes = {row.contender: row.note for row in made if row.note}
    assert notes.pop("none", "rough").startswith("rough")  # others may use this machine
    foreign = [name for name in contenders() if name.startswith(("torchft", "hivemind"))]
    assert notes == {name: f"not installed: {name.partition('_')[0]}" for name in foreign}
    assert all(row.fraction for row in made if row.contender not in ("transport", *foreign))
    told = [row.contender for row in made if row.exposed_ms is not None]
    assert told == [*own(), "ssgd_overlap_pull"]
    assert [row.contender for row in made if row.target is not None] == list(own())


@pytest.mark.parametrize("neighbour", ["torchft", "hivemind"])
@pytest.mark.usefixtures("_started_here")
def test_a_neighbour_that_is_installed_trains(neighbour, tmp_path):
    if importlib.util.find_spec(neighbour) is None:
        pytest.skip(f"{neighbour} is not installed")
    theirs = [name for name in contenders() if name.startswith(neighbour)]
    options = "--workload tiny --batch-size 2 --period 2 --rounds 4 --repeats 1 --limit 100 --contenders"
    main.measure([*options.split(), ",".join(["none", *theirs]), "--out", str(tmp_path / "out")])
    made = {row.contender: row for row in main.read(tmp_path / "out")}
    assert all(made[name].fraction and not made[name].note for name in theirs), made


@pytest.mark.usefixtures("_started_here")
def test_what_hangs_is_ended_and_not_tried_again(tmp_path, library, monkeypatch, capsys):
    library("torchft", "import time; time.sleep(1000)")
    plan = replace(PLAN, contenders=("none", "torchft_diloco"), repeats=3, limit=2.0)
    monkeypatch.setattr(hosts, "schedule", lambda plan: [entry for entry in schedule(plan) if entry.contender != "none"])
    host = Host.of_all(plan, tmp_path / "out", 2)
    main.begin(host)
    host.run()
    row = by_name(main.read(host.out))["torchft_diloco"]
    assert (row.note, row.repeats) == ("timed out after 2 s", 0)
    assert len((host.out / main.TRIALS).read_text().splitlines()) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.timeout(150)
@pytest.mark.usefixtures("_started_here")
def test_a_run_measures_and_keeps_the_row_of_what_crashes(tmp_path, library, capsys):
    """Training, communicating or not, and a library that ends the process."""
    library("torchft", "import os; os.abort()")
    out = tmp_path / "out"
    options = "--workload mlp --period 4 --rounds 2 --repeats 1 --limit 60 --contenders transport,cocod,ddp,torchft_diloco"
    main.measure([*options.split(), "--out", str(out)])
    made = by_name(main.read(out))
    assert list(made) == ["none", "transport", "cocod", "ddp", "torchft_diloco"]
    assert made["torchft_diloco"].note == "crashed: SIGABRT"
    assert made["torchft_diloco"].fraction is None
    measured = [made[name] for name in ("none", "cocod", "ddp")]
    assert [row.note for row in measured[1:]] == ["", ""]
    assert made["none"].note.partition(":")[0] in ("", "rough")  # others may use this machine
    assert all(row.fraction > 0 for row in measured)
    assert made["none"].fraction == 1.0
    parameters = 528_906 * 4 / 1e6
    # Two rounds begin in the window, and no more than one of them ends beyond it; others may use this loopback.
    assert made["cocod"].sent_mb > 0.45 * parameters / 4
    assert made["ddp"].sent_mb > parameters
    assert made["cocod"].limit < 1
    assert made["cocod"].exposed_ms is not None
    assert "torchft_diloco" in capsys.readouterr().out
    with pytest.raises(InputError, match="has the results of a run"):
        main.measure([*options.split(), "--out", str(out)])
