"""Names of two trees: what is proposed is right, what is ambiguous is listed, and a wrong step has its partner too."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

import whywrong
from whywrong.reporting.command import main

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
MODULES = {
    "input_layernorm": "n1", "self_attn.q_proj": "att.wq", "self_attn.k_proj": "att.wk", "self_attn.v_proj": "att.wv",
    "self_attn.o_proj": "att.wo", "post_attention_layernorm": "n2", "mlp.gate_proj": "ff.w1", "mlp.up_proj": "ff.w3",
    "mlp.down_proj": "ff.w2", "mlp.act_fn": "ff.gate", "self_attn.1": "att.p",
}  # fmt: skip
"""What the port calls the parts of a layer."""


def partner(name):
    """The port's name of a step or a weight of the model."""
    if name.endswith(".weight"):
        return f"{partner(name.removesuffix('.weight'))}.weight"
    if name.startswith("model.layers."):
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        return f"blocks.{layer}.{MODULES[part]}" if part else f"blocks.{layer}"
    return {"model.embed_tokens": "tok", "model.norm": "fin", "lm_head": "head"}[name]


def port(weights, broken="", fault=lambda x: x.roll(1, -1)):
    """The same model by hand, step by step; `broken` is a step that has a fault."""
    w = {partner(name): value for name, value in weights.items()}
    steps = dict(w)

    def step(name, value):
        if name == broken:
            value = fault(value)
        steps[name] = value
        return value

    def linear(name, x):
        return step(name, x @ w[f"{name}.weight"].T)

    def norm(name, x):
        return step(name, x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[f"{name}.weight"])

    def heads(x, count):
        return x.view(2, 9, count, 8).transpose(1, 2)

    def rotated(x):
        first, second = x.chunk(2, -1)
        return x * cosine + torch.cat((-second, first), -1) * sine

    angles = torch.arange(9.0)[:, None] * 10000.0 ** (-torch.arange(0.0, 8.0, 2.0) / 8.0)
    cosine, sine = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
    h = step("tok", w["tok.weight"][IDS])
    for block in ("blocks.0", "blocks.1"):
        x = norm(f"{block}.n1", h)
        v, k, q = (linear(f"{block}.att.w{letter}", x) for letter in "vkq")  # in another order than the model
        q, k, v = (
            rotated(heads(q, 4)),
            rotated(heads(k, 2)).repeat_interleave(2, 1),
            heads(v, 2).repeat_interleave(2, 1),
        )
        future = torch.ones(9, 9, dtype=torch.bool).triu(1)
        p = step(f"{block}.att.p", (q @ k.mT * 8**-0.5).masked_fill(future, -torch.inf).softmax(-1))
        h = h + linear(f"{block}.att.wo", (p @ v).transpose(1, 2).reshape(2, 9, 32))
        x = norm(f"{block}.n2", h)
        gate = step(f"{block}.ff.gate", silu(linear(f"{block}.ff.w1", x)))
        h = step(block, h + linear(f"{block}.ff.w2", gate * linear(f"{block}.ff.w3", x)))
    linear("head", norm("fin", h))
    return steps


@pytest.fixture(scope="module")
def hugging_face():
    """A recorded golden of a Llama, and its weights."""
    pytest.importorskip("transformers")
    from tools import hugging_face as models

    model = models.make("llama", "float32", "eager")
    with torch.no_grad():
        return whywrong.golden(model, input_ids=IDS), {k: v.detach() for k, v in model.named_parameters()}


