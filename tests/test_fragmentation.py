"""How a model is cut into fragments."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_cocod.algorithms.fragmentation import assign, cut

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=8)


def runs(numbers, sizes):
    """What each fragment weighs."""
    return [sum(size for number, size in zip(numbers, sizes, strict=True) if number == n) for n in range(max(numbers) + 1)]


@given(sizes, st.data())
def test_a_cut_is_into_runs_of_neighbours_and_its_largest_is_as_small_as_can_be(sizes, data):
    parts = data.draw(st.integers(1, len(sizes)))
    numbers = cut(sizes, parts)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(parts))
    places = itertools.combinations(range(1, len(sizes)), parts - 1)
    best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *cuts, len(sizes)])) for cuts in places)
    assert max(runs(numbers, sizes)) == best


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.first, self.norm = nn.Linear(width, 3), nn.BatchNorm1d(3)


@st.composite
def models(draw):
    blocks = [Block(draw(st.integers(1, 9))) for _ in range(draw(st.integers(1, 3)))]
    model = nn.Sequential(*blocks, nn.ParameterList([torch.ones(2), torch.ones(5)]), nn.Linear(3, 3))
    model[-1].weight = model[0].first.weight if draw(st.booleans()) else model[-1].weight  # tied: it counts once
    for p in model.parameters():
        p.requires_grad_(draw(st.integers(0, 4)) > 0)
    return model


@given(models(), st.integers(1, 12))
def test_fragments_have_every_parameter_once_and_never_a_part_of_a_module(model, fragments):
    moved = [p for p in model.parameters() if p.requires_grad]
    of = assign(model, moved, fragments)
    assert list(of) == list(model.parameters())
    assert list(of.values()) == sorted(of.values())  # neighbours
    modules = [m for m in model.modules() if not isinstance(m, nn.ParameterList)]
    owned = [list(m.parameters(recurse=False)) for m in modules]
    entries = [[p] for m in model.modules() if isinstance(m, nn.ParameterList) for p in m.parameters()]
    first_owner = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
    for group in owned:
        here = [p for p in group if first_owner[id(p)] == first_owner[id(group[0])]]
        assert len({of[p] for p in here}) <= 1
    moving = set(moved)
    units = {first_owner[id(p)] for group in owned for p in group if p in moving}
    units |= {id(p) for (p,) in entries if p in moving}
    assert {of[p] for p in moved} == set(range(min(fragments, len(units))))


def test_modules_that_are_named_are_the_fragments():
    model = nn.Sequential(nn.Linear(2, 2), Block(4), Block(4), nn.Linear(2, 2))
    of = assign(model, [], [["0", "2"], ["1.first", "3", "1.scale"], ["1.norm"]])
    names = dict(model.named_parameters())
    chosen = {"0.bias": 0, "2.norm.weight": 0, "1.first.weight": 1, "1.scale": 1, "1.norm.bias": 2}
    assert {name: of[names[name]] for name in chosen} == chosen
    assert len(of) == len(names)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([["0"]], "fragments must have each parameter once: 1.weight is in none of them"),
        ([["0", "1"], ["1.bias"]], "fragments must have each parameter once: 1.bias is in 2 of them"),
        ([["0", "1", "10"]], "fragments names '10', of which the model has no parameters"),
        ([["0"], ["1.w", "1.bias"]], "fragments must have each parameter once: 1.weight is in none"),
    ],
)
def test_names_that_do_not_divide_the_parameters_are_refused(names, text):
    with pytest.raises(ValueError, match=text):
        assign(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [], names)
