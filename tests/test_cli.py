"""`cocod-train`: what it configures, launches, leaves behind, and says when something is wrong."""

import csv
import json
import logging
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import psutil
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from support.warm import Warm

from lightning_cocod import GLU
from lightning_cocod.cli import ranks, train
from lightning_cocod.cli.build import check, make
from lightning_cocod.cli.conf_dir import conf_dir
from lightning_cocod.cli.failure import RecordFailure, first_failure
from lightning_cocod.comm import PeerLost
from lightning_cocod.workloads import InputError

COMMAND = [sys.executable, "-m", "lightning_cocod.cli.train"]
LIMITS = ["trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
TINY = ["trainer.max_epochs=1", *LIMITS]
LIMIT = 240  # seconds until a run counts as hung; on two busy cores a sweep of three jobs took 80
NAMES = (
    "a_psgd, ad_psgd, cd_sgd, co2, cocod, compskip_dsgd, d_psgd, dc_asgd, dc_s3gd, ddp, diloco, dist_ef_sgd, eager_diloco, "
    "eamsgd, flex_compress_sgd, local_sgd, od_sgd, overlap_local_sgd, pipe_sgd, post_local_sgd, sgp, slowmo, ssd_sgd, ssgd, "
    "streaming_diloco"
)


def environment(folder: Path) -> dict[str, str]:
    """This process's variables, without what could make the command think that a launcher started it."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_", "HYDRA_", "WANDB_"))} | {
        "COLUMNS": "200",
        "TMPDIR": str(folder),
    }


def cocod_train(
    folder: Path, *arguments: str, command=COMMAND, spares: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in new interpreters or, with a number of `spares`, in warm ones."""
    popen = subprocess.Popen if spares is None else partial(Warm, spares=spares)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with popen([*command, *arguments], cwd=folder, env=environment(folder), **pipes) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def images(root: Path, classes: int = 2) -> Path:
    for split in ("train", "test"):
        for label in range(classes):
            folder = root / split / f"c{label}"
            folder.mkdir(parents=True)
            for i in range(3):
                Image.fromarray(np.full((32, 32, 3), 40 * i, dtype=np.uint8)).save(folder / f"{i}.png")
    return root


# The configuration


def composed(folder: Path, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("train", [f"output_dir={folder}", "name=test", *overrides])


GROUPS = sorted(
    (file.parent.name, file.stem) for file in conf_dir().glob("*/*.yaml") if file.parent.name not in ("experiment", "hydra")
)


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_every_choice_of_every_group_can_be_made(tmp_path, group, choice):
    extra = ["trainer.accelerator=cpu", "trainer.devices=2"] if (group, choice) == ("trainer", "gpu") else []
    if choice in ("imagefolder", "cifar10"):
        extra = [f"data.root={images(tmp_path / 'images', classes=10)}"]
    cfg = composed(tmp_path, f"{group}={choice}", *extra)
    if (group, choice) == ("compression", "none"):
        assert make(cfg, group) is None
    elif group == "delay":
        assert make(cfg, "strategy")
    elif group in ("model", "schedule"):
        check(composed(tmp_path, f"{group}={choice}", "data=synthetic"))
    else:
        made = make(cfg, group)
        assert made is not None
    assert (conf_dir() / group / f"{choice}.yaml").read_text().startswith("# "), "each choice says what it is"


@pytest.mark.parametrize("file", sorted((conf_dir() / "experiment").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_experiment_passes_the_check(tmp_path, file):
    cfg = composed(tmp_path, f"experiment={file.stem}")
    if "root" in cfg.data:
        cfg.data.root = str(images(tmp_path / "images", classes=10))
    check(cfg)


def test_help_names_every_choice():
    text = (conf_dir() / "hydra" / "help" / "cocod_train.yaml").read_text()
    for group, choice in GROUPS:
        assert re.search(rf"\b{group}\b", text)
        assert re.search(rf"\b{choice}\b", text), f"{group}={choice} is missing from --help"


def test_strategies_get_their_options(tmp_path):
    cfg = composed(tmp_path, "delay=k16", "delay.overlap=false", "strategy.timeout=5")
    assert make(cfg, "compression") is None
    cfg.strategy.compression = None
    assert OmegaConf.to_container(cfg.strategy, resolve=True) == {
        "_target_": "lightning_cocod.CoCoDStrategy",
        "period": 16,
        "intra_node": None,
        "warmup_steps": 0,
        "overlap": False,
        "compression": None,
        "batch_sizes": "equal",
        "on_nonfinite": "raise",
        "timeout": 5,
        "process_group_timeout": 1800.0,
        "connect_timeout": 300.0,
    }


# Who starts the ranks


@pytest.mark.parametrize(
    ("variables", "started", "rank"),
    [
        ({}, False, 0),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4"}, True, 3),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, True, 1),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, True, 2),
        ({"SLURM_NTASKS": "4"}, False, 0),  # in an allocation, not under srun
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False, 0),
        ({"RANK": "1"}, False, 0),
    ],
)
def test_launchers_are_recognised(variables, started, rank):
    assert ranks.started_by_launcher(variables) is started
    assert ranks.global_rank(variables) == rank


def test_gpus_are_counted(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert ranks.devices(composed(tmp_path, "trainer=gpu")) == 4
    assert ranks.devices(composed(tmp_path, "trainer=gpu", "trainer.devices=auto")) == 4
    assert ranks.devices(composed(tmp_path, "trainer=gpu", "trainer.devices=3")) == 3
    with pytest.raises(InputError, match=r"trainer\.devices=5 .* has 4"):
        ranks.devices(composed(tmp_path, "trainer=gpu", "trainer.devices=5"))


# Wrong input: one line that says what would be right


@pytest.fixture
def in_process(monkeypatch, tmp_path, capsys):
    """Runs the command in this process, with `launch` replaced by a recorder of what it is asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    launched = []

    def launch(config, ranks):
        launched.append((config, ranks))
        return {"error": "not launched in this test"}

    monkeypatch.setattr(train, "launch", launch)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cocod-train", *arguments])
        code = 0
        try:
            train.main()
        except SystemExit as exit:
            code = exit.code
        return code, capsys.readouterr(), launched

    yield run
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "strategy=foo",
            f"strategy=foo is unknown: choose {NAMES}",
        ),
        (
            "-m strategy=ddp,foo",
            f"strategy=foo is unknown: choose {NAMES}",
        ),
        ("stratgy=ddp", "stratgy is no option: did you mean strategy?"),
        ("trainer.max_epoch=3", "trainer.max_epoch is no option: did you mean trainer.max_epochs? trainer has accelerator,"),
        ("model=vgg16 model.batchnorm=true", "did you mean model.batch_norm? model has batch_norm"),
        ("optimizer.foo.bar=1", "optimizer.foo.bar is no option"),
        ("+trainer.max_epochs=2", "trainer.max_epochs is there already: leave the + out"),
        ("+strategy.foo=1", "strategy: CoCoDStrategy has no option foo"),
        ("+trainer.foo=1", "trainer: "),
        ("foo", "missing EQUAL"),
        ("~model", "model"),
        ("~compression", "strategy.compression is made from compression: leave ~compression out"),
        ("delay.period=0", "delay.period must be"),
        ("delay.warmup_steps=-1", "delay.warmup_steps must be"),
        ("compression=int9", "int9"),
        ("compression=int8 compression.block=12", "compression.block must be a multiple of 8, got 12"),
        ("data.batch_size=-4", "data.batch_size must be an integer of at least 1, got -4"),
        ("data=imagefolder", "data.root has no value: add data.root=..."),
        ("data=imagefolder data.root=nowhere", "data.root=nowhere does not exist"),
        ("data=cifar10 data.root=nowhere", "data.root=nowhere does not exist"),
        ("model=vgg16", "the model cannot take the data's images of 1×8×8"),
        ("optimizer.lr=-1", "optimizer: Invalid learning rate: -1"),
        ("optimizer.lr=high", "lr=high"),
        ("trainer.max_epochs=1.5", "trainer.max_epochs must be a whole number, got 1.5"),
        ("output_dir=/proc/nope", "output_dir=/proc/nope cannot be made: No such file or directory"),
        ("schedule=step schedule.milestones=[80]", "schedule.milestones are fractions"),
        ("seed=x", "seed must be"),
        ("label_smoothing=2", "label_smoothing must be"),
        ("ckpt_path=none.ckpt", "ckpt_path=none.ckpt does not exist"),
        ("progress=loud", "progress=loud is unknown: choose auto, bar, lines or none"),
        ("trainer.devices=0", "trainer.devices=0 must be a number of ranks, 1 or more"),
        ("trainer.devices=two", "trainer.devices=two must be"),
        ("trainer.devices=100000", "trainer.devices=100000 is too many"),
        ("trainer.num_nodes=2", "torchrun --nnodes=2"),
        ("trainer.precision=77", "trainer: Precision 77 is invalid"),
        ("trainer.accelerator=tpu", "trainer.accelerator=tpu is unknown"),
    ],
)
def test_wrong_input_is_answered_in_one_line(in_process, arguments, message):
    code, output, launched = in_process(*arguments.split())
    assert code == 2
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert output.err.startswith("cocod-train: ")
    assert launched == []


def test_gpu_that_is_not_there(in_process, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, output, _ = in_process("trainer=gpu")
    assert code == 2
    assert output.err == "cocod-train: trainer.accelerator=gpu needs a GPU, and none was found: use trainer=cpu\n"


def test_options_without_effect_are_noted(in_process):
    _, output, launched = in_process("strategy=ddp", "delay.period=8", "delay=k16", "+mine=3")
    notes = [line for line in output.err.splitlines() if line.startswith("note: ")]
    assert [note.split()[1] for note in notes] == ["delay.period=8", "delay=k16", "+mine=3"]
    assert len(launched) == 1
    _, output, _ = in_process("strategy=local_sgd", "delay.period=8", "delay.overlap=false")
    assert [line.split()[1] for line in output.err.splitlines() if line.startswith("note: ")] == ["delay.overlap=false"]
    _, output, _ = in_process("delay.period=8", "delay.overlap=false", "delay=k1", "+mine=3", "label_smoothing=${mine}")
    assert "note: " not in output.err


def test_ranks_get_a_plain_resolved_configuration(in_process):
    _, _, [(config, ranks)] = in_process("delay.period=7", "trainer.devices=3")
    assert ranks == 3
    assert json.loads(json.dumps(config)) == config
    assert config["strategy"]["period"] == 7
    assert config["name"] == "digits-resnet20-cocod"
    assert Path(config["output_dir"]).is_dir()


@pytest.mark.parametrize(
    ("arguments", "codec"),
    [
        ("strategy=cocod", None),
        ("strategy=dist_ef_sgd", "ScaledSign"),
        ("strategy=compskip_dsgd", "ScaledSign"),
        ("strategy=flex_compress_sgd", "TopK"),
        ("strategy=cd_sgd", "Threshold"),
        ("strategy=dist_ef_sgd compression=int8", "Int8"),
        ("compression=int8 strategy=cd_sgd", "Int8"),
        ("strategy=dist_ef_sgd compression=none", None),
    ],
)
def test_strategies_have_their_own_codecs_unless_another_one_is_chosen(in_process, arguments, codec):
    _, _, [(config, _)] = in_process(*arguments.split())
    chosen = instantiate(config["strategy"]["compression"])
    assert (None if chosen is None else type(chosen).__name__) == codec


@pytest.mark.parametrize(
    ("arguments", "momentum", "rate"),
    [
        ("strategy=cocod", 0.9, 0.05),
        ("strategy=a_psgd", 0.0, 0.05),
        ("strategy=dc_asgd optimizer.lr=0.01", 0.0, 0.01),
        ("strategy=a_psgd optimizer=sgd", 0.9, 0.05),
    ],
)
def test_a_server_that_steps_for_every_gradient_has_its_own_optimizer_unless_another_one_is_chosen(
    in_process, arguments, momentum, rate
):
    _, _, [(config, _)] = in_process(*arguments.split())
    assert (config["optimizer"]["momentum"], config["optimizer"]["lr"]) == (momentum, rate)


def test_a_local_update_with_other_constants_can_be_said_on_the_command_line(in_process):
    chosen = "{_target_: lightning_cocod.GLU, alpha: 1.0}"
    _, _, [(config, _)] = in_process("strategy=ssd_sgd", f"strategy.local_update={chosen}")
    assert instantiate(config["strategy"]["local_update"]) == GLU(alpha=1.0)


def test_sweep_is_refused_under_a_launcher(in_process, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    code, output, _ = in_process("-m", "delay.period=1,2")
    assert code == 1
    assert "without torchrun or srun" in output.err


# End to end. The default run is one of new interpreters, the others are warm ones.


def only(paths) -> Path:
    (path,) = paths
    return path


def wandb_runs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*run-*.wandb"))


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("default")
    return folder, cocod_train(folder, *TINY)


def test_default_run_prints_a_table_and_where_the_results_are(default_run):
    folder, result = default_run
    assert result.returncode == 0, result.stderr
    for label in ("test accuracy", "samples/s", "comm. hidden", "sent per rank", "period"):
        (row,) = (line for line in result.stdout.splitlines() if f" {label} " in line)
        assert re.search(r"\d", row), row
    run = only(wandb_runs(folder)).parent
    assert f"wandb leet {run}" in result.stdout
    assert f"wandb sync {run}" in result.stdout
    assert str(only(folder.rglob("metrics.csv"))) in result.stdout


def test_default_run_is_quiet(default_run):
    _, result = default_run
    lines = [line for line in result.stderr.splitlines() if not re.match(r"epoch 1/1  train/loss", line)]
    assert lines == []
    assert "arning" not in result.stdout


def test_default_run_leaves_one_folder(default_run):
    folder, _ = default_run
    job = only(folder.rglob("summary.json")).parent
    assert job.parent.parent == folder / "outputs"
    assert [path.name for path in folder.iterdir()] == ["outputs"]
    assert only(job.rglob("*.ckpt")).parent.name == "checkpoints"
    summary = json.loads((job / "summary.json").read_text())
    assert (summary["ranks"], summary["steps"], summary["period"]) == (2, 4, 2)
    assert 0 <= summary["test/acc"] <= 1
    assert summary["comm/sent_bytes"] > 0


def test_csv_holds_the_vocabulary(tmp_path, default_run):
    folder, _ = default_run
    with only(folder.rglob("metrics.csv")).open() as file:
        columns = set(csv.DictReader(file).fieldnames)
    assert {"train/loss", "train/acc", "val/loss", "val/acc", "test/acc"} <= columns


def test_sweep_over_strategies(tmp_path):
    result = cocod_train(tmp_path, "-m", "strategy=ddp,cocod", "trainer.log_every_n_steps=2", *TINY, spares=4)
    assert result.returncode == 0, result.stderr
    table = result.stdout[result.stdout.index("sweep trainer.") :]
    assert re.findall(r"strategy=(\w+)", table) == ["ddp", "cocod"]
    sweep = only(tmp_path.rglob("sweep.csv")).parent
    with (sweep / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["ranks"] for row in rows] == ["2", "2"]
    assert [row["name"] for row in rows] == [f"digits-resnet20-{name}" for name in ("ddp", "cocod")]
    assert all(float(row["throughput/samples_per_sec"]) > 0 for row in rows)
    runs = [only(wandb_runs(sweep / str(job))) for job in range(2)]
    assert len(wandb_runs(tmp_path)) == 2
    assert all(sweep.name.encode() in run.read_bytes() for run in runs), "each run belongs to the sweep's group"
    with only((sweep / "1").rglob("metrics.csv")).open() as file:
        assert {"comm/hidden_fraction", "algo/period", "throughput/step_ms"} <= set(csv.DictReader(file).fieldnames)


def test_sweep_over_numbers_of_ranks(tmp_path):
    data = ["data=synthetic", "data.shape=[3,8,8]", "data.length=64", "data.batch_size=8"]
    more_and_fewer = "trainer.devices=1,2,1"
    result = cocod_train(tmp_path, "-m", more_and_fewer, "trainer.max_epochs=1", "logger=csv", *data, spares=4)
    assert result.returncode == 0, result.stderr
    with only(tmp_path.rglob("sweep.csv")).open() as file:
        rows = list(csv.DictReader(file))
    alone, together = ("1", "8"), ("2", "4")  # two ranks share the data
    assert [(row["ranks"], row["steps"]) for row in rows] == [alone, together, alone]


def test_the_rank_that_failed_is_told_of_even_where_another_hears_of_it_first(tmp_path):
    RecordFailure(tmp_path, 0).record(PeerLost("rank 1 failed: InputError: no such file"))
    RecordFailure(tmp_path, 1).record(InputError("no such file"))
    failure = first_failure(tmp_path, 0)
    assert (failure.rank, failure.text, failure.expected) == (1, "no such file", True)


def test_failing_job_of_a_sweep_does_not_end_it(tmp_path):
    root = images(tmp_path / "images")
    (root / "train/c1/1.png").write_bytes(b"junk")
    data = ["data=imagefolder", f"data.root={root}", "data.image_size=8", "logger=none", "trainer.devices=2"]
    result = cocod_train(tmp_path, "-m", "delay.period=0,1", *data, spares=4)
    assert result.returncode == 1
    assert [line.partition(": ")[0] for line in result.stderr.splitlines()] == ["cocod-train", "cocod-train"]
    invalid, damaged = result.stderr.splitlines()
    assert "period must be" in invalid
    assert f"{root}/train/c1/1.png is not a readable image" in damaged
    assert len(list(tmp_path.rglob("summary.json"))) == 2
    assert "failed:     delay.period=0" in result.stdout
    assert "period must be" in result.stdout


def test_torchrun_starts_the_ranks_and_one_folder_is_made(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *COMMAND[1:]]
    result = cocod_train(tmp_path, *TINY, "logger=csv", command=torchrun, spares=2)
    assert result.returncode == 0, result.stderr
    summary = json.loads(only(tmp_path.rglob("summary.json")).read_text())
    assert summary["ranks"] == 2
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1
    assert result.stdout.count("test accuracy") == 1


def test_unreachable_master_is_one_line(tmp_path, monkeypatch):
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}.items():
        monkeypatch.setenv(name, str(value))
    result = cocod_train(tmp_path, "strategy.connect_timeout=0.5", "logger=none", spares=0)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "rank 1 cannot reach the master at 127.0.0.1:9 within 0.5 s" in result.stderr


def test_unreachable_master_is_found_under_ddp_too(monkeypatch):
    from lightning_cocod.cli.job import reach_master

    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}.items():
        monkeypatch.setenv(name, str(value))
    ddp = L.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False).strategy
    with pytest.raises(ConnectionError, match=r"rank 1 cannot reach the master at 127\.0\.0\.1:9"):
        reach_master(ddp, timeout=0.2)


def test_sigterm_ends_all_ranks(tmp_path):
    command = [*COMMAND, "trainer.max_epochs=100000", "trainer.limit_train_batches=4", "logger=none", "progress=none"]
    pipe = {"stdout": subprocess.PIPE, "text": True}
    with Warm(command, spares=2, cwd=tmp_path, env=environment(tmp_path), **pipe) as process:
        try:
            assert process.stdout.readline() == "starting 2 ranks ...\n"
            assert "2 rank(s)" in process.stdout.readline()  # training begins
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == 128 + signal.SIGTERM
            _, alive = psutil.wait_procs(family, timeout=60)
            assert alive == []
        finally:
            process.kill()
