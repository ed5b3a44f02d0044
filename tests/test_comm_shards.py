"""Push and pull: the owners' sums to the bit, whatever the order in which gradients come, and an end whatever happens."""

import threading
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from support.ways import communicator

from lightning_cocod.comm import CommunicationError, Communicator, NonFiniteMessage, Subject
from lightning_cocod.comm.buckets import Layout
from lightning_cocod.comm.gate import Gate
from lightning_cocod.comm.header import _FORMAT
from lightning_cocod.comm.lane import HostLane
from lightning_cocod.comm.lent import Lent
from lightning_cocod.comm.shards import Push, Rows

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
W = {1: [1.0], 2: [0.75, 0.25], 3: [0.5, 0.25, 0.25], 4: [0.25] * 4}


def about(kind, step=0, **options):
    return Subject("test", kind, step, **options)


def alike(n):
    return about("gradients", weights=(1 / n,) * n)


def gradients(rank, dtype=torch.float32):
    """Their weighted sums are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(7,), (33, 5), (), (4, 3, 2), (1000,), (0,), (257,)]
    return [torch.randn(shape, generator=generator).mul(64).round().div(64).to(dtype) for shape in shapes]


def server(comm, like, cap=1024, apart=None):
    """A layout with small buckets, room for this worker's part, and its shards."""
    layout = Layout(like, cap, apart=apart, multiple=comm.world_size)
    g = layout.buffer()
    s = [torch.full((flat.numel() // comm.world_size,), float("nan"), dtype=flat.dtype) for flat in g.buckets]
    return layout, g, s


def opened(comm, layout, order=None):
    gate = comm.gate(layout)
    for bucket in order or range(len(layout)):
        gate.open(bucket)
    return gate


def push_and_pull(rank, n, dtype):
    with_rows = Rows()
    comm = Communicator()
    comm.start()
    own = gradients(rank, dtype)
    layout, g, s = server(comm, own)
    results, x = [], [torch.zeros_like(t) for t in own]
    for step in range(3):  # memory is used again
        g.copy_([t * 2**step for t in own])
        subject = about("gradients", step, weights=tuple(W[n]))
        comm.push_(g, s, with_rows, opened(comm, layout), subject).wait()
        comm.pull_(s, x, layout, with_rows, about("parameters", step)).wait()
        results.append([t.clone() for t in x])
    comm.close()
    return results, len(layout), comm.ledger.totals()


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_get_the_weighted_sum_to_the_bit_rounded_once(n, dtype):
    parts = [gradients(rank, dtype) for rank in range(n)]
    for results, buckets, totals in run_ranks(push_and_pull, n, dtype):
        assert buckets > 5
        for step, x in enumerate(results):
            for number, t in enumerate(x):
                expected = torch.zeros_like(t, dtype=wide(dtype))
                for rank, part in enumerate(parts):
                    product = (part[number] * 2**step).to(wide(dtype)) * W[n][rank]
                    expected = product if rank == 0 else expected + product
                assert torch.equal(t, expected.to(dtype))
        size = sum(t.numel() for t in parts[0])
        carried = size * (wide(dtype).itemsize + dtype.itemsize) * (n - 1) / n
        assert totals.sent == totals.received
        assert 3 * carried <= totals.sent <= 3 * (carried * 1.01 + buckets * n * 16 + 3 * 112 * n)


def over_gloo_and_round_the_ring(rank, n, dtype):
    """Sums that are not exact, in both ways; and what is pushed, before and after."""
    own = [torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for size in (900, 5, 64)]
    own = [t.to(dtype) if not dtype.is_complex else torch.complex(t, -2 * t).to(dtype) for t in own]
    broken = [torch.full_like(t, float("nan")) if rank == n - 1 else t for t in own]
    weights, results = tuple(1 / 3 * w for w in W[n]), []
    for ring in (True, False):
        comm = communicator(ring=ring)
        layout, g, s = server(comm, own)
        x = [torch.zeros_like(t) for t in own]
        for parts in (own, broken):
            g.copy_(parts)
            subject = about("gradients", weights=weights, skip=True)
            message = comm.push_(g, s, Rows(), opened(comm, layout), subject)
            message.wait()
            comm.pull_(s, x, layout, Rows(), about("parameters")).wait()
            kept = layout.buffer()
            kept.copy_(parts)
            unchanged = all(
                torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(g.buckets, kept.buckets, strict=True)
            )
            results.append(([t.clone() for t in x], message.left_out, unchanged, comm.ledger.totals().sent))
        comm.close()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_where_there_is_no_ring_it_is_the_same_to_the_bit(n, dtype):
    for ring, ring_without_one, gloo, gloo_without_one in run_ranks(over_gloo_and_round_the_ring, n, dtype):
        for here, there in ((ring, gloo), (ring_without_one, gloo_without_one)):
            assert all(torch.equal(a, b) for a, b in zip(here[0], there[0], strict=True))
            assert here[1:] == there[1:]
            assert here[2]
        assert (ring[1], ring_without_one[1]) == ((), (n - 1,))
        assert not torch.equal(ring[0][0], ring_without_one[0][0])


def lent_and_copied(rank, n, dtype):
    """Shards of sums of lent tensors and of a copy of them, of all workers and without the last one, which is not finite."""
    own = [torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype) for size in (901, 5, 64, 300)]
    weights, found = tuple(1 / 3 * w for w in W[n]), []
    for value in (1.0, float("inf")):
        if rank == n - 1:
            own[0][-1] = value
        for lend in (False, True):
            comm = communicator(ring=True)
            layout, g, s = server(comm, own)
            lent = Lent(layout)
            for bucket, pieces in enumerate(layout.pieces(own, keep=False)):
                lent.pieces[bucket] = [None if k == 1 else t for k, t in zip(layout.numbers(bucket), pieces, strict=True)]
            g.copy_([torch.zeros_like(t) if k == 1 else t for k, t in enumerate(own)])
            before = [t.clone() for t in own]
            subject = about("gradients", weights=weights, skip=True)
            message = comm.push_(lent if lend else g, s, Rows(), opened(comm, layout), subject)
            message.wait()
            found.append((s, message.left_out, comm.ledger.totals().sent))
            assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
            comm.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_sums_of_what_is_lent_are_those_of_a_copy_to_the_bit(n, dtype):
    for copied, lent, copied_without_one, lent_without_one in run_ranks(lent_and_copied, n, dtype):
        for here, there in ((copied, lent), (copied_without_one, lent_without_one)):
            assert all(torch.equal(a, b) for a, b in zip(here[0], there[0], strict=True))
            assert here[1:] == there[1:]
        assert (copied[1], copied_without_one[1]) == ((), (n - 1,))
        assert not all(torch.equal(a, b) for a, b in zip(copied[0], copied_without_one[0], strict=True))


def test_one_dtype_less_would_not_do():
    """The negative control: bfloat16 added up in bfloat16 differs."""
    a, b = (gradients(rank, torch.bfloat16)[4] for rank in range(2))
    exact = (a.float() * 0.75 + b.float() * 0.25).bfloat16()
    assert not torch.equal(exact, a * 0.75 + b * 0.25)


# Gates


def in_any_order(rank, n):
    """Buckets are computed in an order of each rank's own, by another thread, after the message has set out."""
    comm = Communicator()
    comm.start()
    own = gradients(rank)
    layout, g, s = server(comm, own)
    g.copy_(own)
    truth = [flat.clone() for flat in g.buckets]
    for flat in g.buckets:
        flat.fill_(float("nan"))  # as long as it has not been computed
    gate = comm.gate(layout)
    message = comm.push_(g, s, Rows(), gate, alike(n))
    order = torch.randperm(len(layout), generator=torch.Generator().manual_seed(rank)).tolist()

    def backward():
        for bucket in order:
            g.buckets[bucket].copy_(truth[bucket])
            gate.open(bucket)

    thread = threading.Thread(target=backward)
    thread.start()
    message.wait()
    thread.join()
    comm.close()
    return order, [flat.clone() for flat in s], [flat.view(n, -1)[rank] for flat in truth], truth


@pytest.mark.parametrize("n", [2, 4])
def test_buckets_may_be_computed_in_any_order(n):
    ranks = run_ranks(in_any_order, n)
    assert len({tuple(order) for order, *_ in ranks}) == n
    for rank, (_, s, _, _) in enumerate(ranks):
        for bucket, shard in enumerate(s):
            expected = sum(truth[bucket].view(n, -1)[rank] * (1 / n) for *_, truth in ranks)
            assert torch.equal(shard, expected)


def timed(rank, n):
    """How long the link is said to have worked, before the lane knows its times, as on a device, and after. 100 seconds pass
    at every gate, and 7 with the push.
    """
    now, is_known, pass_, late_flags = [0.0], [False], Gate.pass_, Push.late_flags

    class LateLane(HostLane):
        def mark(self):
            return now[0]

        def seconds(self, start, end):
            return end - start if is_known[0] else None

    def passing(self, bucket, over):
        now[0] += 100.0
        pass_(self, bucket, over)

    def late(self):
        now[0] += 7.0
        return late_flags(self)

    with mock.patch.object(Gate, "pass_", passing), mock.patch.object(Push, "late_flags", late):
        comm = Communicator()
        comm.lane = LateLane()
        comm.start()
        own = gradients(rank)
        layout, g, s = server(comm, own)
        g.copy_(own)
        comm.push_(g, s, Rows(), opened(comm, layout), alike(n)).wait()
        before = comm.ledger.totals().busy
        is_known[0] = True
        after = comm.ledger.totals().busy
        comm.close()
    return before, after, now[0]


def test_the_link_does_not_work_while_a_bucket_is_being_computed():
    for before, after, passed in run_ranks(timed, 2):
        assert (before, after) == (0.0, 7.0)
        assert passed > 500  # what it would be otherwise


def never_computed(rank, n):
    """Rank 1 fails in the middle of its backward."""
    comm = Communicator(timeout=10.0)
    comm.start()
    own = gradients(rank)
    layout, g, s = server(comm, own)
    g.copy_(own)
    gate = comm.gate(layout)
    message = comm.push_(g, s, Rows(), gate, alike(n))
    gate.open(0)
    if rank == 0:
        for bucket in range(len(layout)):
            gate.open(bucket)
        with pytest.raises(CommunicationError, match=r"rank 1 .*ValueError: in backward"):
            message.wait()
        comm.abort(RuntimeError("follows"))
    else:
        comm.abort(ValueError("in backward"))
        with pytest.raises(CommunicationError, match="ValueError: in backward"):
            message.wait()
    comm.close()


def test_a_backward_that_fails_ends_the_push_on_all_ranks_which_name_it():
    run_ranks(never_computed, 2)


def not_finite(rank, n, value):
    comm = Communicator()
    comm.start()
    own = gradients(rank)
    if rank == 1:
        own[4][500] = value
    layout, g, s = server(comm, own)
    g.copy_(own)
    message = comm.push_(g, s, Rows(), opened(comm, layout), alike(n))
    try:
        with pytest.raises(NonFiniteMessage, match="rank 1"):
            message.wait()
    finally:
        comm.abort(RuntimeError("over"))
        comm.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks_before_it_is_used(value):
    run_ranks(not_finite, 2, value)


def huge(rank, n):
    """Finite, although the squares overflow."""
    comm = Communicator()
    comm.start()
    own = [torch.full((100,), 1e30)]
    layout, g, s = server(comm, own)
    g.copy_(own)
    comm.push_(g, s, Rows(), opened(comm, layout), alike(n)).wait()
    comm.close()
    return s[0][0].item()


def test_large_numbers_are_finite():
    assert run_ranks(huge, 2) == [pytest.approx(1e30)] * 2


# The layout


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 2)), max_size=12),
    st.integers(1, 5),
    st.integers(4, 200),
)
def test_buckets_are_multiples_and_keep_labels_apart(spec, multiple, cap):
    tensors = [torch.arange(size).to(dtype) for size, dtype, _ in spec]
    labels = [label for *_, label in spec]
    layout = Layout(tensors, cap, apart=labels, multiple=multiple)
    assert all(size % multiple == 0 for size in layout.sizes())
    for bucket in range(len(layout)):
        assert len({labels[number] for number in layout.numbers(bucket)}) == 1
    g = layout.buffer()
    g.copy_(tensors)
    back = [torch.zeros_like(t) for t in tensors]
    g.copy_to(back)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
    pads = sum(layout.sizes()) - sum(t.numel() for t in tensors)
    assert pads < max(1, multiple) * max(1, len(layout))


