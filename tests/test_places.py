"""Shards set out from where they lie and land where they belong, and only what belongs to several tensors is copied."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import at_once, ring_of

from lightning_cocod.comm.buckets import Layout
from lightning_cocod.comm.carrying import new_scratch, run
from lightning_cocod.comm.shards import Pull, Rows
from lightning_cocod.comm.tracer import Tracer

SIZES = [(900,), (7,), (3, 5), (), (0,), (400,)]
CAP = 1024  # bytes of a bucket: 256 values


def numbered(layout):
    """A buffer of values that are all different, but for the padding."""
    buffer, count = layout.buffer(), 1
    for bucket, flat in enumerate(buffer.buckets):
        for piece in layout.parts(bucket):
            flat[piece.offset : piece.end] = torch.arange(count, count + piece.stop - piece.start)
            count += piece.stop - piece.start
    return buffer


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=9), st.integers(1, 5), st.integers(4, 200))
def test_shares_of_a_bucket_are_what_lies_in_equal_parts_of_it(sizes, n, cap):
    tensors = [torch.zeros(size) for size in sizes]
    layout = Layout(tensors, cap, multiple=n)
    buffer = numbered(layout)
    buffer.copy_to(tensors)
    for bucket, flat in enumerate(buffer.buckets):
        for part, pieces in zip(flat.view(n, -1), layout.shares(bucket, n), strict=True):
            rebuilt = torch.zeros_like(part)
            for piece in pieces:
                rebuilt[piece.offset : piece.end] += tensors[piece.index][piece.start : piece.stop]
            assert torch.equal(rebuilt, part)


def scratch_of_nan(layout):
    memory = new_scratch()
    for turn in memory:
        for bucket in range(len(layout)):
            layout.scratch(bucket, turn, summed=False).fill_(torch.nan)
    return memory


def pull(ring, x, layout, rows):
    """How many values have come to lie in scratch memory."""
    s = [flat.view(ring.n, -1)[ring.place].clone() for flat in numbered(layout).buckets]
    operation, memory = Pull(s, x, layout, ring.place, rows), scratch_of_nan(layout)
    run(operation, None, ring, memory, threading.Event(), Tracer())
    return max(int((~values.isnan()).sum()) for turn in memory for values in turn.values())


def all_pull(n, xs, layout, rows):
    rings = ring_of(n)
    used = at_once(*(lambda r=r: pull(rings[r], xs[r], layout, rows[r]) for r in range(n)))
    for ring in rings:
        ring.close()
    return used


def fresh(n, sizes=SIZES, make=torch.zeros):
    return [[make(size) for size in sizes] for _ in range(n)]


def with_gaps(size):
    return torch.full((*size, 2), -1.0)[..., 0].zero_()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_of_it_arrives_and_what_is_of_one_tensor_without_a_copy(n):
    """No scratch memory holds any of a tensor that fills its buckets."""
    for sizes, fits in ((SIZES, False), ([(256 // n * n * 4,)], True)):
        xs = fresh(n, sizes)
        layout = Layout(xs[0], 256 // n * n * 4, multiple=n)
        used = all_pull(n, xs, layout, [Rows() for _ in range(n)])
        expected = fresh(1, sizes)[0]
        numbered(layout).copy_to(expected)
        for x in xs:
            assert all(torch.equal(a, b) for a, b in zip(x, expected, strict=True))
        assert any(used) != fits


def test_tensors_with_gaps_go_through_scratch_memory():
    xs = fresh(2, make=with_gaps)
    layout = Layout(xs[0], CAP, multiple=2)
    assert all(count > 0 for count in all_pull(2, xs, layout, [Rows(), Rows()]))
    expected = fresh(1, make=with_gaps)[0]
    numbered(layout).copy_to(expected)
    for x in xs:
        assert all(torch.equal(a, b) for a, b in zip(x, expected, strict=True))
        assert all((t._base[..., 1] == -1).all() for t in x)


def test_where_they_lie_is_found_once_and_again_for_tensors_that_have_moved():
    xs, rows = fresh(2), [Rows(), Rows()]
    layout = Layout(xs[0], CAP, multiple=2)
    shards = [[flat.view(2, -1)[r].clone() for flat in numbered(layout).buckets] for r in range(2)]
    first = rows[0].places(shards[0], xs[0], layout, 0)
    assert rows[0].places(shards[0], [t.detach() for t in xs[0]], layout, 0) is first
    all_pull(2, xs, layout, rows)
    moved = fresh(2)
    all_pull(2, moved, layout, rows)
    for x, there in zip(xs, moved, strict=True):
        assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(x, there, strict=True) if a.numel())
        torch._foreach_zero_(there)
    all_pull(2, xs, layout, rows)
    assert not any(t.any() for there in moved for t in there)
