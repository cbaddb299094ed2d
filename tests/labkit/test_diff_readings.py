"""What `labkit diff` reads off a golden where a text says little: masks, scales, sums of slices, norms of images."""

import ast
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from labkit.expression import parse
from labkit.inference import infer

U = 2.0**-53
NONE = torch.zeros((), dtype=torch.float64)


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def attention(rng, fill, dtype, masked=None):
    q, k = (normal(rng, 4, 24, 16).to(dtype) for _ in range(2))
    scores = (q.float() @ k.float().mT).to(dtype) if dtype is not torch.float64 else q @ k.mT
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    if masked is not None:
        hidden = masked(hidden)
    seen = scores.masked_fill(hidden, fill)
    return {"q": q, "k": k, "scores": scores, "masked": seen, "probs": torch.softmax(seen, -1)}


@pytest.mark.parametrize("fill", [-3.0e38, -30_000.0, float("-inf")])
def test_a_mask_may_be_another_very_negative_number(said, fill):
    golden = attention(np.random.default_rng(1), -1e9, torch.float64)
    golden |= {name: golden[name].float().double() for name in "qk"}
    assert not said(golden, attention(np.random.default_rng(1), fill, torch.float32))["alarm"]


def test_one_masked_element_too_many_is_found_whatever_the_mask(said):
    golden = attention(np.random.default_rng(1), -1e9, torch.float64)

    def spoil(hidden):
        hidden[5, 3] = True
        return hidden

    found = said(golden, attention(np.random.default_rng(1), -3.0e38, torch.float32, spoil))
    assert found["first_divergent_step"] == "masked"


def test_a_finite_mask_does_not_hide_what_the_scores_are_off(said, rng):
    """The largest score of a block is off as all scores are, however large the mask is beside them."""
    scores = normal(rng, 3, 40, 40).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -30_000.0)
    seen = scores + 3e-4 * normal(rng, 3, 40, 40) * (scores > -100.0)
    steps = {"scores": {"op": "q k^T, masked", "dtype": "float32"}, "top": {"op": "max per block of 8"}}

    def top(x):
        return x.unflatten(-1, (5, 8)).amax(-1)

    golden = {"scores": scores, "top": top(scores)}
    about = {"compute": "tf32 matmul, fp32 accumulate"}
    assert not said(golden, {"scores": seen.float(), "top": top(seen).float()}, steps, **about)["alarm"]


def test_a_largest_among_equals_may_have_any_large_index(said, rng):
    logits = normal(rng, 30, 900)
    logits[:, 700] = logits[:, 650] = logits.amax(-1) + 1.0
    golden = {"logits": logits, "pred": torch.full((30,), 650)}
    steps = {"pred": {"op": "index of a largest logit", "inputs": ["logits"]}}
    seen = {"logits": logits.float(), "pred": torch.full((30,), 700)}
    assert not said(golden, seen, steps)["alarm"]
    assert said(golden, seen | {"pred": torch.full((30,), 701)}, steps)["first_divergent_step"] == "pred"


def by_chance(x, rng):
    low = x.floor()
    return low + (torch.from_numpy(rng.random(x.shape)) < x - low).double()


@pytest.mark.parametrize("note", ["stochastic rounding", None])
def test_codes_rounded_by_chance_are_right_and_codes_cut_are_not(said, rng, note):
    x = 30.0 * normal(rng, 60, 50)
    golden = {"x": x.float().double(), "xq": x.float().double().round().to(torch.int8)}
    steps = {"xq": {"op": "quantise int8"}}
    about = {"dtype_note": note} if note else {}
    seen = {"x": x.float(), "xq": by_chance(x.float().double(), rng).to(torch.int8)}
    assert not said(golden, seen, steps, **about)["alarm"]
    for wrong in (x.trunc(), x.floor(), x.ceil(), (0.97 * x).round()):
        cut = seen | {"xq": wrong.to(torch.int8)}
        assert said(golden, cut, steps, **about)["first_divergent_step"] == "xq"