def test_padding_is_zero_and_labels_are_part_of_what_all_must_have_alike():
    tensors = [torch.ones(5), torch.ones(6)]
    g = Layout(tensors, multiple=4).buffer()
    g.copy_(tensors)
    assert g.buckets[0].tolist() == [1.0] * 11 + [0.0]
    fingerprints = {Layout(tensors, apart=apart, multiple=m).fingerprint for apart in (None, [0, 1], [1, 0]) for m in (1, 2)}
    assert len(fingerprints) == 6


def without_one(rank, n):
    """Rank 1's gradient is not finite and the others go on without it; rank 0 lacks a gradient."""
    comm = Communicator()
    comm.start()
    own = gradients(rank)
    if rank == 1:
        own[1][3] = float("nan")
    layout, g, s = server(comm, own)
    g.copy_(own)
    gate = comm.gate(layout)
    gate.lacking = rank == 0
    for bucket in range(len(layout)):
        gate.open(bucket)
    subject = about("gradients", weights=(0.25, 0.5, 0.25), skip=True)
    message = comm.push_(g, s, Rows(), gate, subject)
    message.wait()
    x = [torch.zeros_like(t) for t in own]
    pushed = comm.ledger.totals().sent
    comm.pull_(s, x, layout, Rows(), about("parameters")).wait()
    comm.close()
    moved = 4 * sum(flat.numel() for flat in g.buckets) * (n - 1) // n
    return message.left_out, message.lacking, x, pushed - 2 * _FORMAT.size * (n - 1) == 2 * moved


def test_the_others_go_on_without_one_and_all_know_that_something_is_lacking():
    for left_out, lacking, x, all_is_counted in run_ranks(without_one, 3):
        assert (left_out, lacking) == ((1,), True)
        assert all_is_counted  # it was sent twice
        for number, t in enumerate(x):
            assert torch.equal(t, gradients(0)[number] * 0.5 + gradients(2)[number] * 0.5)
