"""An exchange with neighbours: the sum of differences to the bit, bytes to neighbours only, and who is left out."""

import pytest
import torch
from support.ranks import run_ranks

from lightning_cocod.comm import Communicator, Subject
from lightning_cocod.comm.buckets import Layout
from lightning_cocod.comm.mixing import directed, one_peer, undirected
from lightning_cocod.comm.shards import Rows

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SHAPES = [(7,), (33, 5), (), (1000,), (0,), (257,)]
PATH = ((0.75, 0.25, 0.0), (0.25, 0.5, 0.25), (0.0, 0.25, 0.75))
"""Of three workers, whose ends are no neighbours."""
GRAPHS = {3: {"path": PATH, "ring": undirected("ring", 3)[0], "sends": directed({0: [1, 2], 1: [2], 2: [0]}, 3)[0]}}
GRAPHS |= {2: {"ring": undirected("ring", 2)[0]}, 4: {"one peer": one_peer(4)[1], "full": undirected("full", 4)[0]}}


def snapshot(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    kind = torch.complex64 if dtype.is_complex else torch.float64
    return [torch.randn(shape, generator=generator, dtype=kind).to(dtype) for shape in SHAPES]


def about(step, **options):
    return Subject("test", "round", step, **options)


def mixes(rank, n):
    comm, rows, found = Communicator(), Rows(), {}
    comm.start()
    for step, (name, W) in enumerate(GRAPHS[n].items()):
        for dtype in DTYPES:
            x = snapshot(rank, dtype)
            layout = Layout(x, 1024)
            for kept in (0.0, 0.5):  # memory is used again
                S, before = layout.buffer(), comm.ledger.totals()
                S.copy_(x)
                comm.mix_(S, W, rows, about(step), kept=kept).wait()
                out = [torch.empty_like(t) for t in x]
                S.copy_to(out)
                moved = comm.ledger.totals() - before
                found[name, dtype, kept] = out, moved.sent - 112 * (n - 1), moved.received - 112 * (n - 1), layout.nbytes
            assert len(layout) > 1
    comm.close()
    return found


@pytest.mark.parametrize("n", GRAPHS)
def test_all_get_the_weighted_sum_of_differences_to_the_bit_from_neighbours_only(n):
    for rank, found in enumerate(run_ranks(mixes, n)):
        for (name, dtype, kept), (out, sent, received, nbytes) in found.items():
            W, wide = GRAPHS[n][name], torch.promote_types(dtype, torch.float32)
            others = [j for j in range(n) if j != rank]
            assert sent == nbytes * sum(W[j][rank] > 0 for j in others)
            assert received == nbytes * sum(W[rank][j] > 0 for j in others)
            every = [snapshot(r, dtype) for r in range(n)]
            for number, t in enumerate(out):
                own, expected = every[rank][number].to(wide), torch.zeros_like(t, dtype=wide)
                for j in others:
                    if W[rank][j]:
                        expected = expected.add(every[j][number].to(wide) - own, alpha=W[rank][j])
                if kept:
                    expected = expected.add(own, alpha=kept)
                assert torch.equal(t, expected.to(dtype)), (name, dtype, kept)


def test_sums_in_half_precision_would_differ():
    """The negative control."""
    a, b, c = (snapshot(r, torch.bfloat16)[3] for r in range(3))
    exact = ((b.float() - a.float()) / 3 + (c.float() - a.float()) / 3).bfloat16()
    assert not torch.equal(exact, (b - a) / 3 + (c - a) / 3)


def left_out(rank, n):
    comm = Communicator()
    comm.start()
    x = snapshot(rank, torch.float32)
    if rank == 1:
        x[0][0] = torch.nan
    S = Layout(x, 1024).buffer()
    S.copy_(x)
    message = comm.mix_(S, PATH, Rows(), about(0, weights=(1 / 3,) * 3, skip=True), kept=0.5)
    message.wait()
    comm.close()
    return message.left_out, all((bucket == 0).all() for bucket in S.buckets), comm.ledger.totals().sent


def test_where_one_is_not_finite_nobody_sends_and_nothing_is_mixed():
    assert run_ranks(left_out, 3) == [((1,), True, 2 * 112)] * 3
