"""Buckets in huge pages are as good as any others, and go when nobody needs them."""

import gc
import mmap
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_cocod.comm import pages
from lightning_cocod.comm.buckets import Layout

CPU, MMAP = torch.device("cpu"), mmap.mmap
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]


def addresses():
    """What is mapped."""
    return {line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines()}


@pytest.fixture
def made_in_pages(monkeypatch):
    """However little it is; and how often that was done."""
    spy = mock.Mock(wraps=pages.mmap.mmap)
    monkeypatch.setattr(pages, "MANY_BYTES", 1)
    monkeypatch.setattr(pages.mmap, "mmap", spy)
    return spy


@pytest.mark.parametrize("zero", [True, False])
def test_buckets_do_not_touch_each_other_and_begin_where_torchs_own_may(made_in_pages, zero):
    made = pages.buckets([(3 + i, dtype, CPU) for i, dtype in enumerate(DTYPES)], zero=zero)
    assert made_in_pages.call_count == 1
    assert [(b.numel(), b.dtype) for b in made] == [(3 + i, dtype) for i, dtype in enumerate(DTYPES)]
    assert not zero or not any(b.any() for b in made)
    for i, bucket in enumerate(made):
        bucket.fill_(i % 2)
    assert all(bool((bucket == i % 2).all()) for i, bucket in enumerate(made))
    assert all(bucket.data_ptr() % 64 == 0 for bucket in made)


def test_a_buffer_in_pages_holds_what_any_other_does(made_in_pages):
    x = [torch.randn(1001), torch.randn(7, dtype=torch.float64), torch.randn(5, 3).to(torch.bfloat16), torch.zeros(0)]
    layout = Layout(x, 256)
    buffer = layout.buffer()
    assert made_in_pages.call_count == 1
    buffer.copy_(x)
    y = [torch.zeros_like(t) for t in x]
    buffer.copy_to(y)
    assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


def test_they_are_given_back_with_the_last_of_them(made_in_pages):
    size = 4 << 20
    first, last = pages.buckets([(size, torch.uint8, CPU)] * 2, zero=False)
    here = f"{first.data_ptr():x}"
    del first
    gc.collect()
    last.fill_(1)
    assert here in addresses()
    del last
    gc.collect()
    assert here not in addresses()


def test_a_kernel_without_them_has_small_ones(made_in_pages):
    asked = []

    class Block(MMAP):
        def madvise(self, *_):
            asked.append(self)
            raise OSError(22, "no such advice")

    made_in_pages.side_effect = Block
    (bucket,) = pages.buckets([(10, torch.float32, CPU)], zero=True)
    assert len(asked) == 1
    assert not bucket.any()


def test_little_memory_other_devices_and_other_systems_have_torchs_own(monkeypatch):
    spy = mock.Mock(wraps=pages.mmap.mmap)
    monkeypatch.setattr(pages.mmap, "mmap", spy)
    pages.buckets([(10, torch.float32, CPU)], zero=True)
    monkeypatch.setattr(pages, "MANY_BYTES", 1)
    pages.buckets([(10, torch.float32, torch.device("meta"))], zero=False)
    monkeypatch.delattr(pages.mmap, "MADV_HUGEPAGE")
    (bucket,) = pages.buckets([(10, torch.float32, CPU)], zero=True)
    assert not bucket.any()
    assert not spy.called
