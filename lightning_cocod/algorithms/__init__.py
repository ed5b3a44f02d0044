"""The papers, one file each."""

from lightning_cocod.algorithms.a_psgd import APSGD
from lightning_cocod.algorithms.ad_psgd import ADPSGD
from lightning_cocod.algorithms.asynchronous import Asynchronous
from lightning_cocod.algorithms.base import Algorithm
from lightning_cocod.algorithms.cd_sgd import CDSGD
from lightning_cocod.algorithms.co2 import CO2
from lightning_cocod.algorithms.cocod import CoCoD
from lightning_cocod.algorithms.compskip_dsgd import CompSkipDSGD
from lightning_cocod.algorithms.d_psgd import DPSGD
from lightning_cocod.algorithms.dc_asgd import DCASGD
from lightning_cocod.algorithms.dc_s3gd import DCS3GD
from lightning_cocod.algorithms.diloco import DiLoCo
from lightning_cocod.algorithms.dist_ef_sgd import DistEFSGD
from lightning_cocod.algorithms.eager_diloco import EagerDiLoCo
from lightning_cocod.algorithms.eamsgd import EAMSGD
from lightning_cocod.algorithms.flex_compress_sgd import FlexCompressSGD
from lightning_cocod.algorithms.local_sgd import LocalSGD
from lightning_cocod.algorithms.local_update import GLU, DelayCompensation, LocalUpdate
from lightning_cocod.algorithms.od_sgd import ODSGD
from lightning_cocod.algorithms.overlap_local_sgd import OverlapLocalSGD
from lightning_cocod.algorithms.pipe_sgd import PipeSGD
from lightning_cocod.algorithms.post_local_sgd import PostLocalSGD
from lightning_cocod.algorithms.sgp import SGP
from lightning_cocod.algorithms.skipping import EveryNth, Randomly, Skip, WhileSmall
from lightning_cocod.algorithms.slowmo import SlowMo
from lightning_cocod.algorithms.ssd_sgd import SSDSGD
from lightning_cocod.algorithms.ssgd import SSGD
from lightning_cocod.algorithms.streaming_diloco import StreamingDiLoCo
from lightning_cocod.algorithms.when import Every, Schedule, WarmUp, When

__all__ = [
    "ADPSGD",
    "APSGD",
    "CDSGD",
    "CO2",
    "DCASGD",
    "DCS3GD",
    "DPSGD",
    "EAMSGD",
    "GLU",
    "ODSGD",
    "SGP",
    "SSDSGD",
    "SSGD",
    "Algorithm",
    "Asynchronous",
    "CoCoD",
    "CompSkipDSGD",
    "DelayCompensation",
    "DiLoCo",
    "DistEFSGD",
    "EagerDiLoCo",
    "Every",
    "EveryNth",
    "FlexCompressSGD",
    "LocalSGD",
    "LocalUpdate",
    "OverlapLocalSGD",
    "PipeSGD",
    "PostLocalSGD",
    "Randomly",
    "Schedule",
    "Skip",
    "SlowMo",
    "StreamingDiLoCo",
    "WarmUp",
    "When",
    "WhileSmall",
]
