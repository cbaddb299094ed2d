import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import whywrong
from whywrong import Bound, compare
from whywrong.comparing.comparison import MANY_ELEMENTS
from whywrong.errors import UsageError

FIELDS = (
    "shape",
    "observed_dtype",
    "golden_dtype",
    "count",
    "mismatches",
    "first_index",
    "worst_index",
    "worst_observed",
    "worst_golden",
    "max_abs",
    "mean_abs",
    "max_rel",
    "max_ulp",
    "rms_ratio",
    "cosine",
    "observed_nan",
    "golden_nan",
    "observed_inf",
    "golden_inf",
    "observed_zero",
    "golden_zero",
    "bound",
    "ok",
)


@pytest.fixture
def golden(rng):
    return rng.standard_normal((5, 7))


def test_it_is_reached_from_the_package():
    import whywrong.comparing.comparison as _  # noqa: F401

    assert whywrong.compare is compare
    assert callable(whywrong.localise)


def test_the_golden_rounded_to_the_observed_dtype_is_right_without_a_bound(golden):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        found = compare(torch.from_numpy(golden).to(dtype), golden)
        assert found.ok, found
        assert found.max_ulp <= 0.5
    assert all(hasattr(found, name) for name in FIELDS)
    assert found.bound.startswith("dtypes only")


def test_one_ulp_beside_the_rounded_golden_is_a_mismatch(golden):
    observed = golden.astype(np.float32)
    observed[2, 3] = np.nextafter(observed[2, 3], np.float32(10.0))
    found = compare(observed, golden)
    assert (found.mismatches, found.first_index, found.worst_index) == (1, (2, 3), (2, 3))
    assert 0.5 < found.max_ulp <= 1.5
    assert found.bound_used > 1.0


def test_statistics_of_a_known_difference():
    found = compare(np.array([1.0, 2.0, 0.0, -4.0]), np.array([1.0, 1.0, 0.0, -2.0]), bound=1.5)
    assert (found.count, found.mismatches, found.first_index) == (4, 1, (3,))
    assert (found.max_abs, found.mean_abs, found.max_rel) == (2.0, 0.75, 1.0)
    assert found.rms_ratio == pytest.approx(math.sqrt(5.0 / 6.0))
    assert found.cosine == pytest.approx(11.0 / math.sqrt(21.0 * 6.0))
    assert (found.observed_zero, found.golden_zero) == (1, 1)


def test_the_bound_is_elementwise_and_its_largest_share_is_told():
    bound = Bound(np.array([0.1, 1.0]), "by hand")
    assert compare(np.array([0.05, 0.5]), np.zeros(2), bound=bound).bound_used == 0.5
    assert not compare(np.array([0.2, 0.5]), np.zeros(2), bound=bound).ok
    assert compare(np.array([0.05, 0.5]), np.zeros(2), bound=bound).ok
    assert not compare(np.array([0.2, 0.5]), np.zeros(2), bound=bound).ok


