"""Options that a user set and the chosen strategy does not read."""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

GROUPS = ("delay", "compression")


def unused_options(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """One line for each of `overrides` that the strategy has no use for."""
    strategy = str(OmegaConf.to_container(cfg.strategy, resolve=False))
    target = str(cfg.strategy._target_).rpartition(".")[2]
    notices = []
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        group = key.partition(".")[0]
        reference = f"${{{key}}}" if "." in key else f"${{{group}."
        if group in GROUPS and reference not in strategy:
            notices.append(f"note: {override} has no effect on {target}")
    return notices