def test_ties_of_codes_in_blocks_with_a_tail_may_fall_the_other_way(said, rng):
    """Nobody tells which step is the scale, nor that its blocks are 32 x 32."""
    x = torch.from_numpy(rng.integers(-250, 250, (64, 51))).double() / 32.0
    s = torch.full((2, 2), 0.0625, dtype=torch.float64)
    exact = x / 0.0625
    golden = {"x": x, "s": s, "xq": exact.round().to(torch.int8)}
    away = (exact.abs() + 0.5).floor() * exact.sign()
    seen = {"x": x.float(), "s": s.float(), "xq": away.to(torch.int8)}
    assert bool((golden["xq"] != seen["xq"]).any())
    assert not said(golden, seen)["alarm"]
    off = seen | {"xq": seen["xq"] + (exact.frac() == 0.0).to(torch.int8)}
    assert said(golden, off)["first_divergent_step"] == "xq"


def test_only_the_codes_that_a_step_wrote_count(said, rng):
    pool = torch.from_numpy(rng.integers(-100, 100, (40, 16, 2, 8))).to(torch.int8)
    new = 30.0 * normal(rng, 3, 2, 8)

    def written(codes):
        after = pool.clone()
        after[7, :3] = codes.to(torch.int8)
        return after

    steps = {"after": {"op": "write at slot, quantised", "inputs": ["pool", "new"], "inputs_complete": True}}
    golden = {"pool": pool, "new": new.float().double(), "after": written(new.float().double().round())}
    seen = {"pool": pool, "new": new.float(), "after": written(new.round())}
    assert not said(golden, seen, steps)["alarm"]
    assert said(golden, seen | {"after": written(new.trunc())}, steps)["first_divergent_step"] == "after"


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("part", [0, 4, 8])
def test_the_sum_of_a_product_with_some_columns_is_found(said, rng, told, part):
    """dalpha of hyper-connections: a gradient times the columns of the projection that are its own, over all tokens."""
    g, mix = normal(rng, 130, 4, 4) if part == 8 else normal(rng, 130, 4), normal(rng, 130, 24)
    width = g[0].numel()

    def total(g, mix, rows=130):
        return (g.flatten(1) * mix[:, part : part + width])[:rows].sum()[None]

    golden = {"g": g, "mix": mix, "dalpha": total(g, mix)}
    steps = {"dalpha": {"op": "sum over tokens", "inputs": ["g", "mix"]}} if told else None
    seen = {name: golden[name].float() for name in ("g", "mix")}
    right = seen | {"dalpha": total(seen["g"], seen["mix"])}
    assert not said(golden, right, steps)["alarm"]
    assert (
        said(golden, seen | {"dalpha": total(seen["g"], seen["mix"], 126)}, steps)["first_divergent_step"] == "dalpha"
    )


def test_a_mean_over_what_counts_is_found(said, rng):
    loss = normal(rng, 24).abs() * (torch.arange(24) % 4 > 0)
    golden = {"loss": loss, "mean": loss.sum() / 18}
    seen = {"loss": loss.float()}
    assert not said(golden, seen | {"mean": loss.float().sum() / 18})["alarm"]
    assert said(golden, seen | {"mean": loss.float().mean()})["first_divergent_step"] == "mean"


SCALES = {
    "all": lambda x: x.abs().amax()[None] / 127.0,
    "rows": lambda x: x.abs().amax(-1) / 448.0,
    "columns": lambda x: x.abs().amax(0) / 7.0,
    "groups of 25": lambda x: x.unflatten(-1, (3, 25)).abs().amax(-1) / 7.0,
    "tiles of 32": lambda x: (
        torch.stack([torch.stack([b.abs().amax() for b in a.split(32, 1)]) for a in x.split(32, 0)]) / 127.0
    ),
}


@pytest.mark.parametrize("kind", SCALES)
def test_a_scale_is_a_multiple_of_its_blocks_largest_magnitude(rng, kind):
    x = normal(rng, 45, 75)
    golden = SCALES[kind](x)
    found = infer(golden, {"other": normal(rng, 45, 75), "x": x}, U, NONE)
    assert found.names == ["x"]
    again = normal(rng, 45, 75)
    assert torch.allclose(found.way.run(again), SCALES[kind](again), rtol=1e-12)
    off = golden * (1.0 + 1e-9 * torch.arange(golden.numel()).double().view(golden.shape))
    assert golden.numel() == 1 or infer(off, {"x": x}, U, NONE) is None


def test_a_vector_is_no_scale_of_its_product_with_another(rng):
    """The largest of each column of an outer product is a multiple of one factor, and no scale."""
    frequency = 10_000.0 ** (-torch.arange(12).double() / 12)
    assert infer(frequency, {"angle": torch.arange(33).double()[:, None] * frequency}, U, NONE) is None


