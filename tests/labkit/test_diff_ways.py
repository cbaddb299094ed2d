"""What `labkit diff` knows a step to be by text or numbers: code, windows, Sinkhorn, slices, tables, few bits."""

import ast

import pytest
import torch

from labkit.expression import parse, sampled
from labkit.inference import infer, inferred
from labkit.replay import replay

U = 2.0**-53
NONE = torch.zeros((), dtype=torch.float64)


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w", "x * rsqrt(mean(x ** 2) + 1e-06) * w"),
        ("y = F.silu(gate) * up", "gate * sigmoid(gate) * up"),
        ("exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)", "exp_avg * beta1 + (1 - beta1) * grad"),
        ("v.mul_(b2).addcmul_(g, g, value=1 - b2)", "v * b2 + (1 - b2) * g * g"),
        ("torch.lerp(m, g, 0.1)", "m + 0.1 * (g - m)"),
        ("p - lr * m_hat / (np.sqrt(v_hat) + eps), lr=1e-3", "p - lr * m_hat / (sqrt(v_hat) + eps)"),
        ("jnp.exp(s - s.max(axis=-1, keepdims=True))", "exp(s - max(s))"),
    ],
)
def test_code_is_read_as_the_formula_that_it_computes(code, read):
    found = parse(code)
    assert found is not None
    assert ast.unparse(found.tree) == read


@pytest.mark.parametrize(
    ("code", "run"),
    [
        ("F.gelu(x)", torch.nn.functional.gelu),
        ("F.gelu(x, approximate='tanh')", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("torch.reciprocal(x) + x.neg()", lambda x: torch.reciprocal(x) + x.neg()),
        ("x.square().sum(-1, keepdim=True)", lambda x: x.square().sum(-1, keepdim=True)),
        ("x.addcdiv_(x, x.exp(), value=-0.5)", lambda x: x - 0.5 * x / x.exp()),
        ("torch.sub(x, x.tanh(), alpha=3)", lambda x: torch.sub(x, x.tanh(), alpha=3)),
        ("np.subtract(x, x.max(axis=-1, keepdims=True))", lambda x: x - x.amax(-1, keepdim=True)),
    ],
)
def test_code_as_a_formula_has_the_value_that_it_has_as_code(rng, code, run):
    x = normal(rng, 6, 8)
    assert torch.allclose(sampled(code, {"x": x}), run(x), rtol=64 * U, atol=64 * U)  # a few roundings in float64


@pytest.mark.parametrize("code", ["x.sum(0)", "x @ w.T + b", "torch.load('x')", "x.__class__(1)", "f(x)(y)"])
def test_code_without_such_a_meaning_is_no_formula(code):
    assert parse(code) is None


def test_a_norm_written_as_code_that_truncates_is_wrong(said, rng):
    x, w = normal(rng, 48, 64).float(), normal(rng, 64).float()
    y = x.double() * torch.rsqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-6) * w.double()
    steps = {
        "y": {
            "op": "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w", "inputs": ["x", "w"],
            "inputs_complete": True, "dtype": "bf16",
        },
    }  # fmt: skip
    about = {"compute": "bf16 operands, fp32 accumulate", "storage_dtype": "bfloat16"}
    golden, seen = {"x": x.double(), "w": w.double(), "y": y}, {"x": x, "w": w, "y": y.bfloat16().float()}
    assert not said(golden, seen, steps, **about)["alarm"]
    cut = (y.float().view(torch.int32) & -65536).view(torch.float32)
    assert said(golden, seen | {"y": cut}, steps, **about)["first_divergent_step"] == "y"


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("places_first", [False, True])
def test_windows_and_their_sum_are_replayed(rng, stride, places_first):
    settings = {"kernel_size": 3, "padding": 1, "stride": stride}
    x = normal(rng, 3, 5, 10, 9)
    columns = torch.nn.functional.unfold(x, **settings)
    back = torch.nn.functional.fold(columns, (10, 9), **settings)
    laid = columns.mT.reshape(-1, 45) if places_first else columns
    for given, golden in ((x, laid), (laid, back)):
        found = infer(golden, {"given": given}, U, NONE)
        assert found is not None
        assert torch.allclose(found.of([given]), golden)
        assert infer(golden.flip(-1), {"given": given}, U, NONE) is None


def test_a_sum_of_columns_that_were_stored_before_is_made_of_them(said, rng):
    """A gradient by the columns that float8 keeps, not by the exact product that the golden also allows."""
    settings = {"kernel_size": 3, "padding": 1}
    dy, w = normal(rng, 3, 8, 10, 9).to(torch.float8_e5m2), (0.2 * normal(rng, 8, 5, 3, 3)).to(torch.float8_e5m2)
    columns = w.double().flatten(1).T @ dy.double().flatten(2)
    golden = {"dy": dy.double(), "w": w.double(), "columns": columns}
    golden["dx"] = torch.nn.functional.fold(columns, (10, 9), **settings)
    seen = {"dy": dy, "w": w, "columns": columns.to(torch.float8_e5m2)}
    seen["dx"] = torch.nn.functional.fold(seen["columns"].double(), (10, 9), **settings).to(torch.float8_e5m2)
    assert not said(golden, seen)["alarm"]
    seen["dx"] = (1.3 * seen["dx"].double()).to(torch.float8_e5m2)
    assert said(golden, seen)["first_divergent_step"] == "dx"


