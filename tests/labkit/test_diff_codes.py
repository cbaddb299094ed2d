"""What `labkit diff` knows of quantisers: rules for ties, nibbles, zero points, 8-bit floats, integer products."""

import pytest
import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def half_up(x):
    return (x + 0.5).floor()


def half_away(x):
    return (x.abs() + 0.5).floor() * x.sign()


@pytest.mark.parametrize("rule", [half_up, half_away])
def test_where_ties_go_to_even_another_rule_is_wrong_and_where_nothing_is_said_it_is_not(said, rng, rule):
    x = torch.from_numpy(rng.integers(-250, 250, (32, 80))).double() / 2.0
    s = torch.ones(32, 1, dtype=torch.float64)
    golden = {"x": x, "s": s, "xq": x.round().to(torch.int8)}
    seen = {"x": x.float(), "s": s.float(), "xq": rule(x).to(torch.int8)}
    about = {"inputs": ["x", "s"], "inputs_complete": True}
    assert said(golden, seen, {"xq": {"op": "round half to even(x / s)", **about}})["first_divergent_step"] == "xq"
    assert not said(golden, seen, {"xq": {"op": "round(x / s)", **about}})["alarm"]
    one = golden["xq"].clone()
    one.flatten()[int((x.frac().abs() == 0.5).flatten().nonzero()[0])] += 1
    few = seen | {"xq": torch.where((one - golden["xq"]).abs() == 1, rule(x), x.round()).to(torch.int8)}
    assert not said(golden, few, {"xq": {"op": "round half to even(x / s)", **about}})["alarm"]


def test_a_nibble_without_its_sign_is_wrong_in_what_was_unpacked(said, rng):
    codes = torch.from_numpy(rng.integers(-8, 8, (32, 96))).to(torch.int8)
    low, high = codes[:, ::2].to(torch.int32) & 15, codes[:, 1::2].to(torch.int32) & 15
    golden = {"packed": low | (high << 4), "codes": codes}
    steps = {"codes": {"op": "unpack nibbles, sign extend", "inputs": ["packed"], "inputs_complete": True}}
    unsigned = codes.clone()
    unsigned[:, -1] &= 15
    found = said(golden, golden | {"codes": unsigned}, steps)
    assert found["first_divergent_step"] == "codes"
    assert not said(golden, golden, steps)["alarm"]


def zero_points(w, s, rounded):
    least = torch.nn.functional.pad(w, (0, 28)).reshape(len(w), 4, 32).amin(-1).clamp(max=0.0)
    return rounded(-least / s).clamp(0, 15).to(torch.uint8)


def test_a_zero_point_may_fall_to_the_other_side_of_a_tie_and_no_farther(said, rng):
    """Of groups of 32 columns, the last of 4."""
    w = normal(rng, 19, 100).half().double()
    s = torch.full((19, 4), 0.25, dtype=torch.float64)
    w[13, 97] = -0.25 * 8.5  # to even, down; away, up
    golden = {"w": w, "s": s, "zero": zero_points(w, s, torch.round)}
    seen = {"w": w.half(), "s": s.float(), "zero": zero_points(w, s, half_away)}
    steps = {"zero": {"op": "zero point", "inputs": ["w", "s"], "inputs_complete": True}}
    assert int((golden["zero"] != seen["zero"]).sum()) == 1
    assert not said(golden, seen, steps)["alarm"]
    off = seen["zero"].clone()
    off[4, 1] += 1
    assert said(golden, seen | {"zero": off}, steps)["first_divergent_step"] == "zero"


def cut(x, kind):
    """Towards zero."""
    nearest = x.to(kind).double()
    step = 2.0 ** (torch.frexp(x)[1].double() - (4 if kind is E4M3 else 3))
    return torch.where(nearest.abs() > x.abs(), nearest - step * x.sign(), nearest).to(kind)


@pytest.mark.parametrize("rounded", [False, True], ids=["a golden of real numbers", "a golden of 8 bits"])
@pytest.mark.parametrize("told", [False, True])
def test_a_cast_to_8_bits_that_truncates_or_has_another_format_is_wrong(said, rng, rounded, told):
    x, s = (0.5 + normal(rng, 40, 64).abs()).bfloat16().double(), 2.0 ** torch.from_numpy(rng.integers(-4, 0, (40, 4)))
    exact = x / s.repeat_interleave(16, 1)
    golden = {"x": x, "s": s, "xq": exact.to(E4M3).double() if rounded else exact}
    seen = {"x": x.bfloat16(), "s": s.float()}
    steps = {"xq": {"op": "x / s -> e4m3", "inputs": ["x", "s"], "dtype": "fp8 e4m3"}} if told else None
    assert not said(golden, seen | {"xq": exact.to(E4M3)}, steps)["alarm"]
    assert said(golden, seen | {"xq": cut(exact, E4M3)}, steps)["first_divergent_step"] == "xq"
    if told:
        wider = seen | {"xq": exact.to(E5M2).bfloat16()}
        assert said(golden, wider, steps)["first_divergent_step"] == "xq"