NORMS = {
    "group norm": lambda x, w, b, m, v: torch.nn.functional.group_norm(x, 4, w, b, 1e-6),
    "instance norm": lambda x, w, b, m, v: torch.nn.functional.instance_norm(x, eps=1e-5),
    "batch norm": lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, None, None, w, b, training=True),
    "given statistics": lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, m, v, w, b),
    "given, no shift": lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, m, v, w),
}


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_of_images_is_found(rng, kind, images):
    def drawn():
        return 1.0 + 2.0 * normal(rng, images, 12, 7, 5)

    x, (w, b, m) = drawn(), normal(rng, 3, 12)
    v = normal(rng, 12).square()
    golden = NORMS[kind](x, w, b, m, v)
    sources = {"x": x, "w": w, "b": b, "m": m, "v": v}
    found = infer(golden, sources, U, NONE)
    assert found.names[0] == "x"
    again = drawn()
    given = [again if name == "x" else sources[name] for name in found.names]
    value = found.way.run(*given) if found.way else found.written.value(given, [0.0 * y for y in given], U)[0]
    assert torch.allclose(value, NORMS[kind](again, w, b, m, v), rtol=1e-9, atol=1e-11)


def test_the_streams_of_a_token_are_projected_together(said, rng):
    """A product of x [T, n, D] as [T, n D], in the precision that the trace promises for products."""
    x, phi = normal(rng, 38, 4, 24).half().double(), 0.1 * normal(rng, 96, 24)
    golden = {"x": x, "phi": phi, "z": x.flatten(1) @ phi}
    steps = {"z": {"op": "Z=X*Phi", "inputs": ["x", "phi"]}}
    seen = {"x": x.half(), "phi": phi.float()}
    right = seen | {"z": (x.flatten(1) @ phi.half().double()).float()}
    assert not said(golden, right, steps, compute="hmma fp16, fp32 acc")["alarm"]
    assert said(golden, right, steps, compute="fp32 fma")["first_divergent_step"] == "z"


def test_a_missing_z_loss_is_found_in_a_gradient_of_logits(said, rng):
    logits, target = 4.0 * normal(rng, 40, 320), torch.arange(40) * 7
    target[::8] = -100
    given = (target >= 0).double()[:, None]
    hot = (target[:, None] == torch.arange(320)).double()

    def gradient(logits, zeta):
        lse = torch.logsumexp(logits, -1, keepdim=True)
        return given * (torch.softmax(logits, -1) * (1.0 + 2.0 * zeta * lse) - hot) / given.sum()

    golden = {"target": target, "logits": logits, "lse": torch.logsumexp(logits, -1)}
    golden["dlogits"] = gradient(logits, 1e-3)
    steps = {"dlogits": {"op": "(softmax - onehot)/n, z-loss"}}
    seen = {"target": target, "logits": logits.float(), "lse": golden["lse"].float()}
    right = seen | {"dlogits": gradient(logits.float(), 1e-3).float()}
    assert not said(golden, right, steps, compute="fp32")["alarm"]
    wrong = seen | {"dlogits": gradient(logits.float(), 0.0).float()}
    assert said(golden, wrong, steps, compute="fp32")["first_divergent_step"] == "dlogits"


def test_a_step_that_can_be_read_in_several_ways_is_right_if_one_of_them_gives_it(said, rng):
    """In a golden without rounding the product of codes and scales is that of what was quantised."""
    x, w = (normal(rng, n, 80).bfloat16() for n in (26, 36))
    sx, sw = (one.abs().amax(-1, keepdim=True).double() / 57344.0 for one in (x, w))
    golden = {"x": x.double(), "w": w.double(), "sx": sx, "xq": x / sx, "sw": sw.T, "wq": w / sw}
    golden |= {"a": golden["xq"] @ golden["wq"].T, "y": golden["x"] @ golden["w"].T}
    xq, wq = (golden[name].to(torch.float8_e5m2) for name in ("xq", "wq"))
    a = xq.double() @ wq.double().T
    right = {"x": x, "w": w, "sx": sx.float(), "xq": xq, "sw": sw.T.float(), "wq": wq, "a": a.float()}
    right["y"] = (a * sx * sw.T).bfloat16()
    assert not said(golden, right)["alarm"]
    assert said(golden, right | {"y": (a * sx).bfloat16()})["first_divergent_step"] == "y"


