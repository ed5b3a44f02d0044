"""S-SGD: synchronous SGD on a sharded server. What all others are measured against."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.gradients import trainable
from lightning_cocod.algorithms.options import flag
from lightning_cocod.algorithms.server import Server
from lightning_cocod.algorithms.when import as_when
from lightning_cocod.comm.norms import norm

T = TypeVar("T")
_log = logging.getLogger(__name__)


class SSGD(Algorithm):
    r"""Synchronous SGD by push and pull, each worker being the server of a shard of the parameters.

    All workers hold the same x. U is the user's optimizer's update, on the shard that a worker owns; w_j its weights::

        every step:       g_i = ∇ℓ_i(x) ;  Push g_i        # bucket by bucket, as backward comes by
                          W ← W + U(Σ_j w_j g_j)           # each worker its own shard
                          Pull W ;  x ← W

    so that x(t+1) = x(t) + U(Σ_j w_j g_j(x(t))), as under DDP; with two workers equal to it bit for bit, with more as far as
    the order of sums allows. The optimizer's state exists once, a shard on each worker. A gradient that one worker lacks
    counts as zero; one that all lack is none, and its parameter does not step.

    The optimizer must be element-wise (SGD, Adam, RMSprop, …; it is tried out). From ``before_step`` to ``step`` it has the
    parts of its shard in place of the parameters, so clip with ``clip_grad_norm_``, which knows the others' parts; values
    can be clipped as ever. The parameters' own ``grad`` is None once it has been pushed, and the optimizer's ``state`` is
    empty: ``optimizer_state`` has it whole, ``finish`` puts it back. Memory beyond the parameters, gradients and
    optimizer: a copy of the gradients, which are freed as they are copied, a shard of them and one of weights, and four
    buckets; the optimizer's state is N times smaller.

    Pushes overlap backward where there is one optimizer, and one backward a step that is not under ``no_sync``.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        overlap: False pushes after backward: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``). With
            ``on_nonfinite="skip"`` a mean is that of the other ranks.

    Raises:
        ValueError: an option out of range, or ``compression``.

    In a plain loop call ``ssgd.step()`` after ``backward()``. ``start`` raises TypeError for an optimizer that needs whole
    tensors. A gradient scaler is refused: each rank's would decide on its own whether to skip the step.
    """

    name: ClassVar[str] = "ssgd"
    may_skip_steps: ClassVar[bool] = False
    has_rounds: ClassVar[bool] = False
    in_step: ClassVar[bool] = True
    in_shards: ClassVar[bool] = True
    frees_gradients: ClassVar[bool] = True
    server: ClassVar[type[Server]] = Server

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        self.servers: dict[Optimizer, Server] = {}
        super().__init__(model, optimizer, when=as_when(1, 0), weights=weights, **shared)
        if self.compression is not None:
            raise ValueError("ssgd sends gradients whole: leave compression out, or use pipe_sgd, which has it")
        self.overlap = flag("overlap", overlap)
        self._hooks_of_servers: list[Any] = []
        self._accumulating = False
        self._stepped: list[Server] = []

    # The verbs

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0; the optimizers' states are cut into shards."""
        super().start(broadcast=broadcast)
        if self.comm.world_size > 1:
            self._serve()

    def _serve(self) -> None:
        self.release()
        members = [p for opt in self.optimizers for p in dict.fromkeys(trainable([opt]))]
        shared = {p for p, count in Counter(members).items() if count > 1}
        self.servers = {opt: self.server(opt, self.comm, shared) for opt in self.optimizers}
        for server in self.servers.values():
            self._hooks_of_servers.append(server.optimizer.register_step_post_hook(partial(self._on_step, server)))
            load: Any = server.optimizer.register_load_state_dict_post_hook
            self._hooks_of_servers.append(load(lambda _, server=server: server.replace_state()))
            if self.overlap and len(self.servers) == 1:
                for number, p in enumerate(server.x):
                    hook: Any = p.register_post_accumulate_grad_hook  # untyped in torch
                    self._hooks_of_servers.append(hook(partial(self._on_gradient, server, number)))

    def release(self) -> None:
        """The parameters and the optimizers are as they were, but for states."""
        super().release()
        for hook in self._hooks_of_servers:
            hook.remove()
        for server in self.servers.values():
            if server.is_serving:
                server.leave()
        self._hooks_of_servers, self._stepped = [], []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up, and nothing is pushed."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _on_gradient(self, server: Server, number: int, _: Tensor) -> None:
        """A parameter's gradient is complete, if backward is the last of the step: push it."""
        if self._accumulating or not self.one_backward_a_step or self.replica.is_aside:
            return
        if server.is_taken(number):
            raise RuntimeError(
                "a second backward in one step (or one pass that comes twice by a parameter, as re-entrant checkpointing "
                "does), and the gradients of the first are on their way: use overlap=False, or put all backwards but the "
                "last of a step under no_sync()"
            )
        if server.push is None:
            if server.is_outdated:  # before_step sees to it
                return
            self._begin(server)
        server.take(number, free=self.frees_gradients)

    def _begin(self, server: Server) -> None:
        self.weighing.report_step()
        server.begin(self.w, self.subject("gradients"))

    def after_backward(self) -> None:
        """What has been begun does not keep other messages."""
        for server in self.servers.values():
            if server.push is not None:
                server.complete(free=self.frees_gradients)

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """g ← the mean over the workers, of this worker's shard, which the optimizer has from now on."""
        super().before_step(optimizer)
        if optimizer is None and any(server.shared for server in self.servers.values()):
            raise ValueError("optimizers share parameters: call before_step and step for one after the other")
        self._join()
        for server in self._of(optimizer):
            if server.push is None:
                self._begin(server)
            server.complete()
            push, server.push = server.push, None
            assert push is not None  # begun
            push.wait()
            self.repair_buffers(push.left_out)
            server.enter(server.present(self.subject("gradients present")) if push.lacking else None)

    def _join(self) -> None:
        """Parameters that are new in the optimizers are served from now on.

        Raises:
            RuntimeError: they have gradients already, and others are on their way.
        """
        self.after_backward()
        if not any(server.is_outdated for server in self.servers.values()):
            return
        if all(server.push is None for server in self.servers.values()):
            self._renew()
        elif any(p.grad is not None for server in self.servers.values() for p in server.missing()):
            raise RuntimeError(
                "parameters have joined the optimizer between backward and step, and have gradients: "
                "let them join before backward"
            )  # without gradients they are served from the next step on

    def _renew(self) -> None:
        """New servers."""
        self._put_back_states()
        self._serve()

    def _of(self, optimizer: Optimizer | None) -> list[Any]:
        """The server of an optimizer, or all."""
        return [server for opt, server in self.servers.items() if optimizer is None or opt is optimizer]

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """That of all workers' shards together.

        Raises:
            RuntimeError: before ``before_step``, when there is no mean yet.
        """
        if optimizer not in self.servers:
            return super().clip_grad_norm_(optimizer, max_norm)
        if not self.servers[optimizer].is_serving:
            raise RuntimeError("gradients are clipped once they are a mean: call clip_grad_norm_ after before_step()")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        square = norm(gradients).square().reshape(1)
        self.comm.mean_([square], 1.0, self.subject("gradient norm")).wait()
        size = square.sqrt().squeeze()
        torch.nn.utils.clip_grads_with_norm_([p for g in optimizer.param_groups for p in g["params"]], max_norm, size)
        return size

    def step(self, update: Callable[[], T] | None = None, *, scaler: torch.amp.GradScaler | None = None) -> T | None:
        """W ← W + U(g) ; x ← W."""
        if update is None:
            return super().step(scaler=scaler)
        result = super().step(update)
        for server in self._stepped:
            server.leave()
            server.pull(self.subject("parameters")).wait()
        self._stepped = []
        return result

    def _on_step(self, server: Server, *_: Any) -> None:
        if server.is_serving:
            self._stepped.append(server)

    def finish(self) -> None:
        """The model is x; the optimizers get their states back, whole."""
        super().finish()
        self._put_back_states()
        self.release()
        self.servers = {}

    # States

    def _put_back_states(self) -> None:
        self.after_backward()
        for optimizer, server in self.servers.items():
            if server.is_serving:
                server.leave()
            optimizer.state = server.whole_state(self.subject("optimizer", counted=False))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole. Collective. Empty once communication has failed: nobody can put the shards together."""
        server = self.servers.get(optimizer)
        if server is None:
            return super().optimizer_state(optimizer)
        if self.comm.failed:
            _log.warning(
                "communication has failed, and the state of %s is in shards: none of it is saved", type(optimizer).__name__
            )
            with server.shown(defaultdict(dict)):
                return super().optimizer_state(optimizer)
        self.after_backward()
        with server.shown(server.whole_state(self.subject("optimizer", counted=False))):
            return super().optimizer_state(optimizer)

    def _members(self) -> list[nn.Parameter]:
        """Those of the user, whatever the optimizers have."""
        served = [p for server in self.servers.values() for p in server.members()]
        return list(dict.fromkeys(served)) if self.servers else super()._members()

    def _pending_correction(self) -> Callable[[], None] | None:
        """There is none, but whether x is finite is asked where there is one. A push that has begun must not keep others."""
        self.after_backward()
        return None if self.comm.world_size == 1 else lambda: None

    def _why_explicit(self) -> str | None:
        return super()._why_explicit() or "each worker's optimizer steps its shard"
