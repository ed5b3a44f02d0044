"""Codes from the workers to the server, and back: both keep what they drop, and send it later."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_cocod.algorithms.outgoing import Cut, Outgoing, copy_alike
from lightning_cocod.algorithms.skipping import SERVER, Sending, Skip
from lightning_cocod.comm import Group, Message, Subject
from lightning_cocod.comm.buckets import in_memory_order, in_the_order_of, summed_in
from lightning_cocod.comm.coded_shards import CodeRows, Coding
from lightning_cocod.comm.compressed import Compression
from lightning_cocod.comm.gate import Gate


class Direction(NamedTuple):
    """How one direction compresses, and when it skips."""

    compression: Compression
    skip: Skip


class TwoWay(Outgoing):
    r"""One optimizer's part in it. With r = η(t−1)/η(t), of its own for each group; η = 0 stops the group's exchange::

        worker:  p_i ← d_i + r e_i ;  c_i = C(p_i), or 0 when it skips ;  e_i ← p_i − c_i
        server:  q ← Σ_j w_j c_j + r ẽ ;  U = C(q), or 0 when it skips ;  ẽ ← q − U

    where d_i is what SGD makes of a gradient: with weight decay, then with momentum, which is the worker's own and lies in
    the optimizer's state as ever. The worker's e is p in ``g`` once the gradients are in; ẽ is ``E``, a shard.

    Args:
        optimizer: SGD.
        comm: sends.
        up: to the server.
        down: from it.

    Raises:
        TypeError: parameters with gaps in their memory.
    """

    def __init__(self, optimizer: SGD, comm: Group, up: Direction, down: Direction) -> None:
        super().__init__(optimizer, comm, summed=True)
        n, rank = comm.world_size, comm.rank
        self.E = [torch.zeros_like(shard) for shard in self.G]
        """ẽ."""
        self.up = Sending(copy.deepcopy(up.skip), list(range(n)), rank)
        self.down = Sending(copy.deepcopy(down.skip), [SERVER] * n, rank)
        self._up = Coding(up.compression, self.up, CodeRows())
        self._down = Coding(down.compression, self.down, CodeRows())
        self.steps = 0
        """Of this optimizer so far: what rules for skips count, as another one may step more often."""
        self.η_before = [0.0] * len(optimizer.param_groups)
        """The last learning rate of each group that was not 0."""
        self.η, self.r = self._rates()
        self._pushed: dict[int, tuple[Tensor | None, int]] = {}

    def _rates(self) -> tuple[list[float], list[float]]:
        """η and r of each group; r = 1 where there is none."""
        η = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.η_before += [0.0] * (len(η) - len(self.η_before))  # of groups that are new, and all of whose parameters rest
        return η, [b / a if a and b else 1.0 for a, b in zip(η, self.η_before, strict=True)]

    # The worker

    def begin(self, subject: Subject) -> None:
        """G ← async Σ_j w_j c_j."""
        self.η, self.r = self._rates()
        silent = {b for b in range(len(self.layout)) if self.η[self._group(b)] == 0}
        for sending in (self.up, self.down):
            sending.step, sending.silent = self.steps, silent
        self.steps += 1
        self._pushed = {}
        super().begin(subject)

    def _group(self, bucket: int) -> int:
        return self.group_of[self.layout.parts(bucket)[0].index]

    def send(self, gate: Gate, subject: Subject) -> Message:
        """Codes."""
        return self.comm.coded_push_(self.g, self.G, self._up, gate, subject)

    def take(self, number: int, *, free: bool = True) -> None:
        """A parameter's gradient is complete. It must rest from now on."""
        super().take(number, free=free)
        gradient = self.x[number].grad
        self._pushed[number] = gradient, _version(gradient)

    def value(self, number: int) -> Tensor | None:
        """d; None where there is no gradient: then neither momentum nor weight decay is this worker's."""
        p, group = self.x[number], self.optimizer.param_groups[self.group_of[number]]
        if p.grad is None:
            return None
        d = -p.grad if group["maximize"] else p.grad
        if group["weight_decay"]:
            d = d.add(p, alpha=group["weight_decay"])
        if μ := group["momentum"]:
            state = self.optimizer.state[p]
            if (m := state.get("momentum_buffer")) is None:
                m = state["momentum_buffer"] = d.clone()
            else:
                m.mul_(μ).add_(d, alpha=1 - group["dampening"])
            d = d.add(m, alpha=μ) if group["nesterov"] else m
        return d

    def put(self, number: int, cut: Cut, values: Tensor | None) -> None:
        """p ← d + r e."""
        group, place = self.group_of[number], self.into[cut.bucket][cut.piece]
        if self.η[group] == 0:
            return
        if self.r[group] != 1:
            place.mul_(self.r[group])
        if values is not None:
            place.add_(values)

    def check(self) -> None:
        """Gradients and learning rates are as they were when they set out.

        Raises:
            RuntimeError: they are not.
        """
        pushed, self._pushed = self._pushed, {}  # gradients are not kept until the next backward
        for number, (gradient, version) in pushed.items():
            if self.x[number].grad is not gradient or _version(gradient) != version:
                raise RuntimeError(
                    "a gradient was changed after it had been sent in backward: use overlap=False to clip gradients, or to "
                    "change them in another way"
                )
        if [float(group["lr"]) for group in self.optimizer.param_groups][: len(self.η)] != self.η:
            raise RuntimeError(
                "the learning rate was changed between backward and the step, and what was sent depends on it: use "
                "overlap=False, or change it before backward"
            )

    # The server

    def answer(self, subject: Subject) -> Message:
        """U arrives as the gradients of x, once the push is through."""
        silent = self.down.silent
        served = [(E, G, self.r[self._group(b)]) for b, (E, G) in enumerate(zip(self.E, self.G, strict=True))]

        def server() -> None:
            """q."""
            for bucket, (E, G, r) in enumerate(served):
                if bucket not in silent:
                    E.mul_(r).add_(G)

        self.comm.do(server, subject)
        U = [torch.zeros_like(p) if p.grad is None else in_the_order_of(p, p.grad) for p in self.x]
        for p, u in zip(self.x, U, strict=True):
            p.grad = u
        self.η_before = [now or before for now, before in zip(self.η, self.η_before, strict=True)]
        return self.comm.coded_pull_(
            self.E, [p.grad for p in self.x if p.grad is not None], self.layout, self._down, subject
        )

    @torch.no_grad()
    def keep(self, present: Sequence[bool]) -> None:
        """ẽ ← ẽ + U of parameters that are not present, which rest: they lose their U."""
        for bucket, E in enumerate(self.E):
            for piece in self.layout.shares(bucket, self.comm.world_size)[self.comm.rank]:
                if not present[piece.index]:
                    U = self.x[piece.index].grad
                    assert U is not None  # it has been pulled
                    E[piece.offset : piece.end].add_(in_memory_order(U)[piece.start : piece.stop])
        for p, there in zip(self.x, present, strict=True):
            if not there:
                p.grad = None

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside, the optimizer's step is x ← x − η U: what else it does has been done."""
        none: dict[str, Any] = {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
        before = [{option: group[option] for option in none} for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group.update(none)
        try:
            yield
        finally:
            for group, options in zip(self.optimizer.param_groups, before, strict=True):
                group.update(options)

    # What is kept

    def residuals(self, subject: Subject) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """e and ẽ of every parameter, whole, in the dtype of sums. Collective."""
        e, ẽ = ([torch.empty_like(p, dtype=summed_in(p.dtype)) for p in self.x] for _ in range(2))
        shards = self.layout.buffer(summed=True)
        torch._foreach_zero_(shards.buckets)
        torch._foreach_copy_(self.own(shards), self.E)
        self.comm.mean_(shards.buckets, 1.0, subject).wait()  # the sum: what one has is zero elsewhere
        self.g.copy_to(e, keep=False)
        shards.copy_to(ẽ, keep=False)
        return dict(zip(self.x, zip(e, ẽ, strict=True), strict=True))

    def continue_from(self, older: TwoWay, residuals: dict[nn.Parameter, tuple[Tensor, Tensor]]) -> None:
        """Go on where another one was, with nothing of parameters that are new."""
        zeros = [torch.zeros_like(p, dtype=summed_in(p.dtype)) for p in self.x]
        both = [residuals.get(p, (zero, zero)) for p, zero in zip(self.x, zeros, strict=True)]
        self.g.copy_([ẽ for _, ẽ in both], keep=False)
        torch._foreach_copy_(self.E, self.own(self.g))
        self.g.copy_([e for e, _ in both], keep=False)
        self.η_before[: len(older.η_before)] = older.η_before
        self.steps = older.steps

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this worker and of its shard, what the rules remember, the last learning rates, and steps."""
        return {
            "e": [flat.clone() for flat in self.g.buckets],
            "ẽ": [shard.clone() for shard in self.E],
            "skips": [self.up.rule.state_dict(), self.down.rule.state_dict()],
            "η": list(self.η_before),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue.

        Raises:
            ValueError: its buckets are of other sizes.
        """
        copy_alike(self.g.buckets, state["e"])
        copy_alike(self.E, state["ẽ"])
        for sending, remembered in zip((self.up, self.down), state["skips"], strict=True):
            sending.rule.load_state_dict(remembered)
        self.η_before, self.steps = list(state["η"]), state["steps"]


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version