def blockwise(a, b, a_s, b_s, cut=lambda x: x):
    """A product whose blocks of 64 along K are each scaled before they are added."""
    total = torch.zeros(len(a), len(b), dtype=a.dtype)
    for k in range(0, a.shape[1], 64):
        part = cut(a[:, k : k + 64] @ b[:, k : k + 64].T)
        total += part * a_s[:, k // 64, None] * b_s[None, :, k // 64]
    return total


def test_a_product_of_codes_with_a_scale_a_block_is_replayed(said, rng):
    """Blocks accumulated in bfloat16 are far inside what float8 codes cost, and far outside what the product may."""
    a, b = (normal(rng, n, 256) for n in (36, 44))
    a_s, b_s = (x.unflatten(-1, (4, 64)).abs().amax(-1) / 448.0 for x in (a, b))
    a_q, b_q = (x / s.repeat_interleave(64, 1) for x, s in ((a, a_s), (b, b_s)))
    golden = {"a_s": a_s, "b_s": b_s, "a_q": a_q, "b_q": b_q, "c": blockwise(a_q, b_q, a_s, b_s)}
    steps = {"c": {"op": "blockwise scaled fp8 gemm", "inputs": ["a_q", "b_q", "a_s", "b_s"], "inputs_complete": True}}
    q = [x.to(torch.float8_e4m3fn).float() for x in (a_q, b_q)]
    seen = {"a_s": a_s.float(), "b_s": b_s.float(), "a_q": q[0], "b_q": q[1]}
    about = {"compute": "fp8 operands, fp32 accumulate", "dtype_note": "a_q and b_q hold e4m3 values"}
    right = seen | {"c": blockwise(*q, a_s.float(), b_s.float())}
    assert not said(golden, right, steps, **about)["alarm"]
    wrong = seen | {"c": blockwise(*q, a_s.float(), b_s.float(), lambda x: x.bfloat16().float())}
    assert said(golden, wrong, steps, **about)["first_divergent_step"] == "c"


def test_a_note_may_grant_functions_an_absolute_error(said, rng):
    angle = (30.0 * normal(rng, 24, 16)).float().double()
    golden = {"angle": angle, "co": torch.cos(angle)}
    steps = {"co": {"op": "cos", "inputs": ["angle"], "inputs_complete": True}}
    fast = torch.cos(angle) + 2.0**-22 * torch.sign(normal(rng, 24, 16))
    seen = {"angle": angle.float(), "co": fast.float()}
    note = {"compute": "fp32", "dtype_note": "sin/cos.approx, abs err 2^-21"}
    assert not said(golden, seen, steps, **note)["alarm"]
    assert said(golden, seen, steps, compute="fp32")["first_divergent_step"] == "co"
    worse = seen | {"co": (torch.cos(angle) + 2.0**-18).float()}
    assert said(golden, worse, steps, **note)["first_divergent_step"] == "co"


def test_a_copy_in_fewer_digits_is_no_function_of_small_numbers(said, rng):
    """Within a rounding to bfloat16 the tanh of small numbers is the numbers themselves."""
    master = 0.02 * normal(rng, 590).float().double()
    golden = {"master": master, "model": master}
    steps = {"model": {"inputs": ["master"]}}
    seen = {"master": master.float(), "model": master.bfloat16()}
    assert not said(golden, seen, steps, compute="fp32")["alarm"]
    cut = (master.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert said(golden, seen | {"model": cut}, steps, compute="fp32")["first_divergent_step"] == "model"


def test_a_length_and_an_output_make_a_product_whose_factors_may_be_narrow(said, rng):
    p, v = torch.softmax(normal(rng, 8, 16), -1), normal(rng, 16, 32).half()
    golden = {"lse": normal(rng, 8), "v": v.double(), "out": p @ v.double()}
    steps = {"out": {"op": "partial output normalised inside the split", "K": 16, "dtype": "fp16"}}
    right = (p.half().double() @ v.double()).half()
    seen = {"lse": golden["lse"].float(), "v": v, "out": right}
    assert not said(golden, seen, steps, compute="fp16 operands, fp32 accumulate")["alarm"]
    wrong = seen | {"out": (1.02 * (p @ v.double())).half()}
    assert said(golden, wrong, steps, compute="fp16 operands, fp32 accumulate")["first_divergent_step"] == "out"


def test_rounding_between_operations_has_no_drift_and_a_store_that_cuts_has(said, rng):
    p, update = normal(rng, 4000).bfloat16().double(), normal(rng, 4000).float().double()
    golden = {"p": p, "update": update, "new": p - 0.01 * update}
    steps = {"new": {"op": "decoupled decay + p, lr=0.01", "inputs": ["p", "update"], "inputs_complete": True}}
    exact = (p - 0.01 * update).float()
    seen = {"p": p.bfloat16(), "update": update.float()}
    about = {"compute": "fp32 elementwise", "storage_dtype": "bfloat16"}
    assert not said(golden, seen | {"new": exact.bfloat16()}, steps, **about)["alarm"]
    cut = (exact.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert said(golden, seen | {"new": cut}, steps, **about)["first_divergent_step"] == "new"


def test_a_setting_that_turns_tf32_off_denies_it(said, rng):
    x, w = normal(rng, 24, 64).float(), normal(rng, 64, 40).float()
    golden = {"x": x.double(), "w": w.double(), "y": x.double() @ w.double()}
    seen = {"x": x, "w": w, "y": (x.bfloat16().double() @ w.bfloat16().double()).float()}
    found = said(golden, seen, compute="fp32 everywhere", dtype_note="cudnn.allow_tf32=False, dumped with hooks")
    assert found["first_divergent_step"] == "y"


def test_the_denominator_of_a_softmax_is_replayed(said, rng):
    """A chunk of a vocabulary that was summed by its own maximum: the golden does not show it, the logits do."""
    h, w = normal(rng, 17, 32).float(), normal(rng, 32, 260).float()
    x, seen_x = h.double() @ w.double(), h @ w

    def total(x, wrong=False):
        e = torch.exp(x - x.amax(-1, keepdim=True))
        if wrong:
            e[:, 195:] = torch.exp(x[:, 195:] - x[:, 195:].amax(-1, keepdim=True))
        return e.sum(-1)

    golden = {"h": h.double(), "w": w.double(), "logits": x, "top": x.amax(-1), "denominator": total(x)}
    seen = {"h": h, "w": w, "logits": seen_x.bfloat16(), "top": seen_x.amax(-1), "denominator": total(seen_x)}
    steps = {"denominator": {"op": "sum exp(x - max)", "inputs": ["logits", "top"], "K": 260}}
    assert not said(golden, seen, steps)["alarm"]
    wrong = seen | {"denominator": total(seen_x, wrong=True)}
    assert said(golden, wrong, steps)["first_divergent_step"] == "denominator"


def test_what_a_variable_was_before_is_looked_at_first(said, rng):
    """Nothing told: the new parameter is the old one, of ten steps before, less a rate times the update."""
    p, update = normal(rng, 11, 91), normal(rng, 11, 91)
    others = {f"{i:02d}_state": normal(rng, 11, 91) for i in range(1, 9)}
    golden = {"00_param_0": p, **others, "09_update": update, "10_param": 0.999 * p - 1e-3 * update}
    golden = {name: x.float().double() for name, x in golden.items() if name != "10_param"}
    golden["10_param"] = 0.999 * golden["00_param_0"] - 1e-3 * golden["09_update"]
    seen = {name: x.float() for name, x in golden.items()}
    seen["10_param"].flatten()[-1] = seen["00_param_0"].flatten()[-1]
    found = said(golden, seen)
    assert found["first_divergent_step"] == "10_param"


@pytest.mark.parametrize(
    ("about", "right"),
    [
        ({"compute": "jax default_matmul_precision=bfloat16; everything else float32"}, True),
        ({"compute": "mixed precision: bfloat16 compute, float32 statistics"}, True),
        ({"compute": "mixed precision: float32 compute, bfloat16 gradients"}, False),
    ],
)
def test_factors_are_cut_where_the_policy_says_so(said, rng, about, right):
    x, w = normal(rng, 24, 48).float(), normal(rng, 48, 40).float()
    golden = {"x": x.double(), "w": w.double(), "y": x.double() @ w.double()}
    seen = {"x": x, "w": w, "y": (x.bfloat16().double() @ w.bfloat16().double()).float()}
    if "statistics" in about["compute"]:
        seen["y"] = seen["y"].bfloat16()
    assert said(golden, seen, **about)["alarm"] is not right


def test_each_operation_that_stores_is_heeded_wherever_it_is_said(said, rng):
    x, w = normal(rng, 60, 128).bfloat16(), normal(rng, 128).bfloat16()
    exact = x.double()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
    golden = {"x": exact, "w": w.double(), "y": exact * scale * w.double()}
    seen = {"x": x, "w": w, "y": (x.float() * scale.float()).bfloat16() * w}
    steps = {"y": {"op": "rms_norm eps=1e-06", "inputs": ["x", "w"], "inputs_complete": True, "dtype": "bfloat16"}}
    compute = {"compute": "bf16 operands, fp32 everywhere"}
    assert said(golden, seen, steps, **compute)["alarm"]
    assert not said(golden, seen, steps, **compute, dtype_note="elementwise ops round to bf16 after each op")["alarm"]


def test_scores_within_a_step_have_their_factors_cut(said, rng):
    q, k = normal(rng, 3, 2, 32).float(), normal(rng, 3, 2, 40, 32).float()

    def total(q, k):
        return torch.logsumexp((k @ q[..., None])[..., 0] / 32**0.5, -1)

    golden = {"q": q.double(), "k": k.double(), "lse": total(q.double(), k.double())}
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, k)]
    seen = {"q": q, "k": k, "lse": total(*cut)}
    steps = {"lse": {"op": "logsumexp of scaled scores, keys 0..39", "K": 32}}
    assert not said(golden, seen, steps, compute="TF32 tensor cores for dots")["alarm"]
    assert said(golden, seen, steps, compute="fp32")["first_divergent_step"] == "lse"


def test_the_place_of_a_largest_in_its_window_may_be_any(said, rng):
    x = torch.from_numpy(rng.integers(0, 3, (3, 6, 12, 12))).double()
    rows = x.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).transpose(-2, -3).flatten(-2)
    first, last = rows.argmax(-1), 3 - rows.flip(-1).argmax(-1)
    golden = {"x": x, "place": first.to(torch.int32)}
    steps = {"place": {"op": "argmax inside each 2x2 window"}}
    assert not said(golden, {"x": x.bfloat16(), "place": last.to(torch.int32)}, steps)["alarm"]
    off = torch.where(rows.amax(-1) > rows.amin(-1), rows.argmin(-1), first).to(torch.int32)
    assert said(golden, {"x": x.bfloat16(), "place": off}, steps)["first_divergent_step"] == "place"