def test_equal_nans_and_infinities_are_equal_and_counted():
    values = np.array([np.nan, np.inf, -np.inf, 1.0])
    found = compare(values, values.copy(), bound=0.0)
    assert found.ok
    assert (found.observed_nan, found.golden_nan, found.observed_inf, found.golden_inf) == (1, 1, 2, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_or_infinity_on_one_side_only_is_the_worst_mismatch(bad):
    found = compare(np.array([5.0, bad, 0.0]), np.array([0.0, 1.0, 0.0]), bound=1e9)
    assert not found.ok
    assert (found.mismatches, found.worst_index) == (1, (1,))
    assert found.bound_used == math.inf


def test_infinities_of_other_sign_differ():
    assert not compare(np.array([np.inf]), np.array([-np.inf]), bound=1.0).ok


def test_an_infinite_bound_allows_anything():
    assert compare(np.array([np.nan, 9.0]), np.zeros(2), bound=np.array([np.inf, 9.0])).ok


def test_a_value_that_overflows_the_observed_dtype_may_be_infinite():
    assert compare(torch.tensor([float("inf")], dtype=torch.float16), np.array([1e6])).ok


def test_different_shapes_are_a_divergence_not_an_error():
    found = compare(np.zeros((2, 3)), np.zeros((3, 2)))
    assert not found.ok
    assert "(2, 3)" in str(found)
    assert not compare(np.zeros(2), np.zeros(3), bound=1.0).ok


def test_a_narrower_golden_is_refused():
    with pytest.raises(UsageError, match="golden: expected float64, as the observed, or wider, got float32"):
        compare(np.zeros(2), np.zeros(2, np.float32))


def test_integers_are_equal_or_not():
    assert compare(np.array([1, 2]), np.array([1, 2])).ok
    assert compare(np.array([1, 2]), np.array([1, 3])).first_index == (1,)


def test_strided_empty_and_scalar_tensors_work(golden):
    assert compare(torch.from_numpy(golden).T[::2], golden.T[::2], bound=0.0).ok
    assert compare(golden[::-1], golden[::-1], bound=0.0).ok
    assert compare(np.zeros((0, 3)), np.zeros((0, 3)), bound=0.0).ok
    assert compare(np.array(1.5), np.array(1.0), bound=0.0).worst_index == ()
    assert compare(np.array(1.5), np.array(1.5), bound=0.0).worst_index is None


def test_the_line_names_where_and_how_bad(golden):
    observed = golden.copy()
    observed[4, 6] = 100.0
    text = str(compare(observed, golden, bound=0.1))
    assert text.startswith("WRONG: 1 of 35 elements of 5x7 float64")
    assert "(4, 6)" in text
    assert "\n" not in text


def test_large_integers_are_told_apart():
    assert not compare(np.array([2**53 + 1]), np.array([2**53])).ok


def test_complex_numbers_are_compared_by_their_two_parts():
    golden = np.array([[1 + 5j, 2 - 1j], [3 + 0j, 4 + 4j]])
    for observed in (golden.astype(np.complex64), torch.from_numpy(golden).conj().resolve_conj().conj()):
        assert compare(observed, golden).ok
        assert compare(observed, golden).ok
    wrong = compare(torch.from_numpy(golden).conj(), golden)
    assert (wrong.mismatches, wrong.first_index, wrong.observed_dtype) == (3, (0, 0, 1), "float64")
    assert "shapes differ" in repr(compare(golden, golden.real))


def test_bounds_of_another_shape_are_refused():
    with pytest.raises(UsageError, match=r"bound: expected a number or shape \(5,\).*got shape \(3, 5\)"):
        compare(np.zeros(5), np.zeros(5), bound=np.ones((3, 5)))


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64).to_sparse(),
        torch.zeros(2, dtype=torch.float8_e4m3fnuz),
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.strided),
    ],
)
def test_a_tensor_that_holds_no_dense_numbers_is_refused(values):
    with pytest.raises(UsageError, match=r"observed: expected dense numbers, got .*"):
        compare(values, np.zeros(2))


@pytest.mark.parametrize("bound", [-1.0, math.nan, np.array([1.0, -1.0]), torch.tensor([math.nan, 1.0])])
def test_a_bound_that_is_no_distance_is_refused(bound):
    with pytest.raises(UsageError, match="bound: expected numbers from 0, got some below 0, or NaN"):
        compare(np.zeros(2), np.zeros(2), bound=bound)


def test_a_bound_may_have_any_dtype():
    assert compare(np.array([1.0, 2.0]), np.zeros(2), bound=np.array([1, 2], np.uint16)).bound_used == 1.0


def test_the_cosine_of_sums_whose_product_underflows():
    golden = torch.full((4,), 1e-100, dtype=torch.float64)
    assert compare(golden * 0.5, golden, bound=1.0).cosine == pytest.approx(1.0)
    assert compare(-golden * 0.5, golden, bound=1.0).cosine == pytest.approx(-1.0)


class _Largest(TorchDispatchMode):
    """The most elements of what any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not any(
            made.data_ptr() == a.data_ptr() for a in args if isinstance(a, torch.Tensor)
        ):
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("scale", [1e-250, 1e250])
@pytest.mark.parametrize("shape", [(3 << 20,), (7, 1 << 19), (1, 3, 1 << 20)])
def test_squares_that_vanish_or_overflow_are_taken_in_pieces(shape, scale):
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    o = g + 0.01 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    o.view(-1)[5], g.view(-1)[7] = math.inf, math.nan
    usual = compare(o, g)
    with _Largest() as made:
        a, b = o * scale, g * scale
        made.elements = 0
        found = compare(a, b)
    assert 0 < made.elements <= MANY_ELEMENTS
    assert (found.rms_ratio, found.cosine) == pytest.approx((usual.rms_ratio, usual.cosine), rel=1e-12)


def test_what_is_not_finite_on_one_side_says_nothing_of_the_scale():
    """Numbers whose squares vanish, beside a NaN or an infinity that stands opposite a large one."""
    for pair in (([math.nan, 2e-300], [1e300, 1e-300]), ([1e300, 2e-300], [math.inf, 1e-300])):
        observed, golden = (torch.tensor(x, dtype=torch.float64) for x in pair)
        assert whywrong.compare(observed, golden).rms_ratio == pytest.approx(1.0)
