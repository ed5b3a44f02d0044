"""The bytes that a rank sends in a step, by formula: without headers, without what a bucket is padded with.

N ranks, P parameters of four bytes, of each of which a rank owns or forwards the part 1/N. So what goes to all others in one
direction is s = (N − 1)/N · P values. A ring all-reduce is two such directions, as are a push and a pull. PowerSGD sends the
factors of matrices, r (m + n) values in place of m n, and everything else whole: the mean of that is its b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_cocod.algorithms.skipping import as_skip
from lightning_cocod.comm.mixing import directed, undirected
from lightning_cocod.compression import Codec, PowerSGD, as_compression

Shapes = Sequence[Sequence[int]]
"""Of the parameters."""

WHOLE = 32.0
"""Bits of a value that is not compressed."""

BITS: dict[str, Callable[[Any], float]] = {
    "none": lambda c: WHOLE,
    "fp16": lambda c: 16,
    "bf16": lambda c: 16,
    "int8": lambda c: 8 + 32 / c.block,
    "int4": lambda c: 4 + 32 / c.block,
    "e3m0": lambda c: 4 + 32 / c.block,
    "sign": lambda c: 1 + 32 / c.block,
    "threshold": lambda c: 2,
    "topk": lambda c: 64 * c.ratio,
    "randomk": lambda c: 32 * c.ratio,
    "qsgd": lambda c: math.ceil(math.log2(2 * c.levels + 1)) + 32 / c.block,
    "terngrad": lambda c: 2 + 32 / c.block,
    "natural": lambda c: 9,
}
"""b(C) of a value, as in docs/compression.md."""


def bits(compression: str | Codec | PowerSGD | None, shapes: Shapes = ()) -> float:
    """b(C), for PowerSGD that of parameters of these shapes."""
    codec = as_compression(compression)
    if isinstance(codec, PowerSGD):
        matrices = [(shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape)) for shape in shapes]
        values = sum(codec.rank * (m + n) if codec.saves(m, n) else m * n for m, n in matrices)
        return WHOLE * values / sum(m * n for m, n in matrices)
    return WHOLE if codec is None else BITS[codec.name](codec)


class Case(NamedTuple):
    """A run.

    Attributes:
        algorithm: its registered name, or "all-reduce", which is what DDP does.
        options: of the algorithm; ``period``, ``compression`` and what else the formula needs are named.
        window: steps of a whole number of rounds. So many are made first, and so many are measured then.
        shapes: of the parameters, where ``sent`` asks.
        exchanges: of a worker in a step, where they come when they can: as many as have been counted.
    """

    algorithm: str
    options: Mapping[str, Any] = {}
    window: int = 4
    shapes: Shapes = ()
    exchanges: float = 0.0

    def __str__(self) -> str:
        return f"{self.algorithm}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    @property
    def codec(self) -> float:
        """b(C)."""
        return bits(self.options.get("compression"), self.shapes)


class Formula(NamedTuple):
    """Bits that are sent in a step for each of the s values, and how one writes that.

    Attributes:
        text: with k = ``period``, b = b(C), b_s = b(C_s), c = ``compress_steps``, σ the share of steps that are sent,
            d the workers that one sends to, e the exchanges of a worker in a step.
        bits: of a case, with N ranks.
    """

    text: str
    bits: Callable[[Case, int], float]


def _shares(case: Case, n: int) -> tuple[float, float]:
    """σ of the workers and of the server in the window. What has a probability depends on what is drawn: it is drawn."""
    steps, shares = range(case.window, 2 * case.window), []
    for name, who in (("worker_skip", range(n)), ("server_skip", [-1])):
        rule = as_skip(name, case.options.get(name))
        shares.append(sum(not rule(t, w, 0, None) for t in steps for w in who) / len(steps) / len(who))
    return shares[0], shares[1]


def _two_way(case: Case, n: int) -> float:
    b = bits(case.options.get("compression", "sign"))
    σ, σ_s = _shares(case, n)
    return σ * b + σ_s * bits(case.options.get("server_compression", "sign"))


def _cd_sgd(case: Case, n: int) -> float:
    c = case.options["compress_steps"]
    return (c - 1) / c * bits(case.options.get("compression", "threshold")) + 1 / c * WHOLE + WHOLE


def _receivers(case: Case, n: int) -> float:
    """d: those that rank 0 sends to in an exchange, in the named graphs as many as any other."""
    made = undirected(case.options.get("graph", "ring"), n) if case.algorithm == "d_psgd" else None
    matrices = made or directed(case.options.get("graph", "one_peer"), n)
    return sum(bool(row[0]) for P in matrices for row in P[1:]) / len(matrices)


ROUNDS = Formula("2 s b/8 / k", lambda case, n: 2 * case.codec / case.options["period"])
NEIGHBOURS = Formula("d · 4 P", lambda case, n: WHOLE * _receivers(case, n) * n / (n - 1))
EVERY_STEP = Formula("2 s b/8", lambda case, n: 2 * case.codec)
EXCHANGES = Formula("e · b/8 P", lambda case, n: case.exchanges * case.codec * n / (n - 1))

FORMULAS = {
    "all-reduce": EVERY_STEP,
    **dict.fromkeys(("cocod", "local_sgd", "post_local_sgd", "dc_s3gd", "overlap_local_sgd"), ROUNDS),
    **dict.fromkeys(("slowmo", "diloco", "eager_diloco", "co2", "streaming_diloco"), ROUNDS),
    "pipe_sgd": EVERY_STEP,
    "ad_psgd": EXCHANGES,
    "a_psgd": EVERY_STEP,
    "dc_asgd": EVERY_STEP,
    "eamsgd": ROUNDS,
    "d_psgd": NEIGHBOURS,
    "sgp": NEIGHBOURS,
    "ssgd": EVERY_STEP,
    "od_sgd": EVERY_STEP,
    "ssd_sgd": Formula("(1 + 1/k) 4 s", lambda case, n: (1 + 1 / case.options["period"]) * WHOLE),
    "cd_sgd": Formula("((c − 1)/c · b/8 + 4/c + 4) s", _cd_sgd),
    "dist_ef_sgd": Formula("2 s b/8", lambda case, n: 2 * bits(case.options.get("compression", "sign"))),
    "flex_compress_sgd": Formula("(b + b_s)/8 · s", _two_way),
    "compskip_dsgd": Formula("(σ b + σ_s b_s)/8 · s", _two_way),
}


def sent(case: Case, n: int, shapes: Shapes) -> float:
    """Bytes that each of n ranks sends in a step, the mean over them."""
    s = (n - 1) / n * sum(map(math.prod, shapes))
    return s * FORMULAS[case.algorithm].bits(case._replace(shapes=shapes), n) / 8
