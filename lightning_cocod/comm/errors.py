"""What can go wrong between workers. Each error is one line that names the rank and the way out."""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """Anything that ends communication between the workers, at least until they regroup."""


class PeerLost(CommunicationError):
    """A peer died, was stopped, was cut off or left early.

    Args:
        reason: one line.
        for_good: nobody can be reached any more, or this rank is no part of the run: it does not go on without the peer.
    """

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


def store_lost(why: str) -> PeerLost:
    """The same line for all who hear of it: the heartbeat, the vote of who goes on, a claim of a batch."""
    where = "rank 0, or the launcher that hosts the store, is lost"
    return PeerLost(f"{where}: the store does not answer ({why})", for_good=True)


class PeerLeft(PeerLost):
    """A peer has said goodbye: it left in good order, and has nothing more to say."""


class LinkShut(CommunicationError):
    """This rank has shut its end of a link down while another thread of it was using the link."""


class MessageMismatch(CommunicationError):
    """Two workers announced different messages: their training loops are no longer in step."""


class NonFiniteMessage(CommunicationError):
    """A worker's message holds NaN or infinity. It was not sent, so no other worker's weights were touched."""


class TransportError(RuntimeError):
    """What the transport raised: internal, until it is known whose connection broke."""


class _Transport:
    """Around calls into the transport, so that no other error is taken for a broken connection."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):  # as torch's distributed errors are
            raise TransportError(first_line(error)) from None


transport = _Transport()


def in_one_line(error: BaseException) -> str:
    """An error's type and the first line of its message, if it has one."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error) else name


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]