def test_a_copy_in_16_bits_in_place_of_the_float32_original_is_found(said, rng):
    """Where nothing is told but a rate that could be fitted, and in a sum whose bound is wider than bfloat16's."""
    p, update, lr = normal(rng, 48, 33).float(), normal(rng, 48, 33).float(), torch.tensor([2e-3])
    golden = {"p_0": p.double(), "copy": p.double(), "update": update.double(), "lr": lr.double()}
    golden["p_1"] = golden["p_0"] - golden["lr"] * golden["update"]
    seen = {"p_0": p, "copy": p.bfloat16(), "update": update, "lr": lr, "p_1": p - lr * update}
    assert not said(golden, seen)["alarm"]
    assert said(golden, seen | {"p_1": p.bfloat16().float() - lr * update})["first_divergent_step"] == "p_1"
    other = normal(rng, 48, 33).float()
    h = golden["p_0"] @ normal(rng, 33, 33).double()
    p = 0.1 * p
    golden = {"stream": p.double(), "h": h, "sum": p.double() + h}
    seen = {"stream": p, "h": (h + 1e-5 * other).bfloat16(), "sum": (p + h).float()}
    steps = {"sum": {"op": "residual add", "inputs": ["stream", "h"], "inputs_complete": True, "dtype": "float32"}}
    about = {"compute": "bf16 matmul, fp32 accumulate"}
    assert not said(golden, seen, steps, **about)["alarm"]
    assert said(golden, seen | {"sum": seen["sum"].bfloat16().float()}, steps, **about)["first_divergent_step"] == "sum"