def blockwise(x, bits):
    """As integers of `bits` times a scale of 32 numbers."""
    most = 2 ** (bits - 1) - 1
    cut_up = x.unflatten(-1, (-1, 32))
    s = cut_up.abs().amax(-1, keepdim=True) / most
    return ((cut_up / s).round() * s).flatten(-2)


def test_factors_kept_as_integers_are_right_where_the_text_says_so(said, rng):
    x, w = normal(rng, 16, 64).float(), normal(rng, 64, 48).float()
    golden = {"x": x.double(), "w": w.double(), "y": x.double() @ w.double()}
    seen = {"x": x, "w": w, "y": blockwise(x, 8) @ w}
    q8 = {"compute": "src1 quantised to q8_0 per 32, integer dot, f32 accumulate"}
    assert not said(golden, seen, **q8)["alarm"]
    assert said(golden, seen, compute="f32, no tf32")["first_divergent_step"] == "y"
    assert said(golden, seen | {"y": blockwise(x, 4) @ w}, **q8)["first_divergent_step"] == "y"


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("named", ["packed", "qweight"])
def test_bytes_of_two_codes_are_right_if_they_hold_the_observed_codes(said, rng, halves, named):
    """A code fell to the other side of a tie, so its byte is another, by 1 or by 16; nothing is told."""
    codes = torch.from_numpy(rng.integers(1, 15, (40, 96))).to(torch.uint8)
    other = codes.clone()
    other[3, 4], other[7, 51] = other[3, 4] + 1, other[7, 51] - 1

    def packed(x, swap=False):
        first, second = x.chunk(2, -1) if halves else (x[:, ::2], x[:, 1::2])
        return second | (first << 4) if swap else first | (second << 4)

    x = codes.double() - 7.5
    golden = {"x": x + 0.5, "s": torch.ones(1, dtype=torch.float64), "codes": codes, named: packed(codes)}
    seen = {"x": golden["x"].float(), "s": golden["s"].float(), "codes": codes, named: packed(codes)}
    assert not said(golden, seen)["alarm"]
    few = {"codes": other, named: packed(other)}
    assert not said(golden, seen | few)["alarm"]
    assert said(golden, seen | {named: packed(codes, swap=True)})["first_divergent_step"] == named


def test_codes_of_an_odd_row_are_no_bytes_of_two(said, rng):
    codes = torch.from_numpy(rng.integers(0, 16, (6, 17))).to(torch.uint8)
    golden = {"codes": codes, "other": codes.T.contiguous()[:, :3]}
    wrong = golden["other"].clone()
    wrong[0, 0] += 3
    assert said(golden, golden | {"other": wrong})["first_divergent_step"] == "other"


def test_a_contraction_is_a_product_by_its_shapes(said, rng):
    """TF32 cuts the factors of `sum over C`, and of stages whose text says nothing of products."""
    d, y = normal(rng, 64, 4, 48).float(), normal(rng, 64, 48).float()

    def total(d, y):
        return (d * y[:, None, :]).sum(-1)

    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (d, y)]
    golden = {"d": d.double(), "y": y.double(), "dh": total(d.double(), y.double())}
    seen = {"d": d, "y": y, "dh": total(*cut)}
    steps = {"dh": {"op": "sum over C", "inputs": ["d", "y"], "inputs_complete": True}}
    assert not said(golden, seen, steps, compute="TF32 tensor cores, fp32 accumulate")["alarm"]
    assert said(golden, seen, steps, compute="fp32, no tf32")["first_divergent_step"] == "dh"


def test_functions_may_be_approximated_where_a_text_grants_it(said, rng):
    angle = torch.from_numpy(rng.random((32, 8)) * 30.0)
    golden = {"1-angle": angle.float().double(), "2-cos": torch.cos(angle.float().double())}
    seen = {"1-angle": angle.float(), "2-cos": (golden["2-cos"] + 4e-6 * normal(rng, 32, 8).clamp(-2, 2)).float()}
    assert not said(golden, seen, compute="fp32, sincos approximations within 1e-5")["alarm"]
    assert said(golden, seen, compute="fp32")["first_divergent_step"] == "2-cos"
