"""Moving tensors between workers. Knows no algorithm and no Lightning."""

from lightning_cocod.comm.communicator import Communicator, promised_group_is_there, seconds
from lightning_cocod.comm.errors import CommunicationError, MessageMismatch, NonFiniteMessage, PeerLost
from lightning_cocod.comm.group import Group
from lightning_cocod.comm.header import Pace
from lightning_cocod.comm.message import Message, Subject

__all__ = [
    "CommunicationError",
    "Communicator",
    "Group",
    "Message",
    "MessageMismatch",
    "NonFiniteMessage",
    "Pace",
    "PeerLost",
    "Subject",
    "promised_group_is_there",
    "seconds",
]