def normalised(x, times, eps=1e-6, first=-1):
    m = torch.exp(x)
    for done in range(2 * times):
        m = m / (m.sum(-3 - first if done % 2 else first, keepdim=True) + eps)
    return m


@pytest.mark.parametrize("known", [torch.float64, torch.float32])
@pytest.mark.parametrize("told", [False, True])
def test_sinkhorn_is_found_and_its_order_and_epsilon_told_apart(said, rng, told, known):
    x = (2.0 * normal(rng, 30, 4, 4)).float()
    golden = {"logits": x.to(known), "m": normalised(x.double(), 4).to(known)}
    steps = {"m": {"op": "sinkhorn 4 iters", "inputs": ["logits"], "inputs_complete": True}} if told else None
    seen = {"logits": x, "m": normalised(x, 4)}
    assert not said(golden, seen, steps)["alarm"]
    for wrong in (normalised(x, 4, first=-2), normalised(x, 3), normalised(x, 4, 1e-3)):
        assert said(golden, seen | {"m": wrong}, steps)["first_divergent_step"] == "m"


def test_a_step_of_some_columns_is_found(rng):
    logits = normal(rng, 48, 24)
    matrix = logits[:, 8:].reshape(48, 4, 4)
    for part, golden in ((logits[:, 4:8], torch.sigmoid(logits[:, 4:8])), (matrix, normalised(matrix, 6))):
        found = next(inferred(golden, {"logits": logits}, U, NONE, {"part": part}))
        assert found.names == ["part"]


def test_a_product_of_a_slice_is_held_to_that(said, rng):
    """Of hyper-connections' coefficients each kind has columns of its own; here the wrong ones were taken."""
    logits = normal(rng, 48, 24).float()
    golden = {"logits": logits.double(), "pre": torch.sigmoid(logits[:, :4].double())}
    seen = {"logits": logits, "pre": torch.sigmoid(logits[:, :4])}
    assert not said(golden, seen)["alarm"]
    for wrong in (seen["pre"] + 2e-4, seen["pre"].bfloat16().float()):
        assert said(golden, seen | {"pre": wrong})["first_divergent_step"] == "pre"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_a_rotation_by_a_table_of_half_the_columns_is_found(said, rng, told, interleaved):
    k, angle = normal(rng, 40, 3, 32).float(), torch.outer(torch.arange(40.0), 10_000.0 ** -(torch.arange(16.0) / 16))
    cos, sin = torch.cos(angle), torch.sin(angle)

    def turned(x, cos, sin):
        cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        parts = (a * cos - b * sin, b * cos + a * sin)
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    golden = {"k": k.double(), "cos": cos.double(), "sin": sin.double(), "turned": turned(k.double(), cos, sin)}
    steps = {"turned": {"inputs": ["k", "cos", "sin"], "inputs_complete": True}} if told else None
    seen = {"k": k, "cos": cos, "sin": sin, "turned": turned(k, cos, sin)}
    assert not said(golden, seen, steps)["alarm"]
    spoiled = seen["turned"].clone()
    spoiled[..., :16] = spoiled[..., :16].bfloat16().float()
    found = said(golden, seen | {"turned": spoiled}, steps)
    assert found["first_divergent_step"] == "turned"


def test_a_convolution_with_a_bias_is_found(said, rng):
    x, w, b = normal(rng, 2, 16, 9, 11).half(), (0.1 * normal(rng, 12, 16, 3, 3)).half(), normal(rng, 12).float()
    y = torch.nn.functional.conv2d(x.double(), w.double(), b.double(), padding=1)
    golden = {"x": x.double(), "w": w.double(), "b": b.double(), "y": y}
    found = infer(y, {name: golden[name] for name in "xwb"}, U, NONE)
    assert sorted(found.names) == ["b", "w", "x"]
    seen = {"x": x, "w": w, "b": b, "y": y.float()}
    about = {"compute": "fp16 matmul, fp32 accumulate"}
    assert not said(golden, seen, **about)["alarm"]
    assert said(golden, seen | {"y": y.half().float()}, {"y": {"dtype": "float32"}}, **about)["alarm"]


@pytest.mark.parametrize("op", ["addmm", "torch.baddbmm", "hgemm"])
def test_products_have_many_names(said, rng, op):
    x, w, b = normal(rng, 40, 64).float(), normal(rng, 64, 32).float(), normal(rng, 32).float()
    golden = {"x": x.double(), "w": w.double(), "b": b.double(), "y": x.double() @ w.double() + b.double()}
    seen = {"x": x, "w": w, "b": b, "y": x.bfloat16().float() @ w.bfloat16().float() + b}
    steps = {"y": {"op": op, "inputs": ["x", "w", "b"], "inputs_complete": True, "dtype": "float32"}}
    assert not said(golden, seen, steps, compute="bf16 tensor cores, fp32 accumulation")["alarm"]
    assert said(golden, seen, steps, compute="fp32, no tf32, no bf16")["first_divergent_step"] == "y"