def test_a_product_named_by_initials_is_one_and_its_layout_is_found(said, rng):
    """One token over the keys that heads share, tokens before heads: `p v`, with the weights cut to bfloat16."""
    p, v = torch.softmax(normal(rng, 2, 4, 55), -1).float(), normal(rng, 2, 55, 2, 32).bfloat16()

    def out(p, v):
        return (p.unsqueeze(-2) @ v.transpose(1, 2).repeat_interleave(2, 1)).squeeze(-2)

    golden = {"k1.probs": p.double(), "k2.v_gather": v.double(), "k3.out": out(p.double(), v.double())}
    seen = {"k1.probs": p, "k2.v_gather": v, "k3.out": out(p.bfloat16().float(), v.float()).bfloat16()}
    steps = {"k3.out": {"op": "p v", "inputs": ["k1.probs", "k2.v_gather"], "inputs_complete": True}}
    found = said(golden, seen, steps, compute="bf16 operands, fp32 accumulate")
    assert not found["alarm"]
    assert found["steps"]["k3.out"]["own"] is not None
    assert said(golden, seen, steps, compute="fp32, tf32 off")["alarm"]


def test_equal_factors_are_rounded_one_way(said, rng):
    """A gradient of logits, -1/40 at each target and nearly nothing beside: rounding one number moves the whole."""
    h = normal(rng, 40, 64).float()
    d = torch.softmax(normal(rng, 40, 3001), -1) / 40.0
    d[torch.arange(40), torch.arange(40) * 7] -= 1.0 / 40.0
    d = d.float()
    golden = {"dlogits": d.double(), "h": h.double(), "dW": d.double().mT @ h.double()}
    seen = {"dlogits": d, "h": h, "dW": d.bfloat16().float().mT @ h.bfloat16().float()}
    steps = {"dW": {"op": "dlogits^T h", "inputs": ["dlogits", "h"], "inputs_complete": True, "K": 40}}
    about = {"compute": "bf16 operands, fp32 accumulate"}
    assert not said(golden, seen, steps, **about)["alarm"]
    assert said(golden, seen | {"dW": 1.02 * seen["dW"]}, steps, **about)["first_divergent_step"] == "dW"


