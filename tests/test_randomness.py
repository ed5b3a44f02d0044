"""The random state of a rank: whatever has been drawn, it is what the generators say, and can be put back."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cocod.strategies.randomness import random_state, set_random_state

CPU = torch.device("cpu")
DRAWS = {
    "nothing": lambda: None,
    "uniform": np.random.rand,
    "normal": np.random.randn,
    "three normal": lambda: np.random.normal(size=3),
    "bytes": lambda: np.random.bytes(1),
    "seed": lambda: np.random.seed(1),
    "a whole block": lambda: np.random.rand(312),  # the position is where it was
    "Python": random.random,
    "torch": lambda: torch.rand(1),
}


def numpy_says():
    name, keys, *rest = np.random.get_state()
    return name, keys.tolist(), *rest


def as_taken():
    name, keys, *rest = random_state(CPU)["numpy"]
    return name, keys.tolist(), *rest


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
def test_it_is_what_the_generators_say(names):
    np.random.seed(0)
    for name in names:
        DRAWS[name]()
        assert as_taken() == numpy_says()
        taken = random_state(CPU)
        assert taken["python"] == random.getstate()
        assert torch.equal(taken["torch"], torch.get_rng_state())


def test_a_kept_normal_number_does_not_show_in_the_generator():  # so a look at its memory alone would not do
    np.random.seed(0)
    np.random.randn()
    kept = numpy_says()
    np.random.randn()
    assert kept[:3] == numpy_says()[:3]
    assert kept != numpy_says()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6), st.lists(st.sampled_from(sorted(DRAWS)), max_size=6))
def test_put_back_it_gives_the_same_numbers(before, between):
    for name in before:
        DRAWS[name]()
    state = random_state(CPU)
    first = next_numbers()
    for name in between:
        DRAWS[name]()
        random_state(CPU)
    set_random_state(state, CPU)
    assert next_numbers() == first


def next_numbers():
    return np.random.randn(3).tolist(), random.random(), torch.rand(3).tolist()
