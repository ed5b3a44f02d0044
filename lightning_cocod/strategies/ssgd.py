"""``Trainer(strategy="ssgd")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_cocod.algorithms import SSGD
from lightning_cocod.strategies.base import AlgorithmStrategy


class SSGDStrategy(AlgorithmStrategy):
    """Synchronous SGD on a sharded server under Lightning: what DDP computes, by push and pull (see ``SSGD``).

    All ranks hold the same weights, and each a shard of the optimizer's state; checkpoints have it whole, and are DDP's.
    Gradients are pushed while backward runs in automatic optimization with one optimizer, else after it. Their mean is
    known in shards only: Lightning clips it as ever (``gradient_clip_val``, ``self.clip_gradients``), but ``p.grad`` is None
    where hooks could look at it, and one that a hook has kept must not be written to before the optimizer steps. In manual
    optimization it is each rank's own until then.

    Pushing while backward runs needs a step after every backward: with an ``optimizer_step`` that leaves some out, or a
    ``backward`` that has several passes, say ``overlap=False``.

    Args:
        overlap: False pushes after backward: the same trajectory, nothing hidden.
        overlap_pull: True lets the pull overlap what follows the step, callbacks and the next forward: whoever uses a
            parameter waits for it, which compiled modules cannot (see ``SSGD``). The same trajectory.
        elementwise: True says that the optimizer treats every element by itself although a trial says otherwise, as it does
            of one whose steps are random (see ``SSGD``).
        weights: of the ranks in every mean, in any scale. Equal by default.
        **options: see ``AlgorithmStrategy``.

    Raises:
        ValueError: an option out of range; in a fit, ``overlap_pull`` and a compiled model.
        TypeError: an option that only DDP understands, or an unknown one; in a fit, an optimizer that needs whole tensors.
        MisconfigurationException: in a fit with ``precision="16-mixed"``.
    """

    registered_name: ClassVar[str] = SSGD.name

    def __init__(
        self,
        *,
        overlap: bool = True,
        overlap_pull: bool = False,
        elementwise: bool = False,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.runs(SSGD, overlap=overlap, overlap_pull=overlap_pull, elementwise=elementwise, weights=weights)
