"""Overlap-Local-SGD: workers are pulled towards an anchor, whose next position is computed behind the next round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.lost_steps import warn_of_lost_steps
from lightning_cocod.algorithms.options import below_one, flag, share
from lightning_cocod.algorithms.residuals import Residuals
from lightning_cocod.algorithms.when import When, as_when
from lightning_cocod.comm import Message
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.comm.norms import norm


class OverlapLocalSGD(Algorithm):
    r"""Overlap-Local-SGD with anchor momentum (Wang, Liang, Joshi; ICASSP 2020; arXiv 2002.09539).

    Worker i of N holds x_i and u_i; the anchor z is the same for all. U is the user's optimizer's update::

        t = 0:            z ← x ;  u_i ← 0
        every step:       x_i ← x_i + U(g(x_i))
        t = k, 2k, …:     wait(z)
                          x_i ← (1 − α) x_i + α z                  # the pull
                          u_i ← β u_i + (x_i − z)
                          z ← async Σ_j w_j (z + u_j)

    The pull keeps workers together that see different data, and the anchor moves by their mean, with momentum. (In other
    texts u_i is −η v_i; the rate η cancels.) With β = 0 the anchor is the mean of the pulled workers, a round late. α = 1
    with β = 0 would undo every round, and is refused.

    The consensus model is the anchor, the one in flight included: the local steps since are not in it. The optimizer's state
    stays local. Memory beyond the parameters: two copies of them, z and u_i.

    With ``compression`` the workers send codes of u_j, with error feedback (see ``Residuals``), and z moves by their mean:
    two more copies of the parameters. What a code has dropped, e_i, has been said all the same, so that for worker i the
    anchor is z + e_i. The consensus model is z, without them.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: local steps k of a round, a schedule ``{step: k}``, or a rule (``when.When``).
        pull: 0 < α ≤ 1.
        anchor_momentum: 0 ≤ β < 1.
        overlap: False waits for z where it is launched: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale. Equal by default.
        warmup_steps: synchronous steps first, whose gradients are averaged before the optimizer's step.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str] = "overlap_local_sgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 2,
        *,
        pull: float = 0.6,
        anchor_momentum: float = 0.7,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        warmup_steps: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, when=as_when(period, warmup_steps), weights=weights, **shared)
        self.α, self.β = self.check(pull, anchor_momentum)
        self.overlap = flag("overlap", overlap)
        self.residuals = None if self.compression is None else Residuals(self.comm, self.compression)
        self._forget()

    @staticmethod
    def check(pull: float, anchor_momentum: float) -> tuple[float, float]:
        """α and β.

        Raises:
            ValueError: out of range.
        """
        α, β = share("pull", pull), below_one("anchor_momentum", anchor_momentum)
        if α == 1 and β == 0:
            raise ValueError("pull=1 with anchor_momentum=0 takes every round back: pull less, or give the anchor momentum")
        return α, β

    def _forget(self) -> None:
        self.z: Buffer | None = None
        self.u: Buffer | None = None
        self.A: Message | None = None
        self.D: Buffer | None = None  # how far z moves, where that is what travels
        self._moves = False  # whether it has yet to do so
        if self.residuals is not None:
            self.residuals.forget()
        self._known: list[nn.Parameter] = []  # of which z and u are
        self._unfit: tuple[int, ...] = ()  # left out of the anchor with which a resumed run began
        self._ended = self.t
        self._staleness = 0

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0 ; z ← x_0."""
        super().start(broadcast=broadcast)
        self._forget()
        self.rounds.ends = None
        self._at_boundary()

    def after_step(self) -> None:
        """Pull and launch where a round ends."""
        super().after_step()
        if self.z is None:  # synchronous so far
            self._ended = self.t
        self._at_boundary()

    def finish(self) -> None:
        """Every replica becomes z."""
        warn_of_lost_steps(self, self._ended)
        super().finish()
        self._forget()

    def _at_boundary(self) -> None:
        if self.rounds.begin(self.t):
            if self.z is not None and self.u is not None:
                self._pull(self.z, self.u)
            self.begin_round()
            launches, self._ended = self.z is not None, self.t
            self._take_in()
            if launches and self.z is not None and self.u is not None:
                self._launch(self.z, self.u)

    @torch.no_grad()
    def _pull(self, z: Buffer, u: Buffer) -> None:
        """wait(z) ; x ← (1 − α) x + α z ; u ← β u + (x − z)."""
        left_out, self._unfit = self._unfit, ()
        if self.A is not None:
            self._arrived()
            self._merged, self._staleness, left_out = self.A, self.t - self.A.step, self.A.left_out
        if self.comm.rank in left_out:
            z.copy_to(self._known)
            torch._foreach_zero_(u.buckets)
        # What a code has dropped has been said all the same: from here the anchor is z + e, or it would be said again.
        e = [] if self.residuals is None else [self.residuals.of(self._known)]
        for (_, (anchor, x, *kept)), (_, (momentum, _)) in zip(
            z.beside(self._known, *e), u.beside(self._known), strict=True
        ):
            anchor = torch.add(anchor, kept[0]) if kept else anchor
            x.lerp_(anchor, self.α)
            momentum.mul_(self.β).add_(x - anchor)
        self.repair(left_out)

    @torch.no_grad()
    def _launch(self, z: Buffer, u: Buffer) -> None:
        """z ← async Σ_j w_j (z + u_j)."""
        subject, size = self.subject("round"), norm([p.detach() for p in self.x])
        if self.comm.world_size == 1:  # the mean of one
            torch._foreach_add_(z.buckets, u.buckets)
            return
        if self.residuals is None:
            torch._foreach_add_(z.buckets, u.buckets)
            self.A = self.comm.mean_(z.buckets, self.w, subject, measured=True, relative_to=size)
        else:
            if self.D is None or self.D.layout is not u.layout:
                self.D = u.layout.buffer()
            torch._foreach_copy_(self.D.buckets, u.buckets)
            self._moves = True
            self.A = self.residuals.mean_(self.D, self._known, subject, relative_to=size)
        if not self.overlap:
            self._arrived()

    @torch.no_grad()
    def _arrived(self, *, counted: bool = True) -> None:
        """z is there."""
        if self.A is not None:
            self.A.wait(counted=counted)
        if self._moves and self.z is not None and self.D is not None:
            torch._foreach_add_(self.z.buckets, self.D.buckets)
            self._moves = False

    @torch.no_grad()
    def _take_in(self) -> None:
        """z ← x and u ← 0 for parameters that are new. Workers have moved them apart: what they say makes one z of it.

        Codes do not: they begin with the mean.
        """
        layout = self.comm.layout(self.x)
        if self.z is not None and self.z.layout is layout:
            return
        if self.residuals is not None and self.apart and self.comm.world_size > 1:
            new = [p.detach() for p in self.x if p not in set(self._known)]
            mean = self.comm.mean_(new, self.w, self.subject("new parameters"))
            mean.wait()
            self.repair(mean.left_out)
        known = {} if self.z is None or self.u is None else self._by_parameter(self.z, self.u)
        self.z, self.u, self._known = layout.buffer(), layout.buffer(), list(self.x)
        self.z.copy_([known[p][0] if p in known else p.detach() for p in self.x], keep=False)
        torch._foreach_zero_(self.u.buckets)
        if known:
            self.u.copy_([known[p][1] if p in known else torch.zeros_like(p) for p in self.x], keep=False)

    def _by_parameter(self, z: Buffer, u: Buffer) -> dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]]:
        both = [[torch.empty_like(p) for p in self._known] for _ in range(2)]
        z.copy_to(both[0])
        u.copy_to(both[1])
        return dict(zip(self._known, zip(*both, strict=True), strict=True))

    def _pending_correction(self) -> Callable[[], None] | None:
        if self.z is None:
            return None
        self._arrived(counted=False)
        z, x = self.z, self._known
        return lambda: z.copy_to(x)

    def state_dict(self) -> dict[str, Any]:
        """Adds z, drained, and u."""
        self._arrived(counted=False)
        both = [None if b is None else [bucket.clone() for bucket in b.buckets] for b in (self.z, self.u)]
        numbers = {p: number for number, p in enumerate(self._members())}
        known = [numbers[p] for p in self._known] if self.z is not None else []
        unfit = list(self._unfit if self.A is None else self.A.left_out)
        ended = {"ended": self._ended, "unfit": unfit}
        e = None if self.residuals is None else self.residuals.state_dict(numbers)
        return {**super().state_dict(), **ended, "z": both[0], "u": both[1], "known": known, "residuals": e}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the anchor that was in flight."""
        super().load_state_dict(state)
        self._forget()
        self._ended, self._unfit = state["ended"], tuple(state["unfit"])
        if self.residuals is not None:
            self.residuals.load_state_dict(state["residuals"], self._members())
        if state["z"] is not None:
            members = self._members()
            self._known = [members[number] for number in state["known"]]
            layout = self.comm.layout(self._known)
            self.z, self.u = layout.buffer(), layout.buffer()
            for buffer, values in ((self.z, state["z"]), (self.u, state["u"])):
                for bucket, value in zip(buffer.buckets, values, strict=True):
                    bucket.copy_(value)

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """Adds the staleness of the last pull: steps between the launch of its anchor and it."""
        return {**super().metrics(since), "algo/staleness_steps": float(self._staleness)}
