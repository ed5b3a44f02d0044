"""Shards that are served at any time: each rank owns one of all that travels, and answers for it from threads of its own.

A worker asks all owners at once, itself included: it sends each of them what belongs to that owner's shard, and gets as much
back, in the same memory. There are two links between two ranks, one for the questions of each, and behind each link that is
asked a thread that waits for nothing but the owner's lock. So no circle of waiting ranks can close, whatever they do
themselves, and questions are answered in the order in which they come.

    ASK   → words (JSON: the version that the content comes from, and what else the owner is told) and content    ← ANSWER
    SHOW  → nothing: the content would be of no use, or there is none                                            ← ANSWER
    REST  → nothing: this worker takes no step before all have met                                               ← ANSWER

Content that is not finite is not sent: an ASK says so in its header and is answered as a SHOW. An owner whose answer would
not be finite says that in the answer's header, which ends the run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_cocod.comm.beside import beside_training
from lightning_cocod.comm.clocks import Clocks
from lightning_cocod.comm.communicator import Communicator
from lightning_cocod.comm.errors import CommunicationError, LinkShut, NonFiniteMessage, PeerLeft, PeerLost
from lightning_cocod.comm.lane import Lane, lane_for
from lightning_cocod.comm.link import FIRST_FREE, Header, Link
from lightning_cocod.comm.meeting import meet
from lightning_cocod.comm.norms import finite
from lightning_cocod.comm.pairwise import Host
from lightning_cocod.comm.thread import CommunicationThread, Handle

ASK, SHOW, REST, ANSWER = FIRST_FREE, FIRST_FREE + 1, FIRST_FREE + 2, FIRST_FREE + 3
_EVER = 7 * 24 * 3600.0  # seconds between two questions: whether a worker that computes lives, the heartbeat knows
_HEAD = 24  # bytes


class Question(NamedTuple):
    """What an owner is told beside the content.

    Attributes:
        worker: whose it is.
        base: the version of the shard from which it was computed, as an earlier answer said.
        told: whatever else, as JSON has it.
    """

    worker: int
    base: int
    told: Any


class Owner(Protocol):
    """A rank's shard of something. All methods may be called by several threads at a time."""

    nbytes: int
    """Of the shard, as it travels."""

    def like_shard(self) -> list[Tensor]:
        """New memory for content."""

    def answer(self, question: Question, content: list[Tensor]) -> int:
        """Do what is asked. content ← the answer. Returns the version of the shard then."""

    def show(self, worker: int, content: list[Tensor]) -> int:
        """content ← the answer to somebody who has said nothing. Returns the version of the shard."""


class Outbox:
    """On the side of a worker: what each owner is sent, and where its answer goes.

    Args:
        buckets: each is cut into as many equal parts as there are ranks, and those with a rank's number are its shard.
        rank: this one.
        world_size: number of ranks.
    """

    def __init__(self, buckets: Sequence[Tensor], rank: int, world_size: int) -> None:
        rows = [[flat.view(world_size, -1)[r] for flat in buckets] for r in range(world_size)]
        self.own = rows[rank]
        order = [(rank + i) % world_size for i in range(1, world_size)]  # not all of them ask the same one first
        self.others = {r: Host(rows[r]) for r in order}


