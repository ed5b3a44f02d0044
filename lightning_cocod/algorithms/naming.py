"""Options with two names: between nodes, ``period`` is called ``inter_node``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def with_inter_node(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that takes ``inter_node`` for ``period`` where ``intra_node`` is given; one that has none hands it on.

    Raises:
        ValueError: from the constructor, both names, or ``inter_node`` without ``intra_node``.
    """
    takes = inspect.signature(init)
    if "period" not in takes.parameters:
        return init

    @wraps(init)
    def made(self: Any, *args: Any, **options: Any) -> None:
        period = options.pop("inter_node", None)
        if period is not None:
            if options.get("intra_node") is None:
                raise ValueError("inter_node goes together with intra_node: without it, the option is called period")
            if "period" in takes.bind_partial(self, *args, **options).arguments:
                raise ValueError("period and inter_node are two names of one option: give one of them")
            options["period"] = period
        init(self, *args, **options)

    return made
