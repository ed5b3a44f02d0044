"""dist-EF-SGD: compression of what is pushed and of what is pulled, with error feedback on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.optim import SGD, Optimizer

from lightning_cocod.algorithms.options import is_sgd, nothing_in_common
from lightning_cocod.algorithms.pushing import Pushing
from lightning_cocod.algorithms.skipping import Never
from lightning_cocod.algorithms.two_way import Direction, TwoWay
from lightning_cocod.comm.compressed import codes
from lightning_cocod.compression import Codec

T = TypeVar("T")


class DistEFSGD(Pushing):
    r"""dist-EF-SGD (Zheng, Huang, Kwok; NeurIPS 2019; arXiv 1905.10936).

    All workers hold the same x, and each is the server of a shard of it. C is a codec, w_j the workers' weights, η the
    learning rate, of each parameter group its own, and r(t) = η(t−1)/η(t)::

        worker i:  p_i ← d_i + r e_i ;  Push C(p_i) ;  e_i ← p_i − C(p_i)       # bucket by bucket, as backward comes by
        server:    q ← Σ_j w_j C(p_j) + r ẽ ;  ẽ ← q − C(q)
        all:       Pull C(q) ;  x ← x − η C(q)

    d_i is the worker's own gradient as SGD takes it: with weight decay, then with momentum (dampened, Nesterov's), which is
    local: p = d + r e comes after it. So what x has not been told of is not lost:
    x(t+1) − η(t) (ẽ(t+1) + Σ_j w_j e_j(t+1)) = x(0) − Σ_τ η(τ) Σ_j w_j d_j(τ), whatever the codecs and the learning rates.
    A step with a learning rate of 0 sends nothing of its group, and keeps the residuals.

    The optimizer's step is x ← x − η C(q), with its momentum and weight decay set to 0 while it lasts: they have been
    applied. Clip gradients before the step, each worker its own, and with ``overlap=False``: what has been sent cannot be
    changed. A parameter without a gradient on a worker gets nothing from it, weight decay included; one that has none on any
    worker rests, as under SGD, and what would have moved it stays in ẽ.

    A worker that is alone trains plainly. Memory beyond the parameters, gradients and optimizer: a copy of the gradients in
    float32 or wider, which e is, two shards, and some 20 MiB for codes and buckets.

    Follows the paper's algorithm, with its block-wise scaled sign as the default codec; a block here is so many values of a
    shard, not a layer.

    Args:
        model: the module that is trained.
        optimizer: SGD, one or several, without a parameter in common.
        compression: codec of both directions, or its name; a contraction (docs/compression.md), "sign" by default;
            None sends whole values.
        overlap: False pushes after backward: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: an option out of range; another optimizer than SGD; ``on_nonfinite="skip"``, as a message that holds NaN
            is known to only when others have gone into residuals.

    In a plain loop call ``step()`` after ``backward()``. A gradient scaler is refused: each rank's would decide on its own
    whether to skip the step.
    """

    name: ClassVar[str] = "dist_ef_sgd"
    sends_own_gradients: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        compression: str | Codec | None = "sign",
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, overlap=overlap, weights=weights, **shared)
        self.compression = self.codes = codes(self.name, compression)
        if self.skip_nonfinite:
            raise ValueError(
                f"{self.name} cannot go on without a rank whose message is not finite: use on_nonfinite='raise', and lower "
                "the learning rate or clip gradients"
            )
        for opt in self.optimizers:
            if not is_sgd(opt):
                raise ValueError(f"{self.name} is a way of doing SGD, and needs torch.optim.SGD, not {type(opt).__name__}")
        nothing_in_common(self.name, self.optimizers, "each has residuals of its own")
        self._due: list[TwoWay] = []
        self._answered: list[TwoWay] = []  # whose optimizers have yet to make their step

    def directions(self) -> tuple[Direction, Direction]:
        """To the server, and from it."""
        return Direction(self.codes, Never()), Direction(self.codes, Never())

    def make_server(self, optimizer: Optimizer, shared: set[nn.Parameter]) -> TwoWay:
        """Without residuals."""
        assert isinstance(optimizer, SGD)
        return TwoWay(optimizer, self.comm, *self.directions())

    def _serve(self) -> None:
        super()._serve()
        for server in self._of(None):
            self._hooks_of_servers.append(server.optimizer.register_step_post_hook(partial(self._on_step, server)))

    # The verbs

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Gradients are each worker's own until the step."""
        super().before_step(optimizer)
        self._join()
        self._due += [server for server in self._of(optimizer) if server not in self._due]

    def step(self, update: Callable[[], T] | None = None, *, scaler: Any = None) -> T | None:
        """x ← x − η U."""
        if update is None:
            return super().step(scaler=scaler)
        due, self._due = self._due, []
        self._answered = [server for server in self._answered if server not in due]
        for server in due:
            self._exchange(server)
            self._answered.append(server)
        with ExitStack() as stack:
            for server in self._answered:
                stack.enter_context(server.plain())
            return super().step(update)

    def _on_step(self, server: TwoWay, *_: Any) -> None:
        self._answered = [other for other in self._answered if other is not server]

    def _exchange(self, server: TwoWay) -> None:
        """g ← U."""
        if server.push is None:
            self._begin(server)
        server.complete(free=False)
        server.check()
        push, server.push = server.push, None
        answer = server.answer(self.subject("answer"))
        assert push is not None  # begun
        push.wait()
        answer.wait()
        if push.lacking:
            server.keep(server.present(self.subject("gradients present")))

    def release(self) -> None:
        """No hook is left."""
        super().release()
        self._due, self._answered = [], []

    def _renew(self) -> None:
        """New servers, which go on where the older ones were."""
        older, subject = dict(self.servers), self.subject("residuals")
        residuals = {opt: server.residuals(subject) for opt, server in older.items()}
        super()._renew()
        for opt, server in self.servers.items():
            server.continue_from(older[opt], residuals[opt])

    # What is kept

    def state_dict(self) -> dict[str, Any]:
        """Adds the residuals, of this worker and of its shard, and whose they are."""
        self.after_backward()
        servers = [server.state_dict() for server in self._of(None)]
        return {**super().state_dict(), "served": self.served(), "servers": servers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the residuals, each parameter with its own. Collective.

        Raises:
            ValueError: the state of another number of workers, or of other parameters.
        """
        super().load_state_dict(state)
        self.serve_as(state["served"])
        for server, of_server in zip(self._of(None), state["servers"], strict=True):
            server.load_state_dict(of_server)

    def _why_explicit(self) -> str | None:
        return super()._why_explicit() or "the optimizer makes the step of the server's answer"