class ShardService:
    """One rank's part in it: an owner, and a worker that asks.

    The training thread calls ``ask``, ``show``, ``rest``. A thread carries questions out in their order.

    Args:
        comm: of all ranks.
        owners: of this rank, by number, as on all ranks.
        name: of what is served.
    """

    def __init__(self, comm: Communicator, owners: Sequence[Owner], name: str) -> None:
        self.comm, self.owners, self.name = comm, list(owners), name
        self.clocks = Clocks(comm.world_size)
        self._lane: Lane = lane_for(comm.device)
        self._asked: dict[int, Link] = {}
        self._answered: dict[int, Link] = {}
        self._worker: CommunicationThread | None = None
        self._threads: list[threading.Thread] = []
        self._closing = False

    # Lifecycle

    def start(self) -> None:
        """Meet the others and begin to serve. Collective."""
        comm = self.comm
        others = [rank for rank in range(comm.world_size) if rank != comm.rank]
        if not others:
            return
        with comm.named("the making of links between shards"):
            self._asked, self._answered = meet(
                _get_default_store(),
                comm.rank,
                self.name,
                asks=others,
                answers=others,
                ledger=comm.ledger,
                timeout=comm.connect_timeout,
            )
        self._worker = CommunicationThread(f"questions to owners of rank {comm.rank}")
        comm.losses.concern(self._worker, self)
        for peer, link in self._answered.items():
            name = f"shard of rank {comm.rank} for rank {peer}"
            self._threads.append(beside_training(partial(self._serve, link), name))

    def leave(self) -> None:
        """Nothing will be asked any more. All ranks have met since they asked for the last time; ``close`` follows."""
        self._closing = True

    def close(self) -> None:
        """Part: with a goodbye, or at once where communication has failed. Idempotent, and waits for no peer."""
        well = self._closing and not self.comm.failed
        self._closing = True
        if self._worker is not None:
            self._worker.close(timeout=5.0)
            if well:
                self.comm.losses.forget(self._worker, self)
        if well:
            for link in self._asked.values():
                try:
                    link.bye(silence=1.0)
                except CommunicationError:  # it was faster
                    continue
        self.cut()
        for thread in self._threads:
            thread.join()
        for link in (*self._asked.values(), *self._answered.values()):
            link.close()
        self._asked, self._answered, self._threads, self._worker = {}, {}, [], None

    def cut(self) -> None:
        """Wake whoever uses a link."""
        for link in (*self._asked.values(), *self._answered.values()):
            link.shutdown()

    def are_broken(self) -> bool:
        """Threads wait at all links, and see for themselves."""
        return False

    # The worker

    def ask(
        self,
        number: int,
        outbox: Outbox,
        base: Sequence[int],
        told: Any = None,
        *,
        clock: int,
        fit: bool = True,
    ) -> Handle[list[int]]:
        """Send all owners what the outbox has for them. Their answers will be there instead, until when it must rest.

        Args:
            number: which of a rank's owners.
            outbox: the content.
            base: of each owner's shard, the version from which that was computed.
            told: what else to tell, as JSON has it.
            clock: this worker's steps since the last meeting.
            fit: whether the content is finite, on all shards. If not, none of it is sent, and owners show what they have.

        Returns:
            The versions of the shards that have come.
        """
        return self._submit(lambda: self._all(ASK, number, outbox, base, told, clock, fit))

    def show(self, number: int, outbox: Outbox, *, clock: int) -> Handle[list[int]]:
        """As ``ask``, but owners are told nothing."""
        return self._submit(lambda: self._all(SHOW, number, outbox, [], None, clock, True))

    def rest(self) -> Handle[list[int]]:
        """Make known to all that this worker takes no step before the next meeting."""
        return self._submit(self._rest)

    def wait(self, handle: Handle[list[int]], *, counted: bool = True) -> list[int]:
        """For the answers. The time counts as exposed unless told."""
        began = time.perf_counter()
        try:
            with self.comm.tracer.span("wait", message=self.name):
                versions = handle.wait()
        except BaseException:
            self.comm.losses.watchdog.noticed()
            raise
        if counted:
            self.comm.ledger.add(exposed=time.perf_counter() - began)
        return versions

    def _submit(self, work: Callable[[], list[int]]) -> Handle[list[int]]:
        departed = self._lane.mark()

        def explained() -> list[int]:
            try:
                with self._lane.working():
                    self._lane.follow(departed)
                    return work()
            except CommunicationError as error:
                raise self._explain(error) from None
            except BaseException as error:
                self._fail(error)
                raise

        self.comm.check()
        if self._worker is None:  # nobody else is there
            return Handle.of(explained())
        return self._worker.submit(explained)

    @torch.no_grad()
    def _all(
        self, kind: int, number: int, outbox: Outbox, base: Sequence[int], told: Any, clock: int, fit: bool
    ) -> list[int]:
        comm, owner, began = self.comm, self.owners[number], time.perf_counter()
        versions = [0] * comm.world_size
        silence = comm.process_group_timeout
        with comm.tracer.span("transfer", message=self.name):
            for rank, host in outbox.others.items():
                content: list[Tensor] = []
                if kind == ASK and fit:
                    host.load()
                    content = [_words({"base": base[rank], "told": told}), *host.tensors]
                self._send(self._asked[rank], kind, content, step=clock, tag=number, finite=fit, silence=silence)
            self.clocks.tell(comm.rank, clock)
            if kind == ASK and fit:
                versions[comm.rank] = owner.answer(Question(comm.rank, base[comm.rank], told), outbox.own)
            else:
                versions[comm.rank] = owner.show(comm.rank, outbox.own)
            _finite_or_raise(outbox.own, comm.rank)
            for rank, host in outbox.others.items():
                header = self._asked[rank].receive(silence)
                if not header.finite:
                    raise _nonfinite(rank)
                self._asked[rank].take(header, host.tensors, silence)
                host.store()
                versions[rank] = header.step
            self._settled()
        comm.ledger.add(busy=time.perf_counter() - began, messages=1)
        return versions

    def _rest(self) -> list[int]:
        self.clocks.rest(self.comm.rank)
        silence = self.comm.process_group_timeout
        for link in self._asked.values():
            self._send(link, REST, silence=silence)
        for link in self._asked.values():
            link.receive(silence)
        return []

    # The owner

    def _serve(self, link: Link) -> None:
        lane = lane_for(self.comm.device)  # so that it does not queue behind what others compute
        try:
            with lane.working(), torch.no_grad():
                boxes: dict[int, tuple[list[Tensor], Host]] = {}
                while True:
                    header = link.receive(_EVER)
                    if header.tag not in boxes:
                        memory = self.owners[header.tag].like_shard()
                        boxes[header.tag] = memory, Host(memory)
                    self._reply(link, header, *boxes[header.tag])
        except (PeerLeft, LinkShut):
            return
        except CommunicationError as error:
            if not self._closing:
                self._explain(error)
        except BaseException as error:  # the optimizer's, for instance: the training thread raises it at its next verb
            self._fail(error)

    def _reply(self, link: Link, header: Header, content: list[Tensor], host: Host) -> None:
        silence = self.comm.process_group_timeout
        if header.kind == REST:
            self.clocks.rest(link.peer)
            self._send(link, ANSWER, silence=silence)
            return
        owner = self.owners[header.tag]
        if header.kind == ASK and header.finite:
            words = torch.empty(header.nbytes - owner.nbytes, dtype=torch.uint8)
            link.take(header, [words, *host.tensors], silence)
            host.store()
            said = json.loads(words.numpy().tobytes())
            version = owner.answer(Question(link.peer, said["base"], said["told"]), content)
        else:
            version = owner.show(link.peer, content)
        self.clocks.tell(link.peer, header.step)
        fit = finite(content)
        host.load()
        self._send(link, ANSWER, host.tensors, step=version, finite=fit, silence=silence)
        if not fit:
            raise _nonfinite(self.comm.rank)

    def _send(self, link: Link, kind: int, content: Sequence[Tensor] = (), **about: Any) -> None:
        link.send(kind, content, **about)
        self.comm.ledger.add(raw=_HEAD + (sum(t.nbytes for t in content) if about.get("finite", True) else 0))

    # Failures

    def _explain(self, error: CommunicationError) -> BaseException:
        """What ends communication, on all threads of this rank; a broken link may be the first that is seen of a loss."""
        losses = self.comm.losses
        if isinstance(error, PeerLost):
            error = losses.explain(error, self.name)
        elif isinstance(error, LinkShut) and losses.error is not None:
            return losses.error
        else:
            losses.tell(str(error))
        losses.fail(error)
        losses.cut()
        return error

    def _fail(self, error: BaseException) -> None:
        self.comm.losses.tell(f"{type(error).__name__}: {error}")
        self.comm.losses.fail(error)
        self.comm.losses.cut()

    def _settled(self) -> None:
        """The training thread may use what has come."""
        if self.comm.device.type == "cuda":
            torch.cuda.current_stream(self.comm.device).synchronize()


def _words(said: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def _nonfinite(rank: int) -> NonFiniteMessage:
    return NonFiniteMessage(f"the shard of rank {rank} has NaN or infinity after an update: lower the learning rate")


def _finite_or_raise(content: list[Tensor], rank: int) -> None:
    if not finite(content):
        raise _nonfinite(rank)
