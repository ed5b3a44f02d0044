"""Bytes for a tensor and back: codecs without state, error feedback, PowerSGD's arithmetic. Knows torch and NumPy only."""

from lightning_cocod.compression.absmax import Int4, Int8, TernGrad
from lightning_cocod.compression.casts import BF16, FP16, Identity
from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.e3m0 import E3M0
from lightning_cocod.compression.error_feedback import ErrorFeedback
from lightning_cocod.compression.natural import Natural
from lightning_cocod.compression.powersgd import PowerSGD
from lightning_cocod.compression.qsgd import QSGD
from lightning_cocod.compression.randomk import RandomK
from lightning_cocod.compression.sign import ScaledSign
from lightning_cocod.compression.tensors import pack, unpack
from lightning_cocod.compression.threshold import Threshold
from lightning_cocod.compression.topk import TopK

CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (
        *(Identity, FP16, BF16, Int8, Int4, E3M0, ScaledSign, Threshold),
        *(TopK, RandomK, QSGD, TernGrad, Natural),
    )
}


def as_compression(compression: str | Codec | PowerSGD | None) -> Codec | PowerSGD | None:
    """What a user wrote: a name, for that with its default options, or the thing itself; None stays None.

    Raises:
        ValueError: there is nothing of this name.
    """
    if compression is None or isinstance(compression, Codec | PowerSGD):
        return compression
    if compression == PowerSGD.name:
        return PowerSGD()
    if compression not in CODECS:
        known = ", ".join([*CODECS, PowerSGD.name])
        raise ValueError(f"compression must be a codec, PowerSGD, None or one of {known}; got {compression!r}")
    return CODECS[compression]()


__all__ = [
    "BF16",
    "CODECS",
    "E3M0",
    "FP16",
    "QSGD",
    "Codec",
    "ErrorFeedback",
    "Identity",
    "Int4",
    "Int8",
    "Natural",
    "PowerSGD",
    "RandomK",
    "ScaledSign",
    "TernGrad",
    "Threshold",
    "TopK",
    "as_compression",
    "pack",
    "unpack",
]
