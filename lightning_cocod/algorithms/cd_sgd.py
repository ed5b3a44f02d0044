"""CD-SGD: one-step delay, and gradients that are compressed in all steps but every k-th."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.coded_server import CodedServer
from lightning_cocod.algorithms.local_update import LocalUpdate
from lightning_cocod.algorithms.options import whole
from lightning_cocod.algorithms.outgoing import Outgoing
from lightning_cocod.algorithms.ssd_sgd import SSDSGD
from lightning_cocod.comm.compressed import codes
from lightning_cocod.compression import Codec


class CDSGD(SSDSGD):
    r"""CD-SGD (Yu, Dong, Xu, Ouyang, Liao; arXiv 2106.10796): ``SSDSGD`` with k = 1 whose workers push codes.

    With e the worker's residual and c the number of steps between two that push gradients whole::

        (t + 1) mod c = 0:  Push g_i                                                   # e_i rests
        else:               p_i ← g_i + e_i ;  Push C(p_i) ;  e_i ← p_i − C(p_i)
        and as in SSD-SGD:  W ← async W + U(Σ_j w_j …) ;  x_i ← LocalUpdate(b, g_i) ;  P ← async W

    The local update has the worker's own gradient as it is. Memory: that of SSD-SGD, and e.

    A parameter that is frozen keeps its e until it thaws; if others join meanwhile, it begins anew.

    Follows the authors' code: ±θ or 0 in two bits with θ = 0.5, and c = 5. That θ belongs to gradients summed over a batch,
    which is what the authors push: of a mean loss next to nothing is sent in a coded step, so choose a smaller one, such as
    ``Threshold(0.01)``. That a local update is plain SGD is our reading.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters; with ``glu`` they are SGD.
        compression: C, a codec or its name, that is a contraction or made for residuals (docs/compression.md); by default
            ±θ or 0 in two bits, "threshold". None pushes gradients whole.
        compress_steps: c; 1 is OD-SGD with the same local update.
        local_update: "sgd", "glu", "dc_asgd", "dc_asgd_a", or an object.
        warmup_steps: steps of S-SGD first, which push gradients whole.
        overlap: False waits for what is launched: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: ``scaling``, ``pre_refresh`` (see ``SSDSGD``); ``elementwise`` (see ``SSGD``); ``communicator``,
            ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: an option out of range; ``on_nonfinite="skip"``, as what is not finite is found out only once it has gone
            into residuals.
    """

    name: ClassVar[str] = "cd_sgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        compression: str | Codec | None = "threshold",
        compress_steps: int = 5,
        local_update: str | LocalUpdate = "sgd",
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            1,
            local_update=local_update,
            warmup_steps=warmup_steps,
            overlap=overlap,
            weights=weights,
            **shared,
        )
        if self.skip_nonfinite:
            raise ValueError(
                "cd_sgd cannot go on without a rank whose message is not finite: use on_nonfinite='raise', and lower the "
                "learning rate or clip gradients"
            )
        self.compression = self.codes = codes(self.name, compression)
        self.compress_steps = whole("compress_steps", compress_steps, least=1)

    def make_server(self, optimizer: Optimizer, shared: set[nn.Parameter]) -> CodedServer:
        """Without residuals."""
        return CodedServer(optimizer, self.comm, shared, compression=self.codes, elementwise=self.elementwise)

    def _begin(self, server: Outgoing) -> None:
        coded = cast(CodedServer, server)
        coded.whole = self.when.synchronous(self.t) or (coded.steps + 1) % self.compress_steps == 0
        super()._begin(server)

    def _renew(self) -> None:
        for server in self._of(None):
            server.acknowledged()
        older = dict(self.servers)
        residuals = {opt: server.residuals() for opt, server in older.items()}
        super()._renew()
        for opt, server in self.servers.items():
            server.continue_from(older[opt], residuals[opt])
