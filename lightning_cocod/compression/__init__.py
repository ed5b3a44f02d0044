"""Bytes for a tensor and back: codecs without state, and error feedback. Knows torch only."""

from lightning_cocod.compression.absmax import Int4, Int8, TernGrad
from lightning_cocod.compression.casts import BF16, FP16, Identity
from lightning_cocod.compression.codec import Codec
from lightning_cocod.compression.e3m0 import E3M0
from lightning_cocod.compression.error_feedback import ErrorFeedback
from lightning_cocod.compression.natural import Natural
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


def as_codec(compression: str | Codec | None) -> Codec | None:
    """The codec that a user wrote: its name, for one with its default options, or the codec itself; None stays None.

    Raises:
        ValueError: there is no codec of this name.
    """
    if compression is None or isinstance(compression, Codec):
        return compression
    if compression not in CODECS:
        raise ValueError(f"compression must be a codec, None or one of {', '.join(CODECS)}; got {compression!r}")
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
    "RandomK",
    "ScaledSign",
    "TernGrad",
    "Threshold",
    "TopK",
    "as_codec",
    "pack",
    "unpack",
]
