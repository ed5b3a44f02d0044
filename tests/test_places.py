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


class Worker:
    """One of those that pull, with memory for shards of its own."""

    def __init__(self, ring, layout):
        self.ring, self.layout, self.rows = ring, layout, Rows()
        self.s = layout.shard(ring.n)

    def pull(self, x, factor=1):
        """The shards, times a factor. Returns how many values have come to lie in scratch memory."""
        torch._foreach_copy_(self.s, [flat.view(self.ring.n, -1)[self.ring.place] for flat in numbered(self.layout).buckets])
        torch._foreach_mul_(self.s, factor)
        memory = new_scratch()
        for turn in memory:
            for bucket in range(len(self.layout)):
                self.layout.scratch(bucket, turn, summed=False).fill_(torch.nan)
        operation = Pull(self.s, x, self.layout, self.ring.place, self.rows)
        run(operation, None, self.ring, memory, threading.Event(), Tracer())
        return max(int((~values.isnan()).sum()) for turn in memory for values in turn.values())


@pytest.fixture
def workers():
    """Makes them, for a layout."""
    rings = []

    def make(layout):
        rings.extend(made := ring_of(layout.multiple))
        return [Worker(ring, layout) for ring in made]

    yield make
    for ring in rings:
        ring.close()


def all_pull(workers, xs, factor=1):
    """What each returns."""
    found = at_once(*(lambda w=w, x=x: w.pull(x, factor) for w, x in zip(workers, xs, strict=True)))
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def fresh(n, sizes=SIZES, make=torch.zeros):
    return [[make(size) for size in sizes] for _ in range(n)]


def arrived(x, layout, factor=1):
    expected = [torch.empty_strided(t.size(), t.stride()) for t in x]
    numbered(layout).copy_to(expected)
    return all(torch.equal(t, (e * factor).to(t.dtype)) for t, e in zip(x, expected, strict=True))


def with_gaps(size):
    return torch.full((*size, 2), -1.0)[..., 0].zero_()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_of_it_arrives_and_what_is_of_one_tensor_without_a_copy(n, workers):
    """No scratch memory holds any of a tensor that fills its buckets."""
    cap = 256 // n * n * 4
    for sizes, fits in ((SIZES, False), ([(cap,)], True)):
        xs = fresh(n, sizes)
        layout = Layout(xs[0], cap, multiple=n)
        used = all_pull(workers(layout), xs)
        assert all(arrived(x, layout) for x in xs)
        assert any(used) != fits


def test_tensors_with_gaps_go_through_scratch_memory(workers):
    xs = fresh(2, make=with_gaps)
    layout = Layout(xs[0], CAP, multiple=2)
    assert all(count > 0 for count in all_pull(workers(layout), xs))
    for x in xs:
        assert arrived(x, layout)
        assert all((t._base[..., 1] == -1).all() for t in x)


def test_tensors_that_have_moved_are_found(workers):
    xs = fresh(2)
    layout = Layout(xs[0], CAP, multiple=2)
    both = workers(layout)
    all_pull(both, xs)
    places = both[0].rows._places
    all_pull(both, xs, 2)
    assert both[0].rows._places is places
    moved = fresh(2)
    all_pull(both, moved, 3)
    assert all(arrived(x, layout, 3) for x in moved)
    assert all(arrived(x, layout, 2) for x in xs)  # they have been left alone


def test_shards_that_have_moved_are_found(workers):
    xs = fresh(2)
    layout = Layout(xs[0], CAP, multiple=2)
    both = workers(layout)
    all_pull(both, xs)
    for worker in both:
        worker.s = [torch.full_like(s, torch.nan) for s in worker.s]
    all_pull(both, xs, 2)
    assert all(arrived(x, layout, 2) for x in xs)


def test_tensors_of_another_dtype_than_the_layout_s_are_cast(workers):
    """A model may have been cast since. bfloat16 has 8 bits of these numbers."""
    xs = fresh(2, [(256,)])
    layout = Layout(xs[0], 4 * 256, multiple=2)
    both = workers(layout)
    all_pull(both, xs)
    xs = [[t.bfloat16() for t in x] for x in xs]
    all_pull(both, xs, 3)
    assert all(arrived(x, layout, 3) for x in xs)


def test_tensors_in_another_memory_order_in_the_same_memory_are_refused(workers):
    xs = fresh(2, [(16, 16)])
    layout = Layout(xs[0], CAP, multiple=2)
    both = workers(layout)
    all_pull(both, xs)
    with pytest.raises(ValueError, match="memory order of a tensor has changed"):
        all_pull(both, [[t.t() for t in x] for x in xs])


def test_autograd_knows_that_what_has_landed_has_changed(workers):
    """Whoever keeps a graph over a pull is told, on all workers."""
    xs = fresh(2, [(128,), (128,)])
    layout = Layout(xs[0], CAP, multiple=2)
    assert not any(all_pull(workers(layout), [[t.requires_grad_().detach() for t in x] for x in xs]))
    kept = [[(t * t).sum() for t in x] for x in xs]
    all_pull(workers(layout), [[t.detach() for t in x] for x in xs], 2)
    for x, losses in zip(xs, kept, strict=True):
        for t, loss in zip(x, losses, strict=True):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, t)
