"""A worker's replica: the model and what is kept beside it, and setting it aside while another model is in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Replica:
    """All tensors of this worker that a consensus replaces for a while.

    Args:
        model: the module that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.beside: list[nn.Module] = []
        """Modules that this worker keeps beside the model, such as a moving average of it. They are in the consensus: where
        the model is the workers' mean, each of these is the mean of the workers'."""
        self.is_aside = False
        self._aside: dict[str, Tensor] = {}

    def parameters(self) -> list[nn.Parameter]:
        """All parameters."""
        return [p for module in self._modules() for p in module.parameters()]

    def buffers(self) -> list[Tensor]:
        """All buffers, those that a ``state_dict`` leaves out included."""
        return [b for module in self._modules() for b in module.buffers()]

    def named(self) -> dict[str, Tensor]:
        """All parameters and buffers as they are now, by name, each once."""
        beside = {f"beside {n}: {name}": t for n, m in enumerate(self.beside) for name, t in named_tensors(m).items()}
        return {**named_tensors(self.model), **beside}

    def values(self) -> dict[str, Tensor]:
        """This worker's own parameters and buffers by name, those set aside included. They are not copies."""
        return self._aside if self.is_aside else {name: tensor.detach() for name, tensor in self.named().items()}

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put a worker's own parameters and buffers in place of what is there, as far as the model has them."""
        for name, tensor in self.named().items():
            if name in values:
                tensor.copy_(values[name])

    @contextmanager
    def set_aside(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, these parameters and all buffers may be overwritten; on leaving they are bit for bit what they were.

        Costs a copy of them in host memory.
        """
        modules = [m for root in self._modules() for m in root.modules()]
        buffers = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        tensors = [*parameters, *(b for _, _, b in buffers)]
        own = [t.detach().to("cpu", copy=True) for t in tensors]
        copies = {id(tensor): copy for tensor, copy in zip(tensors, own, strict=True)}
        self._aside = {name: copies[id(tensor)] for name, tensor in self.named().items()}
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside, self._aside = False, {}
            for module, name, buffer in buffers:  # evaluation may have put another tensor in its place
                module._buffers[name] = buffer
            with torch.no_grad():
                for tensor, value in zip(tensors, own, strict=True):
                    tensor.copy_(value)

    def _modules(self) -> list[nn.Module]:
        return [self.model, *self.beside]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a module by name, each once, those that its ``state_dict`` leaves out included."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
