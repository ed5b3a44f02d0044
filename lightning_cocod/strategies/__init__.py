"""Lightning's side: one thin class per algorithm over one base."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_cocod.strategies.a_psgd import APSGDStrategy
from lightning_cocod.strategies.ad_psgd import ADPSGDStrategy
from lightning_cocod.strategies.asynchronous import AsynchronousStrategy
from lightning_cocod.strategies.base import AlgorithmStrategy
from lightning_cocod.strategies.cd_sgd import CDSGDStrategy
from lightning_cocod.strategies.co2 import CO2Strategy
from lightning_cocod.strategies.cocod import CoCoDStrategy
from lightning_cocod.strategies.compskip_dsgd import CompSkipDSGDStrategy
from lightning_cocod.strategies.d_psgd import DPSGDStrategy
from lightning_cocod.strategies.dc_asgd import DCASGDStrategy
from lightning_cocod.strategies.dc_s3gd import DCS3GDStrategy
from lightning_cocod.strategies.diloco import DiLoCoStrategy
from lightning_cocod.strategies.dist_ef_sgd import DistEFSGDStrategy
from lightning_cocod.strategies.eager_diloco import EagerDiLoCoStrategy
from lightning_cocod.strategies.eamsgd import EAMSGDStrategy
from lightning_cocod.strategies.flex_compress_sgd import FlexCompressSGDStrategy
from lightning_cocod.strategies.local_sgd import LocalSGDStrategy
from lightning_cocod.strategies.od_sgd import ODSGDStrategy
from lightning_cocod.strategies.overlap_local_sgd import OverlapLocalSGDStrategy
from lightning_cocod.strategies.pipe_sgd import PipeSGDStrategy
from lightning_cocod.strategies.post_local_sgd import PostLocalSGDStrategy
from lightning_cocod.strategies.sgp import SGPStrategy
from lightning_cocod.strategies.slowmo import SlowMoStrategy
from lightning_cocod.strategies.ssd_sgd import SSDSGDStrategy
from lightning_cocod.strategies.ssgd import SSGDStrategy
from lightning_cocod.strategies.streaming_diloco import StreamingDiLoCoStrategy

STRATEGIES: tuple[type[AlgorithmStrategy], ...] = (
    ADPSGDStrategy,
    APSGDStrategy,
    DCASGDStrategy,
    EAMSGDStrategy,
    CO2Strategy,
    CoCoDStrategy,
    DCS3GDStrategy,
    DPSGDStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    LocalSGDStrategy,
    ODSGDStrategy,
    CDSGDStrategy,
    CompSkipDSGDStrategy,
    DistEFSGDStrategy,
    FlexCompressSGDStrategy,
    OverlapLocalSGDStrategy,
    PipeSGDStrategy,
    PostLocalSGDStrategy,
    SGPStrategy,
    SSDSGDStrategy,
    SSGDStrategy,
    SlowMoStrategy,
    StreamingDiLoCoStrategy,
)
"""All strategies of the package."""


def register() -> None:
    """Make the names known to ``Trainer(strategy=...)``. Doing it twice changes nothing."""
    for strategy in STRATEGIES:
        strategy.register_strategies(StrategyRegistry)


__all__ = [
    "STRATEGIES",
    "ADPSGDStrategy",
    "APSGDStrategy",
    "AlgorithmStrategy",
    "AsynchronousStrategy",
    "CDSGDStrategy",
    "CO2Strategy",
    "CoCoDStrategy",
    "CompSkipDSGDStrategy",
    "DCASGDStrategy",
    "DCS3GDStrategy",
    "DPSGDStrategy",
    "DiLoCoStrategy",
    "DistEFSGDStrategy",
    "EAMSGDStrategy",
    "EagerDiLoCoStrategy",
    "FlexCompressSGDStrategy",
    "LocalSGDStrategy",
    "ODSGDStrategy",
    "OverlapLocalSGDStrategy",
    "PipeSGDStrategy",
    "PostLocalSGDStrategy",
    "SGPStrategy",
    "SSDSGDStrategy",
    "SSGDStrategy",
    "SlowMoStrategy",
    "StreamingDiLoCoStrategy",
    "register",
]
