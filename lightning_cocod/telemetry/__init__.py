"""What a user sees of the communication."""

from lightning_cocod.telemetry.monitor import CommunicationMonitor

__all__ = ["CommunicationMonitor"]
