"""The typed declare of a precision: what it may say, what is refused, and the formats behind it."""

import pytest
import torch

from whywrong import Precision
from whywrong.comparing.precision import (
    FIELD_CHOICES,
    UNIT_ROUNDOFF,
    from_fields,
    from_words,
    guess,
    representable,
    stored,
)
from whywrong.errors import UsageError


def test_every_way_to_say_it_gives_the_same():
    one = Precision(storage="bfloat16", products="tf32", steps={"scores": {"storage": "float32"}})
    assert from_fields({"storage": "bf16", "products": "tf32", "steps": {"scores": {"storage": "float32"}}}) == one
    assert Precision(torch.bfloat16, "TF32", steps=one.steps) == one
    assert Precision("half", accumulate=torch.float16) == Precision("float16", accumulate="float16")
    assert from_words("storage=bfloat16, products=tf32") == Precision(storage="bfloat16", products="tf32")
    assert from_words("eager=true,flush=False") == Precision(eager=True)
    assert "other fields for scores" in str(one)
    assert (one.of("scores").storage, one.of("other").storage) == ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Precision(storage="bf17"), r"expected one of float64, float32.*got storage='bf17'"),
        (lambda: Precision(products="fp8"), r"expected one of ieee.*got products='fp8'"),
        (lambda: Precision(accumulate="tf32"), r"expected one of float64.*got accumulate='tf32'"),
        (lambda: Precision(eager=1), r"expected true or false, got eager=1"),
        (lambda: Precision(steps={"x": {"colour": 1}}), r"expected the fields storage, products, .*, got 'colour'"),
        (lambda: Precision(steps=3), r"expected fields by the name of a step, got steps=3"),
        (lambda: Precision(steps={"x": {"steps": {}}}), r"expected storage.*got steps\['x'\]="),
        (lambda: from_words("eager=true,eager=false"), r"expected each field once, got eager twice"),
        (lambda: from_fields({"compute": "bf16"}), r"expected the fields storage, products, .*, got 'compute'"),
        (lambda: from_words("bf17"), r"expected one of float64, .*got storage='bf17'"),
        (lambda: from_words("eager=true,bf16"), r"expected name=value of .*got 'bf16'"),
    ],
)
def test_what_is_no_precision_is_one_line(make, message):
    with pytest.raises(UsageError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_a_type_alone_is_that_of_storage_as_in_python():
    assert from_words("bf16") == Precision("bf16")
    assert from_words("bf16,products=tf32") == Precision("bf16", products="tf32")


@pytest.mark.parametrize("name", [n for n in UNIT_ROUNDOFF if hasattr(torch, n)])
def test_the_unit_roundoff_is_half_of_torchs_epsilon(name):
    assert UNIT_ROUNDOFF[name] == torch.finfo(getattr(torch, name)).eps / 2


@pytest.mark.parametrize("name", FIELD_CHOICES["products"])
def test_what_is_cut_to_a_format_is_representable_in_it_and_nearby(name):
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert representable(x, name) == (name == "ieee")
    if hasattr(torch, name):
        kept = stored(x, name)
        assert representable(kept, name)
        assert float(((kept - x).abs() / x.abs()).max()) <= UNIT_ROUNDOFF[name] * 1.001 or name.startswith("float8")


def test_a_sum_of_two_bfloat16_is_representable_as_two():
    high = torch.tensor([1.0, 3.0]).double()
    assert representable(high + 2.0**-9, "bfloat16x2")
    assert not representable(high + 2.0**-9 + 2.0**-20, "bfloat16x2")


def test_nothing_said_is_each_dtype_and_float32_sums_and_narrow_ones_between_operations_too():
    assert guess([torch.float64, torch.int64]) == Precision(accumulate="float64")
    assert guess([torch.float64, torch.bfloat16]) == Precision(eager=True)
    assert guess([torch.float32, torch.float64]) == Precision()
