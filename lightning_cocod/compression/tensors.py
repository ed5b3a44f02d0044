"""Codecs for tensors of any shape and dtype, at the price of new memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cocod.compression.codec import Codec


def pack(codec: Codec, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The code of a tensor's values in the order of its indices, the last one running fastest.

    Raises:
        ValueError: the values are not floating-point numbers.
    """
    x = _flat(tensor)
    code = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
    codec.encode(x, code, generator)
    return code


def unpack(codec: Codec, code: Tensor, like: Tensor) -> Tensor:
    """A new tensor of the shape, dtype and device of another one, from its code.

    Raises:
        ValueError: see pack, or the code is not one of so many values.
    """
    out = torch.empty_like(_flat(like))
    codec.decode(code, out)
    return out.view(like.shape).to(like.dtype)


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        raise ValueError(f"codecs are for floating-point numbers, got {tensor.dtype}")
    wide = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to(wide).reshape(-1).contiguous()
