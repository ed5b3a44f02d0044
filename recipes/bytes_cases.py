"""What is counted: every algorithm, every codec."""

from __future__ import annotations

from bytes_formulas import Case

from lightning_cocod.compression import CODECS, PowerSGD

PLAIN = [
    Case("all-reduce", window=1),
    *(Case(name, {"period": 4}) for name in ("cocod", "local_sgd", "overlap_local_sgd", "slowmo", "diloco")),
    *(Case(name, {"period": 4}) for name in ("eager_diloco", "co2", "streaming_diloco")),
    Case("post_local_sgd", {"period": 4, "warmup_steps": 1}),
    Case("dc_s3gd", {"period": 1}, window=2),
    Case("pipe_sgd", window=2),
    Case("d_psgd", window=2),
    Case("d_psgd", {"graph": "full"}, window=2),
    Case("sgp", window=2),
    Case("sgp", {"delay": 1}, window=2),
    Case("ssgd", window=2),
    Case("ssd_sgd", {"period": 4}),
    Case("od_sgd", window=2),
    Case("a_psgd", window=2),
    Case("dc_asgd", window=2),
    Case("eamsgd", {"period": 4}),
    Case("ad_psgd", window=4),
]
"""Whole values."""
CODED = [
    Case("cd_sgd", {"compress_steps": 5}, window=5),
    Case("flex_compress_sgd", {"compression": "topk", "server_compression": "sign"}, window=2),
    Case("compskip_dsgd", window=2),
    Case("compskip_dsgd", {"worker_skip": 2}, window=2),
    Case("compskip_dsgd", {"worker_skip": 2, "server_skip": 2}, window=2),
    Case("compskip_dsgd", {"compression": "topk", "worker_skip": 2}, window=2),
    Case("ad_psgd", {"compression": "int8"}, window=4),
]
"""Codes by nature, with their default codecs where none is named."""
RANDOM = Case("compskip_dsgd", {"worker_skip": 0.5}, window=20)
COCOD = [Case("cocod", {"period": 4, "compression": name}) for name in (*CODECS, PowerSGD.name)]
DIST_EF = [Case("dist_ef_sgd", {"compression": name}, window=2) for name in CODECS]
FEW = ("int8", "sign", "topk", PowerSGD.name)
"""Codecs where not all are wanted."""


def cases(codecs: str) -> list[Case]:
    """With all codecs, or with few and without what takes many steps."""
    if codecs == "all":
        return [*PLAIN, *CODED, RANDOM, *COCOD, *DIST_EF]
    return [*PLAIN, *CODED, *(case for case in (*COCOD, *DIST_EF) if case.options["compression"] in FEW)]
