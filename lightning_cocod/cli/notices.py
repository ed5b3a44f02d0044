"""Options that a user set and nothing reads."""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from lightning_cocod.cli.conf_dir import conf_dir

FOR_STRATEGY = ("delay", "compression")


def unused_options(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """One line for each of `overrides` that has no effect: the strategy has no use for it, or `+` made it up."""
    strategy, everything = (str(OmegaConf.to_container(node, resolve=False)) for node in (cfg.strategy, cfg))
    known = {*OmegaConf.load(conf_dir() / "train.yaml"), *(entry.name for entry in conf_dir().iterdir())}
    notices = []
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~").partition("@")[0]
        group = key.partition(".")[0].partition("/")[0]
        reader, reference = (strategy, key) if group in FOR_STRATEGY else (everything, group)
        read = f"${{{reference}" in reader or f"${{{group}}}" in reader
        if (group in FOR_STRATEGY or group not in known) and not read:
            who = str(cfg.strategy._target_).rpartition(".")[2] if group in FOR_STRATEGY else "nothing"
            notices.append(f"note: {override} has no effect: {who} reads {'no ' if who != 'nothing' else ''}{key}")
    return notices
