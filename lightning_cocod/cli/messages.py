"""Hydra's exceptions about options, each in one line with the valid choices."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from lightning_cocod.cli.conf_dir import conf_dir


def option_message(error: HydraException | OmegaConfBaseException, arguments: Sequence[str]) -> str:
    """What is wrong in the command line's `arguments`, and what would be right."""
    text = " ".join(str(error).split())
    found = re.search(r"Could not find '(\w+)/([^']+)'", text)
    if isinstance(error, MissingConfigException) and found and error.options:
        return f"{found[1]}={found[2]} is unknown: choose {', '.join(error.options)}"
    found = re.search(r"An item is already at '([^']+)'", text)
    if isinstance(error, ConfigCompositionException) and found:
        return f"{found[1]} is there already: leave the + out"
    found = re.search(r"Could not (?:override|append to config|delete from config)\W+([\w./@]*\w)", text)
    if isinstance(error, ConfigCompositionException) and found:
        return unknown_option(found[1], arguments)
    cause = error.__cause__
    return f"{text} ({str(cause).splitlines()[0]})" if isinstance(cause, OmegaConfBaseException) else text


def value_message(error: OmegaConfBaseException, arguments: Sequence[str]) -> str:
    """What is wrong with a value that the configuration has, or has no more."""
    line = str(error).splitlines()[0]
    found = re.search(r"Interpolation key '(\w+)[^']*' not found", line)
    if isinstance(error, InterpolationKeyError) and found and f"~{found[1]}" in arguments:
        return f"{error.full_key} is made from {found[1]}: leave ~{found[1]} out"
    return line


def unknown_option(key: str, arguments: Sequence[str]) -> str:
    """The option most like `key`, and the options that stand beside it."""
    config = _composed([a for a in arguments if "=" in a and a.partition("=")[0].lstrip("+~") != key])
    close = difflib.get_close_matches(key, list(_options(OmegaConf.to_container(config))), n=1)
    parent = key.rpartition(".")[0]
    node = OmegaConf.select(config, parent) if parent else config
    if not isinstance(node, DictConfig):
        parent, node = "", config
    beside = ", ".join(str(name) for name in node if not str(name).startswith("_"))
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{key} is no option: {hint}{parent or 'the configuration'} has {beside}"


def _composed(overrides: list[str]) -> DictConfig:
    """The configuration as chosen otherwise, or the default one if that does not compose either."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            return compose("train", overrides)
        except HydraException:
            return compose("train")


def _options(node: Any, prefix: str = "") -> Iterable[str]:
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _options(value, f"{prefix}{name}.")
