"""Every element of a step, as pages and pictures show them: shares of the tolerance, the worst, what is reduced."""

import math

import numpy as np
import pytest
import torch

from whywrong import Precision, golden, localise, step
from whywrong.checking.without_program import BLOCK_ELEMENTS
from whywrong.comparing.elements import (
    BINS_WITHIN_TOLERANCE,
    HISTOGRAM_BINS,
    HISTOGRAM_EDGES,
    PICTURE_CELLS,
    PICTURE_SIDE,
    Block,
    Elements,
)


def elements(observed, golden, allowed=1.0):
    return Elements.of(observed, golden, [Block.of(observed, golden, allowed)])


def test_the_worst_come_first_and_what_is_not_finite_before_any_number():
    g = torch.zeros(3, 4, dtype=torch.float64)
    o = g.clone()
    o[0, 1], o[1, 2], o[2, 3], o[2, 0] = 2.0, math.nan, math.inf, -5.0
    found = elements(o, g)
    assert {e.at for e in found.worst[:2]} == {(1, 2), (2, 3)}
    assert [e.at for e in found.worst[2:]] == [(2, 0), (0, 1)]
    assert [e.share for e in found.worst] == [math.inf, math.inf, 5.0, 2.0]
    assert math.isnan(next(e for e in found.worst if e.at == (1, 2)).observed)
    assert found.worst[2][1:] == (-5.0, 0.0, 0.0, 5.0, 1.0, 5.0)


def test_equal_nan_and_inf_are_no_error_and_an_infinite_tolerance_allows_anything():
    special = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 1.0])
    allowed = torch.tensor([1.0, 1.0, 1.0, 1.0, math.inf])
    other = torch.tensor([math.nan, math.inf, -math.inf, 1.0, math.nan])
    found = elements(other, special, allowed)
    assert found.share.tolist() == [0.0] * 5
    assert found.worst == []
    assert elements(-other, special, 1.0).share.tolist() == [0.0, math.inf, math.inf, 2.0, math.inf]


def test_among_many_without_a_limit_the_largest_errors_are_listed():
    g = torch.arange(100)
    assert [e.error for e in elements(g * 3, g, 0.0).worst] == [2.0 * k for k in range(99, 89, -1)]


def test_whole_numbers_that_float64_does_not_tell_apart_differ():
    g = torch.tensor([2**62, 5], dtype=torch.int64)
    found = elements(g + torch.tensor([1, 0]), g, 0.0)
    assert found.share.tolist() == [math.inf, 0.0]
    assert found.worst[0].observed - found.worst[0].golden == 1


def test_the_histogram_counts_each_element_once_and_1_is_within_the_tolerance():
    shares = [0.0, 1e-9, *HISTOGRAM_EDGES, 1.5, 5e3, math.inf]
    o = torch.tensor(shares, dtype=torch.float64)
    counts = elements(o, torch.zeros_like(o)).histogram
    assert len(counts) == len(HISTOGRAM_BINS)
    assert sum(counts) == len(shares)
    assert (counts[0], counts[-1], counts[-2]) == (1, 1, 1)
    assert sum(counts[:BINS_WITHIN_TOLERANCE]) == sum(share <= 1.0 for share in shares)


@pytest.mark.parametrize("shape", [(1500, 700), (3, 5, 129, 257), (70_001,), (2, 1, 90_000), (300, 300, 7)])
def test_reduction_keeps_the_worst_element_of_each_cell(shape):
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    o = g + torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    at = tuple(n // 2 for n in shape)
    o[at] += 7.0
    size, (share, golden_, observed) = elements(o, g).reduced()
    assert max(size) > 1
    assert share.size <= PICTURE_CELLS
    assert max(share.shape) <= PICTURE_SIDE
    assert (share >= 0.0).all(), "no cell is padding alone"
    cell = tuple(i // k for i, k in zip((0,) * (len(size) - len(shape)) + at, size, strict=True))
    assert (golden_[cell], observed[cell]) == (g[at], o[at])
    block = tuple(slice(c * k, (c + 1) * k) for c, k in zip((0,) * len(size), size, strict=True))
    assert np.isclose(share[(0,) * len(size)], (o - g).reshape((1,) * (2 - len(shape)) + shape)[block].abs().max())


def test_a_window_is_reduced_by_itself():
    g = torch.zeros(2, 600, 600)
    o = torch.arange(2.0 * 600 * 600).view(2, 600, 600) + 1.0
    size, (share, _, observed) = elements(o, g).reduced(window=(1, slice(10, 20), slice(0, 600, None)))
    assert size == [1, 2]
    assert share.shape == (10, 300)
    assert np.array_equal(observed[0], o[1, 10, 1::2])


def test_a_step_of_one_dimension_or_none_is_a_row():
    for x, names in ((torch.tensor(2.0), ["one row", "one column"]), (torch.ones(5), ["one row", "axis 0"])):
        assert elements(x + 1.0, x).reduced()[1][0].shape == (1, x.numel())
        assert elements(x + 1.0, x).axes == names


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint64, torch.int8, torch.bfloat16])
def test_every_dtype_that_is_compared_can_be_shown(dtype):
    x = torch.tensor([[0, 1], [1, 0]], dtype=torch.int16).to(dtype)
    found = elements(x, x.clone())
    assert [array.tolist() for array in found.reduced()[1][1:]] == [[[0.0, 1.0], [1.0, 0.0]]] * 2


def attention(q, k):
    scores = step("scores", q @ k.T)
    return step("p", torch.softmax(scores, -1))


def pair():
    q, k = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    scores = q @ k.T
    p = torch.softmax(scores, -1)
    p[3, 4] *= 1.01
    return {"q": q, "k": k, "scores": scores, "p": p}, golden(attention, q=q, k=k)


def test_the_elements_are_those_that_were_judged():
    """The largest share is the table's, to the bit: it is no second simulation."""
    observed, reference = pair()
    plain = localise(observed, reference, precision=Precision("float32"))
    assert all(f.elements is None for f in plain.findings.values()), "nothing is kept that nobody asked for"
    found = plain.detailed
    assert found.findings == plain.findings
    assert found.detailed is found
    for finding in found.findings.values():
        worst = finding.elements.worst[0].share if finding.elements.worst else 0.0
        assert worst == pytest.approx(finding.own.bound_used, rel=1e-12)
    assert found.findings["p"].elements.worst[0].at == (3, 4)
    assert found.findings["p"].elements.observed.data_ptr() == observed["p"].data_ptr(), "no copy is kept"


def test_plain_steps_are_shown_as_they_were_judged_in_blocks_too():
    g = torch.randn(BLOCK_ELEMENTS // 512 + 40, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    o = g.float()
    o[-1, 7] += 1.0
    found = localise({"x": o}, {"x": g}, precision=Precision("float32")).detailed.findings["x"]
    assert found.elements.share.shape == g.shape
    assert found.elements.worst[0].at == (len(g) - 1, 7) == found.total.worst_index
    assert found.elements.worst[0].share == pytest.approx(found.total.bound_used, rel=1e-12)


def test_shapes_that_differ_and_steps_that_are_missing_have_none():
    g = {"a": torch.ones(3, 3), "b": torch.ones(2), "c": torch.ones(2), "e": torch.ones(0)}
    found = localise({"a": torch.ones(3, 2), "c": torch.ones(2), "e": torch.ones(0)}, g).detailed.findings
    assert found["a"].elements is found["b"].elements is None
    assert found["c"].elements.histogram[0] == 2
    assert found["e"].elements.share.numel() == 0
