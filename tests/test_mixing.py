"""Mixing matrices: what is promised of them, and one line for what is none."""

import numpy as np
import pytest
import torch

from lightning_cocod.comm.mixing import DIRECTED, UNDIRECTED, directed, is_regular, pushed, undirected

SIZES = [1, 2, 3, 4, 5, 7, 8, 16]


def second(W):
    """The second largest eigenvalue in absolute value."""
    values = np.sort(np.abs(np.linalg.eigvals(np.array(W))))
    return values[-2] if len(values) > 1 else 0.0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", UNDIRECTED)
def test_undirected_graphs_are_symmetric_doubly_stochastic_and_mix(name, n):
    (W,) = undirected(name, n)
    assert np.array_equal(np.array(W), np.array(W).T)
    assert np.allclose(np.sum(W, 1), 1, atol=1e-15)
    assert second(W) < 1 - 1e-3
    assert undirected(W, n) == (W,)  # what a user may give


def test_they_are_those_that_their_names_say():
    assert undirected("ring", 1) == (((1.0,),),)
    assert undirected("ring", 2) == (((0.5, 0.5), (0.5, 0.5)),)
    third = 1 / 3
    assert undirected("ring", 5)[0][0] == (third, third, 0, 0, third)
    assert undirected("exponential", 8)[0][0] == tuple(1 / 6 if j != 3 and j != 5 else 0 for j in range(8))
    assert all(weight == 0.25 for row in undirected("full", 4)[0] for weight in row)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", DIRECTED)
def test_directed_graphs_are_column_stochastic_and_regular(name, n):
    matrices, w = directed(name, n), [1.0] * n
    product = np.eye(n)
    for P in matrices * (1 if name == "one_peer" else 4):
        assert np.allclose(np.sum(P, 0), 1, atol=1e-15)
        assert all(P[i][i] > 0 for i in range(n))
        assert is_regular(P)
        w, product = pushed(P, w), np.array(P) @ product
    assert w == [1.0] * n
    assert (product > 0).all()  # all hear of all
    if name == "one_peer" and n in (2, 4, 8, 16):
        assert np.allclose(product, 1 / n)  # and the mean is exact after log₂ N exchanges


def test_one_peer_graphs_have_one_receiver_and_one_sender():
    for k, P in enumerate(directed("one_peer", 5)):
        for j in range(5):
            assert [i for i in range(5) if P[i][j] and i != j] == [(j + 2**k) % 5]


def test_weights_of_an_irregular_graph_add_up_to_the_number_of_workers():
    (P,), w = directed({0: [1, 2], 1: [2], 2: [0]}, 3), [1.0] * 3
    assert not is_regular(P)
    assert P == ((1 / 3, 0.0, 0.5), (1 / 3, 0.5, 0.0), (1 / 3, 0.5, 0.5))
    for _ in range(50):
        w = pushed(P, w)
        assert abs(sum(w) - 3) < 1e-12
    assert max(w) - min(w) > 0.1


def test_a_matrix_may_be_a_tensor_or_an_array():
    W = undirected("ring", 4)[0]
    assert undirected(torch.tensor(W, dtype=torch.float64), 4) == (W,) == undirected(np.array(W), 4)
    assert directed(torch.tensor(W, dtype=torch.float64), 4) == (W,)


HALF = [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("graph", "n", "text"),
    [
        ("star", 2, "graph must be 'ring', 'exponential', 'full' or a matrix of weights, got 'star'"),
        (3, 2, "graph must be 'ring'"),
        ({0: [1], 1: [0]}, 2, "graph must be 'ring'"),
        ([[1.0]], 2, "graph is one of 1 workers, there are 2"),
        ([[0.5, 0.5], [1.0]], 2, r"graph must be a square matrix, a row for each worker, got rows of \[2, 1\]"),
        ([], 2, "graph must be a square matrix"),
        ([1.0, 0.0], 2, "graph must be a square matrix"),
        ([[1.5, -0.5], [-0.5, 1.5]], 2, "graph must have numbers of at least 0, got -0.5"),
        ([[float("nan"), 0.5], [0.5, 0.5]], 2, "graph must have numbers of at least 0, got nan"),
        ([["a", 0.5], [0.5, 0.5]], 2, "graph must have numbers of at least 0, got 'a'"),
        ([[0.5, 0.5], [0.4, 0.6]], 2, r"graph must be symmetric: weight \[0\]\[1\] is 0.5, \[1\]\[0\] is 0.4"),
        ([[0.5, 0.4], [0.4, 0.5]], 2, "graph must have rows that add up to 1: row 0 adds up to 0.9"),
        ([[1.0, 0.0], [0.0, 1.0]], 2, "graph must connect all workers"),
        ([[0.0, 1.0], [1.0, 0.0]], 2, "graph only swaps what workers have"),
    ],
)
def test_what_is_no_undirected_graph_is_refused_in_one_line(graph, n, text):
    with pytest.raises(ValueError, match=text) as error:
        undirected(graph, n)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("graph", "n", "text"),
    [
        ("ring", 2, "graph must be 'one_peer', 'exponential', 'full' or a matrix of weights, or the workers that each"),
        (HALF, 3, "graph is one of 2 workers, there are 3"),
        ([[0.5, 0.5], [0.4, 0.5]], 2, "graph must have columns that add up to 1: column 0 adds up to 0.9"),
        ([[0.0, 0.5], [1.0, 0.5]], 2, r"graph must leave each worker a part of what it has: weight \[0\]\[0\] is 0"),
        ([[1.0, 0.5], [0.0, 0.5]], 2, "graph must connect all workers"),
        ({0: [1], 2: [0]}, 2, "graph must say of each worker, from 0 on, whom it sends to"),
        ({0: [1], 1: [5]}, 2, r"graph has workers 0 to 1, but worker 1 sends to \[5\]"),
        ({0: [1], 1: []}, 2, "graph must connect all workers"),
    ],
)
def test_what_is_no_directed_graph_is_refused_in_one_line(graph, n, text):
    with pytest.raises(ValueError, match=text) as error:
        directed(graph, n)
    assert "\n" not in str(error.value)


def test_one_worker_looks_at_a_matrix_only_for_itself():
    assert undirected(HALF, 1) == directed(HALF, 1) == (((1.0,),),)
    with pytest.raises(ValueError, match="symmetric"):
        undirected([[0.5, 0.5], [0.4, 0.6]], 1)
