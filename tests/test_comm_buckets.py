"""Flat buckets: nothing is lost, nothing is moved to the wrong place, whatever the tensors look like."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cocod.comm.buckets import Layout, is_dense

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.integers(0, 5), max_size=4)))


FORMS = {
    "contiguous": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "reversed": lambda shape, dtype: torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1]),
    "view into another": lambda shape, dtype: torch.zeros(3 + torch.Size(shape).numel(), dtype=dtype)[3:].view(shape),
    "every other": lambda shape, dtype: torch.zeros(tuple(2 * s for s in shape), dtype=dtype)[
        (slice(None, None, 2),) * len(shape)
    ],
    "cut out": lambda shape, dtype: torch.zeros(tuple(s + 1 for s in shape), dtype=dtype)[tuple(slice(s) for s in shape)],
    "channels_last": lambda shape, dtype: torch.zeros(shape, dtype=dtype).to(
        memory_format=torch.channels_last if len(shape) == 4 else torch.contiguous_format
    ),
}

specs = st.tuples(shapes(), st.sampled_from(DTYPES), st.sampled_from(sorted(FORMS)))
many = st.lists(specs, max_size=8)
dense = st.lists(specs.filter(lambda spec: spec[2] not in ("every other", "cut out") and 0 not in spec[0]), max_size=3)
caps = st.one_of(st.none(), st.integers(1, 400))


def make(spec_list, start=1):
    """Tensors of these specs, with numbers that differ from place to place and that every dtype holds exactly."""
    tensors = []
    for number, (shape, dtype, form) in enumerate(spec_list):
        tensor = FORMS[form](shape, dtype)
        values = (torch.arange(tensor.numel()) + start + 31 * number) % 120
        tensors.append(tensor.copy_(values.reshape(shape)))
    return tensors


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def memory_order(tensor):
    """Strides that mean something."""
    return tuple(n for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)


@settings(deadline=None, max_examples=60)
@given(many, caps)
def test_copying_in_and_out_again_is_the_identity(spec_list, cap):
    tensors = make(spec_list)
    before = [t.clone() for t in tensors]
    buffer = Layout(tensors, cap).buffer()
    buffer.copy_(tensors)
    for t in tensors:
        t.zero_()
    buffer.copy_to(tensors)
    assert same(tensors, before)


@settings(deadline=None, max_examples=60)
@given(many, caps)
def test_a_copy_goes_to_the_same_places_of_other_tensors_with_the_same_layout(spec_list, cap):
    source, target = make(spec_list), make(spec_list, start=50)
    buffer = Layout(source, cap).buffer()
    buffer.copy_(source)
    buffer.copy_to(target)
    assert same(source, target)


@settings(deadline=None, max_examples=60)
@given(st.lists(specs.filter(lambda spec: spec[1].is_floating_point), max_size=8), caps)
def test_taking_copies_and_folding_adds_before_and_both_tell_the_norm(spec_list, cap):
    tensors, more = make(spec_list), make(spec_list, start=9)
    expected, copies = [a + b for a, b in zip(tensors, more, strict=True)], make(spec_list)
    buffer = Layout(tensors, cap).buffer()
    assert buffer.take(more).item() == pytest.approx(size_of(more), rel=1e-5)
    assert buffer.fold(tensors).item() == pytest.approx(size_of(expected), rel=1e-5)
    assert same(tensors, expected)
    buffer.copy_to(copies)
    assert same(copies, expected)


def size_of(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


@settings(deadline=None, max_examples=60)
@given(many, caps)
def test_add_to_adds(spec_list, cap):
    tensors, more = make(spec_list), make(spec_list, start=9)
    expected = [a + b for a, b in zip(tensors, more, strict=True)]
    buffer = Layout(tensors, cap).buffer()
    buffer.copy_(more)
    buffer.add_to(tensors)
    assert same(tensors, expected)


@settings(deadline=None, max_examples=60)
@given(many, caps)
def test_the_pieces_hold_every_element_exactly_once(spec_list, cap):
    tensors = make(spec_list)
    layout = Layout(tensors, cap)
    for t in tensors:
        t.zero_()
    for bucket in layout.pieces(tensors):
        for piece in bucket:
            piece.add_(1)
    assert all((t == 1).all() for t in tensors)
    assert layout.nbytes == sum(t.numel() * t.element_size() for t in tensors)


@settings(deadline=None, max_examples=60)
@given(many, st.integers(1, 400))
def test_no_bucket_is_larger_than_the_cap_unless_it_ends_with_a_tensor_that_cannot_be_cut(spec_list, cap):
    tensors = make(spec_list)
    layout = Layout(tensors, cap)
    buckets = layout.pieces(tensors)
    assert len(buckets) == len(layout)
    for bucket, flat in zip(buckets, layout.buffer().buckets, strict=True):
        *others, last = [piece.numel() * piece.element_size() for piece in bucket] or [0]
        assert flat.numel() * flat.element_size() == sum(others) + last
        assert len({piece.dtype for piece in bucket} | {flat.dtype}) == 1
        most = max(cap, flat.element_size())
        if bucket and not bucket[-1].is_contiguous():
            assert sum(others) < most
        else:
            assert sum(others) + last <= most


@settings(deadline=None, max_examples=60)
@given(many, caps)
def test_equal_tensors_have_equal_fingerprints_wherever_they_lie(spec_list, cap):
    assert Layout(make(spec_list), cap).fingerprint == Layout(make(spec_list, start=7), cap).fingerprint


@settings(deadline=None, max_examples=60)
@given(dense, dense)
def test_without_gaps_fingerprints_differ_where_shape_dtype_or_memory_order_differs(left, right):
    left, right = make(left), make(right)
    if [(t.shape, t.dtype, memory_order(t)) for t in left] != [(t.shape, t.dtype, memory_order(t)) for t in right]:
        assert Layout(left).fingerprint != Layout(right).fingerprint


def test_the_order_of_tensors_and_the_order_of_dimensions_are_part_of_the_fingerprint():
    a, b, turned = torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(3, 2).t()
    prints = {Layout(tensors).fingerprint for tensors in ([a, b], [b, a], [turned, b], [a], [a.double(), b], [a, b, b])}
    assert len(prints) == 6


def test_two_caps_make_two_fingerprints():
    assert Layout([torch.zeros(9)], 8).fingerprint != Layout([torch.zeros(9)], 12).fingerprint


def test_the_stride_of_a_dimension_of_size_one_means_nothing():
    weight = torch.nn.Conv2d(4, 8, 1).weight  # autograd is free to choose, and does: see its gradient below
    gradient = torch.zeros(8, 4).as_strided((8, 4, 1, 1), (4, 1, 4, 4))
    assert Layout([torch.zeros_like(weight)]).fingerprint == Layout([gradient]).fingerprint


def test_pieces_are_kept_while_the_tensors_stay_and_follow_them_when_they_move():
    parameters = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3))]
    layout = Layout(parameters, 16)
    assert layout.pieces(parameters) is layout.pieces(parameters)
    buffer = layout.buffer()
    buffer.copy_(parameters)
    for p in parameters:
        p.data = torch.full_like(p, 4.0)
    buffer.add_to(parameters)
    assert all((p == 5).all() for p in parameters)
    buffer.copy_(parameters)
    parameters[1].data = torch.zeros(3)
    buffer.copy_to(parameters)
    assert all((p == 5).all() for p in parameters)


def test_tensors_whose_memory_order_has_changed_are_refused_and_left_alone():
    tensor = torch.arange(16.0).reshape(1, 4, 2, 2)
    buffer = Layout([tensor]).buffer()
    buffer.copy_([tensor])
    turned = torch.zeros_like(tensor).to(memory_format=torch.channels_last)
    for use in (buffer.copy_to, buffer.add_to, buffer.copy_, buffer.layout.pieces):
        with pytest.raises(ValueError, match="memory order") as error:
            use([turned])
        assert "\n" not in str(error.value)
    assert (turned == 0).all()
    buffer.copy_to([other := torch.zeros_like(tensor)])
    assert torch.equal(other, tensor)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_what_is_empty_has_no_gaps(shape):
    assert is_dense(torch.empty(shape))


def test_without_a_cap_a_bucket_is_of_two_mib():
    def sizes(*numels):
        return [flat.nbytes for flat in Layout([torch.empty(n) for n in numels]).buffer().buckets]

    assert sizes(1000) == [4000]
    assert sizes(400_000, 300_000) == [2 << 20, 4 * 700_000 - (2 << 20)]


def test_buckets_of_a_large_model_are_twice_as_large():
    at_most, more = (torch.empty(n, device="meta") for n in ((256 << 20) // 4, (256 << 20) // 4 + 1))
    assert len(Layout([at_most])) == 128
    assert len(Layout([more])) == 65
    assert len(Layout([more.half()])) == 65  # as it is summed


@pytest.mark.parametrize(("n", "mib"), [(1, 2), (2, 2), (3, 2), (4, 4), (7, 6), (8, 8), (9, 8), (64, 8)])
def test_buckets_that_more_workers_cut_into_parts_are_larger(n, mib):
    small, large = torch.empty((24 << 20) // 4, device="meta"), torch.empty((512 << 20) // 4, device="meta")
    assert Layout([small], among=n).sizes()[0] == (mib << 20) // 4
    assert Layout([large], among=n).sizes()[0] == (min(2 * mib, 8) << 20) // 4
    assert Layout([small], 1 << 20, among=n).fingerprint == Layout([small], 1 << 20).fingerprint


def test_overlapping_tensors_are_refused_when_written():
    expanded = torch.zeros(1).expand(4)
    buffer = Layout([expanded]).buffer()
    buffer.copy_([expanded])
    with pytest.raises(RuntimeError, match="single memory location"):
        buffer.copy_to([expanded])


def test_parameters_stay_leaves_and_record_nothing():
    parameter = torch.nn.Parameter(torch.ones(4))
    buffer = Layout([parameter]).buffer()
    buffer.copy_([parameter])
    buffer.add_to([parameter])
    assert parameter.is_leaf
    assert parameter.grad_fn is None
    assert not any(flat.requires_grad for flat in buffer.buckets)


def test_scratch_grows_to_the_largest_bucket_and_is_used_again():
    layout, memory = Layout([torch.zeros(10)], 16), {}
    first = layout.scratch(0, memory, summed=True)
    assert [layout.scratch(j, memory, summed=True).numel() for j in range(3)] == [4, 4, 2]
    assert all(layout.scratch(j, memory, summed=True).data_ptr() == first.data_ptr() for j in range(3))