NO_PARTNER = ["input_ids", "model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
NO_PARTNER += ["model.rotary_emb.0", "model.rotary_emb.1"]


def test_every_step_of_a_port_gets_its_name(hugging_face):
    golden, weights = hugging_face
    steps = port(weights)
    proposed = whywrong.propose_names(steps, golden)
    assert proposed.names == {name: partner(name) for name in golden.trace().names if name not in NO_PARTNER}
    assert (proposed.golden, proposed.observed) == (NO_PARTNER, [])
    report = whywrong.localise(steps, golden, names=proposed.names)
    assert report.first is None, str(report)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("broken", ["blocks.0.n1", "blocks.0.att.p", "blocks.0.att.wo", "blocks.1.ff.w3", "fin"])
def test_a_wrong_step_and_those_after_it_get_theirs(hugging_face, broken):
    golden, weights = hugging_face
    steps = port(weights, broken)
    proposed = whywrong.propose_names(steps, golden)
    right = {name: partner(name) for name in golden.trace().names if name not in NO_PARTNER}
    assert {k: v for k, v in proposed.names.items() if right.get(k) != v} == {}
    report = whywrong.localise(steps, golden, names=proposed.names)
    assert partner(report.first) == broken, str(report)


@pytest.mark.parametrize(
    "fault",
    [lambda x: 2.0 * x, lambda x: -x, lambda x: x.flip(1), lambda x: x + 0.3],
    ids=["2", "-1", "rows", "offset"],
)
def test_whatever_the_fault_every_step_gets_its_name(hugging_face, fault):
    golden, weights = hugging_face
    proposed = whywrong.propose_names(port(weights, "blocks.0.att.wv", fault), golden)
    assert proposed.names == {name: partner(name) for name in golden.trace().names if name not in NO_PARTNER}


def test_what_is_all_zeros_is_listed_and_not_guessed(hugging_face):
    golden, weights = hugging_face
    steps = port(weights, "blocks.0.ff.w3", torch.zeros_like)
    del steps["blocks.0.ff.w1"], steps["blocks.0.ff.gate"]
    proposed = whywrong.propose_names(steps, golden)
    assert "blocks.0.ff.w3" in proposed.observed
    assert all(partner(name) == theirs for name, theirs in proposed.names.items())


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_of_equals_none_is_proposed_and_both_sides_are_listed():
    a, b = drawn(4, 5), drawn(4, 5, seed=1)
    proposed = whywrong.propose_names({"p": a, "q": a, "r": b}, {"x": a, "y": a, "z": b})
    assert proposed.names == {"z": "r"}
    assert (proposed.golden, proposed.observed) == (["x", "y"], ["p", "q"])
    assert "golden without a partner: x, y" in str(proposed)
    assert whywrong.propose_names({"p": a.float(), "q": a.float() + 1e-6}, {"x": a}).names == {}, (
        "equal but for rounding of float32"
    )


def test_without_a_program_a_wrong_step_is_found_by_its_place_or_its_direction():
    a, b, c = (drawn(4, 5, seed=k) for k in range(3))
    golden = {"x": a, "y": b, "z": c}
    by_place = whywrong.propose_names({"p": a.float(), "q": drawn(4, 5, seed=9).float(), "r": c.float()}, golden)
    assert by_place.names == {"x": "p", "y": "q", "z": "r"}
    assert by_place.partners["y"].reason == "place"
    two = {"p": a.float(), "q": drawn(4, 5, seed=9).float(), "r": c.float(), "s": drawn(4, 5, seed=8).float()}
    between = whywrong.propose_names(two, golden | {"u": drawn(4, 5, seed=7)})
    assert between.names == {"x": "p", "y": "q", "z": "r", "u": "s"}, "each the only one between its neighbours"
    unknown = whywrong.Trace(two)
    unknown.ordered = False
    assert whywrong.propose_names(unknown, golden | {"u": drawn(4, 5, seed=7)}).names == {"x": "p", "z": "r"}
    by_direction = whywrong.propose_names({"p": -2.0 * a.float(), "q": drawn(4, 5, seed=9).float()}, golden)
    assert by_direction.names == {"x": "p"}
    assert by_direction.partners["x"].reason == "direction"


def test_steps_of_one_name_are_partners_already_and_shapes_have_to_be_equal():
    a, b = drawn(4, 5), drawn(6, seed=1)
    proposed = whywrong.propose_names({"x": b, "same": a}, {"same": a, "y": b, "z": b.view(2, 3)})
    assert (proposed.names, proposed.golden, proposed.observed) == ({"y": "x"}, ["z"], [])


def test_single_operations_of_a_capture_are_no_candidates():
    class Golden(torch.nn.Sequential):
        def __init__(self, names):
            torch.manual_seed(0)
            super().__init__()
            for name in names:
                self.add_module(name, torch.nn.Linear(6, 6))

    x = drawn(3, 6).float()
    with torch.no_grad():
        golden = whywrong.golden(Golden(("first", "second")), x)
        observed = whywrong.capture(Golden(("one", "two")), x)
    assert any("/" in name for name in observed.names)
    proposed = whywrong.propose_names(observed, golden)
    assert {k: v for k, v in proposed.names.items() if "." not in k} == {"first": "one", "second": "two"}
    assert whywrong.localise(observed, golden, names=proposed.names).first is None


def test_a_map_in_a_file_serves_the_command_and_its_pictures(tmp_path, capsys, monkeypatch):
    a, b = drawn(4, 5), drawn(4, 5, seed=1)
    monkeypatch.chdir(tmp_path)
    whywrong.Trace({"x": a, "y": b}).save("golden.safetensors")
    whywrong.Trace({"p": a.float(), "q": b.float() + 1.0}).save("observed.safetensors")
    Path("names.json").write_text(json.dumps({"x": "p", "y": "q"}))
    files = ["diff", "golden.safetensors", "observed.safetensors"]
    assert main(files) == 2
    assert main([*files, "--names", "names.json", "--plot", "pictures"]) == 1
    assert "first divergence: y" in capsys.readouterr().out
    assert len(list(Path("pictures").glob("*.png"))) == 2
    for text in ("[1]", "{", '{"x": 1}', '{"x": "none"}'):
        Path("names.json").write_text(text)
        assert main([*files, "--names", "names.json"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_what_is_made_of_a_wrong_step_is_found_by_its_values():
    """Without an order, and although all that follows differs from the golden."""

    def reference(x):
        a = whywrong.step("a", x.cumsum(0))
        whywrong.step("b", torch.sin(a))
        return whywrong.step("c", a * a)

    x, wrong = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    observed = whywrong.Trace({"x": x, "p": wrong, "q": torch.sin(wrong), "r": wrong * wrong})
    observed.ordered = False
    proposed = whywrong.propose_names(observed, whywrong.golden(reference, x=x))
    assert proposed.names == {"a": "p", "b": "q", "c": "r"}
    assert [one.reason for one in proposed.partners.values()] == ["what follows", "values", "values"]


def test_of_observed_steps_with_the_same_values_the_first_is_taken():
    """A dump of calls has each value twice, as an output and as the next call's input."""
    a, b = drawn(4, 5), drawn(4, 5, seed=1)
    golden = {"h": a, "y": b}
    observed = {"call.0.output": a.float(), "call.1.input": a.float(), "call.1.output": b.float()}
    assert whywrong.propose_names(observed, golden).names == {"h": "call.0.output", "y": "call.1.output"}
    twice = whywrong.propose_names(observed, {"h": a, "dropped": a, "y": b})
    assert twice.names == {"y": "call.1.output"}, "which of two golden steps it is, values do not tell"
