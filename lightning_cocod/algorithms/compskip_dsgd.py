"""CompSkipDSGD: compression in both directions, and messages that are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.flex_compress_sgd import FlexCompressSGD
from lightning_cocod.algorithms.skipping import SkipRule, as_skip
from lightning_cocod.algorithms.two_way import Direction
from lightning_cocod.compression import Codec


class CompSkipDSGD(FlexCompressSGD):
    r"""CompSkipDSGD (Phuong, Phong, Fukushima; IEEE Access 2023; doi 10.1109/access.2023.3315331).

    ``DistEFSGD`` in which workers and server may leave a message out in any step, and keep its content for later::

        worker i:  p_i ← d_i + r e_i ;  c_i = 0 where i skips, else C_w(p_i) ;  Push c_i ;  e_i ← p_i − c_i
        server:    q ← Σ_j w_j c_j + r ẽ ;  U = 0 where it skips, else C_s(q) ;  ẽ ← q − U
        all:       Pull U ;  x ← x − η U

    The mean is over all workers, whoever sends. What is left out costs nothing on the link: the shards of workers that skip
    are not sent at all. With rules that depend on values, a byte from each rank and bucket tells who sends.

    A rule for skips is n, to send in every n-th step; a probability with which a step is left out; an object, such as
    ``EveryNth(n)``, ``Randomly(p, seed)``, ``WhileSmall(fraction)``, which leaves a bucket out while its norm is small
    beside that of the last one sent, or your own ``Skip``; or a function of ``(step, bucket, values)`` that is called in
    the communication thread. Each worker draws its own random numbers, and the server draws as one; under ``WhileSmall``, or
    a function of values, each owner decides for its own shard.

    The update is our reading of the abstract on the base of dist-EF-SGD, the rules are ours.

    Args:
        model: the module that is trained.
        optimizer: SGD, one or several, without a parameter in common.
        compression: codec of the workers, or its name; "sign" by default, None for whole values.
        server_compression: codec of the server, or its name.
        worker_skip: when a worker does not send; see ``as_skip``. It always sends by default.
        server_skip: when the server does not, likewise. Then x rests.
        overlap: False pushes after backward: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: see ``DistEFSGD``, and rules out of range.
    """

    name: ClassVar[str] = "compskip_dsgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        compression: str | Codec | None = "sign",
        server_compression: str | Codec | None = "sign",
        worker_skip: SkipRule = None,
        server_skip: SkipRule = None,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            compression=compression,
            server_compression=server_compression,
            overlap=overlap,
            weights=weights,
            **shared,
        )
        self.worker_skip = as_skip("worker_skip", worker_skip)
        self.server_skip = as_skip("server_skip", server_skip)

    def directions(self) -> tuple[Direction, Direction]:
        """To the server, and from it."""
        up, down = super().directions()
        return up._replace(skip=self.worker_skip), down._replace(skip=self.server_skip)