def test_a_step_that_neither_side_places_is_no_divergence(said, tmp_path, judged, rng):
    x, w = normal(rng, 8, 6), normal(rng, 6, 4)
    golden = {"acc": x @ w, "x": x, "w": w, "y": 0.5 * (x @ w)}
    seen = {"x": x.float(), "w": w.float(), "y": 0.5 * (x.float() @ w.float())}
    save_file(golden, tmp_path / "golden.safetensors", {})
    save_file(seen, tmp_path / "observed.safetensors", {"order": json.dumps(["x", "w", "y"])})
    code, found = judged(tmp_path / "golden.safetensors", tmp_path / "observed.safetensors")
    assert code == 0
    assert found["first_divergent_step"] is None


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("m = 0.9 m + 0.1 g", "0.9 * m + 0.1 * g"),
        ("adamw: p(1-lr wd) - lr u, lr=0.001 wd=0.01", "p * (1 - lr * wd) - lr * u"),
        ("x / s -> e4m3", "x / s"),
        ("weight decay: p*(1-lr*wd), lr=0.1", "p * (1 - lr * wd)"),
    ],
)
def test_what_stands_side_by_side_is_multiplied(text, read):
    found = parse(text)
    assert found is not None
    assert ast.unparse(found.tree) == read
    assert not {"m", "p", "x"} & set(found.numbers)


def test_transformed_factors_are_cut_again(said, rng):
    """Winograd's F(2, 3) along rows in float16: its sums of inputs have more digits than the inputs."""
    x, w = normal(rng, 1, 16, 10, 18).half(), normal(rng, 8, 16, 3, 3).half()
    golden = {"x": x.double(), "w": w.double(), "y": torch.nn.functional.conv2d(x.double(), w.double())}
    left, middle, right = w.double().unbind(-1)
    taps = [left, (left + middle + right) / 2.0, (left - middle + right) / 2.0, right]
    d = x.double().unfold(-1, 4, 2)  # [.., columns / 2, 4]
    cuts = [d[..., 0] - d[..., 2], d[..., 1] + d[..., 2], d[..., 2] - d[..., 1], d[..., 1] - d[..., 3]]
    parts = [
        torch.nn.functional.conv2d(one.half().double(), tap.half().double().unsqueeze(-1))
        for one, tap in zip(cuts, taps, strict=True)
    ]
    y = torch.stack((parts[0] + parts[1] + parts[2], parts[1] - parts[2] - parts[3]), -1).flatten(-2)
    assert torch.allclose(y, golden["y"], rtol=0.0, atol=0.1)
    seen = {"x": x, "w": w, "y": y.half()}
    assert not said(golden, seen, compute="winograd F(2,3), fp16 transforms, fp32 accumulate")["alarm"]
    assert said(golden, seen, compute="direct convolution, fp32 accumulate")["first_divergent_step"] == "y"
