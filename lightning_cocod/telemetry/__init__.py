"""What a user sees of the communication."""

from lightning_cocod.telemetry.monitor import CommunicationMonitor
from lightning_cocod.telemetry.trace import CommunicationTrace

__all__ = ["CommunicationMonitor", "CommunicationTrace"]
