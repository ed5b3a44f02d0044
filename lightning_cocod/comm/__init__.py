"""Moving tensors between workers. Knows no algorithm and no Lightning."""

from lightning_cocod.comm.communicator import Communicator, seconds
from lightning_cocod.comm.errors import CommunicationError, MessageMismatch, NonFiniteMessage, PeerLost
from lightning_cocod.comm.message import Message, Subject

__all__ = [
    "CommunicationError",
    "Communicator",
    "Message",
    "MessageMismatch",
    "NonFiniteMessage",
    "PeerLost",
    "Subject",
    "seconds",
]
