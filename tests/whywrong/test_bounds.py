import numpy as np
import pytest
import torch

from whywrong import compare
from whywrong.comparing.bounds import Bound, gamma, roundings, sum_of_products
from whywrong.comparing.precision import UNIT_ROUNDOFF, half_ulp, name_of


def sequential_float32(a, b):
    """Dot products of the rows of a and b, one addition after the other in float32."""
    total = np.zeros(a.shape[0], np.float32)
    for k in range(a.shape[1]):
        total = total + a[:, k] * b[:, k]
    return total


@pytest.mark.parametrize("length", [1, 3, 64, 1000, 8192])
@pytest.mark.parametrize("sign", ["positive", "mixed"])
def test_right_dot_products_stay_within_the_bound(rng, length, sign):
    a, b = (rng.random((400, length), np.float32) - (0.5 if sign == "mixed" else 0.0) for _ in range(2))
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    bound = sum_of_products((abs(a64) * abs(b64)).sum(1), length)
    error = abs(sequential_float32(a.astype(np.float32), b.astype(np.float32)) - (a64 * b64).sum(1))
    assert (error <= bound.absolute).all()
    assert error.max() > 1e-4 * bound.absolute.max()  # not so loose that it could not fail


def test_a_single_element_ten_times_beyond_its_bound_is_caught(rng):
    a, b = rng.random((50, 64)), rng.random((50, 64))
    exact = (a * b).sum(1)
    bound = sum_of_products(exact, 64)
    observed = exact.copy()
    observed[17] += 10.0 * bound.absolute[17]
    found = compare(observed, exact, bound=bound)
    assert (found.mismatches, found.first_index) == (1, (17,))


def test_the_probabilistic_factor_grows_with_the_root_of_k_and_never_beyond_the_worst_case():
    u = UNIT_ROUNDOFF["float32"]
    small, large = gamma(10_000, u, 1), gamma(40_000, u, 1)
    assert large / small == pytest.approx(2.0, rel=0.1)
    assert all(gamma(k, u, 10**6) <= 1.0001 * k * u / (1 - k * u) for k in (1, 8, 64, 4096))


def test_a_larger_tensor_gets_a_larger_factor_for_the_same_false_alarm_rate():
    u = UNIT_ROUNDOFF["float32"]
    assert gamma(4096, u, 10**8) > gamma(4096, u, 10)


def test_tf32_allows_what_rounding_its_inputs_costs_and_float32_does_not(rng):
    a, b = rng.random((20, 64)), rng.random((20, 64))

    def cut(x):
        bits = x.astype(np.float32).view(np.int32)
        return (bits & ~0x1FFF).view(np.float32).astype(np.float64)  # truncated to 10 bits after the point

    exact, magnitude = (a * b).sum(1), (a * b).sum(1)
    error = abs((cut(a) * cut(b)).sum(1) - exact)
    assert (error <= sum_of_products(magnitude, 64, "tf32").absolute).all()
    assert (error > sum_of_products(magnitude, 64, "float32").absolute).any()


def test_tf32_accumulation_gets_the_worst_case_at_large_k():
    factor = sum_of_products(np.array(1.0), 1 << 20, "tf32").absolute
    assert factor > (1 << 20) * 2.0**-23


def test_bounds_add_and_scale():
    total = (Bound(1.0, "a") + Bound(2.0, "b")).scaled(-3.0)
    assert total.absolute == 9.0
    assert "a + b" in total.why


def test_two_roundings_cover_a_rounded_factor_and_a_rounded_product(rng):
    x = rng.random(10_000)
    factor = 1.0 / np.sqrt(29.0)
    computed = x.astype(np.float32) * np.float32(factor)
    exact = x.astype(np.float32).astype(np.float64) * factor
    assert (abs(computed - exact) <= roundings(exact, 2).absolute).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_half_ulps_are_the_distance_to_the_next_number(dtype):
    values = torch.tensor([1.0, 1.5, 3.0, 1000.0, 2.0**-10], dtype=dtype)
    integer = {torch.float32: torch.int32}.get(dtype, torch.int16)
    after = (values.view(integer) + 1).view(dtype)
    assert torch.equal(2.0 * half_ulp(values.double(), name_of(dtype)), after.double() - values.double())


def test_subnormals_share_one_ulp():
    assert half_ulp(torch.tensor([0.0, 1e-45]).double(), "float32").tolist() == [2.0**-150, 2.0**-150]
