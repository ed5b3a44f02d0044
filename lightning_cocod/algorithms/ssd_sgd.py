"""SSD-SGD: push every step, pull every k-th, and a step of the worker's own in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.background_server import BackgroundServer, Clipping
from lightning_cocod.algorithms.local_update import GLU, LocalUpdate, Scales, as_local_update
from lightning_cocod.algorithms.mean_model import on_device
from lightning_cocod.algorithms.options import choice, is_sgd, nothing_in_common
from lightning_cocod.algorithms.outgoing import Outgoing
from lightning_cocod.algorithms.repair import restore
from lightning_cocod.algorithms.ssgd import SSGD
from lightning_cocod.algorithms.when import Rounds, When, as_when
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.comm.norms import finite

T = TypeVar("T")


class SSDSGD(SSGD):
    r"""SSD-SGD (Xu, Dong, Zhao, Xu, Liao; arXiv 2012.05396): separated push and pull, k-step delay.

    W is the server's, in shards; U the user's optimizer's update, there. Worker i holds x_i, and from time to time a copy P
    of W; the local update has a base b and a rate ℓ of its own::

        t < H:            Push g_i ;  W ← W + U(Σ_j w_j g_j) ;  Pull W ;  x_i ← W          # S-SGD
        t ≥ H:            Push g_i ;  W ← async W + U(Σ_j w_j g_j)                         # every step
                          b ← P if a pull was launched in the step before, else x_i
                          x_i ← LocalUpdate(b, g_i)
                          (t − H) mod k = k − 1:  P ← async W                              # this step's update included

    so a pull has the next step's forward and backward to travel in, and k = 1 still has a delay of one step. A push waits
    for the one before. The model that is evaluated and saved is W, which is where ``finish`` leaves all workers.

    The user's optimizer steps in the communication thread, on this worker's shard, with the rates that its groups had when
    the step was told; clipping is done to the mean gradient as under DDP, and to the worker's own before its local update.
    After the warm-up a parameter without a gradient counts as one with a gradient of zero; a frozen one without rests. With
    ``on_nonfinite="skip"`` a worker whose gradient is not finite is left out of the mean, and counts it as zero itself.
    Memory beyond the parameters, gradients and
    optimizer, whose state is N times smaller: the gradients that are pushed, P, the base of an earlier step, and shards.

    Follows the abstract and the authors' code; the local updates are in ``local_update``. One worker trains plainly.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters; with ``glu`` they are SGD.
        period: k, a schedule ``{step: k}``, or a rule (``when.When``). The authors have 5.
        local_update: "glu", "sgd", "dc_asgd", "dc_asgd_a", or an object.
        scaling: "plain", a factor s = 1 of the worker's gradient and ℓ = the learning rate; "paper", s = 1/N and ℓ = N times
            that, as in the authors' scripts.
        pre_refresh: for "glu": "pull", the base of the pull before is what ĝ is read off; or "every_step".
        warmup_steps: H. The authors have 500.
        overlap: False waits for what is launched: the same trajectory bit for bit, nothing hidden.
        weights: w of every rank, in any scale, for example the batch sizes. Equal by default.
        **shared: ``elementwise`` (see ``SSGD``); ``on_nonfinite``, ``communicator``, ``timeout``,
            ``process_group_timeout`` (see ``Algorithm``).

    Raises:
        ValueError: an option out of range; "glu" beside another optimizer than SGD.
    """

    name: ClassVar[str] = "ssd_sgd"
    server: ClassVar[type[BackgroundServer]] = BackgroundServer
    frees_gradients: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 5,
        *,
        local_update: str | LocalUpdate = "glu",
        scaling: Literal["plain", "paper"] = "plain",
        pre_refresh: Literal["pull", "every_step"] = "pull",
        warmup_steps: int = 0,
        overlap: bool = True,
        weights: Sequence[float] | None = None,
        **shared: Any,
    ) -> None:
        if shared.pop("overlap_pull", False):
            raise ValueError(f"{self.name} pulls behind whole steps anyway: leave overlap_pull out")
        super().__init__(model, optimizer, overlap=overlap, weights=weights, **shared)
        self.when = as_when(period, warmup_steps)
        self.rounds = Rounds(self.when)
        self.local_update = as_local_update(local_update)
        self.scaling = choice("scaling", scaling, ("plain", "paper"))
        every_step = choice("pre_refresh", pre_refresh, ("pull", "every_step")) == "every_step"
        if every_step and not isinstance(self.local_update, GLU):
            raise ValueError("pre_refresh is for local_update='glu': leave it out")
        if isinstance(self.local_update, GLU):
            self.local_update.every_step |= every_step
        nothing_in_common(self.name, self.optimizers, "its server would have two values of it")
        for opt in self.optimizers:
            if self.local_update.needs_sgd and not is_sgd(opt):
                raise ValueError(
                    f"local_update='glu' reads gradients off the movement of weights and needs SGD, not "
                    f"{type(opt).__name__}: choose sgd, dc_asgd or dc_asgd_a"
                )

    # The verbs

    def start(self, *, broadcast: bool = True) -> None:
        """W ← x_i ← x_0."""
        self.rounds.ends = None
        super().start(broadcast=broadcast)

    def _serve(self) -> None:
        super()._serve()
        for server in self.servers.values():
            self.local_update.begin(server.x)

    def _begin(self, server: Outgoing) -> None:
        """Push g, after the push before."""
        cast(BackgroundServer, server).acknowledged()
        super()._begin(server)

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """The gradients are on their way."""
        self._join()
        for server in self._of(optimizer):
            if server.push is None:
                self._begin(server)
            server.complete(free=False)
            self._repair(server)
            server.clipping = Clipping()

    def _repair(self, server: BackgroundServer) -> None:
        left_out, server.left_out = server.left_out, ()
        self.repair_buffers(left_out)

    def _renew(self) -> None:
        for server in self._of(None):
            server.acknowledged()
            self._repair(server)
        self._read_server()
        super()._renew()

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """The worker's own gradient, now; the mean, when the server steps."""
        for server in self._of(optimizer):
            server.clipping.max_norm = max_norm
        return nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_norm)

    def clip_grad_value_(self, optimizer: Optimizer, max_value: float) -> None:
        """The worker's own gradient, now; the mean, when the server steps."""
        for server in self._of(optimizer):
            server.clipping.max_value = max_value
        super().clip_grad_value_(optimizer, max_value)

    def step(self, update: Callable[[], T] | None = None, *, scaler: torch.amp.GradScaler | None = None) -> T | None:
        """W ← async W + U(g) ; x ← LocalUpdate(b, g) ; P ← async W where it is time. The user's optimizer moves nothing."""
        if update is not None:
            for server in self._of(None):
                if server.push is not None:
                    self._advance(server)
        return super().step(update, scaler=scaler)

    def _advance(self, server: BackgroundServer) -> None:
        synchronous = self.when.synchronous(self.t)
        resting = server.unused(self.subject("gradients present")) if synchronous else server.resting()
        server.serve(self.subject("server's step"), resting)
        if synchronous:
            server.pull_now(self.subject("parameters"))
            self.local_update.begin(server.x)
        else:
            self.rounds.begin(self.t)
            self._update_locally(server)
            if self.rounds.ends is not None and self.t + 1 >= self.rounds.ends:
                server.begin_pull(self.subject("parameters"))
        if not self.overlap:
            server.acknowledged()
            server.arrived()
        for p in server.x:
            p.grad = None

    @torch.no_grad()
    def _update_locally(self, server: BackgroundServer) -> None:
        """x ← LocalUpdate(b, g)."""
        server.arrived()
        numbers, resting = {p: number for number, p in enumerate(server.x)}, server.resting()
        counts = not self.skip_nonfinite or finite([p.grad for p in server.x if p.grad is not None])
        factor, s = (self.comm.world_size, 1 / self.comm.world_size) if self.scaling == "paper" else (1, 1.0)
        k = server.k if server.pulled else self.rounds.length or 1  # a round may begin with this step, of another length
        for group in server.optimizer.param_groups:
            scales = Scales(factor * float(group["lr"]), s, group.get("weight_decay", 0.0), k)
            for p in group["params"]:
                if p not in numbers:
                    continue
                b = server.P[numbers[p]] if server.pulled else p.detach()
                if numbers[p] in resting:
                    p.detach().copy_(b)
                    self.local_update.begin([p])
                    continue
                g = torch.zeros_like(p) if p.grad is None or not counts else p.grad
                g = g.neg_() if group.get("maximize") else g
                self.local_update.step(p, b, g, scales, pulled=server.pulled)
        server.pulled = False

    # What is evaluated and kept

    def _read_server(self) -> None:
        """x ← W."""
        for server in self.servers.values():
            server.pull(self.subject("model", counted=False)).wait(counted=False)

    def _pending_correction(self) -> Callable[[], None] | None:
        return None if super()._pending_correction() is None else self._become_served

    def _become_served(self) -> None:
        """x ← W, and buffers of a worker whose last forward was not sound are those of one whose was."""
        for server in self._of(None):
            server.acknowledged()
            if server.left_out:
                with on_device(list(self.model.buffers()), self.comm.device) as buffers:
                    restore(buffers, self.comm, server.left_out, self.subject("repair", counted=False))
        self._read_server()

    def state_dict(self) -> dict[str, Any]:
        """Adds this worker's shard of W, what has been pulled and is not used yet, and the local update's memory."""
        numbers = {p: number for number, p in enumerate(self._members())}
        servers = [server.state_dict() for server in self._of(None)]
        local_update = self.local_update.state_dict(numbers)
        return {**super().state_dict(), "served": self.served(), "servers": servers, "local_update": local_update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the server was, and with what was pulled. Collective.

        Raises:
            ValueError: the state of another number of workers, or of other parameters.
        """
        super().load_state_dict(state)
        self.serve_as(state["served"])
        for server, of_server in zip(self._of(None), state["servers"], strict=True):
            server.load_state_dict(of_server)
        self.local_update.load_state_dict(state["local_update"], self._members())

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """Adds the staleness of what is pulled."""
        return {**super().metrics(since), "algo/staleness_steps": 0.0 if self.when.synchronous(self.t) else 1.0}
