"""Forward, backward and step of a plain PyTorch loop, seen by hooks of the model and of its optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_cocod.algorithms import Algorithm
from lightning_cocod.comm.tracer import Recorder


class Passes:
    """Records them as long as there is a recorder.

    Args:
        algorithm: whose model and optimizers.
        recorder: the one that records now, if any.
    """

    def __init__(self, algorithm: Algorithm, recorder: Callable[[], Recorder | None]) -> None:
        self._recorder = recorder
        self._starts: dict[str, tuple[Recorder, Any]] = {}
        model = algorithm.model
        self._handles: list[Any] = [
            model.register_forward_pre_hook(lambda *_: self._start("forward")),
            model.register_forward_hook(self._after_forward),
        ]
        for optimizer in algorithm.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._start("step")))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.end_step()))

    def remove(self) -> None:
        """Take the hooks away. Not inside of one."""
        for handle in self._handles:
            handle.remove()

    def end_step(self) -> None:
        """The optimizer's step is over, if it has not been before."""
        self._end("step")

    def _after_forward(self, _: Any, __: Any, output: Any) -> None:
        self._end("forward")
        if self._recorder() is not None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._before_backward)  # type: ignore[no-untyped-call]  # torch has no types here

    def _before_backward(self, _: Tensor) -> None:
        if "backward" not in self._starts and self._recorder() is not None:
            self._start("backward")
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end("backward"))  # as DDP does

    def _start(self, name: str) -> None:
        if (recorder := self._recorder()) is not None:
            self._starts[name] = recorder, recorder.mark()

    def _end(self, name: str) -> None:
        if name in self._starts:
            recorder, start = self._starts.pop(name)
            recorder.add(name, start, recorder.mark())
