"""Whether an optimizer treats every element by itself, so that it can be given parts of tensors."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

_SHAPE, _STEPS = (4, 6), 3


def is_elementwise(optimizer: Optimizer) -> bool:
    """Tried out, with the optimizer's options: steps on a matrix, and on the halves of its elements, have to agree."""
    generator = torch.Generator().manual_seed(0)
    start, slopes = torch.randn(_SHAPE, generator=generator), torch.randn(_STEPS, *_SHAPE, generator=generator)
    for group in optimizer.param_groups:
        device = group["params"][0].device if group["params"] else torch.device("cpu")  # some kinds are for one only
        matrix, gradients = start.to(device), slopes.to(device)
        try:
            whole = _stepped(optimizer, group, [matrix], [[g] for g in gradients])
            halves = _stepped(optimizer, group, matrix.view(2, -1).unbind(), [g.view(2, -1).unbind() for g in gradients])
        except Exception:  # whatever it is that it does not like about a vector
            return False
        together = torch.cat([t.flatten() for t in whole]), torch.cat(halves)
        if not torch.allclose(*together, rtol=1e-5, atol=1e-7):
            return False
    return True


def _stepped(optimizer: Optimizer, group: dict[str, Any], start: Any, gradients: Any) -> list[Tensor]:
    """Where these tensors end in an optimizer of the same class with the options of a group."""
    x = [nn.Parameter(t.clone()) for t in start]
    rate = torch.tensor(0.05) if isinstance(group.get("lr"), Tensor) else 0.05  # a warm-up's may be 0
    probe = twin(optimizer, [{**group, "params": x, **({"lr": rate} if "lr" in group else {})}])
    if isinstance(optimizer, Adagrad):  # the only one of torch's that makes its state when it is made
        probe.state.update(Adagrad(probe.param_groups, **optimizer.defaults).state)
    for step in gradients:
        for p, g in zip(x, step, strict=True):
            p.grad = g.clone()
        probe.step()
    return [p.detach() for p in x]


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
