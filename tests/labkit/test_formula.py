"""Formulas in a step's text: what is read, what is not, and that their error bound holds and is not loose."""

import numpy as np
import pytest
import torch

from labkit.formula import formula

NONE = torch.zeros(())
U = 2.0**-24


def read(op, golden, **inputs):
    return formula(op, list(inputs), [v.double() for v in inputs.values()], golden, 2.0**-53, NONE)


def drawn(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def test_names_are_found_whatever_the_steps_are_called(rng):
    m, g = drawn(rng, 4, 5), drawn(rng, 4, 5)
    inputs = {"opt.exp_avg": m, "opt.s1_g": g}
    assert read("0.9*m + (1-0.9)*g", 0.9 * m + (1 - 0.9) * g, **inputs) is not None
    assert read("new m = 0.9*m+(1-0.9)*g, lr=1", 0.9 * m + (1 - 0.9) * g, **inputs) is not None


def test_a_text_that_says_another_thing_of_the_tensor_is_no_reading(rng):
    m, g = drawn(rng, 4, 5), drawn(rng, 4, 5)
    assert read("0.9*m + 0.1*g", 0.8 * m + 0.2 * g, m=m, g=g) is None


@pytest.mark.parametrize(
    "op", ["layernorm", "__import__('os').system('true')", "a.b", "a[0]", "lambda: 1", "a if b else c", "x" * 3000,
           "open('/etc/passwd')", "a +", "", "1 + 2", "(" * 5000],
)  # fmt: skip
def test_what_is_no_formula_is_not_run(rng, op):
    x = drawn(rng, 3)
    assert read(op, x, a=x, b=x) is None


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("xhat*w + b", {"xhat": (2, 3, 4, 5), "w": (3,), "b": (3,)}),
        ("q*scale", {"q": (6, 7, 8), "scale": (6, 7)}),
        ("x/x_scale", {"x": (4, 6), "x_scale": (4, 2)}),
        ("dout*(pre>0)", {"dout": (5, 6), "pre": (5, 6)}),
    ],
)
def test_smaller_inputs_broadcast_by_channel_leading_dimensions_or_groups(rng, op, shapes):
    inputs = {name: drawn(rng, *shape) for name, shape in shapes.items()}
    laid = {
        "xhat*w + b": lambda v: v["xhat"] * v["w"].view(1, 3, 1, 1) + v["b"].view(1, 3, 1, 1),
        "q*scale": lambda v: v["q"] * v["scale"][..., None],
        "x/x_scale": lambda v: v["x"] / v["x_scale"].repeat_interleave(3, -1),
        "dout*(pre>0)": lambda v: v["dout"] * (v["pre"] > 0),
    }[op]
    assert read(op, laid(inputs), **inputs) is not None


def test_the_bound_holds_over_thousands_of_float32_runs_and_is_within_an_order_of_them(rng):
    op = "m/(1-0.9^5) / (sqrt(v/(1-0.999^5)) + 1e-8)"
    m, v = drawn(rng, 2000, 10).float(), drawn(rng, 2000, 10).float().square() + 1e-9
    exact = m.double() / (1 - 0.9**5) / (torch.sqrt(v.double() / (1 - 0.999**5)) + 1e-8)
    found = read(op, exact, m=m, v=v)
    value, bound = found.value([m.double(), v.double()], [torch.zeros(2000, 10).double()] * 2, U)
    one, two = np.float32(1) - np.float32(0.9) ** 5, np.float32(1) - np.float32(0.999) ** 5
    narrow = (m / torch.tensor(one)) / (torch.sqrt(v / torch.tensor(two)) + 1e-8)
    share = (narrow.double() - value).abs() / bound
    assert 0.01 < float(share.max()) < 1.0
    eps_inside = (m / torch.tensor(one)) / torch.sqrt(v / torch.tensor(two) + 1e-8)
    assert float(((eps_inside.double() - value).abs() / bound).max()) > 1.0


def test_a_comparison_near_its_threshold_may_fall_either_way(rng):
    x, d = torch.tensor([1e-9, 0.5]).double(), torch.ones(2).double()
    found = read("d*(x>0)", d, d=d, x=x)
    _, bound = found.value([d, x], [torch.zeros(2).double(), torch.full((2,), 1e-6).double()], U)
    assert bound[0] >= 1.0
    assert bound[1] < 1e-5
