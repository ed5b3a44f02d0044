"""What algorithms have in common whose workers do not keep step: they meet only where a loop brings all of them together."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.mean_model import on_device
from lightning_cocod.algorithms.options import nonfinite
from lightning_cocod.algorithms.staleness import Staleness
from lightning_cocod.algorithms.weighing import Weighing
from lightning_cocod.algorithms.when import When
from lightning_cocod.comm import PeerLost


class _Place(NamedTuple):
    """Where a worker is in the run: meetings, the step that was last claimed or −1, and what lost ones have done."""

    meetings: int
    claimed: int
    samples: int
    steps: int


class Asynchronous(Algorithm):
    """Workers that make different numbers of steps.

    ``before_step``, ``step`` and ``after_step`` hold no collective and wait for no peer. ``consensus``, ``finish`` and
    ``state_dict`` are collective: all workers call them at the same point of their own calendars, however many steps each
    has made until then. There they meet: whatever goes on beside training pauses on all of them, and goes on afterwards.
    Headers therefore carry the number of the meeting, not that of the step.

    A peer that is lost is named in a warning and left out from then on, and the others train on. At their next meeting they
    regroup: from then on the ranks, those of torch's default group included, are those of the workers that are left, and of
    one that is left alone. What needs all of them fails if one is lost while it is under way. A worker that has come back
    (``comm.joining.join``) is let in at the end of a meeting, with the weights of one that has been there; ``start`` waits
    for that, and ``meetings`` then says where the others are. Whoever hosts the process group's store cannot be spared.

    Args:
        model: the module that is trained.
        optimizer: one or several. Everything in them stays local.
        when: how often a worker communicates.
        on_nonfinite: "raise": a worker whose weights are not finite raises NonFiniteMessage; nobody takes anything from it.
        **shared: ``communicator``, ``timeout``, … (see ``Algorithm``).

    Raises:
        ValueError: ``on_nonfinite="skip"``: to repair a worker takes a mean of all the others; ``weights``.
    """

    deterministic = False
    has_rounds: ClassVar[bool] = False
    weighs_workers: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = True
    outlives: ClassVar[bool] = True
    """Whether the others train on without a peer that is lost, and regroup where they next meet."""
    may_leave_out: ClassVar[bool] = False
    """Whether a worker can do without what was not finite."""
    lets_in: bool = True
    """Whether those that have come back are let in at the end of a meeting; said by the loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        when: When,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        **shared: Any,
    ) -> None:
        if nonfinite(on_nonfinite) and not self.may_leave_out:
            raise ValueError(f'{self.name} takes no mean of all workers that could repair one: use on_nonfinite="raise"')
        super().__init__(model, optimizer, when=when, on_nonfinite=on_nonfinite, **shared)
        self.comm.outlives = self.outlives
        self.staleness = Staleness()
        """Of what comes from others, in this worker's own steps."""
        self.meetings = 0
        """How often the workers have met."""
        self._claimed: int | None = None
        self._awaited = False  # somebody waits to be let in
        self._met = 0  # meetings of these workers
        self._resting = False

    # For the training loop

    def start(self, *, broadcast: bool = True) -> None:
        """As ``Algorithm.start``. A worker that has come back waits until it is let in, and takes another one's weights."""
        comes_back = self.comm.members is not None and self.comm.members.is_waiting
        self.comm.fingerprint = self._fingerprint()
        super().start(broadcast=broadcast and not comes_back)
        if comes_back:
            self._welcome()
        else:
            self._begin()

    @property
    def global_steps(self) -> int:
        """Steps of the whole job, as far as this worker knows: what was last ``claimed``, or what heartbeats tell."""
        return self.comm.total_steps() if self._claimed is None else self._claimed

    def claimed(self, number: int) -> None:
        """The job's step of this number is the one that this worker is at, by a counter that all workers share."""
        self._claimed = number

    def after_step(self) -> None:
        """A step of this worker has been attempted."""
        super().after_step()
        self.comm.steps = self.t

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around what all workers do together: nothing goes on beside training, and nobody waits for a worker that has come.

        Collective. Inside another one it is part of that.
        """
        if self._resting or not self._started or (self.comm.world_size == 1 and self.comm.members is None):
            yield
            return
        self.meetings, self._met = self.meetings + 1, self._met + 1
        with self._all_at_rest():
            self._resting, before = True, self.comm.needs_all(True)
            try:
                yield
            finally:
                self._resting = False
                self.comm.needs_all(before)
        if self._awaited and self._started:
            self._regroup(lets_in=True)

    @contextmanager
    def _all_at_rest(self) -> Iterator[None]:
        """All that are left when one is lost."""
        with ExitStack() as rest:
            while True:
                try:
                    rest.enter_context(self._rest(self._all_paused))
                    if self._settled("begins") == "begins":
                        break
                except PeerLost:
                    if self.comm.failed or self._settled("regroups") == "begins":
                        raise
                rest.close()
                self._regroup(lets_in=False)  # whoever comes back has no part in this meeting
            yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is the mean of all workers' masters, and everything rests. Collective."""
        if not self._started or self.replica.is_aside:
            with super().consensus():
                yield
            return
        with self.meeting(), super().consensus():
            yield

    def finish(self) -> None:
        """Every replica ends on the mean of the masters. Collective."""
        if not self._started:
            return
        with self.meeting():
            self._leave()
            super().finish()
        self.release()

    def state_dict(self) -> dict[str, Any]:
        """Adds what goes on beside training, at rest on all workers: a consistent cut. Collective after ``start``."""
        with self.meeting():
            return {**super().state_dict(), "meetings": self.meetings, "claimed": self._claimed, **self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from such a cut.

        Raises:
            ValueError: the state of another number of workers, or of other parameters than those that are exchanged now.
        """
        numbers = {p: number for number, p in enumerate(self._members())}
        if self._started and (exchanged := [numbers[p] for p in self.x]) != state["x"]:
            raise ValueError(
                f"the state is of parameters {state['x']} of the optimizers, and parameters {exchanged} are exchanged now: "
                "freeze and thaw as when it was saved, and start then"
            )
        super().load_state_dict(state)
        self.meetings, self._claimed, self.comm.steps = state["meetings"], state["claimed"], self.t

    def metrics(self, since: Any = None) -> dict[str, float]:
        """Adds the staleness of what has been merged."""
        return {**super().metrics(since), **self.staleness.metrics("algo/staleness")}

    @property
    def header_step(self) -> int:
        """The number of meetings so far."""
        return self.meetings

    # For the algorithms

    @abstractmethod
    def _rest(self, all_paused: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside, nothing goes on beside training on any worker. ``all_paused`` returns once all workers have called it."""

    @abstractmethod
    def _leave(self) -> None:
        """The workers part: from here on others may be gone rightly."""

    def _begin(self) -> None:
        """What goes on beside training begins, once this worker has its weights."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What is part of the state; at rest."""

    def _settled(self, what: str) -> str:
        """What all do with this meeting: a loss is noticed at another moment on each."""
        members = self.comm.members
        return what if members is None else members.settle(f"meeting {self._met}", what)

    def _fingerprint(self) -> str:
        """Of what must be the same on all workers."""
        state = [*self.model.parameters(), *self.model.buffers()]
        return f"{self.name} {zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in state]).encode()):x}"

    def _all_paused(self) -> None:
        """Returns once all workers have called it. All know then whether somebody waits to be let in."""
        members = self.comm.members
        awaits = self.lets_in and members is not None and members.somebody_waits()
        self._awaited = bool(self.comm.who(awaits, self.subject("meeting", counted=False)))

    def _regroup(self, *, lets_in: bool) -> None:
        """Go on with those that are left, and those that have come back."""
        while True:
            self.comm.regroup(lets_in=lets_in)
            with suppress(PeerLost):  # one of them has gone again
                return self._welcome()

    def _welcome(self) -> None:
        """The workers are others than before. Newcomers take the weights of one that is not, and its place in the run."""
        place = _Place(self.meetings, -1 if self._claimed is None else self._claimed, *self.comm.departed)
        self.weighing, self._met = Weighing(None, self.comm.world_size), 0
        self.meetings = 0  # headers have it, and a newcomer is yet to hear it
        try:
            self._part()
            place = self._taken_over(place)
        finally:
            self.meetings = place.meetings
        self._claimed, self.comm.departed = None if place.claimed < 0 else place.claimed, (place.samples, place.steps)
        self._begin()

    def _part(self) -> None:
        """What goes on beside training ends, on all."""
        with self._rest(self._all_paused):
            self._leave()
            self._all_paused()  # before nobody looks for the others any more, none of them closes
        self.release()

    def _taken_over(self, place: _Place) -> _Place:
        members = self.comm.members
        if members is None or not members.newcomers:
            return place
        source = min(set(range(self.comm.world_size)) - set(members.newcomers))
        is_new = self.comm.rank in members.newcomers
        numbers = torch.tensor(place, device=self.comm.device)
        state = [p.detach() for p in self.model.parameters()] + list(self.model.buffers())
        with on_device(state, self.comm.device) as here:
            for told in ([numbers], here):
                self.comm.broadcast_(told, self.subject("welcome", counted=False), source=source, wanted=is_new).wait()
        return _Place(*numbers.tolist())

    def _why_explicit(self) -> str | None:
        return "others read the parameters, and must not see half a step"
