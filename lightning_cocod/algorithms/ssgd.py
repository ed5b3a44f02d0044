"""S-SGD: synchronous SGD on a sharded server. What all others are measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.first_use import FirstUse, is_compiled
from lightning_cocod.algorithms.lending_server import LendingServer
from lightning_cocod.algorithms.options import flag
from lightning_cocod.algorithms.pushing import Pushing
from lightning_cocod.algorithms.server import Server
from lightning_cocod.comm import Message
from lightning_cocod.comm.norms import norm

T = TypeVar("T")


class SSGD(Pushing):
    r"""Synchronous SGD by push and pull, each worker being the server of a shard of the parameters.

    All workers hold the same x. U is the user's optimizer's update, on the shard that a worker owns; w_j its weights::

        every step:       g_i = ∇ℓ_i(x) ;  Push g_i        # bucket by bucket, as backward comes by
                          W ← W + U(Σ_j w_j g_j)           # each worker its own shard
                          Pull W ;  x ← W

    so that x(t+1) = x(t) + U(Σ_j w_j g_j(x(t))), as under DDP; with two workers equal to it bit for bit, with more, or
    clipped norms, as far as the order of sums allows. The optimizer's state exists once, a shard on each worker. A
    gradient that one worker lacks counts as zero; one that all lack is none, and its parameter does not step.

    The optimizer must be element-wise (SGD, Adam, RMSprop, …; it is tried out, unless you vouch for it). From
    ``before_step`` to ``step`` it has the parts of its shard in place of the parameters, so clip with ``clip_grad_norm_``,
    which knows the others' parts; values can be clipped as ever. The parameters' own ``grad`` is None once it has been
    pushed, and the optimizer's ``state`` is empty: ``optimizer_state`` has it whole, ``finish`` puts it back. Gradients are
    lent to the push, and free once ``before_step`` returns: whoever holds on to one in backward must not write to it until
    then. Memory beyond the parameters, gradients and optimizer: a shard of their mean and one of weights, and up to four
    buckets; the optimizer's state is N times smaller.

    Pushes overlap backward where there is one optimizer, and one backward a step that is not under ``no_sync``. With
    ``overlap_pull`` the pull overlaps what follows the step: the first function of torch that is given a parameter waits
    for it (``FirstUse``), and the first layers' come first. The trajectory is the same bit for bit. Compiled models cannot
    have it, as their parameters are read where nobody can wait, and other threads than the training one, and extensions
    that are called past torch, must not read parameters between a step and the next backward.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        overlap: False pushes after backward: the same trajectory bit for bit, nothing hidden.
        overlap_pull: True lets the pull overlap the next forward.
        elementwise: True says that the optimizer treats every element by itself although a trial says otherwise, as it does
            of one whose steps are random. One that needs whole tensors would silently get parts of them.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, ``process_group_timeout`` (see ``Algorithm``). With
            ``on_nonfinite="skip"`` a mean is that of the other ranks.

    Raises:
        ValueError: an option out of range, or ``compression``.

    In a plain loop call ``ssgd.step()`` after ``backward()``. ``start`` raises TypeError for an optimizer that needs whole
    tensors. A gradient scaler is refused: each rank's would decide on its own whether to skip the step.
    """

    name: ClassVar[str] = "ssgd"
    in_shards: ClassVar[bool] = True
    frees_gradients: ClassVar[bool] = True
    server: ClassVar[type[Server]] = LendingServer

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        overlap: bool = True,
        overlap_pull: bool = False,
        elementwise: bool = False,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, overlap=overlap, weights=weights, **shared)
        self.elementwise = flag("elementwise", elementwise)
        self.overlap_pull = flag("overlap_pull", overlap_pull)
        if self.compression is not None:
            raise ValueError(f"{self.name} sends gradients whole: leave compression out, or use cd_sgd or dist_ef_sgd")
        self._stepped: list[Server] = []
        self._uses = FirstUse()
        self._pulls: list[Message] = []  # that somebody may still have to wait for

    # The verbs

    def start(self, *, broadcast: bool = True) -> None:
        """x_i ← x_0.

        Raises:
            ValueError: ``overlap_pull`` and a compiled model.
        """
        if self.overlap_pull and is_compiled(self.model):
            raise ValueError("overlap_pull waits in functions of torch that compiled models do without: leave it out")
        super().start(broadcast=broadcast)

    def make_server(self, optimizer: Optimizer, shared: set[nn.Parameter]) -> Server:
        """The optimizer's state is cut into shards."""
        return self.server(optimizer, self.comm, shared, elementwise=self.elementwise)

    def _serve(self) -> None:
        super()._serve()
        for server in self.servers.values():
            self._hooks_of_servers.append(server.optimizer.register_step_post_hook(partial(self._on_step, server)))
            load: Any = server.optimizer.register_load_state_dict_post_hook
            self._hooks_of_servers.append(load(lambda _, server=server: server.replace_state()))

    def release(self) -> None:
        """The parameters and the optimizers are as they were, but for states."""
        super().release()
        self._uses.leave()
        self._pulls = []
        for server in self.servers.values():
            if server.is_serving:
                server.leave()
        self._stepped = []

    def after_backward(self) -> None:
        """What has been pulled is there, used or not."""
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            pull.wait()
        self._uses.leave()
        super().after_backward()

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
            server.copy_parts()  # while it is on its way
            push.wait()
            self.repair_buffers(push.left_out)
            server.enter(server.present(self.subject("gradients present")) if push.lacking else None)

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
        square = norm(gradients).square().reshape(1).to(self.comm.device)  # there may be none here
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
            if self.overlap_pull:
                self._pulls.append(server.pull_behind(self.subject("parameters"), self._uses))
            else:
                server.pull(self.subject("parameters")).wait()
        self._stepped = []
        return result

    def _on_step(self, server: Server, *_: Any) -> None:
        if server.is_serving:
            self._stepped.append(server)

    # States

    def put_back_states(self) -> None:
        """The optimizers get their states back, whole."""
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
        failed = self.comm.failed
        if not failed:
            self.after_backward()
        with server.shown_whole(self.subject("optimizer", counted=False), failed=failed):
            return super().optimizer_state(optimizer)

    def _why_explicit(self) -> str | None:
        return super()._why_explicit() or "each worker's optimizer steps its shard"
