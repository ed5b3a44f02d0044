"""Bytes: the formulas of all algorithms and codecs, beside what ranks send."""

import sys
from pathlib import Path

import pytest
from support.ranks import run_ranks
from torch import nn

RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

import bytes as recipe  # noqa: E402
import bytes_cases  # noqa: E402
import bytes_formulas as formulas  # noqa: E402
import bytes_measured as measured  # noqa: E402
from bytes_formulas import Case, sent  # noqa: E402
from bytes_imagenet import Training  # noqa: E402

from lightning_cocod.compression import CODECS, Int8, PowerSGD, TopK  # noqa: E402
from lightning_cocod.strategies import STRATEGIES  # noqa: E402

RANKS, LIMIT = 2, 900.0  # far above what is needed
pytestmark = pytest.mark.timeout(LIMIT + 100)
CASES = [*bytes_cases.cases("few"), bytes_cases.RANDOM._replace(window=8)]


def model():
    return nn.Sequential(nn.Linear(700, 900), nn.BatchNorm1d(900), nn.Linear(900, 500, bias=False))


SHAPES = [p.shape for p in model().parameters()]


def close(counted, formula):
    return abs(counted / formula - 1) < 0.01


def send(rank, world_size):
    """What this rank sends in every case."""
    return [measured.measure(case, model()) for case in CASES]


@pytest.fixture(scope="module")
def table():
    heard = zip(*run_ranks(send, RANKS, timeout=LIMIT), strict=True)
    return recipe.rows(CASES, list(heard), RANKS, SHAPES)


def test_every_algorithm_sends_what_its_formula_says(table):
    for row in table:
        if row.case.algorithm != "all-reduce":
            assert close(row.counted, row.formula), row


def test_what_is_counted_is_what_the_kernel_has_seen(table):
    """Where messages go through Gloo they need some kB of its own, however few they carry; a ring needs nothing."""
    for row in table:
        counted = row.formula if row.counted is None else row.counted
        assert counted <= row.written < 1.01 * counted + 8192, row


def test_another_formula_would_be_noticed(table):
    """Negative control."""
    row = {str(row.case): row for row in table}
    cocod, ssd_sgd, cd_sgd = row["cocod(period=4)"], row["ssd_sgd(period=4)"], row["cd_sgd(compress_steps=5)"]
    skips = row["compskip_dsgd(worker_skip=2)"]
    assert not close(cocod.counted, sent(Case("cocod", {"period": 5}), RANKS, SHAPES))
    assert not close(cocod.counted, sent(cocod.case, RANKS + 1, SHAPES))
    assert not close(ssd_sgd.counted, sent(Case("od_sgd"), RANKS, SHAPES))
    assert not close(cd_sgd.counted, sent(Case("cd_sgd", {"compress_steps": 6}), RANKS, SHAPES))
    assert not close(skips.counted, sent(Case("compskip_dsgd"), RANKS, SHAPES))
    gossip = row["ad_psgd()"]
    assert gossip.case.exchanges == 1
    assert not close(gossip.counted, sent(gossip.case._replace(exchanges=1.1 * gossip.case.exchanges), RANKS, SHAPES))
    factors = row["cocod(period=4, compression='powersgd')"]
    assert not close(factors.counted, sent(Case("cocod", {"period": 4, "compression": PowerSGD(rank=3)}), RANKS, SHAPES))


def test_no_algorithm_and_no_codec_is_left_out():
    names = {strategy.registered_name for strategy in STRATEGIES}
    for which in ("few", "all"):
        assert {case.algorithm for case in bytes_cases.cases(which)} == names | {"all-reduce"}
    assert set(formulas.FORMULAS) == names | {"all-reduce"}
    assert set(measured.ALGORITHMS) == names
    for algorithm in ("cocod", "dist_ef_sgd"):
        told = {case.options.get("compression") for case in bytes_cases.cases("all") if case.algorithm == algorithm}
        assert told >= {*CODECS, *([PowerSGD.name] if algorithm == "cocod" else [])}  # servers add codes up, not factors


@pytest.mark.parametrize("codec", [*(kind() for kind in CODECS.values()), Int8(block=64), TopK(ratio=0.002)], ids=repr)
def test_bits_of_codecs_are_those_of_their_codes(codec):
    n = 1 << 20
    assert close(8 * codec.nbytes(n) / n, formulas.bits(codec))


def test_shares_of_messages():
    def bits(**options):
        return formulas.FORMULAS["compskip_dsgd"].bits(Case("compskip_dsgd", {"compression": "none", **options}), 2)

    sign = formulas.bits("sign")
    assert bits() == 32 + sign
    assert bits(worker_skip=2) == 16 + sign
    assert bits(worker_skip=2, server_skip=4) == 16 + sign / 4
    assert bits(worker_skip=0.5, server_skip=2) < 32 + sign / 2


def test_a_training_on_imagenet():
    """N = 8: 7/8 of 25.6 M parameters, 4 bytes, twice, in 90 · 5005 steps."""
    training = Training(8, 256)
    assert (training.parameters, training.steps) == (25_557_032, 450_450)
    each = 450_450 * 2 * 7 / 8 * 4 * 25_557_032
    first = training.cells()[0]
    assert first[1:3] == [f"{each / 1e12:.3f}", f"{8 * each / 1e12:.2f}"]
