"""One training, written as a call: ``cocod(period=4, lr=0.5)``."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cifar10_job import KNOWN, strategy

from lightning_cocod import algorithms
from lightning_cocod.algorithms import Algorithm
from lightning_cocod.algorithms.when import Rounds, as_when
from lightning_cocod.compression import CODECS

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4),
    "adamw": functools.partial(torch.optim.AdamW, weight_decay=0.05),
}
CLASSES = [kind for kind in vars(algorithms).values() if inspect.isclass(kind) and issubclass(kind, Algorithm)]
ALGORITHMS = [kind for kind in CLASSES if hasattr(kind, "name")]
HAS_ROUNDS = {kind.name for kind in ALGORITHMS if kind.has_rounds}
"""Names of those whose model, when it is evaluated, may lack the steps since a round has ended."""


@dataclass(frozen=True)
class Run:
    """A strategy with its options, the learning rate in units of that of all runs, and the (inner) optimizer.

    Raises:
        ValueError, TypeError: a name or an option that does not exist, or is refused; one line.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 1.0
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        strategy(self.strategy, **self.options)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if not isinstance(self.lr, int | float) or not self.lr > 0:
            raise ValueError(f"lr is a positive factor of the learning rate of all runs, got {self.lr!r}")

    def __str__(self) -> str:
        told = dict(self.options)
        told |= {} if self.optimizer == "sgd" else {"optimizer": self.optimizer}
        told |= {} if self.lr == 1 else {"lr": self.lr}
        return f"{self.strategy}({', '.join(f'{name}={value!r}' for name, value in told.items())})"


def as_run(text: str) -> Run:
    """The run that a call describes.

    Raises:
        ValueError, TypeError: it is no such call, or see ``Run``.
    """
    try:
        match ast.parse(text.strip(), mode="eval").body:
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(word.arg for word in keywords):
                options = {str(word.arg): _value(word.value) for word in keywords}
                own = {key: options.pop(key) for key in ("lr", "optimizer") if key in options}
            case _:
                raise SyntaxError
    except (SyntaxError, ValueError):
        raise ValueError(f"a run is a call such as cocod(period=4, lr=0.5), got {text!r}") from None
    return Run(name, options, **own)


def _value(written: ast.expr) -> Any:
    """A literal, or a codec with options that are."""
    codecs = {codec.__name__: codec for codec in CODECS.values()}
    match written:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in codecs:
            return codecs[name](**{str(word.arg): ast.literal_eval(word.value) for word in keywords})
    return ast.literal_eval(written)


def fits(run: Run, steps: int, epochs: int) -> bool:
    """Whether a round ends with every epoch of so many steps; where none does, some models lack the steps since."""
    if run.strategy not in HAS_ROUNDS:
        return True
    told = inspect.signature(KNOWN[run.strategy]).bind_partial(**run.options)
    told.apply_defaults()
    rounds = Rounds(as_when(told.arguments["period"], told.arguments["warmup_steps"]))
    for step in range(steps * epochs):
        rounds.begin(step)
        if (step + 1) % steps == 0 and rounds.ends not in (None, step + 1):
            return False
    return True


def chosen(names: str, extra: Sequence[str], runs: Mapping[str, str]) -> dict[str, str]:
    """Names and calls: those of ``runs`` that are named, or none of them, and the extra ones, each ``NAME=CALL``.

    Raises:
        ValueError: nobody has that name, or somebody else has it.
    """
    found = {}
    for name in names.split(",") if names != "none" else []:
        if name not in runs:
            raise ValueError(f"there is no run {name!r}: choose from {', '.join(runs)}, or add it with --extra")
        found[name] = runs[name]
    for pair in extra:
        name, equals, call = pair.partition("=")
        if not equals or not name.isidentifier() or name in runs or name in found:
            raise ValueError(f"--extra is NAME=CALL with a new name of letters, digits and underscores, got {pair!r}")
        found[name] = call
    return found
