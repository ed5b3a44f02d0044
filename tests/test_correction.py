"""Corrections round a ring: exact, the same mean everywhere to the bit, without the ones left out, in three rooms."""

import random
import threading
from contextlib import closing
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks
from support.rings import at_once, ring_of
from support.ways import communicator

from lightning_cocod.comm import Subject, buckets
from lightning_cocod.comm.buckets import Layout
from lightning_cocod.comm.cargo import Filled
from lightning_cocod.comm.carrying import new_scratch
from lightning_cocod.comm.correction import Correction, Rooms, RunningMean
from lightning_cocod.comm.ring import IN_FLIGHT, Leg
from lightning_cocod.comm.tracer import Tracer

SIZES = [[5], [1, 1], [1000, 17, 4096, 1, 2, 64], [4000] * 7]


def tensors_of(n, sizes, dtype):
    torch.manual_seed(n)
    return [[torch.randn(size, dtype=dtype) * 100 for size in sizes] for _ in range(n)]


def corrected(ring, tensors, weights, own=1.0, cap=800, late=None):
    """What S becomes, the correction's account of how far it moved, and the scratch memory."""
    snapshot = Layout(tensors, cap).buffer()
    snapshot.copy_(tensors)
    correction, scratch = Correction(snapshot, weights, ring.place, own), new_scratch()
    correction.is_finite(correction.size())  # as it is asked before anything is sent

    def cargoes():
        for bucket in range(len(correction.layout)):
            if late is not None:
                threading.Event().wait(late.random() * 2e-3)
            cargo = correction.cargo(bucket, bucket % IN_FLIGHT, ring, scratch, Tracer())
            assert isinstance(cargo, RunningMean)
            yield cargo

    for _ in ring.travel(Leg.ALL_REDUCE, cargoes(), len(correction.layout), threading.Event()):
        pass
    assert len(correction._rooms[tensors[0].dtype]._free) == 3  # all are given back
    out = [torch.empty_like(t) for t in tensors]
    snapshot.copy_to(out)
    return out, correction.distance(), scratch


def everybody(n, tensors, weights, **options):
    rings = ring_of(n)
    try:
        results = at_once(*(lambda r=r: corrected(rings[r], tensors[r], weights, **options) for r in range(n)))
    finally:
        for ring in rings:
            ring.close()
    assert not [error for error in results if isinstance(error, Exception)], results
    return results


def exact(tensors, weights):
    """In float64, without those of weight 0."""
    return [sum(w * t.double() for w, t in zip(weights, same, strict=True) if w) for same in zip(*tensors, strict=True)]


