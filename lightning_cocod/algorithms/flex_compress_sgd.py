"""FlexCompressSGD: other codecs towards the server than from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.dist_ef_sgd import DistEFSGD
from lightning_cocod.algorithms.skipping import Never
from lightning_cocod.algorithms.two_way import Direction
from lightning_cocod.comm.compressed import codes
from lightning_cocod.compression import Codec


class FlexCompressSGD(DistEFSGD):
    """FlexCompressSGD (Phuong, Phong; IEEE Access 2020): dist-EF-SGD with a codec for each direction (see ``DistEFSGD``).

    Our reading of the abstract: any codec of workers beside any of the server. Its example saves most on the way to the
    server; that is why the defaults are top-k there and the scaled sign back.

    Args:
        model: the module that is trained.
        optimizer: SGD, one or several, without a parameter in common.
        compression: codec of the workers, or its name; "topk" by default, None for whole values.
        server_compression: codec of the server, or its name.
        overlap: False pushes after backward: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: see ``DistEFSGD``.
    """

    name: ClassVar[str] = "flex_compress_sgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        compression: str | Codec | None = "topk",
        server_compression: str | Codec | None = "sign",
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, compression=compression, overlap=overlap, weights=weights, **shared)
        self.server_compression = codes(f"the server of {self.name}", server_compression)

    def directions(self) -> tuple[Direction, Direction]:
        """To the server, and from it."""
        up, _ = super().directions()
        return up, Direction(self.server_compression, Never())
