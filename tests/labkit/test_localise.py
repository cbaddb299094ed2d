import numpy as np
import pytest

from labkit import Trace, localise
from labkit.numerics.bounds import EXACT, Bound


def golden_trace(x):
    """x, its double, and the square of that; each may be off by 1e-6 and can be replayed."""
    trace = Trace()
    trace.add("x", x, bound=EXACT)
    trace.add("double", 2 * x, ("x",), Bound(1e-6, "t"), lambda x: (2 * x, Bound(1e-6, "t")))
    trace.add("square", (2 * x) ** 2, ("double",), Bound(1e-5, "t"), lambda d: (d**2, Bound(1e-6, "t")))
    return trace


@pytest.fixture
def x():
    return np.linspace(1.0, 2.0, 11)


def test_nothing_diverges_when_all_is_right(x):
    found = localise(Trace({"x": x, "double": 2 * x, "square": 4 * x * x}), golden_trace(x))
    assert found.first is None
    assert found.own == []


def test_own_and_inherited_error_are_told_apart(x):
    wrong = 2.1 * x
    found = localise(Trace({"x": x, "double": wrong, "square": wrong**2}), golden_trace(x))
    assert (found.first, found.own, found.inherited) == ("double", ["double"], ["square"])
    assert found.findings["square"].inherited == pytest.approx((2.1 / 2) ** 2 - 1)


def test_two_faults_are_both_found(x):
    wrong = 2.1 * x
    found = localise(Trace({"x": x, "double": wrong, "square": wrong**3}), golden_trace(x))
    assert found.own == ["double", "square"]


def test_a_missing_step_and_a_wrong_shape_are_divergences(x):
    assert localise(Trace({"x": x, "square": 4 * x * x}), golden_trace(x)).first == "double"
    assert localise(Trace({"x": x[:3], "double": 2 * x, "square": 4 * x * x}), golden_trace(x)).first == "x"


def test_a_step_whose_inputs_were_not_observed_is_not_separated(x):
    found = localise(Trace({"x": x, "square": 5 * x * x}), golden_trace(x))
    assert found.findings["square"].own is None
    assert "not separated" in str(found)


def test_an_unexpected_step_is_listed(x):
    observed = Trace({"x": x, "double": 2 * x, "square": 4 * x * x, "extra": x})
    assert localise(observed, golden_trace(x)).unexpected == ["extra"]


def test_a_step_cannot_be_added_twice(x):
    trace = Trace({"x": x})
    with pytest.raises(ValueError, match="'x' is already there"):
        trace.add("x", x)


def test_an_input_of_a_wrong_shape_is_a_divergence_and_not_replayed(x):
    found = localise(Trace({"x": x, "double": x[:3], "square": 4 * x * x}), golden_trace(x))
    assert found.first == "double"
    assert found.findings["square"].own is None
