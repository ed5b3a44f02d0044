"""The seam between an algorithm and whatever trains: the verbs that a training loop calls, and what all algorithms share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_cocod.algorithms.gradients import average_gradients
from lightning_cocod.algorithms.heap import keep_freed_memory
from lightning_cocod.algorithms.loop import StepHooks
from lightning_cocod.algorithms.mean_model import become_mean, on_device
from lightning_cocod.algorithms.naming import with_inter_node
from lightning_cocod.algorithms.node import Sizes, node_average
from lightning_cocod.algorithms.options import nonfinite
from lightning_cocod.algorithms.repair import forget, restore, tell
from lightning_cocod.algorithms.replica import Replica
from lightning_cocod.algorithms.weighing import Weighing
from lightning_cocod.algorithms.when import Rounds, When
from lightning_cocod.comm import Communicator, Group, Message, Subject, promised_group_is_there
from lightning_cocod.comm.buckets import form_of
from lightning_cocod.comm.compressed import Compression
from lightning_cocod.comm.ledger import Reading
from lightning_cocod.comm.norms import finite
from lightning_cocod.comm.parts import How
from lightning_cocod.comm.powersgd import LowRank
from lightning_cocod.compression import Codec, PowerSGD, as_compression

T = TypeVar("T")


class Algorithm:
    """What moves the parameters of one worker, and what it tells the others.

    A training loop calls the verbs in this order, always from the same thread::

        start()
        every step:   forward, backward      under no_sync() while gradients accumulate
                      before_step()          gradients complete and unscaled, not yet clipped
                      step(update)           the parameters move
                      after_step()           attempted steps count, skipped by a scaler or not; before the next forward
        finish()

    A plain PyTorch loop uses it as a context manager and need not know the verbs::

        with CoCoD(model, optimizer, period=4) as cocod:
            for x, y in batches:
                loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            with cocod.consensus():
                evaluate(model)

    On the CPU glibc is told, for the whole process, to keep memory that has been freed (``heap.py``).

    Args:
        model: its buffers are averaged with the parameters for evaluation.
        optimizer: one or several. The parameters that they move are those that are averaged.
        when: the lengths of rounds.
        weights: of the workers in every mean, in the order of ranks, for example their batch sizes; equal by default.
        on_nonfinite: what to do about a rank whose message holds NaN or infinity. "raise": NonFiniteMessage on all ranks.
            "skip": the mean is that of the others, it becomes that rank's replica too, and its optimizer's state is reset,
            or where that is the server's its gradient counts as none; NonFiniteMessage only if no rank is finite.
        compression: codec of the rounds' messages, ``PowerSGD``, or the name of either (docs/compression.md).
        intra_node: h, if the workers of a machine are to average every h steps among themselves (see ``NodeAverage``). The
            rounds are then those between the machines.
        inter_node: with ``intra_node``, another name of ``period``.
        ranks_per_node: with ``intra_node``: of every machine, or a list; by default what ``torchrun`` says.
        communicator: one made for this object, which closes it; by default one with the three options that follow.
        timeout: 60 by default; seconds without a heartbeat after which a peer counts as lost, and its process is ended if it
            is one of this host. Heartbeats need the interpreter lock: choose more than the longest call that holds it.
        process_group_timeout: 1800 by default; seconds after which a collective fails although all peers live.
        connect_timeout: 300 by default; seconds that ``start`` waits for a peer to appear.

    Raises:
        ValueError: an option out of range, or one of the communicator's beside a communicator.
        TypeError: an optimizer that evaluates its closure several times (LBFGS).
    """

    name: ClassVar[str]
    """Registered name; announced in the header of every message."""
    deterministic: bool = True
    """Whether two equal runs are equal bit for bit."""
    may_skip_steps: ClassVar[bool] = True
    """Whether a rank may skip a step on its own, as a gradient scaler does. (See ``steps_together``.)"""
    has_rounds: ClassVar[bool] = True
    """Whether all workers average at the ends of rounds, within which those of a node can do so on their own."""
    brings_closer: ClassVar[str] = (
        "Shorter rounds (period=) help with both, a lower rate with the latter; where the data has to differ, "
        "strategy='overlap_local_sgd' pulls the replicas together"
    )
    """What a user can do about replicas that are far apart."""
    in_step: ClassVar[bool] = False
    """Whether all workers have the same parameters where a model is evaluated, so that no mean of them is taken."""
    in_shards: ClassVar[bool] = False
    """Whether a worker has a part of the gradients only, between ``before_step`` and ``step``, and of optimizers' states."""
    weighs_workers: ClassVar[bool] = True
    """Whether workers may weigh differently in a mean, as they do whose batches have different sizes."""
    frees_gradients: ClassVar[bool] = False
    """Whether a gradient is taken away in backward, as soon as it is complete."""
    sends_own_gradients: ClassVar[bool] = False
    """Whether each worker clips its own gradients, before they are sent. Otherwise they are clipped once they are a mean."""
    asynchronous: ClassVar[bool] = False
    """Whether workers make different numbers of steps, and meet only where a loop brings all of them together."""
    one_backward_a_step: bool = True
    """Whether a backward that is not under ``no_sync()`` completes the gradients of a step; said by the loop."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = with_inter_node(cls.__init__)  # type: ignore[method-assign]  # the same with two names

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        when: When,
        weights: Sequence[float] | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        compression: str | Codec | PowerSGD | None = None,
        intra_node: int | None = None,
        inter_node: int | Mapping[int, int] | When | None = None,
        ranks_per_node: Sizes | None = None,
        communicator: Communicator | None = None,
        timeout: float | None = None,
        process_group_timeout: float | None = None,
        connect_timeout: float | None = None,
    ) -> None:
        if weights is not None and not self.weighs_workers:
            raise ValueError(f"{self.name} weighs all workers alike: leave weights out")
        self.model = model
        self.replica = Replica(model)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for opt in self.optimizers:
            if isinstance(opt, torch.optim.LBFGS):
                raise TypeError("LBFGS evaluates its closure several times a step; use SGD, Adam or another optimizer")
        self.skip_nonfinite = nonfinite(on_nonfinite)
        self.compression = _how(compression)
        self.when = when
        self.rounds = Rounds(when)
        self.t = 0
        """Optimizer steps attempted so far."""
        self._trainable: set[nn.Parameter] = set()
        self.x = self._parameters()
        """The parameters, in the order in which they travel."""
        times = {"timeout": timeout, "process_group_timeout": process_group_timeout, "connect_timeout": connect_timeout}
        self.comm = _communicator(_device_of(self.x), times) if communicator is None else communicator
        for name, value in times.items():
            if communicator is not None and value is not None:
                raise ValueError(f"{name} is the communicator's: give it to that, or leave communicator out")
        if not self.has_rounds and intra_node is not None:
            raise ValueError(f"{self.name} has no rounds at whose ends all workers average: leave intra_node out")
        if inter_node is not None:
            raise ValueError(f"{self.name} has no period that inter_node could be another name of: leave it out")
        self.node = node_average(self, intra_node, ranks_per_node)
        """What averages inside the nodes, if anything does."""
        self.weighing = Weighing(weights, self.comm.world_size)
        self.left_out: tuple[int, ...] = ()
        """Ranks whose replica the pending correction replaces; known once it has been drained."""
        self.apart = False
        """Whether the workers may differ: they have made steps since they were given the same weights."""
        self._hooks: StepHooks | None = None
        self._started = False
        self._merged: Message | None = None  # the last one, for the metrics
        self._measured: tuple[int, float] | None = None
        self._begun = Reading()

    # The verbs

    def start(self, *, broadcast: bool = True) -> None:
        """Before the first step: connect, and give every worker the weights and buffers of rank 0.

        Args:
            broadcast: False where the loop has already seen to it that all workers have the weights they should have.
        """
        if self.comm.device.type == "cpu":
            keep_freed_memory()
        self.comm.start()
        if self.node is not None:
            self.node.start()
        self._started, self.apart = True, False
        if self.compression is not None:
            self.compression.forget()
        self._begun = self.reading()
        if broadcast and self.comm.world_size > 1:
            state = [p.detach() for p in self.model.parameters()] + list(self.model.buffers())
            with on_device(state, self.comm.device) as here:
                self.comm.broadcast_(here, self.subject("initial weights", counted=False)).wait()

    def after_backward(self) -> None:
        """A pass is over. Nothing to do without gradient hooks; a loop whose steps may not follow at once says so."""

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Gradients are complete. In a synchronous step they become the mean over the workers, or over those of a node.

        Args:
            optimizer: whose gradients; all by default. A loop with several optimizers calls it once for each that steps.
        """
        moved = self.optimizers if optimizer is None else [optimizer]
        if self.node is not None and not self.when.synchronous(self.t):
            self.node.before_step(moved)
        elif self.comm.world_size > 1 and self.when.synchronous(self.t):
            w = self.weighing.of_next  # each of these steps is a round of its own
            subject = self.subject("gradients", weights=w)
            self.repair_buffers(average_gradients(moved, self.comm, w[self.comm.rank], subject))

    def step(self, update: Callable[[], T] | None = None, *, scaler: torch.amp.GradScaler | None = None) -> T | None:
        """Move the parameters.

        Args:
            update: the user's optimizer step, called once. Without it, this is the whole step of a plain loop:
                ``before_step``, every optimizer's step, ``after_step``. To clip in between, call the three yourself:
                ``before_step()``, clip, ``step(optimizer.step)``, ``after_step()``.
            scaler: of a plain loop in float16. It unscales, steps and updates in here, and a step that it skips counts.

        Returns:
            What ``update`` returns.

        Raises:
            ValueError: a scaler where no rank may skip a step on its own (see ``steps_together``).
        """
        if update is not None:
            with self._hooks.paused() if self._hooks else nullcontext():
                return update()
        if scaler is not None and scaler.is_enabled() and (together := self.steps_together(self.t)) is not None:
            what, otherwise = together
            raise ValueError(
                f"{what} and a gradient scaler do not go together: each rank's scaler decides on its own "
                f"whether to skip a step; use bfloat16{otherwise}"
            )
        for opt in self.optimizers:
            if scaler is not None:
                scaler.unscale_(opt)
            self.before_step(opt)
            self.step(opt.step if scaler is None else partial(scaler.step, opt))
        if scaler is not None:
            scaler.update()
        self.after_step()
        return None

    def after_step(self) -> None:
        """A step has been attempted.

        Raises:
            RuntimeError: inside ``consensus()``, on leaving which the step would be undone.
        """
        if self.replica.is_aside:
            raise RuntimeError("no optimizer step inside consensus(): leaving it would undo the step")
        self.t, self.apart = self.t + 1, True
        self.weighing.end_step()
        if self.node is not None:
            self.node.after_step()

    def steps_together(self, t: int) -> tuple[str, str] | None:
        """What makes several ranks take step t or none of them, and another option than bfloat16; None if nothing does."""
        if not self.may_skip_steps:
            return self.name, ""
        if self.when.synchronous(t):
            return "synchronous steps (warmup_steps)", " or none of them"
        if self.node is not None and self.node.every == 1:
            return "intra_node=1", " or intra_node=2"
        return None

    def finish(self) -> None:
        """Drain. Every replica, buffers included, ends on the consensus model; training goes on only after ``start``."""
        if not self._started:
            return
        self._reset(self._become_consensus("finish"), "consensus", self.comm)
        self._started = False

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Around the replacement of all weights in mid-training, by their average for instance. Collective.

        What is in flight is drained before; a new round begins with the new weights, which must be the same everywhere.
        """
        running = self._started
        self.finish()
        yield
        if running:
            self.start(broadcast=False)

    def release(self) -> None:
        """Model and optimizers are let go of, whatever has happened. Idempotent; after ``finish`` there is nothing to do."""

    def close(self) -> None:
        """Wait for the peers that live, then end thread and groups. Idempotent; raises PeerLost (see ``Communicator``)."""
        self.release()
        self.comm.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Marks the passes that only accumulate gradients. Algorithms without gradient hooks have nothing to do."""
        yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, parameters and buffers of the model are those of the consensus model, the same on every rank.

        Collective. Outside, training continues exactly where it was: nothing is folded, nothing is reset. Costs one more
        copy of the parameters while it lasts, in host memory, and one of what is kept beside the model.
        """
        alone = self.comm.world_size == 1 and self._pending_correction() is None
        if alone or not self._started or self.replica.is_aside:
            yield
            return
        with self.replica.set_aside(self._moved()):
            if left_out := self._become_consensus("consensus"):
                tell(self.comm, left_out, self.t, "left out of the consensus")
            yield

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Scale an optimizer's gradients down to this norm, if theirs is larger; between ``before_step`` and ``step``.

        Returns:
            Their norm before.
        """
        return nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_norm)

    def clip_grad_value_(self, optimizer: Optimizer, max_value: float) -> None:
        """Cut an optimizer's gradients off at this size; between ``before_step`` and ``step``."""
        nn.utils.clip_grad_value_([p for g in optimizer.param_groups for p in g["params"]], max_value)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Of one of the optimizers, in the form of its ``state_dict()``. Collective where workers have a part of it each."""
        return optimizer.state_dict()

    @property
    def started(self) -> bool:
        """Whether training is between ``start`` and ``finish``."""
        return self._started

    def state_dict(self) -> dict[str, Any]:
        """What this worker needs to continue, beside model and optimizer. Waits for a message in flight, folds nothing."""
        numbers = {p: number for number, p in enumerate(self._members())}
        return {
            "members": [form_of(p) for p in numbers],
            "t": self.t,
            "round": (self.rounds.ends, self.rounds.length),
            **self.weighing.state_dict(),
            "x": [numbers[p] for p in self.x],
            "trainable": sorted(numbers[p] for p in self._trainable),
            "compression": {} if self.compression is None else self.compression.state_dict(numbers),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. Call after ``start`` and before the next step, on every rank.

        Where this object has been made with other weights than that one, they are set as by ``set_weights``.

        Raises:
            ValueError: the state of another number of workers, or of other parameters.
        """
        now, then = [form_of(p) for p in self._members()], state["members"]
        instead = "continue with the same model and the same parameter groups"
        if len(now) != len(then):
            raise ValueError(f"the state is of {len(then)} parameters, and the optimizers have {len(now)}: {instead}")
        for number, ((shape, strides), (its_shape, its_strides)) in enumerate(zip(now, then, strict=True)):
            if (shape, strides) != (its_shape, its_strides):
                raise ValueError(
                    f"parameter {number} of the optimizers has shape {shape}, strides {strides}, and in the state shape "
                    f"{its_shape}, strides {its_strides}: {instead}"
                )
        self.weighing.load_state_dict(state)
        self.t, (self.rounds.ends, self.rounds.length) = state["t"], state["round"]
        self.apart = True
        members = self._members()
        self.x = [members[number] for number in state["x"]]
        self._trainable = {members[number] for number in state["trainable"]}
        if self.compression is not None:
            self.compression.load_state_dict(state["compression"], members)

    def reading(self) -> Reading:
        """The counters now; hand it to ``metrics`` later to look at the time in between."""
        return Reading(time.perf_counter(), self.t, self.comm.total_samples(), self.comm.ledger.totals())

    def metrics(self, since: Reading | None = None) -> dict[str, float]:
        """The metric vocabulary (docs/metrics.md): times per step and rates since a reading, bytes since the start.

        What is not known is left out. Never blocks, on a peer or on a device.

        Args:
            since: an earlier ``reading()``; by default that of ``start``.
        """
        measured = self.measured()
        period = 1 if self.when.synchronous(self.t) else self.rounds.length or self.when.period(self.t)
        return {
            **self.reading().since(since or self._begun),
            "algo/period": float(period),
            "algo/staleness_steps": 0.0,
            **({} if measured is None else {"algo/replica_distance": measured[1]}),
        }

    def measured(self) -> tuple[int, float] | None:
        """The step at which the last message that was measured has been launched, and ``algo/replica_distance`` in it.

        Never blocks, and costs next to nothing. None where there has been no such message.
        """
        if self._merged is not None and (numbers := self._merged.numbers()) is not None:
            size, distance = numbers
            self._measured = self._merged.step, distance / size if size > 0 else 0.0
        return self._measured

    def set_weights(self, weights: Sequence[float]) -> None:
        """New weights of the workers, the same on every rank. They are those of the rounds that begin with the next merge.

        Call it when the batch sizes of those rounds are known. The report of the round under way is still weighted by the
        weights that the round began with.

        Raises:
            ValueError: not one positive number for each worker, or an algorithm that weighs all alike.
        """
        self._must_weigh()
        self.weighing.set(weights)

    def weigh_batch(self, sizes: Sequence[int]) -> None:
        """A batch begins: how many of its samples are each worker's, the same numbers on every rank.

        From now on the report of a round is weighted with what each worker has computed in it, and the gradients of a
        synchronous step with what each has in that step.

        Raises:
            ValueError: not one positive number for each worker, or an algorithm that weighs all alike.
        """
        self._must_weigh()
        self.weighing.count(sizes)

    # For the algorithms

    def begin_round(self) -> None:
        """A round has ended and another begins: what is sent now reports the one that ended, with its weights."""
        self.x = self._parameters()
        self.weighing.begin_round()

    def repair(self, left_out: tuple[int, ...], group: Group | None = None) -> None:
        """x is the mean without these ranks, theirs as well. What else they hold may not be finite: see to it.

        Where all ranks were finite nothing is done or sent. A mean inside a node is that of a ``group``.
        """
        group = group or self.comm
        if left_out:
            members = set(self.x)
            others = [p.detach() for p in self._moved() if p not in members]
            with on_device([*others, *self.replica.buffers()], self.comm.device) as rest:
                restore(rest, group, left_out, self.subject("repair"))
            self._reset(left_out, "round" if group is self.comm else "mean in their node", group)

    def repair_buffers(self, left_out: tuple[int, ...], group: Group | None = None) -> None:
        """Gradients are the mean without those of these ranks: the model is sound, what their forwards wrote may not be."""
        group = group or self.comm
        if left_out:
            with on_device(list(self.model.buffers()), self.comm.device) as buffers:
                restore(buffers, group, left_out, self.subject("repair"))
            tell(group, left_out, self.t, "gradients left out of the mean")

    @property
    def weights(self) -> list[float]:
        """w of all workers in the message in flight, and so in the next merge."""
        return self.weighing.in_flight

    @property
    def w(self) -> float:
        """w_i: this worker's weight."""
        return self.weights[self.comm.rank]

    @property
    def own_weight(self) -> float:
        """Of all workers that report what this one does: its own, or that of its node."""
        return self.w if self.node is None else math.fsum(self.weights[rank] for rank in self.node.ranks)

    @property
    def header_step(self) -> int:
        """What headers say of when a message was sent: the same on all workers that are in step."""
        return self.t

    def subject(self, kind: str, *, counted: bool = True, weights: Sequence[float] | None = None) -> Subject:
        """The header of a message of this algorithm at this step; weighted as the message in flight unless told."""
        return Subject(self.name, kind, self.header_step, counted, tuple(weights or self.weights), self.skip_nonfinite)

    def _pending_correction(self) -> Callable[[], None] | None:
        """What adds c_i, the correction that has been drained but not yet folded, to x; None if there is none."""
        return None

    # Inside

    def _must_weigh(self) -> None:
        if not self.weighs_workers:
            raise ValueError(f"{self.name} weighs all workers alike: set no weights")

    def _parameters(self) -> list[nn.Parameter]:
        """Every parameter that an optimizer has ever been free to move.

        Freezing for a while (a GAN's toggling) takes nothing away, and gradients are never looked at: ranks may differ.
        """
        members = self._members()
        self._trainable.update(p for p in members if p.requires_grad)
        return [p for p in members if p in self._trainable]

    def _members(self) -> list[nn.Parameter]:
        """The parameters in the optimizers."""
        return list(dict.fromkeys(p for opt in self.optimizers for g in opt.param_groups for p in g["params"]))

    def _moved(self) -> list[nn.Parameter]:
        """All parameters that are moved: the user may move some without an optimizer."""
        return list(dict.fromkeys([*self._parameters(), *self.replica.parameters()]))

    def _differing(self) -> list[nn.Parameter]:
        """Those of them that may differ between workers."""
        same = set(self._parameters()) if self.in_step else set()
        return [p for p in self._moved() if p not in same]

    def _reset(self, left_out: tuple[int, ...], what: str, group: Group) -> None:
        if group.rank in left_out:
            forget(self.optimizers)
        if left_out:
            tell(group, left_out, self.t, f"left out of the {what}, repaired from the others, optimizer state reset")

    @torch.no_grad()
    def _become_consensus(self, kind: str) -> tuple[int, ...]:
        """Returns the ranks that the consensus is one without; they have it now, like all."""
        fold, fit = self._pending_correction(), None
        if fold is not None:
            if not finite([p.detach() for p in self.x]):  # the fold may hide it, and buffers tell nothing
                fit = False
            fold()
        if self.comm.world_size == 1:
            return ()
        if self.comm.rank in self.left_out:
            fit = False
        parameters, subject = [p.detach() for p in self._differing()], self.subject(kind, counted=False)
        return become_mean(parameters, self.replica.buffers(), self.comm, self.w, subject, fit=fit)

    # A plain loop

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise RuntimeError(f"{type(self).__name__} is already in use: leave its block before entering it again")
        try:
            self.start()
        except BaseException as error:
            self.comm.abort(error)
            self.close()
            raise
        self._hooks = StepHooks(self.optimizers, lambda: self.after_step(), self._why_explicit)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        try:
            if error is None:
                self.finish()
            else:
                self.comm.abort(error)
        except BaseException as failure:
            self.comm.abort(failure)
            raise
        finally:
            self.close()

    def _why_explicit(self) -> str | None:
        """Why ``optimizer.step()`` alone is not enough in a plain loop, if it is not."""
        if len(self.optimizers) > 1:
            return "there are several optimizers"
        if self.when.synchronous(self.t):
            return "synchronous warm-up steps need the gradients before you clip them"
        if self.node is not None and self.node.every == 1:
            return "intra_node=1 averages the gradients in a node before you clip them"
        return None


def _how(compression: str | Codec | PowerSGD | None) -> How | None:
    chosen = as_compression(compression)
    if chosen is None:
        return None
    return LowRank(chosen) if isinstance(chosen, PowerSGD) else Compression(chosen)


def _communicator(device: torch.device, times: Mapping[str, Any]) -> Communicator:
    promised_group_is_there()
    return Communicator(device, **{name: value for name, value in times.items() if value is not None})


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise ValueError(f"the parameters of one worker must be on one device, not on {sorted(map(str, devices))}")
    return devices.pop() if devices else torch.device("cpu")
