"""A server that steps by itself: in the communication thread, once the gradients of all workers have come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.elementwise import twin
from lightning_cocod.algorithms.outgoing import copy_alike
from lightning_cocod.algorithms.server import Server
from lightning_cocod.comm import Group, Message, Subject
from lightning_cocod.comm.norms import norm
from lightning_cocod.comm.thread import Handle


@dataclass
class Clipping:
    """What is done to a mean gradient before the step."""

    max_norm: float | None = None
    max_value: float | None = None


class BackgroundServer(Server):
    """W ← W + U(G) for this worker's shard, behind computation.

    W is the server's own: what workers do to x does not matter. U is that of the user's optimizer as its groups are when a
    step is told; a twin of it steps, while the user's has no state. What is frozen, and has no gradient, rests.

    Args:
        optimizer: element-wise.
        comm: sends.
        shared: parameters that other optimizers have as well.
        elementwise: see ``Server``.
    """

    def __init__(
        self, optimizer: Optimizer, comm: Group, shared: Set[nn.Parameter] = frozenset(), *, elementwise: bool = False
    ) -> None:
        super().__init__(optimizer, comm, shared, elementwise=elementwise)
        self.read_x()
        self._twin = twin(optimizer, [{**group} for group in optimizer.param_groups])
        self._twin.state = self.state
        self.P: list[Tensor] = []
        """What has been pulled, on this worker."""
        self.pulled = False
        """Whether P is the base of the next local update."""
        self.k = 1
        """Steps of W from the pull before to the last one."""
        self._since = 0  # steps of W since then
        self.clipping = Clipping()
        self.left_out: tuple[int, ...] = ()
        """Ranks that the last mean gradient was without."""
        self._pull: Message | None = None
        self._pushed: Message | None = None
        self._served: Handle[Any] | None = None

    def acknowledged(self) -> None:
        """Wait for the last push."""
        if self._pushed is not None:
            self._pushed.wait()
            self.left_out, self._pushed = self._pushed.left_out, None

    def resting(self) -> set[int]:
        """Parameters that are frozen, and had no gradient when the others' was pushed. By number."""
        return {number for number in self._absent if not self.x[number].requires_grad}

    def begin_pull(self, subject: Subject) -> None:
        """P ← async W."""
        self.P = self.P or [torch.empty_like(p) for p in self.x]
        self._pull, self.pulled = self.pull(subject, into=self.P), True
        self.k, self._since = self._since, 0

    def pull_now(self, subject: Subject) -> None:
        """x ← W. What was pulled before is outdated."""
        self.arrived()
        self.pull(subject).wait()
        self.pulled, self._since = False, 0

    def arrived(self, *, counted: bool = True) -> None:
        """Wait for the last pull."""
        if self._pull is not None:
            self._pull.wait(counted=counted)
            self._pull = None

    def unused(self, subject: Subject) -> set[int]:
        """Parameters that no worker has had a gradient of, by number. Collective; waits for the push that has begun."""
        assert self.push is not None
        self.push.wait()
        there = self.present(subject) if self.push.lacking else []
        return {number for number, is_there in enumerate(there) if not is_there}

    def serve(self, subject: Subject, resting: Set[int]) -> None:
        """W ← async W + U(G), with the optimizer's options as they are now, after the push that has begun.

        Args:
            subject: of what is done.
            resting: parameters that do not step, by number.
        """
        self._pushed, self.push, clipping = self.push, None, self.clipping
        self._since += 1
        if self.optimizer.state:  # it has been loaded
            self.rest()
            self._take_state()
        groups = self.optimizer.param_groups
        options = [{key: _copied(value) for key, value in group.items() if key != "params"} for group in groups]
        square = torch.zeros(1, dtype=torch.float64, device=self.comm.device)

        def measure() -> None:
            square.copy_(norm(self.G).square())

        if clipping.max_norm is not None:
            self.comm.do(measure, subject)
            self.comm.mean_([square], 1.0, subject)

        def step() -> None:
            for part, gradient in zip(self.parts, self._gradients, strict=True):
                part.p.grad = None if part.number in resting else gradient
            served = zip(options, self._groups, strict=False)  # a group that has just come has nothing here
            self._twin.param_groups = [{**group, "params": params} for group, params in served]
            self.comm.lane.keep([square, *(v for group in options for v in group.values() if isinstance(v, Tensor))])
            if clipping.max_norm is not None:
                own = [part.p for part in self.parts]
                torch.nn.utils.clip_grads_with_norm_(own, clipping.max_norm, square.sqrt().squeeze().float())
            if clipping.max_value is not None and self.parts:
                torch.nn.utils.clip_grad_value_([part.p for part in self.parts], clipping.max_value)
            self._twin.step()

        self._served = self.comm.do(step, subject)

    def whole_state(self, subject: Subject) -> defaultdict[Tensor, Any]:
        """That after the last step."""
        self.rest()
        return super().whole_state(subject)

    def replace_state(self) -> None:
        """After the last step."""
        self.rest()
        super().replace_state()

    def rest(self) -> None:
        """Until all steps have been made that were told."""
        if self._served is not None:
            self.comm.lane.follow(self._served.wait())

    def state_dict(self) -> dict[str, Any]:
        """This worker's shard of W, and what has been pulled and is not used yet. The optimizer's is not here."""
        self.arrived(counted=False)
        self.acknowledged()
        self.rest()
        P = [p.clone() for p in self.P] if self.pulled else None
        return {"W": [W.clone() for W in self.W], "P": P, "k": self.k, "since": self._since, "left_out": list(self.left_out)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue.

        Raises:
            ValueError: its buckets are of other sizes.
        """
        self.arrived(counted=False)
        self.rest()
        copy_alike(self.W, state["W"])
        self.pulled, self.k, self._since = state["P"] is not None, state["k"], state["since"]
        self.P = [p.to(self.comm.device, copy=True) for p in state["P"] or []]
        self.left_out = tuple(state["left_out"])


def _copied(value: Any) -> Any:
    """An option as it is now: a scheduler may change a rate that is a tensor."""
    return value.clone() if isinstance(value, Tensor) else value
