"""Whether an optimizer treats every element by itself, so that it can be given parts of tensors."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from lightning_cocod.comm.errors import in_one_line

_SHAPE, _STEPS = (4, 6), 3
WHOLE = "needs whole tensors, and a sharded server has parts of them"


def refusal(optimizer: Optimizer, *, elementwise: bool = False) -> str | None:
    """Why it cannot be given parts; None if it can.

    Tried out, with its options, where its parameters are: steps on a matrix, and on each half of its elements by itself,
    have to agree, unless it is known to be ``elementwise``, and its state has to be of tensors and plain values.
    """
    generator = torch.Generator().manual_seed(0)
    start, slopes = torch.randn(_SHAPE, generator=generator), torch.randn(_STEPS, *_SHAPE, generator=generator)
    for group in optimizer.param_groups:
        device = next((p.device for p in group["params"]), start.device)
        m, g = start.to(device), slopes.to(device)
        try:
            whole, state = _stepped(optimizer, group, m, g)
        except Exception as error:  # whatever it is
            return f"cannot step a matrix beside the model ({in_one_line(error)})"
        if torch.equal(whole, m):
            return "moves nothing when its class is tried out beside the model, as one around another optimizer"
        for p, values in state.items():
            if not isinstance(p, Tensor):
                return f"keeps {p!r} in its state, which belongs to no parameter and cannot be cut into shards"
            for key, value in values.items():
                if not isinstance(value, Tensor | bool | int | float | complex | str | None):
                    return f"keeps a {type(value).__name__} as {key!r} in its state, which cannot be cut into shards"
        if elementwise:
            continue
        try:
            rows, of_rows = m.view(2, -1), g.view(_STEPS, 2, -1)
            halves = [_stepped(optimizer, group, rows[i], of_rows[:, i])[0] for i in range(2)]
        except Exception as error:  # whatever it is that it does not like about a vector
            return f"{WHOLE} ({in_one_line(error)})"
        if not torch.allclose(whole.flatten(), torch.cat(halves), rtol=1e-5, atol=1e-7):
            return WHOLE
    return None


def _stepped(optimizer: Optimizer, group: dict[str, Any], start: Tensor, gradients: Tensor) -> tuple[Tensor, Any]:
    """Where a tensor ends in an optimizer of the same class with the options of a group, and its state then."""
    x = nn.Parameter(start.clone())
    given = group.get("lr")
    rate = torch.full_like(given, 0.05) if isinstance(given, Tensor) else 0.05  # a warm-up's may be 0
    probe = twin(optimizer, [{**group, "params": [x], **({"lr": rate} if "lr" in group else {})}])
    if isinstance(optimizer, Adagrad):  # the only one of torch's that makes its state when it is made
        probe.state.update(Adagrad(probe.param_groups, **optimizer.defaults).state)
    for step in gradients:
        x.grad = step.clone()
        probe.step()
    return x.detach(), probe.state


def twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Another optimizer of the same kind, for other groups, without a state and without the hooks of the first."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__ = {
        **vars(optimizer),
        "param_groups": groups,
        "state": defaultdict(dict),
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    made.__dict__.pop("step", None)  # a scheduler has put its own around it
    return made
