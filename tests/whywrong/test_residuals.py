"""The passes over a block, against the same in torch; and a large step, in whatever number of threads."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from whywrong import Bound, Precision, localise
from whywrong.checking.residuals import MASK, Groups, Pair, Tolerance, change_sums, float64
from whywrong.comparing.comparison import measure
from whywrong.recording.steps import Trace


@pytest.mark.parametrize("unit", [1.0, 1e-200, 1e200, 5e307])
@pytest.mark.parametrize("shape", [(), (7,), (12, 33), (3, 4, 5), (130, 70)])
def test_a_block_is_measured_as_torch_measures_it(rng, shape, unit):
    g = torch.from_numpy(np.asarray(rng.uniform(0.1, 1.0, shape)))
    o = g + 1e-3 * torch.from_numpy(np.asarray(rng.standard_normal(shape)))
    tolerance = Tolerance(np.full(2048, 0.25 * unit), 2.0, 0.5 * unit)
    got = Pair(o * unit, g * unit).measured(tolerance)
    matrix = g.reshape(-1, shape[-1] if shape else 1)
    rows, columns = (matrix.square().mean(dim, keepdim=True).sqrt() for dim in (1, 0))
    size = torch.maximum(torch.maximum(matrix.abs(), rows), columns).view(shape)
    z = (o * unit / unit - g) / size
    assert torch.allclose(got.size / unit, size, rtol=1e-12)
    assert torch.allclose(got.z, z, rtol=1e-9, atol=1e-12)
    allowed = (0.25 * unit + 0.5 * unit + 2.0 * size * unit).clamp(max=np.finfo(np.float64).max)
    assert torch.allclose(got.allowed / unit, allowed / unit, rtol=1e-12)
    assert got.relative == pytest.approx(float(z.square().mean().sqrt()), rel=1e-9)
    assert got.absolute / unit == pytest.approx(float((o - g).square().mean().sqrt()), rel=1e-9)
    sums = (got.sums.z, got.sums.zh, got.sums.hh, got.sums.least / unit, got.sums.largest / unit)
    h, r = g / size, o - g
    wanted = (z.sum(), (z * h).sum(), h.square().sum(), size.min(), r.abs().max())
    assert sums == pytest.approx([float(x) for x in wanted], rel=1e-9, abs=1e-12)
    assert got.sums.counted == g.numel()
    if unit < 1e150:  # else squares overflow, which measure mends
        statistics = measure(o * unit, g * unit, got.allowed)
        wanted = dict(zip(statistics._fields, statistics, strict=True))
        if unit < 1e-150:
            wanted = {name: value for name, value in wanted.items() if not name.startswith("sum_")}
        assert {name: getattr(got.statistics, name) for name in wanted} == pytest.approx(wanted, rel=1e-12)


def test_masks_have_no_part_in_sizes_and_what_has_none_is_not_counted():
    g = torch.tensor([[1.0, -math.inf, MASK, 0.0], [2.0, 3.0, math.nan, 0.0], [0.0, 0.0, 0.0, 0.0]]).double()
    o = g + torch.tensor([[0.5, 0.0, 0.0, 0.25], [0.0, math.inf, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]])
    got = Pair(o, g).measured(Tolerance(np.full(2048, 0.125), math.inf, 0.0), Groups(np.array([0.5]), 1))
    assert got.allowed[2, 3] == 0.0, "Inf times no size"
    assert [float(x) for x in got.groups[0]] == [5.0, 2.0], "of those that count"
    row, other = 0.5, math.sqrt(13.0) / 2.0
    columns = [math.sqrt(5.0 / 3.0), math.sqrt(3.0), 0.0, 0.0]
    inf = math.inf
    sizes = [[columns[0], inf, -MASK, row], [2.0, inf, inf, other], [columns[0], columns[1], inf, inf]]
    assert torch.allclose(got.size, torch.tensor(sizes).double())
    assert got.sums.least == 0.0
    assert (got.sums.counted, got.sums.largest) == (7, 0.5)
    assert float(Pair(o, g).measured(shrink=0.25).z[0, 3]) == 0.0 < float(got.z[0, 3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_change_is_measured_from_what_was_observed_before_it(rng, dtype):
    before_g = torch.from_numpy(rng.standard_normal((50, 70))).float()
    g = before_g + 1e-3 * torch.from_numpy(rng.standard_normal((50, 70))).float()
    before_o = (before_g + 0.01).to(getattr(torch, dtype)).float()
    o = (before_o + 1.5 * (g - before_g)).to(getattr(torch, dtype)).float()
    pair = Pair(o, g, (before_o, before_g), dtype)
    scale = g.double() - before_g.double()
    expected = (before_o.double() + scale).to(getattr(torch, dtype)).double()
    got, rows = pair.measured(), scale.square().mean(1).sqrt()
    assert torch.equal(pair.expected, expected)
    assert torch.allclose(got.z, (o - expected) / got.size, rtol=1e-12)
    assert got.sums.largest == float((o - expected).abs().max())
    assert np.allclose(pair.sizes[0], rows)
    assert pair.sizes[2] == pytest.approx(float((before_o - before_g).double().square().mean().sqrt()))
    old, new = before_g.flatten().numpy(), g.flatten().numpy()
    sums = float(g.abs().max()), float(before_g.double().square().sum()), float(scale.square().sum())
    assert change_sums(old, new) == pytest.approx((max(sums[0], float(before_g.abs().max())), *sums[1:]))


@pytest.mark.parametrize("apart", [1, 3])
def test_groups_are_those_that_torch_makes(rng, apart):
    g = torch.from_numpy(rng.standard_normal((20, 50)).round(1)).float()
    o = g + torch.from_numpy(rng.standard_normal((20, 50))).float()
    borders = np.quantile(g.double().numpy(), [0.25, 0.5, 0.75])
    got = Pair(o, g).measured(groups=Groups(borders, apart))
    z, values = (x.double().flatten()[::apart].contiguous() for x in (got.z, g))
    group = torch.bucketize(values, torch.from_numpy(borders), right=True)
    for found, weights in zip(got.groups, (torch.ones_like(z), z, z**2), strict=True):
        assert np.allclose(found, torch.bincount(group, weights, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_numbers_of_any_type_and_order_become_float64(dtype):
    x = torch.arange(80_000).remainder(7).to(dtype).view(200, 400).t()
    got = float64(x)
    assert got.is_contiguous()
    assert torch.equal(got, x.double())


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_large_step_is_the_same_in_any_number_of_threads(rng, factor):
    right = {f"p.{k}": torch.from_numpy(rng.standard_normal((2000, 400))).float() for k in range(2)}
    observed = right | {"p.1": right["p.1"] * factor}
    threads, several = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        several.append(localise(observed, Trace(right), precision=Precision()).findings["p.1"])
        torch.set_num_threads(threads)
    assert replace(several[0], elements=None) == replace(several[1], elements=None)
    assert several[0].wrong == (factor != 1.0)


def test_a_large_step_of_little_but_nan_is_checked(rng):
    right = np.full((1000, 300), np.nan, np.float32)
    right[0, 1] = 1.0
    observed = right.copy()
    observed[0, 1] += np.float32(2.0**-23)
    assert localise({"x": observed}, Trace({"x": right})).first is None
    observed[0, 1] = 2.0
    assert localise({"x": observed}, Trace({"x": right})).findings["x"].total.first_index == (0, 1)


def test_what_is_not_finite_before_a_change_hides_nothing_and_is_no_error(rng):
    masked = torch.ones(64, 64).triu(1).bool()
    right = {"scores.0": torch.from_numpy(3.0 * rng.standard_normal((4, 64, 64))).float()}
    right["scores.1"] = right["scores.0"] + torch.from_numpy(0.05 * rng.standard_normal((4, 64, 64))).float()
    right = {name: x.masked_fill(masked, -math.inf) for name, x in right.items()}
    observed = {
        name: x * (1.0 + 1e-7 * torch.from_numpy(rng.standard_normal(x.shape)).float()) for name, x in right.items()
    }
    assert localise(observed, Trace(right), precision=Precision()).first is None
    wrong = observed | {"scores.1": observed["scores.0"] + 2.0 * (right["scores.1"] - right["scores.0"])}
    wrong["scores.1"] = wrong["scores.1"].masked_fill(masked, -math.inf)
    assert localise(wrong, Trace(right), precision=Precision()).first == "scores.1"


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_a_change_is_measured_at_any_size(rng, size):
    before_g = torch.from_numpy(rng.standard_normal((20, 30))).abs() * size
    g, before_o = before_g * (1.0 + 1e-3 * torch.rand(20, 30)), before_g * 1.01
    got, small = (Pair(g * k, g * k, (before_o * k, before_g * k)) for k in (1.0, 1.0 / size))
    assert np.allclose(got.sizes[0] / size, small.sizes[0])
    assert torch.allclose(got.measured().z, small.measured().z)


def test_a_change_beyond_the_range_of_its_type_ends_at_its_largest_number():
    before = torch.tensor([[400.0, 1.0]])
    pair = Pair(before, before + 100.0, (before, before), "float8_e4m3fn")
    assert pair.expected.tolist() == [[448.0, 104.0]]
    assert pair.measured().sums.largest == 103.0


def test_another_default_device_changes_nothing():
    x = torch.arange(600.0).view(20, 30)
    for right in ({"x": x}, {"x": x.long()}):
        with torch.device("meta"):
            report = localise({"x": x}, Trace(right), precision=Precision())
        assert report.first is None


@pytest.mark.parametrize(
    ("bound", "error", "first"), [(0.1, 0.1 + 1e-9, "x"), (0.7, 0.7 - 1e-9, None), (1e39, 2e39, "x")]
)
def test_a_bound_that_is_a_number_has_all_its_digits(bound, error, first):
    right = Trace()
    right.add("x", torch.ones(3).double(), Bound(bound, "given"))
    assert localise({"x": torch.ones(3).double() + error}, right, precision=Precision()).first == first


@pytest.mark.parametrize(("error", "first"), [(2, None), (3, "x")])
def test_whole_numbers_may_have_a_bound(error, first):
    right = Trace()
    right.add("x", torch.arange(5), Bound(2.0, "given"))
    assert localise({"x": torch.arange(5) + error}, right, precision=Precision()).first == first
