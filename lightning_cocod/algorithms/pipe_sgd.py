"""Pipe-SGD: synchronous SGD whose mean of gradients is a step late, and travels behind the next gradient's computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.gradients import filled, trainable, withdraw
from lightning_cocod.algorithms.options import flag
from lightning_cocod.algorithms.residuals import Residuals
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.comm import Message
from lightning_cocod.comm.buckets import Buffer
from lightning_cocod.comm.ledger import Reading

T = TypeVar("T")


@dataclass
class Pipe:
    """One optimizer's gradients under way: G becomes the mean of those of the step before."""

    x: list[nn.Parameter]
    G: Buffer
    present: Tensor
    """For each parameter, more than 0 where some worker had a gradient."""
    complete: bool
    """Whether this worker had all of them."""
    A: Message | None = None
    left_out: tuple[int, ...] = ()
    """Ranks that G is without; known once it has been waited for."""

    def by_parameter(self) -> dict[nn.Parameter, tuple[Tensor, float]]:
        """The mean gradient of each, and what is present of it."""
        G = [torch.empty_like(p) for p in self.x]
        self.G.copy_to(G, keep=False)
        return dict(zip(self.x, zip(G, self.present.tolist(), strict=True), strict=True))


class PipeSGD(Algorithm):
    r"""Pipe-SGD (Li, Yu, Li, Avestimehr, Kim, Schwing; NeurIPS 2018; arXiv 1811.03619) of two stages.

    All workers hold the same x. U is the user's optimizer's update, w_j the workers' weights::

        every step:       g_i = ∇ℓ_i(x)                      # overlaps the transfer
                          wait(A) ;  G ← A
                          A ← async Σ_j w_j g_j
                          x ← x + U(G)                       # not in the first step

    so that x(t+1) = x(t) + U(Σ_j w_j g_j(x(t−1))). In the first step nothing has come yet: gradients are zero until they
    have been clipped, and the optimizer then finds none, so that neither momentum nor weight decay nor a count of steps
    begins. (A gradient of zero would let them.) The same holds after a warm-up, and for a parameter's first step where it
    comes later. Schedules count that step like any other.

    Each optimizer has a mean of its own in flight; one that does not step at every step gets that of its last. Gradients are
    complete, unscaled and averaged before they are clipped, on all workers alike. In the last step a mean is launched that
    nobody applies: the model is x, at the end as in an evaluation; BatchNorm's running statistics are local until then.
    Memory beyond the parameters: one copy of the gradients, and a few buckets.

    With ``compression`` the workers send codes of their gradients, with error feedback (see ``Residuals``): one more copy.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        overlap: False waits for A where it is launched: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        warmup_steps: synchronous steps first, without the delay.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``). With
            ``on_nonfinite="skip"`` a mean is that of the other ranks; weights never were in danger.

    Raises:
        ValueError: an option out of range.

    In a plain loop call ``pipe_sgd.step()`` after ``backward()``. A gradient scaler is refused: each rank's would decide on
    its own, and from its own gradients, whether to skip the step in which all apply a mean of others.
    """

    name: ClassVar[str] = "pipe_sgd"
    may_skip_steps: ClassVar[bool] = False
    has_rounds: ClassVar[bool] = False
    in_step: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        warmup_steps: int = 0,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, when=as_when(1, warmup_steps), weights=weights, **shared)
        self.overlap = flag("overlap", overlap)
        self.residuals: dict[Optimizer, Residuals] = {}  # one each: two optimizers may have a parameter in common
        if self.compression is not None:
            self.residuals = {opt: Residuals(self.comm, self.compression) for opt in self.optimizers}
        self._forget()

    def _forget(self) -> None:
        self.pipes: dict[Optimizer, Pipe] = {}
        for residuals in self.residuals.values():
            residuals.forget()
        self._resting: list[nn.Parameter] = []  # of the optimizer that is about to step
        self._staleness = 0

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0."""
        super().start(broadcast=broadcast)
        self._forget()

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """g ← the mean of the step before; this step's is launched."""
        super().before_step(optimizer)
        if not self.when.synchronous(self.t):
            for opt in self.optimizers if optimizer is None else [optimizer]:
                self._advance(opt)

    def step(self, update: Callable[[], T] | None = None, *, scaler: torch.amp.GradScaler | None = None) -> T | None:
        """Where nothing has come, the optimizer sees no gradient."""
        if update is not None:
            for p in self._resting:
                p.grad = None
            self._resting = []
        return super().step(update, scaler=scaler)

    @torch.no_grad()
    def _advance(self, optimizer: Optimizer) -> None:
        """wait(A) ; G ← A ; A ← async Σ_j w_j g_j, of one optimizer."""
        x = trainable([optimizer])
        g, present, complete = filled(x, self.comm.device)
        late = self._arrived(optimizer, x, g)
        late.G.swap(g)
        if not late.complete or late.left_out:
            if late.present.any():
                withdraw(x, late.present)
            else:
                self._resting = x  # zeros for now: torch cannot clip where there is no gradient at all
        self.repair_buffers(late.left_out)
        pipe = self.pipes[optimizer] = Pipe(x, late.G, present, complete)
        self.x = self._parameters()
        self.weighing.report_step()
        if self.comm.world_size > 1:
            subject = self.subject("gradients")
            if not self.residuals:
                pipe.A = self.comm.mean_([*pipe.G.buckets, present], self.w, subject)
            else:
                self.comm.mean_([present], self.w, self.subject("gradients present"))  # on its way before those
                pipe.A = self.residuals[optimizer].mean_(pipe.G, x, subject)
            if not self.overlap:
                pipe.A.wait()

    def _arrived(self, optimizer: Optimizer, x: list[nn.Parameter], g: list[Tensor]) -> Pipe:
        """What was in flight, for the parameters x as they are now: those that are new have had no gradient."""
        layout, late = self.comm.layout(g), self.pipes.get(optimizer)
        if late is not None and late.A is not None:
            late.A.wait()
            late.left_out, self._staleness = late.A.left_out, self.t - late.A.step
        if late is not None and late.G.layout is layout and list(map(id, late.x)) == list(map(id, x)):
            return late
        known = {} if late is None else late.by_parameter()
        present = torch.tensor([known[p][1] if p in known else 0.0 for p in x])
        now = Pipe(x, layout.buffer(), present, complete=False, left_out=late.left_out if late else ())
        torch._foreach_zero_(now.G.buckets)
        if known:
            now.G.copy_([known[p][0] if p in known else torch.zeros_like(p) for p in x], keep=False)
        return now

    def finish(self) -> None:
        """The model is x. The mean in flight is not applied."""
        super().finish()
        self._forget()

    def _pending_correction(self) -> Callable[[], None] | None:
        """There is none, but whether x is finite is asked where there is one."""
        self._drain()
        return None if self.comm.world_size == 1 else lambda: None

    def _drain(self) -> None:
        for pipe in self.pipes.values():
            if pipe.A is not None:
                pipe.A.wait(counted=False)
                pipe.left_out = pipe.A.left_out

    def state_dict(self) -> dict[str, Any]:
        """Adds the gradients in flight, drained."""
        self._drain()
        numbers = {p: number for number, p in enumerate(self._members())}
        pipes = {
            self.optimizers.index(opt): {
                "x": [numbers[p] for p in pipe.x],
                "G": [bucket.clone() for bucket in pipe.G.buckets],
                "present": pipe.present.tolist(),
                "left_out": list(pipe.left_out),
            }
            for opt, pipe in self.pipes.items()
        }
        e = {self.optimizers.index(opt): residuals.state_dict(numbers) for opt, residuals in self.residuals.items()}
        return {**super().state_dict(), "pipes": pipes, "residuals": e}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the gradients that were in flight; they are applied in the next step."""
        super().load_state_dict(state)
        self._forget()
        members = self._members()
        for opt, residuals in self.residuals.items():
            residuals.load_state_dict(state["residuals"].get(self.optimizers.index(opt)), members)
        for number, kept in state["pipes"].items():
            x, present = [members[n] for n in kept["x"]], torch.tensor(kept["present"])
            pipe = Pipe(x, self.comm.layout([p.detach() for p in x]).buffer(), present, complete=False)
            pipe.left_out = tuple(kept["left_out"])
            for bucket, value in zip(pipe.G.buckets, kept["G"], strict=True):
                bucket.copy_(value)
            self.pipes[self.optimizers[number]] = pipe

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """Adds the staleness of the gradients that were applied last."""
        return {**super().metrics(since), "algo/staleness_steps": float(self._staleness)}

    def _why_explicit(self) -> str | None:
        return super()._why_explicit() or "gradients are averaged before you clip them and the optimizer steps"
