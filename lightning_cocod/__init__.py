"""PyTorch Lightning strategies that hide the network behind the computation.

Importing the package registers its strategies: ``Trainer(strategy="cocod")``.
"""

from lightning_cocod.algorithms import Algorithm, CoCoD, Every, LocalSGD, Schedule, WarmUp, When
from lightning_cocod.comm import CommunicationError, MessageMismatch, NonFiniteMessage, PeerLost
from lightning_cocod.strategies import AlgorithmStrategy, CoCoDStrategy, LocalSGDStrategy, register
from lightning_cocod.telemetry import CommunicationMonitor, CommunicationTrace

register()

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "AlgorithmStrategy",
    "CoCoD",
    "CoCoDStrategy",
    "CommunicationError",
    "CommunicationMonitor",
    "CommunicationTrace",
    "Every",
    "LocalSGD",
    "LocalSGDStrategy",
    "MessageMismatch",
    "NonFiniteMessage",
    "PeerLost",
    "Schedule",
    "WarmUp",
    "When",
]
