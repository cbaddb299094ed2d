"""Numbers of a program that are solved for together, and stretches of it that are run twice or later."""

import math

import pytest
import torch

import whywrong
from whywrong.explaining.solved import Equation

SLOPES, WRONG = [0.5, 0.25, 0.125, 0.0625], [0.7, 0.49, 0.343, 0.2401]


def explained(reference, wrong, **inputs):
    """What is said of the result of another reference, in float32."""
    recorded = whywrong.golden(reference, **inputs)
    given = {name: x.float() for name, x in inputs.items()}
    return whywrong.explain({**given, "output": wrong(**given)}, recorded)


def biased(slopes, hidden=False):
    def reference(x):
        far = torch.arange(9, dtype=x.dtype)
        y = x - torch.tensor(slopes, dtype=x.dtype)[:, None, None] * far
        return y.masked_fill(far[:, None] < far, -math.inf) if hidden else y

    return reference


def polynomial(a, b, c):
    return lambda x: a * x.tanh() + b * x.sin() - c * x.cos()


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).double()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_table_whose_numbers_are_all_others_is_named_with_these(hidden):
    found = explained(biased(SLOPES, hidden), biased(WRONG, hidden), x=randn(4, 9, 9))
    assert (found.verdict, found.causes[0].kind) == ("cause", "constant"), found
    assert "holds other numbers: 0.7 at 0, not 0.5; 0.49 at 1, not 0.25" in found.causes[0].says


def test_of_the_numbers_of_a_line_those_that_differ_are_named_and_no_other():
    found = explained(polynomial(2.5, 0.75, 1.3), polynomial(2.0, 0.75, 1.7), x=randn(40, 7))
    assert found.verdict == "cause", found
    assert "mul has 2 where the reference has 2.5" in found.causes[0].says
    assert "mul has 1.7 where the reference has 1.3" in found.causes[0].says
    assert "0.75" not in found.causes[0].says


def test_an_error_that_no_numbers_give_is_not_fitted():
    noise = torch.randn(4, 9, 9, generator=torch.Generator().manual_seed(8))
    found = explained(biased(SLOPES), lambda x: biased(SLOPES)(x) + 0.1 * noise, x=randn(4, 9, 9))
    assert found.verdict == "none of these", found


def test_numbers_that_make_no_difference_stay_as_they_are():
    t = torch.linspace(0, 1, 50, dtype=torch.float64)
    start, true = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([1.0, 2.5, 3.0], dtype=torch.float64)

    def run(x):
        return 1e4 * (x[0] * x[2] * t + x[1] * t.sin())  # of the first and the third only the product shows

    equation = Equation(run, run(true), lambda: False)
    assert equation.fewest(start).tolist()[::2] == [1.0, 3.0]
    assert equation.polished(equation.fewest(start), start != true).tolist() == true.tolist()


def test_without_time_nothing_is_solved():
    start = torch.ones(2, dtype=torch.float64)
    assert Equation(lambda x: 10.0 * x, 20.0 * start, lambda: True).fewest(start) is None


def normed(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)


def by_each(x, n):
    return torch.cat([normed(part) for part in x.split(n, -1)], -1)


@pytest.mark.long(cases=2)
@pytest.mark.parametrize(
    ("reference", "wrong", "words"),
    [
        (normed, lambda x: normed(normed(x)), "is done twice"),
        (
            lambda x: torch.tanh(x - x.mean(-1, keepdim=True)),
            lambda x: x.tanh() - x.tanh().mean(-1, keepdim=True),
            "after",
        ),
        (normed, lambda x: by_each(x, 12), "mean runs over each 12 of dimension 1 by itself"),
        (normed, lambda x: by_each(x, 16), "mean runs over each 16 of dimension 1 by itself"),
        (
            lambda x: x.mean(-1),
            lambda x: torch.stack([part.mean(-1) for part in x.split(16, -1)]).mean(0),
            "mean is that of the means of each 16 of dimension 1",
        ),
    ],
)
def test_what_is_done_twice_later_or_by_tiles_is_named(reference, wrong, words):
    found = explained(reference, wrong, x=randn(20, 36) + 0.3)
    assert found.verdict == "cause", found
    assert words in found.causes[0].says


def read_on(x, up_to):
    memory = torch.cat([x.flatten(), torch.zeros(up_to)])
    return memory.as_strided((len(x), up_to), (x.shape[1], 1))


@pytest.mark.parametrize(
    ("reference", "wrong", "words"),
    [
        (
            lambda x, w: x @ w.T,
            lambda x, w: read_on(x, 48) @ read_on(w, 48).T,
            "mm reads 48 elements of each row of 36",
        ),
        (lambda x, w: x.sum(1) * w[0, 0], lambda x, w: read_on(x, 40).sum(1) * w[0, 0], "sum reads 40 elements"),
        (lambda x, w: x.amax(1) * w[0, 0], lambda x, w: read_on(x, 64).amax(1) * w[0, 0], "amax reads 64 elements"),
    ],
)
def test_rows_that_are_read_on_into_the_next_are_named(reference, wrong, words):
    found = explained(reference, wrong, x=randn(20, 36), w=randn(9, 36) + 1.0)
    assert found.verdict == "cause", found
    assert words in found.causes[0].says


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_softmax_that_overflows_is_known_by_where_it_does(dtype):
    x = (randn(40, 6) * (40.0 if dtype == torch.float32 else 5.0)).to(dtype)
    recorded = whywrong.golden(lambda x: torch.softmax(x, -1), x=x)
    found = whywrong.explain({"x": x, "output": x.exp() / x.exp().sum(-1, keepdim=True)}, recorded)
    assert (found.verdict, found.causes[0].kind) == ("cause", "drop_term"), found
    name = str(dtype).removeprefix("torch.")
    says = f"the largest is not subtracted before the exp of softmax, whose result overflows {name}"
    assert found.causes[0].says == says
