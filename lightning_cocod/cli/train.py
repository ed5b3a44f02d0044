"""`cocod-train`: one training, or a sweep of them, from the command line."""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from torch.distributed.elastic.multiprocessing import SignalException

from lightning_cocod.cli.build import check
from lightning_cocod.cli.conf_dir import conf_dir
from lightning_cocod.cli.job import train
from lightning_cocod.cli.launch import RankError, launch
from lightning_cocod.cli.messages import option_message, value_message
from lightning_cocod.cli.notices import unused_options
from lightning_cocod.cli.quiet import quiet
from lightning_cocod.cli.ranks import devices, global_rank, one_machine, started_by_launcher
from lightning_cocod.cli.summary import Summary, print_summary, save_summary
from lightning_cocod.workloads import InputError

WRONG_INPUT, FAILED = 2, 1  # exit codes


def main() -> None:
    """Run the command line; exits with 2 if the input is wrong, with 1 if a job failed otherwise."""
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions come here, instead of into Hydra's own report
    if global_rank() > 0:  # one process keeps the records
        sys.argv += ["hydra.output_subdir=null", "hydra.run.dir=."]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        if full_error:
            raise
        _complain(option_message(error, sys.argv[1:]))
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(130)


def job(cfg: DictConfig) -> float | None:
    """Hydra's task: one job. Returns the validation accuracy, for sweepers that optimise it.

    In a sweep a job that fails leaves its error in summary.json, and the next one starts.
    """
    runtime = HydraConfig.get()
    sweep = runtime.mode == RunMode.MULTIRUN
    folder = Path(runtime.runtime.output_dir)
    overrides = list(runtime.overrides.task)
    summary: Summary | None
    code = FAILED
    try:
        if sweep and started_by_launcher():
            raise InputError("a sweep starts the ranks of each job itself: run `cocod-train -m` without torchrun or srun")
        if sweep and cfg.group is None:
            cfg.group = Path(runtime.sweep.dir).name
        for notice in unused_options(cfg, overrides):
            print(notice, file=sys.stderr, flush=True)
        summary = run(cfg)
    except (InputError, ConnectionError) as error:  # a master that cannot be reached: its address was wrong input
        _complain(str(error))
        summary, code = {"error": str(error)}, WRONG_INPUT
    except OmegaConfBaseException as error:  # a group taken away with ~, an interpolation to nowhere
        message = value_message(error, overrides)
        _complain(message)
        summary, code = {"error": message}, WRONG_INPUT
    except RankError as error:
        _complain(str(error))
        summary = {"error": str(error)}
    except SignalException as error:
        _complain(f"stopped by {error.sigval.name}; what was written until then lies in {folder}")
        sys.exit(128 + error.sigval)
    if summary is None:  # a launcher's rank other than 0
        return None
    save_summary({"overrides": " ".join(overrides), **summary}, folder)
    if "error" not in summary:
        print_summary(summary, folder)
    elif not sweep:
        sys.exit(code)
    return summary.get("val/acc")


def run(cfg: DictConfig) -> Summary | None:
    """Check the configuration, then train: in new processes, or in this one if a launcher has started the ranks.

    Returns:
        The summary, on rank 0.

    Raises:
        InputError: the configuration, the data or the machine does not allow it.
        RankError: training failed otherwise.
    """
    cfg.trainer.devices = devices(cfg)
    try:
        config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise InputError(f"{error.full_key} has no value: add {error.full_key}=...") from error
    if started_by_launcher():
        return train(config)
    one_machine(cfg)
    quiet()
    check(cfg)
    return launch(config, cfg.trainer.devices)


def _complain(message: str) -> None:
    print(f"cocod-train: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
