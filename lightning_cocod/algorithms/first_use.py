"""Parameters that are still on their way: whoever uses one first waits for it, and for no other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

# What tells something about a tensor, and reads none of its values.
_OF_TENSORS: Any = Tensor  # these are descriptors, of which their types say nothing
_PROPERTIES = ("requires_grad", "grad_fn", "is_leaf", "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse")
_METHODS = ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "requires_grad_")
_ABOUT = {
    _OF_TENSORS.grad.__get__,
    _OF_TENSORS.grad.__set__,
    _OF_TENSORS.requires_grad.__set__,
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
}


class FirstUse(TorchFunctionMode):
    """From ``watch`` to ``leave``, every function of torch that this thread calls waits for the parameters it is given.

    A parameter is recognised by its memory, so a view of it, or an alias that was made before, is as good as itself. What
    reads memory behind torch's back is not seen: TorchScript, compiled graphs, extensions that are called directly. Other
    threads are not kept; those that bring the parameters are such. On CUDA it is the stream that is current then that waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._awaited: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)

    def watch(self, x: Sequence[Tensor], wait: Callable[[int], None]) -> None:
        """From now on whoever uses one of x waits for it first.

        Args:
            x: they rest, but for those who bring them.
            wait: until the one with this number is there.
        """
        for number, p in enumerate(x):
            self._awaited[p.untyped_storage().data_ptr()].append(partial(wait, number))
        if self not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]  # torch has no types here
            self.__enter__()  # type: ignore[no-untyped-call]  # nor here

    def leave(self) -> None:
        """All are there, or nobody waits for them any more."""
        self._awaited.clear()
        if _get_current_function_mode_stack()[-1:] == [self]:  # type: ignore[no-untyped-call]  # nor here
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # nor here
        # Otherwise a context of somebody else's has begun since; then it goes once it is on top, and waits for nothing.

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._awaited and func not in _ABOUT:
            for tensor in _tensors(args, kwargs):
                if tensor.layout == torch.strided:
                    for wait in self._awaited.pop(tensor.untyped_storage().data_ptr(), ()):
                        wait()
        return func(*args, **(kwargs or {}))


def _tensors(*values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(*value)
        elif isinstance(value, Mapping):
            yield from _tensors(*value.values())


def is_compiled(model: nn.Module) -> bool:
    """Whether the parameters of some module are read by code that torch has compiled."""
    return any(
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"  # importing what it is takes seconds
        or module._compiled_call_impl is not None
        or getattr(module, "_compiler_ctx", None) is not None  # Lightning's, of a module that was compiled whole
        for module in model.modules()
    )
