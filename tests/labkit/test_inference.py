"""What an untold step is made of: what is found in the golden's numbers, and what is not."""

import ast
import re

import numpy as np
import pytest
import torch

from labkit.inference import infer
from labkit.polynomial import polynomial

U = 2.0**-53
NONE = torch.zeros((), dtype=torch.float64)


@pytest.fixture
def sources(rng):
    def drawn(*shape):
        return torch.from_numpy(rng.standard_normal(shape))

    return {"x": drawn(12, 16), "y": drawn(12, 16), "w": drawn(16, 10), "gain": drawn(16), "shift": drawn(16)}


STEPS = {
    "x / 3": lambda s: s["x"] / 3.0,
    "x y": lambda s: s["x"] * s["y"],
    "gelu": lambda s: torch.nn.functional.gelu(s["x"]),
    "(x - y) gain": lambda s: (s["x"] - s["y"]) * s["gain"],
    "x w": lambda s: s["x"] @ s["w"],
    "x y^T / 4": lambda s: s["x"] @ s["y"].T / 4.0,
    "softmax": lambda s: torch.softmax(s["x"], -1),
    "rms norm": lambda s: s["x"] * torch.rsqrt((s["x"] ** 2).mean(-1, keepdim=True) + 1e-6) * s["gain"],
    "layer norm": lambda s: torch.nn.functional.layer_norm(s["x"], (16,), s["gain"], s["shift"]),
    "column sums": lambda s: s["x"].sum(0),
    "transposed": lambda s: s["x"].T,
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_found_and_gives_the_golden(sources, step):
    golden = STEPS[step](sources)
    found = infer(golden, sources, U, NONE)
    given = [sources[name] for name in found.names]
    value = found.way.run(*given) if found.way else found.written.value(given, [0.0 * x for x in given], U)[0]
    assert torch.allclose(value, golden, rtol=1e-12, atol=1e-13)


def test_of_two_epsilons_that_a_golden_in_float32_allows_the_closer_is_taken(sources):
    x = sources["x"].float()
    golden = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)).double()
    found = infer(golden, {"x": x.double()}, 2.0**-23, NONE)
    assert "1e-06" in ast.unparse(found.written.tree)


def test_what_is_made_of_nothing_here_is_not_found(sources, rng):
    assert infer(torch.from_numpy(rng.standard_normal((12, 16))), sources, U, NONE) is None


def test_a_step_that_equals_another_is_no_copy_of_it(sources):
    """In a golden without rounding what is quantised in the observed equals what it is made of."""
    assert infer(sources["x"].clone(), {"x": sources["x"]}, U, NONE) is None


def test_few_or_equal_numbers_tell_nothing(sources):
    assert infer(sources["x"][:1, :4].sum(-1), sources, U, NONE) is None
    assert infer(torch.ones(12, 16, dtype=torch.float64), sources, U, NONE) is None


@pytest.mark.parametrize("rest", [float("nan"), float("-inf")])
def test_a_golden_of_zeros_and_what_is_no_number_tells_nothing(sources, rest):
    golden = torch.full((12, 16), rest, dtype=torch.float64)
    golden[0, :5] = 0.0
    assert infer(golden, sources, U, NONE) is None
    golden[1, 0] = float("inf")
    assert infer(golden, sources, U, NONE) is None


def test_a_golden_with_some_nan_is_found_by_the_rest(sources):
    golden = sources["x"] * sources["y"]
    sources["x"][3, 4] = golden[3, 4] = float("nan")
    found = infer(golden, sources, U, NONE)
    assert found is not None
    assert set(found.names) == {"x", "y"}


def test_a_polynomial_is_found_with_the_constants_that_no_text_gives(sources):
    a, b, c = sources["x"], sources["y"], sources["gain"]
    golden = 0.02134567 * a + 1.7e-3 * a * c - 0.02134567 * b
    found = infer(golden, {"x": a, "y": b, "gain": c}, U, NONE)
    assert set(found.names) == {"x", "y", "gain"}
    assert found.fitted
    given = [sources[name] for name in found.names]
    value = found.written.value(given, [0.0 * x for x in given], U)[0]
    assert torch.allclose(value, golden, rtol=1e-12, atol=1e-13)


def test_a_polynomial_has_no_more_terms_than_it_needs_and_plain_fractions():
    table = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 200)))
    found = polynomial(table, 0.25 * table[0] - table[2] * table[2], 1e-13)
    assert (found.places, found.fitted) == ((0, 2), False)
    assert sorted(re.split(r"(?<=[ab])\+", found.text)) == ["(-1.0)*b*b", "(0.25)*a"]
    assert polynomial(table, torch.exp(table[0]), 1e-13) is None
    assert polynomial(table[:, :8], table[0, :8] * table[1, :8], 1e-13) is None  # fewer samples than it may have terms


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "gradient of the input"])
def test_a_convolution_is_found(rng, transposed):
    x, w = torch.from_numpy(rng.standard_normal((2, 4, 9, 9))), torch.from_numpy(rng.standard_normal((6, 4, 3, 3)))
    golden = torch.nn.functional.conv2d(x, w, padding=1)
    sources = {"w": w, "x": x}
    if transposed:
        golden, sources["x"] = torch.nn.grad.conv2d_input(x.shape, w, golden, padding=1), golden
    found = infer(golden, sources, U, NONE)
    assert torch.allclose(found.way.run(*[sources[name] for name in found.names]), golden)
