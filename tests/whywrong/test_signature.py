"""What a wrong step looks like, said as a hypothesis."""

import pytest
import torch

from whywrong import Precision, golden, localise, step
from whywrong.comparing.signature import signature


def spoilt(x, spoil):
    y = x.clone()
    spoil(y)
    return y


def fill(*places, value):
    return lambda y: y.__setitem__(places, value)


SQUARE = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SIGNATURES = {
    "every element is 9.9e-05 too large": SQUARE + 9.9e-5,
    "every element is 0.0001 too small": SQUARE - 1e-4,
    "every element is 1.001 times what it should be": SQUARE * 1.001,
    "every element is -1 times what it should be": -SQUARE,
    "what belongs at each place stands one place later in dimension 1": SQUARE.roll(1, 1),
    "what belongs at each place stands one place earlier in dimension 0": SQUARE.roll(-1, 0),
    "it is transposed in dimensions 0 and 1": SQUARE.T,
    "what is wrong is a block: 32 to 63 of dimension 0, 48 to 63 of dimension 1": spoilt(
        SQUARE, fill(slice(32, 64), slice(48, 64), value=7.0)
    ),
    "what is zero is a block: 5 of dimension 0": spoilt(SQUARE, fill(5, value=0.0)),
    "what is zero is a block: 40 to 63 of dimension 1": spoilt(SQUARE, fill(slice(None), slice(40, 64), value=0.0)),
    "what is wrong is zero": spoilt(SQUARE, fill(slice(0, 64, 3), value=0.0)),
    "all is wrong but the diagonal": torch.where(torch.eye(64) > 0, SQUARE, SQUARE.T + 0.1),
}


@pytest.mark.parametrize("words", SIGNATURES)
def test_a_simple_error_is_said_in_a_sentence(words):
    assert signature(SIGNATURES[words], SQUARE, 1e-9) == words


@pytest.mark.parametrize(
    "observed",
    [
        SQUARE.flip(0) + SQUARE.T,
        spoilt(SQUARE, fill(3, 4, value=9.0)),
        torch.full_like(SQUARE, torch.nan),
        SQUARE * (1.0 + 1e-12),  # no element is beyond what it may be off
        spoilt(SQUARE + 1e-11, fill(3, 4, value=SQUARE[3, 4] + 1.5e-9)),  # an offset is little of this
        SQUARE.long(),
    ],
)
def test_of_what_is_not_simple_nothing_is_said(observed):
    assert signature(observed, SQUARE, 1e-9) == ""


def test_localise_says_what_the_first_wrong_step_looks_like():
    def normalised(x):
        variance = step("variance", x.var(-1, correction=0, keepdim=True) + 1e-6)
        step("y", x / variance.sqrt())

    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    variance = x.var(-1, correction=0, keepdim=True) + 1e-4  # another epsilon
    observed = {"x": x, "variance": variance, "y": x / variance.sqrt()}
    report = localise(observed, golden(normalised, x=x), precision=Precision("float32"))
    assert report.findings["variance"].signature == "every element is 9.9e-05 too large"
    assert "as it looks, every element" in str(report)
    assert report.findings["y"].signature == ""


def test_of_two_numbers_everything_would_be_true_and_nothing_is_said():
    assert signature(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]), 1e-6) == ""