def weights_of(n, kind):
    if kind == "equal":
        return [1 / n] * n
    drawn = [1.0 + rank for rank in range(n)]
    if kind == "one left out":
        drawn[n // 2] = 0.0
    return [w / sum(drawn) for w in drawn]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["equal", "unequal", "one left out"])
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_the_correction_is_exact_and_the_mean_the_same_everywhere(n, kind, dtype):
    weights, close = weights_of(n, kind), 1e-12 if dtype is torch.float64 else 1e-4
    for sizes in SIZES:
        tensors = tensors_of(n, sizes, dtype)
        if kind == "one left out":
            tensors[n // 2] = [torch.full_like(t, torch.nan) for t in tensors[n // 2]]
        means = exact(tensors, weights)
        for rank, (S, distance, _) in enumerate(everybody(n, tensors, weights)):
            own = tensors[rank] if weights[rank] else [torch.zeros_like(t) for t in tensors[rank]]
            for t, x, mean in zip(S, own, means, strict=True):
                torch.testing.assert_close(t.double(), mean - x.double(), rtol=0, atol=close)
            if weights[rank]:
                moved = sum((m - x.double()).square().sum() for m, x in zip(means, own, strict=True)).sqrt()
                assert float(distance) == pytest.approx(float(moved), rel=1e-3)
        S = [result[0] for result in everybody(n, tensors, weights, own=0.0)]
        assert all(torch.equal(a, b) for other in S[1:] for a, b in zip(S[0], other, strict=True))


@pytest.mark.parametrize("own", [0.0, 0.25, 1.0])
def test_a_part_of_ones_own_is_taken_off(own):
    tensors, weights = tensors_of(3, [300, 5], torch.float64), weights_of(3, "unequal")
    for rank, (S, _, _) in enumerate(everybody(3, tensors, weights, own=own)):
        for t, x, mean in zip(S, tensors[rank], exact(tensors, weights), strict=True):
            torch.testing.assert_close(t, mean - own * x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_where_all_agree_nothing_is_corrected_to_the_bit(n):
    """A sum of w x is not x: 1/3 of it, three times."""
    (x, *_) = tensors_of(n, [997], torch.float32)
    for S, distance, _ in everybody(n, [x] * n, weights_of(n, "unequal")):
        assert not S[0].any()
        assert float(distance) == 0
    w = weights_of(3, "equal")
    assert not torch.equal(sum(w[r] * x[0] for r in range(3)), x[0])  # the negative control


def test_the_only_one_that_is_left_is_the_mean():
    tensors = tensors_of(3, [100], torch.float32)
    for rank, (S, _, _) in enumerate(everybody(3, tensors, [0.0, 1.0, 0.0])):
        assert torch.equal(S[0], torch.zeros(100) if rank == 1 else tensors[1][0])


def huge():
    return [[torch.tensor([-2.5e38, 1.0])], [torch.tensor([2.5e38, 3.0])]]


def test_a_mean_of_values_whose_difference_would_overflow_is_finite(monkeypatch):
    for sign, (S, _, _) in zip((1, -1), everybody(2, huge(), [0.5, 0.5]), strict=True):
        torch.testing.assert_close(S[0], torch.tensor([sign * 2.5e38, sign * 1.0]))
    monkeypatch.setattr(Correction, "is_finite", lambda *_: True)  # the negative control
    assert not any(S[0].isfinite().all() for S, _, _ in everybody(2, huge(), [0.5, 0.5]))


def test_weights_that_ignore_who_has_been_passed_would_be_wrong(monkeypatch):
    """The negative control."""
    landed = RunningMean.landed

    def alike(self, part, under_way):
        self._weights = [1.0] * len(self._weights)
        landed(self, part, under_way)

    monkeypatch.setattr(RunningMean, "landed", alike)
    tensors, weights = tensors_of(3, [100], torch.float64), weights_of(3, "unequal")
    (S, _, _), *_ = everybody(3, tensors, weights)
    assert not torch.allclose(S[0], exact(tensors, weights)[0] - tensors[0][0])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_three_rooms_are_enough_in_any_timing_and_two_buckets_of_scratch_are_not_filled(n):
    draw = random.Random(n)
    for _ in range(5):
        tensors, weights = tensors_of(n, [3000, 1, 5000, 700], torch.float32), weights_of(n, "equal")
        late = random.Random(draw.random())
        for rank, (S, _, scratch) in enumerate(everybody(n, tensors, weights, cap=2000, late=late)):
            for t, x, mean in zip(S, tensors[rank], exact(tensors, weights), strict=True):
                torch.testing.assert_close(t.double(), mean - x.double(), rtol=0, atol=1e-4)
            assert sum(m.numel() for memory in scratch for m in memory.values()) == 3 * -(-500 // n)


@pytest.mark.parametrize(("n", "buckets"), [(2, 3), (2, 4), (3, 3), (3, 4), (4, 3)])
def test_parts_larger_than_what_sockets_buffer_wait_for_a_room(n, buckets, monkeypatch):
    """With one slow worker the others have to wait for room to send; from three workers on, parts wait for rooms as well."""
    tensors, weights, waited = tensors_of(n, [buckets * 500_000], torch.float64), weights_of(n, "unequal"), []
    take = Rooms.take

    def slow(rooms, size):
        taken = take(rooms, size)
        waited.append(taken is None)
        return taken

    monkeypatch.setattr(Rooms, "take", slow)
    for rank, (S, _, _) in enumerate(everybody(n, tensors, weights, cap=4_000_000, late=random.Random(0))):
        torch.testing.assert_close(S[0], exact(tensors, weights)[0] - tensors[rank][0], rtol=0, atol=1e-11)
    assert any(waited) == (n > 2)


def test_buckets_of_several_dtypes_have_rooms_of_their_own():
    tensors = [
        [t.to(dtype) for t, dtype in zip(of_one, (torch.float32, torch.float64, torch.float32), strict=True)]
        for of_one in tensors_of(3, [900, 700, 300], torch.float64)
    ]
    weights = weights_of(3, "unequal")
    for rank, (S, _, scratch) in enumerate(everybody(3, tensors, weights)):
        for t, x, mean in zip(S, tensors[rank], exact(tensors, weights), strict=True):
            close = 1e-12 if t.dtype is torch.float64 else 1e-4
            torch.testing.assert_close(t.double(), mean - x.double(), rtol=0, atol=close)
        assert {dtype for memory in scratch for dtype, _ in memory} == {torch.float32, torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_what_is_added_up_otherwise_is_filled_into_scratch(dtype):
    rings = ring_of(2)
    with closing(rings[0]), closing(rings[1]):
        snapshot = Layout([torch.zeros(9), torch.zeros(9, dtype=dtype)]).buffer()
        correction, scratch = Correction(snapshot, [0.5, 0.5], 0), new_scratch()
        for bucket in range(2):
            assert isinstance(correction.cargo(bucket, bucket, rings[0], scratch, Tracer()), Filled)


def both_ways(rank, n, weights):
    """S over Gloo and round a ring."""
    found = []
    for with_ring in (False, True):
        with closing(communicator(ring=with_ring)) as comm, mock.patch.object(buckets, "BUCKET_BYTES", 4096):
            tensors = tensors_of(n, [3000, 77], torch.float32)[rank]
            snapshot = comm.layout(tensors).buffer()
            snapshot.copy_(tensors)
            comm.correction_(snapshot, Subject("test", "round", 1, weights=tuple(weights))).wait()
            found.append(torch.cat(snapshot.buckets))
            assert bool(snapshot._parts) == with_ring
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_over_gloo_it_is_the_same_but_for_rounding(n):
    for gloo, ring in run_ranks(both_ways, n, weights_of(n, "unequal")):
        torch.testing.assert_close(gloo, ring, rtol=0, atol=1e-4)
        assert gloo.abs().max() > 1
