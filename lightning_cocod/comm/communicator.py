"""All workers of a run, seen from one of them: how they meet, agree, and part."""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_cocod.comm.agreement import Agreement
from lightning_cocod.comm.default_group import forget_default_group
from lightning_cocod.comm.errors import CommunicationError, PeerLost, in_one_line, transport
from lightning_cocod.comm.group import Group
from lightning_cocod.comm.header import WISH, Header, Pace
from lightning_cocod.comm.heartbeat import Heartbeat, Note
from lightning_cocod.comm.ledger import Ledger
from lightning_cocod.comm.losses import Losses
from lightning_cocod.comm.members import Members
from lightning_cocod.comm.message import Subject
from lightning_cocod.comm.tracer import Tracer
from lightning_cocod.comm.wishes import Wishes

_log = logging.getLogger(__name__)
_MAKING = 30.0  # seconds in which members that have all just been there make their groups
_ATTEMPTS = 10


def seconds(name: str, value: object) -> float:
    """A time.

    Raises:
        ValueError: not a positive, finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive, finite number of seconds, got {value!r}")
    return float(value)


class Communicator(Group):
    """The workers of one training run, seen from one of them.

    Messages are submitted by the training thread and carried out by the communication thread in that order. Each is
    announced by a header that all workers compare before anything is reduced. All methods are for the training thread.

    Args:
        device: of the tensors that travel.
        timeout: seconds without a heartbeat after which a peer counts as lost, and its process is ended if it is one of
            this host. Heartbeats need the interpreter lock: choose more than the longest call that holds it.
        process_group_timeout: seconds after which a collective fails although all peers live.
        connect_timeout: seconds that ``start`` waits for a peer to appear.
        grace: seconds after a loss, if it is not outlived, in which the training thread must come back to a verb; else the
            process is ended.
        in_step: whether all workers make the same steps, so that they can agree on one.
        members: of a run that this rank waits to be let in to; see ``comm.joining.join``.

    Raises:
        ValueError: a time that is not positive and finite.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        timeout: float = 60.0,
        process_group_timeout: float = 1800.0,
        connect_timeout: float = 300.0,
        grace: float = 5.0,
        in_step: bool = True,
        members: Members | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.timeout = seconds("timeout", timeout)
        self.process_group_timeout = seconds("process_group_timeout", process_group_timeout)
        self.connect_timeout = seconds("connect_timeout", connect_timeout)
        self.ledger = Ledger()
        self.samples = 0
        """Samples that this rank has trained on; the caller counts."""
        self.steps = 0
        """Optimizer steps that this rank has attempted, where ranks make different numbers of them; the caller counts."""
        self.outlives = False
        """Whether the others go on without a peer that is lost, as those that ``regroup``; said before ``start``."""
        self.members = members
        """Who they are, if so, and if there is more than one."""
        self.fingerprint = ""
        """Of what must be the same on all of them, for those that come back."""
        self.on_regroup: list[Callable[[], None]] = []
        """Called when the ranks are others than before."""
        self.pace = Pace()
        """What this rank's next message tells of it; the caller measures."""
        self.heard: list[Pace] = []
        """The paces of all ranks in the last message of training that has been waited for: the same on all of them."""
        self.tracer = Tracer()
        """Told what all threads do. A message that is on its way keeps the one under which it was launched."""
        self._be_one_of_the_group()
        self.agreement = Agreement(self.rank, self.world_size, check=self.check)
        self.wishes = Wishes()
        self._asking = self.agreement if in_step else self.wishes
        self.grace = seconds("grace", grace)
        self.losses = Losses(self.rank, grace)
        """Failures, and what follows."""
        self._needs_all = False
        self._backend = "gloo"
        self.departed = 0, 0
        """Samples and steps of those that are lost, as far as is known."""
        self._nodes: dict[tuple[tuple[int, ...], ...], Group] = {}

    def _be_one_of_the_group(self) -> None:
        """One of torch's default group."""
        self._be(*((dist.get_rank(), dist.get_world_size()) if _is_distributed() else (0, 1)))

    def _be(self, rank: int, world_size: int) -> None:
        super().__init__(self, rank, range(world_size))
        self.samples_heard = [0] * self.world_size
        """Samples that each rank has trained on, as of its last header."""
        self._notes: dict[int, Note] = {}

    @classmethod
    def alone(cls) -> Communicator:
        """Of one worker, whatever group there is: options are looked at with it."""
        made = cls()
        made._be(0, 1)
        return made

    # Lifecycle

    def start(self) -> None:
        """Make the heartbeat, the groups and the thread. Collective: every rank calls it at the same place.

        Raises:
            PeerLost: a peer has not appeared; or this rank waited to be let in to a run, and was not.
        """
        if self.members is not None and self.members.is_waiting:
            self._be_let_in(self.members)
            return
        if self.world_size == 1 or self._thread is not None:
            return
        if self.outlives and self.members is None:
            self.members = Members.founding(_get_default_store(), self.rank, self.world_size)
        try:
            self._begin_life(self.connect_timeout)
        except BaseException as error:
            self.abort(error)
            self.close()
            raise

    def _begin_life(self, connect_timeout: float, making: float | None = None) -> None:
        """Heartbeat, thread and groups of those who are in torch's default group."""
        self.losses = Losses(self.rank, self.grace)
        self.losses.outlived, self.losses.needs_all = self.outlives, self._needs_all
        if self.world_size == 1:
            return
        self._open("communication")
        atexit.register(self._at_exit)
        self.losses.heartbeat = Heartbeat(
            _get_default_store(),
            self.rank,
            self.world_size,
            timeout=self.timeout,
            connect_timeout=connect_timeout,
            compose=self._note,
            receive=partial(self._receive, self.losses, self._notes),
            lost=self.losses.lost,
        )
        self.losses.heartbeat.meet()
        self.losses.check()
        self._connect(self.process_group_timeout, [self.ranks], making)

    # Others than before

    def regroup(self, *, lets_in: bool) -> None:
        """Go on with those that live and, if wanted, with those that have come back: from now on the ranks are theirs.

        Collective among them. torch's default group is made anew, and all others are gone.

        Raises:
            PeerLost: nobody can go on, or the others have gone on without this one.
        """
        members, life, notes = self.members, self.losses, self._notes
        if members is None:
            life.check()
            raise RuntimeError("nobody can regroup before start() or after close()")
        members.fingerprint = self.fingerprint
        before, heartbeat = members.names, life.heartbeat
        life.cut()  # whoever still waits for somebody who is lost is woken, and comes as well
        self._end_threads()
        self._disband_all()

        def living() -> set[int]:
            if life.for_good is not None:
                raise life.for_good
            return {before[rank] for rank in ([0] if heartbeat is None else heartbeat.living)} & set(members.names)

        try:
            self._come_together(lambda: members.elect(living, lets_in=lets_in))
        finally:
            self._end_life(life)
        stayed = {name for rank, name in enumerate(members.names) if rank not in members.newcomers}
        lost = [note for rank, note in notes.items() if before[rank] not in stayed]
        samples, steps = self.departed
        self.departed = samples + sum(int(n["samples"]) for n in lost), steps + sum(int(n["steps"]) for n in lost)
        _log.warning(
            "[rank %d] goes on as rank %d of %d, which are ranks %s of the beginning%s",
            before.index(members.name),
            self.rank,
            self.world_size,
            ", ".join(map(str, members.names)),
            f"; rank {', '.join(map(str, members.newcomers))} is new" if members.newcomers else "",
        )
        for told in self.on_regroup:
            told()

    def _be_let_in(self, members: Members) -> None:
        if not self.outlives:
            raise ValueError("a run whose workers are in step lets nobody in: leave members out, and start all of it again")
        members.fingerprint = self.fingerprint
        self._come_together(lambda: members.wait(self.timeout))
        for told in self.on_regroup:
            told()

    def _come_together(self, choose: Callable[[], None]) -> None:
        """Choose members, and be one of their group, until all that are chosen have come so far."""
        why: BaseException | None = None
        for _ in range(_ATTEMPTS):
            choose()
            if (why := self._gather()) is None:
                return
            _log.warning("[rank %d] not all have come together, and those that live try again: %s", self.rank, why)
        raise PeerLost(f"the ranks have not come together in {_ATTEMPTS} attempts: {why}", for_good=True)

    def _gather(self) -> BaseException | None:
        """Be one of the members' group. Returns why not all of them have come so far, if so."""
        assert self.members is not None
        life, making = self.losses, min(self.connect_timeout, _MAKING)
        why: BaseException | None = None
        try:
            with transport:
                if _is_distributed():
                    self._backend = dist.get_backend()
                    forget_default_group(somebody_is_lost=life.error is not None)
                self.members.gather(self._backend, self.device, self.process_group_timeout, making)
            self._be_one_of_the_group()
            self.wishes.forget()
            self._begin_life(making, making)
        except RuntimeError as error:  # of the transport, or a PeerLost
            why = error
        if self.members.agree(why is None, lambda: self.losses is not life and self.losses.error is not None):
            return None
        self._end_threads()
        self._disband_all()
        if _is_distributed():
            forget_default_group(somebody_is_lost=True)
        failed = why or self.losses.error or PeerLost("another one could not")
        if self.losses is not life:
            self._end_life(self.losses)
            self.losses = life
        return failed

    def within(self, nodes: Sequence[Sequence[int]]) -> Group:
        """The ranks of this one's node, with a thread and a group of their own until ``close``.

        Their messages neither wait for those between all ranks nor keep them waiting. If one of both fails, both have.
        Collective: every rank calls it at the same place, after ``start``. For the same nodes the group is the same.

        Args:
            nodes: the ranks of each, the same on all ranks; every rank belongs to one.
        """
        key = tuple(tuple(node) for node in nodes)
        if key not in self._nodes:
            self._working()
            node = self._nodes[key] = Group(self, self.rank, next(node for node in key if self.rank in node))
            node._open("communication in the node")
            with self.named("the making of a node's group"):
                node._connect(self.process_group_timeout, key)
        return self._nodes[key]

    def close(self) -> None:
        """Leave together: wait for the queued messages and for the peers, then end thread, heartbeat and groups.

        Idempotent. A peer that lives is waited for, up to ``process_group_timeout``; after a failure nobody is.

        Raises:
            PeerLost: a peer was lost and this rank has not been told so before.
        """
        if self.members is not None:
            self.members.leave()
            self.members = None
        atexit.unregister(self._at_exit)
        if self._thread is None:
            return
        lost = self._farewell()
        told = self.losses.watchdog.was_noticed or self.losses.is_outlived
        self.losses.closing = True
        if lost is not None:
            self.losses.cut()
        self._end_threads()
        self._end_life(self.losses)
        self._disband_all()
        self.losses = Losses(self.rank, self.grace)
        if lost is not None and not told:
            raise lost

    def _end_threads(self) -> None:
        for channel in (*self._nodes.values(), self):
            channel._end()

    def _disband_all(self) -> None:
        for channel in (*self._nodes.values(), self):
            channel._disband()
        self._nodes = {}

    def _end_life(self, life: Losses) -> None:
        life.closing = True
        if life.heartbeat is not None:
            life.heartbeat.close(timeout=2.0)
            life.heartbeat = None
        life.watchdog.over()

    def abort(self, reason: BaseException) -> None:
        """This rank cannot go on. The peers are told why; nothing is waited for. ``close`` follows."""
        if self._thread is None:
            return
        self.losses.watchdog.noticed()
        if not self.losses.over.is_set() or self.losses.outlived:  # others outlive what has ended it for this one
            self.losses.tell(in_one_line(reason))
        self.losses.fail(CommunicationError(f"communication ended by {in_one_line(reason)}"))
        self.losses.cut()

    @property
    def failed(self) -> bool:
        """Whether communication has ended by a failure, this rank's or a peer's, that is not outlived."""
        return self.losses.error is not None and not self.losses.is_outlived

    def needs_all(self, does: bool) -> bool:
        """Whether, from now on, a loss ends the run in any case: something that goes on needs all peers.

        Returns:
            Whether that was so before.
        """
        before, self._needs_all = self._needs_all, does
        self.losses.need_all(does)
        return before

    def check(self) -> None:
        """Raise if it has. Cheap enough for every step."""
        if self.failed:
            self.losses.check()

    def _farewell(self) -> BaseException | None:
        """Wait until all ranks are here. Returns the failure that stands against it."""

        def all_here() -> None:
            with transport:
                work = dist.barrier(self._groups[0], async_op=True)
            assert work is not None  # every rank is a member of the group
            self._finish(work)
            self.losses.closing = True  # from here on a peer may be gone

        assert self._thread is not None
        try:
            self._send(self._thread, all_here, "the end of the run").wait()
        except Exception as error:  # raised by close() once everything is put away
            return error
        return None

    def _at_exit(self) -> None:
        """The interpreter must not tear a thread out of the transport: the process would abort."""
        self.abort(RuntimeError("the process ended without close()"))
        self.close()

    # What all of them know

    def who(self, wish: bool, subject: Subject) -> list[int]:
        """The ranks that wish it. Blocking; nothing but headers travels, and they show whether all are in step."""
        if self.world_size == 1:
            return [0] if wish else []
        thread, tracer = self._working(), self.tracer
        wishing: list[int] = []

        def work() -> None:
            flags = WISH if wish else 0
            header = Header(subject.algorithm, subject.kind, subject.step, layout=0, nbytes=0, flags=flags)
            with self.lane.working(), tracer.span("headers", message=str(subject)):
                headers = self._exchange(header)
            wishing.extend(rank for rank, h in enumerate(headers) if h.flags & WISH)

        handle = self._send(thread, work, str(subject))
        try:
            with tracer.span("wait", message=str(subject)):
                handle.wait()
        except BaseException:
            self.losses.watchdog.noticed()
            raise
        return wishing

    def total_samples(self) -> int:
        """Samples that all ranks together have trained on, as of the last header or heartbeat; no collective."""
        noted = [int(self._notes[r]["samples"]) if r in self._notes else 0 for r in range(self.world_size)]
        heard = [max(pair) for pair in zip(noted, self.samples_heard, strict=True)]
        heard[self.rank] = self.samples
        return sum(heard) + self.departed[0]

    def total_steps(self) -> int:
        """Optimizer steps of all ranks together, where the caller counts, as of the last heartbeat; no collective."""
        others = sum(int(note["steps"]) for rank, note in self._notes.items() if rank != self.rank)
        return self.steps + others + self.departed[1]

    def _hear(self, paces: list[Pace]) -> None:
        self.heard = paces

    # Failures of others

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Around a collective of somebody else's: a connection that breaks in it is explained as one of ours would be."""
        with self.losses.named(what):
            yield

    def loss_behind(self, error: BaseException) -> CommunicationError | None:
        """The loss of a peer behind the error of a collective that is neither ours nor ``named``, if there was one."""
        return self.losses.behind(error)

    # Heartbeat

    def _note(self) -> Note:
        return {"samples": self.samples, "steps": self.steps, **self._asking.note()}

    def _receive(self, life: Losses, notes: dict[int, Note], heard: dict[int, Note]) -> bool:
        """While the members of a generation come together, the one before lives as well."""
        notes.update(heard)
        life.look()
        return life is self.losses and self._asking.receive(heard)


def promised_group_is_there() -> None:
    """Raise where there are to be several workers and nothing connects them.

    Raises:
        RuntimeError: the launcher has promised them, and there is no process group.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _is_distributed():
        raise RuntimeError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but there is no process group: "
            "call torch.distributed.init_process_group() first"
        )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