def test_a_part_of_attention_may_be_named_by_initials_and_more_words(said, rng):
    p, v = torch.softmax(normal(rng, 6, 5, 8), -1).float(), normal(rng, 6, 8, 32).float()
    golden = {"split.p": p.double(), "gather.v": v.double(), "split.acc": p.double() @ v.double()}
    seen = {"split.p": p, "gather.v": v, "split.acc": p.bfloat16().float() @ v.bfloat16().float()}
    steps = {"split.acc": {"op": "p v of each split", "K": 8}}
    assert not said(golden, seen, steps, compute="operands bf16, acc fp32")["alarm"]


def in_4_bits(w, group=32):
    cut = w.reshape(-1, group)
    low, high = cut.amin(-1, keepdim=True), cut.amax(-1, keepdim=True)
    scale = (high - low) / 15.0
    return (((cut - low) / scale).round() * scale + low).reshape(w.shape)


@pytest.mark.parametrize(
    ("op", "note"),
    [
        ("dequantize(quantize int4 asym group=32)", None),
        ("dq", "golden weights are unquantised; int4 asymmetric per group"),
        ("deq", "weights int4 with group scale, the reference weight is not quantised"),
    ],
)
def test_weights_that_only_the_observed_keeps_in_4_bits_are_off_by_half_a_level(said, rng, op, note):
    w = normal(rng, 48, 128).bfloat16()
    golden = {"w": w.double(), "w2": w.double()}
    about = {"dtype_note": note} if note else {}
    steps = {"w2": {"op": op, "inputs": ["w"], "inputs_complete": True}}
    seen = {"w": w, "w2": in_4_bits(w.double()).bfloat16()}
    assert not said(golden, seen, steps, **about)["alarm"]
    shifted = seen | {"w2": (seen["w2"].double() + 0.2).bfloat16()}
    assert said(golden, shifted, steps, **about)["first_divergent_step"] == "w2"


def test_fixed_point_may_fall_to_the_other_side_of_a_tie_and_no_farther(said, rng):
    angle = 16.0 * normal(rng, 36, 12)
    exact = 32767.0 * torch.cos(angle)
    golden = {"angle": angle, "cos": exact.round()}
    codes = golden["cos"].clone()
    codes[31, 1] += 1.0
    steps = {"cos": {"op": "Cos -> Q15 int16", "inputs": ["angle"], "inputs_complete": True, "dtype": "int16"}}
    seen = {"angle": angle.float(), "cos": codes.to(torch.int16)}
    assert not said(golden, seen, steps)["alarm"]
    assert said(golden, seen | {"cos": exact.trunc().to(torch.int16)}, steps)["alarm"]


def test_two_scales_of_float8_cut_both_factors(said, rng):
    x, w = normal(rng, 32, 160).float(), normal(rng, 48, 160)
    scale, codes = w.abs().max() / 448.0, (448.0 * w / w.abs().max()).to(torch.float8_e4m3fn)
    golden = {
        "x": x.double(), "x_scale": x.double().abs().amax(-1, keepdim=True) / 448.0, "w_scale": scale.reshape(1),
        "w_q": codes.double(),
    }  # fmt: skip
    golden["out"] = golden["x"] @ (codes.double() * scale).T
    cast = (x.double() / golden["x_scale"]).to(torch.float8_e4m3fn).double() * golden["x_scale"]
    seen = {name: golden[name].float() for name in ("x", "x_scale", "w_scale")} | {"w_q": codes}
    seen["out"] = (cast @ (codes.double() * scale).T).float()
    steps = {"out": {"inputs": ["x", "x_scale", "w_q", "w_scale"], "inputs_complete": True}}
    about = {"compute": "fp32 accumulate"}
    assert not said(golden, seen, steps, **about)["alarm"]
    assert said(golden, seen | {"out": 1.1 * seen["out"]}, steps, **about)["first_divergent_step"] == "out"


def test_of_readings_one_without_a_fitted_number_comes_first(rng):
    y, a, b = normal(rng, 17, 33), torch.tensor(69.25603864).double(), torch.tensor(1076.88262910).double()
    found = infer(y / (a * b), {"y": y, "a": a, "b": b}, U, NONE)
    assert not found.fitted
    assert sorted(found.names) == ["a", "b", "y"]


def test_where_a_silent_trace_stores_in_16_bits_products_may_take_such_factors(said, rng):
    x, y = normal(rng, 57, 96).bfloat16(), normal(rng, 57, 24)
    w = normal(rng, 96, 24)
    golden = {"x": x.double(), "h": x.double() @ w, "y": y}
    seen = {"x": x, "h": (x.double() @ w.bfloat16().double()).float(), "y": y.float()}
    assert not said(golden, seen)["alarm"]
    assert said(golden, seen | {"h": seen["h"] + 0.5})["first_divergent_step"] == "h"


def test_a_transposed_copy_is_no_window(rng):
    x = normal(rng, 2, 4, 5, 6)
    assert replay("im2col", [x], x.flatten(2), U) is None
