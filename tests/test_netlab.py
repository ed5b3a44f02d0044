"""The slow network on one machine: its command line, its links, an outage in mid-run, and that nothing is left.

So for the benchmark's recipe, which runs in it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

import lab as labs  # noqa: E402
import netlab  # noqa: E402
from lab import Lab, Link, SharedLoopback  # noqa: E402

from lightning_cocod.cli.bench.counters import device_towards  # noqa: E402

LIMIT = 60.0  # seconds for anything that waits; far above what is needed
pytestmark = pytest.mark.timeout(150)
missing = labs.missing()
needs_a_lab = pytest.mark.skipif(missing is not None, reason=f"no lab here: {missing}")


# The command line


def parse(line):
    return netlab.parse(line.split())


def test_one_rate_is_for_all_ranks_or_there_is_one_for_each():
    assert netlab.rates("200", 3, "--up") == [200.0] * 3
    assert netlab.rates("200,none,0.5", 3, "--up") == [200.0, None, 0.5]
    assert netlab.rates(None, 2, "--up") == [None, None]


@pytest.mark.parametrize("text", [" ", "fast", "0", "-1", "nan", "inf", "1,2,3"])
def test_what_is_no_rate_is_named(text):
    with pytest.raises(ValueError, match=r"got '|3 rates for 2 ranks"):
        netlab.rates(text, 2, "--up")


def test_the_directions_of_a_link_are_set_apart():
    lab, events, command = parse("--ranks 2 --rate 100 --up 20,none -- python train.py --lr 1")
    assert lab.links == [Link(20.0, 100.0), Link(None, 100.0)]
    assert events == []
    assert command == ["python", "train.py", "--lr", "1"]


class Recorder:
    """Stands in for a lab: what has been asked of it."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.asked.append((name, *args, kwargs))


