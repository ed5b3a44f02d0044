"""What algorithms have in common whose workers do not keep step: they meet only where a loop brings all of them together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.options import nonfinite
from lightning_cocod.algorithms.staleness import Staleness
from lightning_cocod.algorithms.when import When


class Asynchronous(Algorithm):
    """Workers that make different numbers of steps.

    ``before_step``, ``step`` and ``after_step`` hold no collective and wait for no peer. ``consensus``, ``finish`` and
    ``state_dict`` are collective: all workers call them at the same point of their own calendars, however many steps each
    has made until then. There they meet: whatever goes on beside training pauses on all of them, and goes on afterwards.
    Headers therefore carry the number of the meeting, not that of the step.

    A peer that is lost is named in a warning and left out from then on. The next meeting, which needs all workers, raises
    PeerLost; until then the others train on.

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
    asynchronous: ClassVar[bool] = True
    outlives: ClassVar[bool] = True
    """Whether the others train on without a peer that is lost, until they meet."""
    may_leave_out: ClassVar[bool] = False
    """Whether a worker can do without what was not finite."""

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
        if shared.get("weights") is not None:
            raise ValueError(f"{self.name} weighs all workers alike: leave weights out")
        super().__init__(model, optimizer, when=when, on_nonfinite=on_nonfinite, **shared)
        self.comm.outlives = self.outlives
        self.staleness = Staleness()
        """Of what comes from others, in this worker's own steps."""
        self._meetings = 0
        self._claimed: int | None = None
        self._resting = False

    # For the training loop

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
        if self._resting or not self._started or self.comm.world_size == 1:
            yield
            return
        self._meetings += 1
        with self._rest(lambda: self._all_paused()):
            self._resting = True
            try:
                yield
            finally:
                self._resting = False

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
            return {**super().state_dict(), "meetings": self._meetings, "claimed": self._claimed, **self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from such a cut."""
        super().load_state_dict(state)
        self._meetings, self._claimed, self.comm.steps = state["meetings"], state["claimed"], self.t

    def set_weights(self, weights: Sequence[float]) -> None:
        """All workers weigh alike.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.name} weighs all workers alike: set no weights")

    def metrics(self, since: Any = None) -> dict[str, float]:
        """Adds the staleness of what has been merged."""
        return {**super().metrics(since), **self.staleness.metrics("algo/staleness")}

    @property
    def header_step(self) -> int:
        """The number of meetings so far."""
        return self._meetings

    # For the algorithms

    @abstractmethod
    def _rest(self, all_paused: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside, nothing goes on beside training on any worker. ``all_paused`` returns once all workers have called it."""

    @abstractmethod
    def _leave(self) -> None:
        """The workers part: from here on others may be gone rightly."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What is part of the state; at rest."""

    def _all_paused(self) -> None:
        """Returns once all workers have called it."""
        self.comm.who(False, self.subject("meeting", counted=False))

    def _why_explicit(self) -> str | None:
        return "others read the parameters, and must not see half a step"
