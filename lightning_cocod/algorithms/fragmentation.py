"""Which parameters travel together: a model cut into fragments, between its modules and never inside one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from torch import nn

from lightning_cocod.algorithms.options import whole

Fragments: TypeAlias = int | Sequence[Sequence[str]]
"""A number of fragments, or the names of the modules, or parameters, of each."""


def checked(fragments: Fragments) -> int | list[list[str]]:
    """The option, in lists.

    Raises:
        ValueError: neither a number of at least 1 nor lists of names.
    """
    if isinstance(fragments, str) or not isinstance(fragments, Sequence):
        return whole("fragments", fragments, least=1)
    lists = [[] if isinstance(names, str) or not isinstance(names, Sequence) else list(names) for names in fragments]
    if not lists or not all(names and all(isinstance(name, str) for name in names) for names in lists):
        raise ValueError(f"fragments must be a number, or for each a list of names of modules, got {fragments!r}")
    return lists


def assign(model: nn.Module, moved: Collection[nn.Parameter], fragments: Fragments) -> dict[nn.Parameter, int]:
    """The fragment of every parameter of the model.

    Given a number, neighbours stay together, in the order in which the model names its parameters, and the largest fragment
    is as small as that allows, counting the elements of those that are ``moved``. A module whose own parameters are moved is
    never cut, so there are no more fragments than such modules. Entries of a ``ParameterList`` count as modules.

    Raises:
        ValueError: lists of names that leave a parameter out, name it twice or name nothing.
    """
    if not isinstance(fragments, int):
        return _named(model, fragments)
    units: dict[str, list[nn.Parameter]] = {}
    containers = {name for name, m in model.named_modules() if isinstance(m, nn.ParameterList | nn.ParameterDict)}
    for name, p in model.named_parameters():
        owner = name.rpartition(".")[0]
        units.setdefault(name if owner in containers else owner, []).append(p)
    chosen = set(moved)
    sizes = [sum(p.numel() for p in unit if p in chosen) for unit in units.values()]
    counted = [size for size in sizes if size > 0]
    numbers = iter(cut(counted, min(fragments, len(counted))) if counted else [])
    of, number = {}, 0
    for size, unit in zip(sizes, units.values(), strict=True):
        number = next(numbers) if size > 0 else number  # what is frozen goes with what comes before it
        of.update(dict.fromkeys(unit, number))
    return of


def cut(sizes: Sequence[int], parts: int) -> list[int]:
    """Which of so many runs of neighbours each belongs to, none of them empty, the largest as small as can be."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        cap = (low + high) // 2
        low, high = (low, cap) if _filled(sizes, cap, parts)[-1] < parts else (cap + 1, high)
    return _filled(sizes, low, parts)


def _filled(sizes: Sequence[int], cap: int, parts: int) -> list[int]:
    numbers, load = [0], sizes[0]
    for place, size in enumerate(sizes[1:], start=1):
        wanted = parts - 1 - numbers[-1]  # more runs, for which there must be as many left
        begins = load + size > cap or len(sizes) - place <= wanted
        load = size if begins else load + size
        numbers.append(numbers[-1] + begins)
    return numbers


def _named(model: nn.Module, lists: Sequence[Sequence[str]]) -> dict[nn.Parameter, int]:
    of: dict[nn.Parameter, int] = {}
    unused = {name for names in lists for name in names}
    for name, p in model.named_parameters():
        here = {(n, prefix) for n, names in enumerate(lists) for prefix in names if f"{name}.".startswith(f"{prefix}.")}
        if len({n for n, _ in here}) != 1:
            how = "none" if not here else f"{len({n for n, _ in here})}"
            raise ValueError(f"fragments must have each parameter once: {name} is in {how} of them")
        of[p] = min(here)[0]
        unused -= {prefix for _, prefix in here}
    if unused:
        raise ValueError(f"fragments names {min(unused)!r}, of which the model has no parameters")
    return of