def test_what_happens_comes_in_the_order_of_time():
    line = "--ranks 3 --outage 1@30+3 --change 2@31.5=20 --change 0@1=none/5 -- train"
    _, events, _ = parse(line)
    recorder = Recorder()
    for event in events:
        event.act(recorder)
    assert [event.at for event in events] == [1.0, 30.0, 31.5, 33.0]
    assert recorder.asked == [
        ("rate", 0, {"up": None, "down": 5.0}),
        ("cut", 1, {}),
        ("rate", 2, {"up": 20.0, "down": 20.0}),
        ("mend", 1, {}),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--rate 5", "which command"),
        ("--outage 1@3 -- x", "RANK@START+SECONDS"),
        ("--outage 2@3+1 -- x", "there is no rank 2 among 2"),
        ("--change 1@3 -- x", "RANK@START=RATE"),
        ("--change 1@3=slow -- x", "got 'slow'"),
        ("--loopback --up 5 -- x", "--loopback has one --rate for all"),
        ("--loopback --rate 5,6 -- x", "--rate has 2 rates"),
        ("--ranks 0 -- x", "one rank at least"),
        ("--ranks 300 -- x", "250 ranks"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(line, says, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_ranks_compute_with_their_share_of_the_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [netlab.threads(ranks) for ranks in (1, 3, 16)] == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert netlab.threads(16) == "3"


def test_a_rank_is_told_what_lightning_and_torch_read():
    told = Lab([Link()] * 3).environment(2, 29500)
    assert [told[name] for name in ("MASTER_ADDR", "MASTER_PORT")] == ["10.77.0.1", "29500"]
    assert [told[name] for name in ("RANK", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["2", "2", "0", "3"]
    assert told["GLOO_SOCKET_IFNAME"] == "eth0"


@needs_a_lab
@pytest.mark.parametrize(("right", "what"), [("sys_admin", "a network namespace"), ("net_admin", "a veth pair")])
def test_a_right_that_is_missing_is_named(right, what):
    without = ["setpriv", f"--bounding-set=-{right}", sys.executable, RECIPES / "netlab.py", "--check"]
    done = subprocess.run(without, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(rf"not permitted: {what} \(.*CAP_{right.upper()}.*\): .*not permitted\n", done.stdout)


def test_a_tool_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(labs.shutil, "which", lambda tool: None if tool in ("ip", "tc") else "/usr/bin/" + tool)
    assert labs.missing() == "not installed: ip, tc (package iproute2)"


def test_there_is_no_network_outside_of_the_block():
    with pytest.raises(RuntimeError, match="inside `with"):
        Lab([Link()]).run(["true"])
    with pytest.raises(RuntimeError, match="inside `with"):
        SharedLoopback(1, None).rate(5)


def test_a_lab_that_is_not_permitted_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(labs, "missing", lambda: "not installed: tc (package iproute2)")
    monkeypatch.setattr(sys, "argv", ["netlab.py", "--", "true"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit, match=r"^no lab here: not installed: tc \(package iproute2\)$"):
            netlab.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# The links


def shape(namespace, device):
    """Rate in Mbit/s of what the device sends; None without a limit."""
    options = [q["options"] for q in json.loads(namespace.do(f"tc -json qdisc show dev {device}")) if q["kind"] == "tbf"]
    return options[0]["rate"] * 8 / 1e6 if options else None


@needs_a_lab
def test_each_direction_of_each_link_is_shaped_and_can_change():
    with Lab([Link(200, 50), Link(20, None)]) as lab:
        switch = lab._switch
        assert [shape(lab.home(rank), "eth0") for rank in range(2)] == [200, 20]
        assert [shape(switch, f"port{rank}") for rank in range(2)] == [50, None]
        lab.rate(0, up=None)
        lab.rate(1, up=5, down=7)
        assert [shape(lab.home(rank), "eth0") for rank in range(2)] == [None, 5]
        assert [shape(switch, f"port{rank}") for rank in range(2)] == [50, 7]
        with pytest.raises(ValueError, match="a rate must be a positive number"):
            lab.rate(0, up=-1)
        with pytest.raises(ValueError, match="there is no rank 2"):
            lab.cut(2)


@needs_a_lab
def test_the_loopback_is_one_for_all():
    with SharedLoopback(2, 100) as lab:
        assert lab.home(0) is lab.home(1)
        assert shape(lab.home(0), "lo") == 100
        lab.rate(None)
        assert shape(lab.home(0), "lo") is None
        codes = [process.wait(LIMIT) for process in lab.run(lambda rank: ["sh", "-c", f"exit {rank + 3}"])]
        assert codes == [3, 4]


OUTSIDE = """
import errno, socket, sys
for address in sys.argv[1:]:
    with socket.socket() as probe:
        print(errno.errorcode[probe.connect_ex((address, 9))])
"""


@needs_a_lab
@pytest.mark.parametrize(("lab", "peer"), [(Lab([Link()] * 2), "10.77.0.1"), (SharedLoopback(2, None), "127.0.0.1")])
def test_no_rank_has_a_route_to_anybody_but_the_others(lab, peer):
    """A peer answers that nobody listens; from another network (one for examples, another for benchmarks) nothing can."""
    with lab:
        processes = lab.run([sys.executable, "-IS", "-c", OUTSIDE, peer, "192.0.2.1", "198.18.0.1"], stdout=subprocess.PIPE)
        found = [process.communicate(timeout=LIMIT)[0].split() for process in processes]
    assert found == [["ECONNREFUSED", "ENETUNREACH", "ENETUNREACH"]] * 2


@needs_a_lab
def test_the_benchmark_counts_the_device_of_the_link():
    with Lab([Link()] * 2) as lab:
        for rank in range(2):  # the first is the master itself
            assert device_towards("10.77.0.1", lab.home(rank).do("cat /proc/net/route")) == "eth0"


WAITS = """
import socket, subprocess, sys, time
def is_cut():
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((sys.argv[1], 9)) != 111  # refused: by whoever is there, at once
def rate():
    return subprocess.run(["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout
if sys.argv[2] == "1":
    while "rate 9Mbit" not in rate():
        time.sleep(0.02)
    print("has another rate")
else:
    while not is_cut():
        time.sleep(0.02)
    print("is cut off")
"""


@needs_a_lab
def test_what_is_to_happen_happens_while_the_ranks_run():
    """Each rank goes on until it sees it; without it they would until the limit."""
    line = "--rate 100 --outage 0@0.3+500 --change 1@0.1=7 --change 1@0.2=9/11"
    script = f"exec {sys.executable} -ISc '{WAITS}' 10.77.0.2 $RANK"
    command = [sys.executable, RECIPES / "netlab.py", *line.split(), "--", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("[netlab]")] == [
        "[netlab] 0.1 s: rank 1 has 7.0 up, 7.0 down, in Mbit/s",
        "[netlab] 0.2 s: rank 1 has 9.0 up, 11.0 down, in Mbit/s",
        "[netlab] 0.3 s: rank 0 is cut off",
        "[netlab] not done, as all ranks had ended before: 500.3 s: rank 0 is connected again",
    ]
    assert {"[0] is cut off", "[1] has another rate"} <= set(lines)


TOO_SLOW = "1e-9"  # Mbit/s: less than a byte a second


@needs_a_lab
@pytest.mark.parametrize("line", ["netlab.py --rate R -- true", "netlab.py --change 0@0=R -- sleep 9", "speed.py --rates R"])
def test_a_lab_that_fails_ends_with_one_line(line, tmp_path):
    recipe, *arguments = line.replace("R", TOO_SLOW).split()
    arguments += ["--out", tmp_path] if recipe == "speed.py" else []
    done = subprocess.run([sys.executable, RECIPES / recipe, *arguments], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    assert re.fullmatch(r"the lab has failed: 'tc qdisc replace dev eth0 .*' failed: .*\n", done.stderr)


# Nothing is left


def namespaces(process):
    """The network namespaces that the descendants of a process are in."""
    own = os.readlink("/proc/self/ns/net")
    found = {child.pid: os.readlink(f"/proc/{child.pid}/ns/net") for child in process.children(recursive=True)}
    return set(found.values()) - {own}


def are_gone(ids, limit=LIMIT):
    """Whether nobody is in these namespaces any more, soon."""
    deadline = time.monotonic() + limit
    while (left := [pid for id in ids for pid in labs.inside(id)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def devices():
    return subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout.count("\n")


FORKS = ["sh", "-c", "trap '' INT TERM HUP; setsid sleep 1000 & echo started; wait"]  # a descendant that leaves the group


@needs_a_lab
def test_nothing_is_left_after_an_error_and_two_labs_do_not_meet():
    before = devices()
    with Lab([Link()]) as other:
        others = namespaces(psutil.Process())
        with suppress(KeyError), Lab([Link(10, 10)] * 2) as lab:
            processes = lab.run(FORKS, stdout=subprocess.PIPE)
            assert [process.stdout.readline() for process in processes] == ["started\n"] * 2
            ids = namespaces(psutil.Process())
            raise KeyError
        assert (len(others), len(ids)) == (2, 5)  # each lab has a switch
        assert are_gone(ids - others, limit=0)
        assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2
        assert other.run(["true"])[0].wait(LIMIT) == 0
    assert are_gone(ids, limit=0)
    assert devices() == before


@needs_a_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number):
    command = [sys.executable, RECIPES / "netlab.py", "--ranks", "2", "--", *FORKS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] started\n", "[1] started\n"]
        ids = namespaces(psutil.Process(process.pid))
        assert len(ids) == 3
        process.send_signal(number)
        assert process.wait(LIMIT) == (-number if number == signal.SIGKILL else 128 + number)
    assert are_gone(ids)


@needs_a_lab
def test_the_worst_rank_decides_the_exit_code_and_each_line_says_whose_it_is():
    script = "echo rank $RANK of $WORLD_SIZE; test $RANK = 0 || kill -9 $$"
    command = [sys.executable, RECIPES / "netlab.py", "--rate", "10", "--outage", "0@500+3", "--", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 128 + signal.SIGKILL
    assert {"[0] rank 0 of 2", "[1] rank 1 of 2"} <= set(done.stdout.splitlines())
    assert "not done, as all ranks had ended before: 500 s: rank 0 is cut off" in done.stdout


STANDS_IN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import speed
speed.BENCH = ["sh", "-c", "mktemp -d -t cocod-bench-XXXX && exec sleep 1000"]
speed.main()
"""


@needs_a_lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_benchmark_after_a_signal(number, tmp_path):
    """Of ranks that are killed and cannot remove their folders themselves."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", STANDS_IN, RECIPES, "--out", tmp_path / "out"]
    pipe, env = subprocess.PIPE, {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        folders = [Path(process.stdout.readline().strip()) for _ in range(2)]
        assert all(folder.is_dir() and scratch in folder.parents for folder in folders)
        process.send_signal(number)
        assert process.communicate(timeout=LIMIT) == ("", "")
        assert process.returncode == 128 + number
    assert list(scratch.iterdir()) == []


# An outage in the middle of a run

TRAIN = """
    import os, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch import nn
    from lightning_cocod import CoCoD

    def outage():
        Path(f"reached{rank}").touch()
        while not Path("cut").exists():
            time.sleep(0.01)

    def train(halfway):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(400, 1000), nn.Tanh(), nn.Linear(1000, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        draw = torch.Generator().manual_seed(rank)
        with CoCoD(model, optimizer, period=2, timeout=60):
            for step in range(1, 13):
                optimizer.zero_grad()
                x = torch.randn(8, 400, generator=draw)
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                if step == 4:
                    halfway()  # a message has just been launched
            Path(f"last{rank}").touch()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    calm = train(lambda: None)
    Path(f"last{rank}").unlink()
    torch.save({"calm": calm, "outage": train(outage)}, f"rank{rank}.pt")
    dist.destroy_process_group()
"""


def wait_for(*files):
    deadline = time.monotonic() + LIMIT
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{[str(file) for file in files if not file.exists()]} did not appear"
        time.sleep(0.01)


@needs_a_lab
def test_an_outage_in_the_middle_of_a_run_does_not_change_its_end(tmp_path):
    """Rank 1 is cut off for 3 s with a message on its way; TCP carries on, nobody is lost, and not a bit differs."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    paths = {"PYTHONPATH": str(RECIPES.parent), "OMP_NUM_THREADS": "1"}
    with Lab([Link(50, 50)] * 2) as lab:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes = lab.run([sys.executable, "train.py"], env=paths, cwd=tmp_path, **pipes)
        wait_for(tmp_path / "reached0", tmp_path / "reached1")
        lab.cut(1)
        (tmp_path / "cut").touch()
        time.sleep(3.0)
        sent = lab.traffic(1).sent
        assert not (tmp_path / "last0").exists()  # nobody gets past the next merge: the link is really cut
        assert not (tmp_path / "last1").exists()
        lab.mend(1)
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert lab.traffic(1).sent > sent
    ends = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for end in ends:
        assert torch.equal(end["outage"], end["calm"])
        assert torch.equal(end["outage"], ends[0]["calm"])
