"""Attention in one step: replayed from queries, keys and values in every layout, its weights' errors with it."""

import math

import pytest
import torch

from labkit.attention import attentions
from labkit.inference import infer
from labkit.replay import replay

U = 2.0**-53
NONE = torch.zeros((), dtype=torch.float64)


def draw(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).bfloat16().double()


def attend(q, k, v, hidden=None, weights=lambda p: p):
    """[.., heads, tokens, width] in the type of q; `weights` is what becomes of exp(s - max) before it meets v."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights(p) @ v / p.sum(-1, keepdim=True)


def late(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


@pytest.fixture
def heads(rng):
    return [draw(rng, 2, 4, 96, 32) for _ in range(3)]


def traces(heads, weights, dtype=torch.bfloat16, hidden=None):
    golden = dict(zip("qkv", heads, strict=True)) | {"out": attend(*heads, hidden)}
    seen = {name: golden[name].to(dtype) for name in "qkv"}
    seen["out"] = attend(*(seen[name].float() for name in "qkv"), hidden, weights).to(dtype)
    return golden, seen


STEP = {"out": {"op": "flash attention, causal", "inputs": ["q", "k", "v"], "inputs_complete": True}}
ABOUT = {"compute": "bf16 matmul, fp32 accumulate"}


def test_weights_cut_to_the_promised_type_are_right(said, heads):
    golden, seen = traces(heads, lambda p: p.bfloat16().float(), hidden=late(96, 96))
    found = said(golden, seen, STEP, **ABOUT)
    assert not found["alarm"]
    assert found["steps"]["out"]["inherited"] < 1e-12  # separated: the inputs are the golden's


@pytest.mark.parametrize(
    "weights",
    [lambda p: p.to(torch.float8_e4m3fn).float(), lambda p: p.clone().index_fill_(-1, torch.tensor([40]), 0.0)],
    ids=["in float8", "without a key"],
)
def test_wrong_weights_are_found_within_one_step(said, heads, weights):
    golden, seen = traces(heads, weights, hidden=late(96, 96))
    assert said(golden, seen, STEP, **ABOUT)["first_divergent_step"] == "out"


def test_bfloat16_weights_are_wrong_where_float32_is_promised(said, heads):
    golden, seen = traces(heads, lambda p: p.bfloat16().float(), torch.float32, late(96, 96))
    assert said(golden, seen, STEP, compute="fp32, no tf32")["first_divergent_step"] == "out"
    golden, seen = traces(heads, lambda p: p, torch.float32, late(96, 96))
    assert not said(golden, seen, STEP, compute="fp32, no tf32")["alarm"]


def swapped(x):
    return x.transpose(-2, -3).contiguous()


def layouts(rng):
    q, k, v = (draw(rng, 2, 6, 24, 16) for _ in range(3))
    few_k, few_v = k[:, :3], v[:, :3]
    grouped = attend(q, few_k.repeat_interleave(2, 1), few_v.repeat_interleave(2, 1))
    one = q[:, :, :1]
    bias = draw(rng, 24, 24)
    yield "heads first", "attention", [q, k, v], attend(q, k, v)
    yield "tokens first", "sdpa", [swapped(q), swapped(k), swapped(v)], swapped(attend(q, k, v))
    yield "merged", "attn", [q, k, v], swapped(attend(q, k, v)).flatten(-2)
    yield "grouped", "grouped attention", [q, few_k, few_v], grouped
    yield "one query", "decode attention", [one[:, :, 0], k, v], attend(one, k, v)[:, :, 0]
    first = attend(one[0], k[0], v[0])[:, 0]
    yield "one query, tokens first", "attention", [q[0, :, 0], swapped(k[0]), swapped(v[0])], first
    yield "causal", "softmax(q k^T) v, causal", [q, k, v], attend(q, k, v, late(24, 24))
    yield "last queries", "causal attention", [q[:, :, -5:], k, v], attend(q[:, :, -5:], k, v, late(5, 24))
    yield "a part", "partial attention, keys 8:20", [q, k, v], attend(q, k[:, :, 8:20], v[:, :, 8:20])
    yield "a part, last included", "attn keys 8..19", [q, k, v], attend(q, k[:, :, 8:20], v[:, :, 8:20])
    yield "the first keys", "attention, keys < 9", [q, k, v], attend(q, k[:, :, :9], v[:, :, :9])
    far = late(24, 24) | ~torch.ones(24, 24, dtype=torch.bool).triu(-6)
    yield "window", "attention, sliding window 7", [q, k, v], attend(q, k, v, far)
    yield "unscaled", "attention", [q, k, v], attend(4.0 * q, k, v)
    with_bias = torch.softmax(q @ k.mT / 4.0 + bias, -1) @ v
    yield "a mask that is added", "attention with a bias", [q, k, v, bias], with_bias


@pytest.mark.parametrize("which", range(14))
def test_every_layout_is_replayed(rng, which):
    name, text, inputs, golden = list(layouts(rng))[which]
    found = replay(text, inputs, golden, U)
    assert found is not None, name
    assert found.weighed is not None, name
    assert torch.allclose(found.run(*inputs), golden, rtol=0.0, atol=1e3 * U)


def test_another_mask_than_the_golden_has_is_not_replayed(rng):
    q, k, v = (draw(rng, 2, 24, 16) for _ in range(3))
    golden = attend(q, k, v, late(24, 24).roll(1, -1))
    assert replay("attention", [q, k, v], golden, U) is None
    assert not list(attentions("attention", [q, k], golden))


def test_it_is_found_in_the_numbers_where_nothing_is_told(rng):
    q, k, v, other = (draw(rng, 2, 4, 40, 16) for _ in range(4))
    steps = {"layer.q": q, "layer.k": k, "x": other, "layer.v": v}
    found = infer(attend(q, k, v, late(40, 40)), steps, U, NONE)
    assert found is not None
    assert found.names == ["layer.q", "layer.k", "layer.v"]
    assert infer(attend(q, k, other, late(40, 40)), {**steps, "x": q + k}, U, NONE) is None
