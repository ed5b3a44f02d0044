"""EAMSGD: workers on elastic bands around a centre, in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.on_shards import OnShards
from lightning_cocod.algorithms.options import flag, share
from lightning_cocod.algorithms.repair import forget
from lightning_cocod.algorithms.staleness import Staleness
from lightning_cocod.algorithms.when import When, as_when
from lightning_cocod.comm import Communicator, NonFiniteMessage
from lightning_cocod.comm.buckets import Buffer, Layout
from lightning_cocod.comm.norms import finite
from lightning_cocod.comm.shard_service import Outbox, Owner, Question
from lightning_cocod.comm.shards import Rows
from lightning_cocod.comm.thread import Handle
from lightning_cocod.comm.turn import Turn

BUCKET_BYTES = 1 << 20
ALPHA = 0.9
"""β of the paper: N α, by default."""


class EAMSGD(OnShards):
    r"""EAMSGD (Zhang, Choromanska, LeCun; NeurIPS 2015; arXiv 1412.6651): elastic averaging, asynchronously.

    x̃ is the centre, in shards, one with each worker; worker i has x_i and an optimizer of its own, in the paper SGD with
    Nesterov's momentum::

        every step:         x_i ← x_i + U(g(x_i))
        every k-th step:    d = α (x_i − x̃) ;  x_i ← x_i − d ;  x̃ ← x̃ + d         # for one worker at a time

    so x̃ + Σ x_i is moved by gradients alone. Only parameters are pulled at; momentum is the worker's own. With ``overlap``
    d is taken of a snapshot, and subtracted after the first step at whose end it is there, k steps later at the latest:
    local steps made meanwhile survive. The model that is evaluated and saved is x̃, and where ``finish`` leaves all workers.

    The loss of a worker ends the run on all others, with PeerLost: its shard of x̃ is gone. Memory beyond the parameters,
    gradients and optimizer: a copy of the parameters, a shard of them, and another shard for each other worker.

    Args:
        model: the module that is trained.
        optimizer: one or several torch optimizers over its parameters.
        period: k, a schedule ``{step: k}``, or a rule (``when.When``). The paper has 10 at first, and also 1 … 64.
        alpha: α. By default 0.9/N for N workers, the paper's β/N.
        overlap: False waits for d, and subtracts it in the step in which it was asked for.
        max_staleness: the most by which a worker may be ahead of the slowest, in exchanges with the centre since all last
            met: a faster one waits. None for any.
        **shared: ``on_nonfinite``, ``communicator``, ``timeout``, … (see ``Algorithm``). With "raise" a worker whose x_i is
            not finite raises at its next exchange; with "skip" it begins anew at x̃, and its optimizer's state is reset.

    Raises:
        ValueError: an option out of range, or ``compression``.

    A gradient scaler is refused.
    """

    name: ClassVar[str] = "eamsgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int | Mapping[int, int] | When = 10,
        *,
        alpha: float | None = None,
        overlap: bool = True,
        max_staleness: int | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, optimizer, when=as_when(period), max_staleness=max_staleness, **shared)
        self.alpha = ALPHA / self.comm.world_size if alpha is None else share("alpha", alpha)
        self.overlap = flag("overlap", overlap)
        self.skipped = 0
        """Times at which this worker was not finite, and began anew at x̃."""
        self.centre: Centre | None = None
        self._asked: Handle[list[int]] | None = None

    # The verbs

    def _make_owners(self) -> list[Owner]:
        self.x, self.rounds.ends, self._asked = self._parameters(), None, None
        self.rounds.begin(self.t)
        self.centre = Centre(self.x, self.comm, self.alpha, self.turn, self.staleness)
        return [self.centre]

    @torch.no_grad()
    def after_step(self) -> None:
        """d is subtracted where it has come, and asked for where it is time.

        Raises:
            RuntimeError: parameters have joined the optimizer, of which the centre knows nothing.
        """
        super().after_step()
        if list(map(id, self._parameters())) != list(map(id, self.x)):
            raise RuntimeError(
                f"parameters have joined the optimizer, and the centre of {self.name} has not: let them join before "
                "training starts, or between finish() and start() on all ranks"
            )
        due = self.rounds.ends is not None and self.t >= self.rounds.ends
        if self._asked is not None and (due or self._asked.done()):
            self._subtract()
        if due:
            self.rounds.begin(self.t)
            self._ask()
            if not self.overlap:
                self._subtract()

    def finish(self) -> None:
        """x_i ← x̃."""
        super().finish()
        self.centre, self._asked = None, None

    # Inside

    def _options(self) -> str:
        assert self.centre is not None
        return repr((self.centre.layout.fingerprint, self.alpha))

    def _ask(self) -> None:
        assert self.service is not None
        assert self.centre is not None
        clock, centre = self._next_exchange(), self.centre
        centre.s.copy_([p.detach() for p in self.x])
        fit = finite(centre.s.buckets)
        if fit:
            self._asked = self.service.ask(0, centre.outbox, centre.base, clock=clock)
            return
        if not self.skip_nonfinite:
            raise NonFiniteMessage(f"rank {self.comm.rank} has NaN or infinity in its weights at its step {self.t}")
        self.skipped += 1
        centre.base = self.service.wait(self.service.show(0, centre.outbox, clock=clock))
        centre.s.copy_to([p.detach() for p in self.x])
        forget(self.optimizers)

    def _subtract(self) -> None:
        """x_i ← x_i − d."""
        if self._asked is not None:
            assert self.service is not None
            assert self.centre is not None
            self.centre.base = self.service.wait(self._asked)
            self.centre.s.add_to([p.detach() for p in self.x])
            self._asked = None

    def _settle(self) -> None:
        if self._asked is not None:
            assert self.service is not None
            self.service.wait(self._asked, counted=False)

    @torch.no_grad()
    def _read_server(self) -> None:
        assert self.centre is not None
        x = [p.detach() for p in self.x]
        if self.comm.world_size > 1:
            subject = self.subject("centre", counted=False)
            self.comm.pull_(self.centre.x̃, x, self.centre.layout, Rows(), subject).wait(counted=False)  # meetings are rare
            return
        Buffer(self.centre.layout, self.centre.x̃).copy_to(x, keep=False)  # one worker's shard is all of it

    def _state(self) -> dict[str, Any]:
        """The shard of x̃, and −d where it has come and is not in x_i yet."""
        if self.centre is None:
            return {"centre": None}
        come = None if self._asked is None else (self._asked.wait(), [flat.clone() for flat in self.centre.s.buckets])
        return {"centre": self.centre.state_dict(), "come": come}

    def _load(self, state: dict[str, Any]) -> None:
        if self.centre is None or state["centre"] is None:
            return
        with self.turn:
            self.centre.load_state_dict(state["centre"])
        self._asked = None
        if state["come"] is not None:
            versions, buckets = state["come"]
            for flat, value in zip(self.centre.s.buckets, buckets, strict=True):
                flat.copy_(value)
            self._asked = Handle.of(versions)

    def _why_explicit(self) -> str | None:
        return "there are several optimizers" if len(self.optimizers) > 1 else None

    def _pending_correction(self) -> Callable[[], None] | None:
        return None if self.centre is None else self._read_server


class Centre:
    """This worker's shard of x̃, and what it sends of its own x.

    Args:
        x: the parameters.
        comm: of all ranks.
        α: of an elastic band.
        turn: held while x̃ is read or moved.
        staleness: told, for each d, how many others x̃ has taken up since the last of the same worker.
    """

    def __init__(self, x: Sequence[Tensor], comm: Communicator, α: float, turn: Turn, staleness: Staleness) -> None:
        self.α, self.turn, self.staleness = α, turn, staleness
        self.layout = Layout(x, BUCKET_BYTES, multiple=comm.world_size)
        self.s = self.layout.buffer()
        """A snapshot of this worker's x; later −d."""
        self.s.copy_([p.detach() for p in x])
        self.outbox = Outbox(self.s.buckets, comm.rank, comm.world_size)
        self.x̃ = [own.clone() for own in self.outbox.own]
        self.nbytes = sum(t.nbytes for t in self.x̃)
        self.version = 0
        """How many d this shard has taken up."""
        self.base = [0] * comm.world_size
        """The versions that this worker's last exchange was with."""

    def like_shard(self) -> list[Tensor]:
        """As x̃."""
        return [torch.empty_like(t) for t in self.x̃]

    def answer(self, question: Question, content: list[Tensor]) -> int:
        """d = α (x − x̃) ; x̃ ← x̃ + d ; content ← −d."""
        with self.turn:
            self.staleness.add([self.version - question.base])
            for x, x̃ in zip(content, self.x̃, strict=True):
                minus_d = torch.sub(x̃, x, out=x).mul_(self.α)
                x̃.sub_(minus_d)
            self.version += 1
            return self.version

    def show(self, worker: int, content: list[Tensor]) -> int:
        """content ← x̃."""
        with self.turn:
            for out, x̃ in zip(content, self.x̃, strict=True):
                out.copy_(x̃)
            return self.version

    def state_dict(self) -> dict[str, Any]:
        """x̃ and versions."""
        return {"x̃": [t.clone() for t in self.x̃], "version": self.version, "base": list(self.base)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""
        for x̃, value in zip(self.x̃, state["x̃"], strict=True):
            x̃.copy_(value)
        self.version, self.base = state["version"], list(state["base"])
