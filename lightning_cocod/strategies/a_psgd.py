"""``Trainer(strategy="a_psgd")``."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_cocod.algorithms.a_psgd import APSGD
from lightning_cocod.strategies.asynchronous import AsynchronousStrategy


class APSGDStrategy(AsynchronousStrategy):
    """A-PSGD under Lightning: an asynchronous parameter server, of which each rank has a shard (see ``APSGD``).

    Ranks share each epoch, a fast one trains on more batches (docs/asynchrony.md). Evaluation, checkpoints and the end have
    the server's parameters. ``optimizer.step`` moves nothing: the server steps for each gradient, with the rates of the
    rank's optimizer. The loss of a rank ends the run.

    Args:
        overlap: False waits for the server's parameters before the next forward.
        max_staleness: the most steps by which a rank may be ahead of the slowest since all last met; None for any.
        elementwise: True says that the optimizer treats every element by itself although a trial says otherwise, as it does
            of one whose steps are random (see ``SSGD``).
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range.
        TypeError: an option that only DDP understands, or an unknown one; in a fit, an optimizer that needs whole tensors.
        MisconfigurationException: in a fit, what ranks with different numbers of steps cannot do, or ``"16-mixed"``.
    """

    registered_name: ClassVar[str] = APSGD.name

    def __init__(
        self,
        *,
        overlap: bool = True,
        max_staleness: int | None = None,
        elementwise: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(APSGD, overlap=overlap, max_staleness=max_staleness, elementwise=elementwise)
