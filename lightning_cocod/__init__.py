"""PyTorch Lightning strategies that hide the network behind the computation.

Importing the package registers its strategies: ``Trainer(strategy="cocod")``.
"""

from lightning_cocod.algorithms import (
    CO2,
    DCS3GD,
    ODSGD,
    SSDSGD,
    SSGD,
    Algorithm,
    CoCoD,
    DiLoCo,
    EagerDiLoCo,
    Every,
    LocalSGD,
    OverlapLocalSGD,
    PipeSGD,
    PostLocalSGD,
    Schedule,
    SlowMo,
    StreamingDiLoCo,
    WarmUp,
    When,
)
from lightning_cocod.comm import CommunicationError, MessageMismatch, NonFiniteMessage, PeerLost
from lightning_cocod.strategies import (
    AlgorithmStrategy,
    CO2Strategy,
    CoCoDStrategy,
    DCS3GDStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    LocalSGDStrategy,
    ODSGDStrategy,
    OverlapLocalSGDStrategy,
    PipeSGDStrategy,
    PostLocalSGDStrategy,
    SlowMoStrategy,
    SSDSGDStrategy,
    SSGDStrategy,
    StreamingDiLoCoStrategy,
    register,
)
from lightning_cocod.telemetry import CommunicationMonitor, CommunicationTrace

register()

__version__ = "0.1.0"

__all__ = [
    "CO2",
    "DCS3GD",
    "ODSGD",
    "SSDSGD",
    "SSGD",
    "Algorithm",
    "AlgorithmStrategy",
    "CO2Strategy",
    "CoCoD",
    "CoCoDStrategy",
    "CommunicationError",
    "CommunicationMonitor",
    "CommunicationTrace",
    "DCS3GDStrategy",
    "DiLoCo",
    "DiLoCoStrategy",
    "EagerDiLoCo",
    "EagerDiLoCoStrategy",
    "Every",
    "LocalSGD",
    "LocalSGDStrategy",
    "MessageMismatch",
    "NonFiniteMessage",
    "ODSGDStrategy",
    "OverlapLocalSGD",
    "OverlapLocalSGDStrategy",
    "PeerLost",
    "PipeSGD",
    "PipeSGDStrategy",
    "PostLocalSGD",
    "PostLocalSGDStrategy",
    "SSDSGDStrategy",
    "SSGDStrategy",
    "Schedule",
    "SlowMo",
    "SlowMoStrategy",
    "StreamingDiLoCo",
    "StreamingDiLoCoStrategy",
    "WarmUp",
    "When",
]
