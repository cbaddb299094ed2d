"""Kernels whose calls on the same inputs differ: in how many elements, and that it is a race."""

import re

import pytest
import torch
import triton
import triton.language as tl

import whywrong
from whywrong import child

EXAMPLE = {"x": torch.randn(6, 8)}
WORDS = r"; two calls on the same inputs differ in \d+ of (\d+) elements"
calls = [0]


@triton.jit
def plus_one_kernel(x_ptr, out_ptr, n, late, EVERY: tl.constexpr):
    i = tl.program_id(0) * 16 + tl.arange(0, 16)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x + 1.0, mask=(i < n) & (i % EVERY != late))


def raced(x, every=5):
    """An update in `every` comes too late, in each call another: a race, simulated by a count of the calls."""
    calls[0] += 1
    out = x.clone()
    plus_one_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), calls[0] % every, every)
    return out


def rarely_raced(x):
    """Wrong in one call of seven alone."""
    calls[0] += 1
    return x + 1.0 - float(calls[0] % 7 == 0)


def plus_one(x):
    return x + 1.0


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    "isolate", [False, pytest.param(None, marks=pytest.mark.skipif(not child.available(), reason="no fork"))]
)
@pytest.mark.parametrize("kernel", [raced, rarely_raced])
def test_calls_are_compared_element_by_element_and_a_race_is_no_read_outside(kernel, isolate):
    found = whywrong.fuzz(kernel, plus_one, EXAMPLE, examples=30, most=1 << 8, isolate=isolate, progress=str)
    size = re.search(WORDS, found.failure.words)[1]
    assert int(size) == found.failure.inputs["x"].numel()
    assert "reads" not in found.failure.words
    (cause,) = found.failure.explain().causes
    assert cause.kind == "race"


def test_every_call_of_a_kernel_without_a_race_is_the_same():
    found = whywrong.fuzz(lambda x: plus_one(x) * (1 + (len(x) > 3)), plus_one, EXAMPLE, examples=30, progress=str)
    assert "two calls" not in found.failure.words
    assert not found.failure.again
