"""What can go wrong between workers. Each error is one line that names the rank and the way out."""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """Anything that ends communication between the workers for good."""


class PeerLost(CommunicationError):
    """A peer died, was stopped, was cut off or left early."""


class MessageMismatch(CommunicationError):
    """Two workers announced different messages: their training loops are no longer in step."""


class NonFiniteMessage(CommunicationError):
    """A worker's message holds NaN or infinity. It was not sent, so no other worker's weights were touched."""
