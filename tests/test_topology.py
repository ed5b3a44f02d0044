"""Graphs for gossip: bipartite, connected, and gone through fairly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cocod.comm.topology import NAMES, Topology, as_topology, at_random, exponential, is_active, ring

SIZES = st.integers(1, 40)


@given(st.sampled_from(NAMES), SIZES)
def test_every_edge_joins_the_two_sides_and_all_ranks_are_connected(name, n):
    topology = as_topology(name, n)
    assert all(is_active(a) and not is_active(p) for a, p in topology.edges)
    assert Topology(n, topology.edges).edges == topology.edges  # which looks whether it is connected
    assert all((a in topology.neighbours(p)) and (p in topology.neighbours(a)) for a, p in topology.edges)
    assert sum(len(topology.neighbours(rank)) for rank in range(n)) == 2 * len(topology.edges)


@given(SIZES)
def test_a_ring_of_an_even_number_is_one_and_of_an_odd_number_a_path(n):
    degrees = sorted(len(ring(n).neighbours(rank)) for rank in range(n))
    if n == 1:
        assert degrees == [0]
    elif n == 2:
        assert degrees == [1, 1]
    elif n % 2 == 0:
        assert degrees == [2] * n
    else:
        assert degrees == [1, 1] + [2] * (n - 2)


@given(SIZES)
def test_exponential_has_the_distances_one_and_one_plus_powers_of_two(n):
    allowed = {1} | {1 + 2**i for i in range(1, 10)}
    for a, p in exponential(n).edges:
        assert {(a - p) % n, (p - a) % n} & allowed
    assert set(ring(n).edges) <= set(exponential(n).edges)
    if n >= 8 and n % 2 == 0:
        assert {(p - 0) % n for p in exponential(n).neighbours(0)} >= {1, 3, 5}


def test_exponential_of_sixteen():
    assert exponential(16).neighbours(0) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert exponential(32).neighbours(0) == (1, 3, 5, 9, 15, 17, 23, 27, 29, 31)


@given(st.integers(1, 20).map(lambda half: 2 * half))
def test_active_ranks_of_an_even_ring_ask_different_ones_in_their_first_exchanges(n):
    for exchange in range(4):
        asked = [ring(n).partner(rank, exchange, range(n)) for rank in range(0, n, 2)]
        assert len(set(asked)) == n // 2


@given(st.sampled_from(["ring", "exponential"]), st.integers(2, 40), st.data())
def test_partners_come_in_turn_and_only_from_those_that_are_left(name, n, data):
    topology = as_topology(name, n)
    rank = data.draw(st.sampled_from(range(0, n, 2)))
    among = data.draw(st.sets(st.integers(0, n - 1)))
    left = set(topology.neighbours(rank)) & among
    asked = [topology.partner(rank, exchange, among) for exchange in range(2 * len(left) or 1)]
    if not left:
        assert asked == [None]
    else:
        assert all(asked.count(other) == 2 for other in left)
        assert set(asked) == left


@given(st.integers(2, 40), st.integers(0, 5))
def test_random_draws_across_the_two_sides_alike_for_one_seed(n, seed):
    draws = [[at_random(n, seed).partner(0, k, range(n)) for k in range(40)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert all(not is_active(other) for other in draws[0])
    assert at_random(n).neighbours(0) == tuple(range(1, n, 2))


def test_other_seeds_draw_others():
    assert len({tuple(at_random(16, seed).partner(0, k, range(16)) for k in range(20)) for seed in range(4)}) == 4


@given(st.integers(2, 30), st.data())
def test_edges_of_a_user_that_join_equals_are_refused(n, data):
    first = data.draw(st.integers(0, n - 1))
    second = data.draw(st.sampled_from(range(first % 2, n, 2)))
    with pytest.raises(ValueError, match="joins equals") as caught:
        Topology(n, [*ring(n).edges, (first, second)])
    assert "\n" not in str(caught.value)


@given(st.integers(3, 30), st.data())
def test_a_graph_of_a_user_is_refused_exactly_if_it_is_not_connected(n, data):
    edges = data.draw(st.lists(st.sampled_from(at_random(n).edges)))
    component = list(range(n))  # by union, where the class searches
    for a, p in edges:
        component = [component[a] if c == component[p] else c for c in component]
    if len(set(component)) == 1:
        assert set(Topology(n, edges).edges) == set(edges)
    else:
        with pytest.raises(ValueError, match="must connect all ranks"):
            Topology(n, edges)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 4)], "there is no rank 4 among 4"),
        ([(-1, 2)], "there is no rank -1 among 4"),
        ([(0, 1, 2)], "an edge is a pair"),
        ([(0, True)], "an edge is a pair"),
        ([(0, 1.0)], "an edge is a pair"),
        ([3], "an edge is a pair"),
        ([(0, 2)], "joins equals"),
        ([(0, 1), (2, 3)], "no path leads from rank 0 to rank 2"),
        ([], "no path leads from rank 0 to rank 1"),
        ("star", "'exponential', 'random' or a list of edges, got 'star'"),
        (3, "or a list of edges, got 3"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(edges, message):
    with pytest.raises(ValueError, match=message) as caught:
        as_topology(edges, 4)
    assert "\n" not in str(caught.value)


def test_one_rank_has_no_edges():
    assert [as_topology(name, 1).edges for name in NAMES] == [(), (), ()]
    assert as_topology([], 1).partner(0, 0, [0]) is None


def test_an_edge_may_be_said_in_either_direction_and_twice():
    assert as_topology([(1, 0), [0, 1], (2, 1)], 3).edges == ((0, 1), (2, 1))
