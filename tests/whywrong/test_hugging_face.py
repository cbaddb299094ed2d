"""Models of `transformers` that nobody tuned the check to: right ones are not flagged, a broken module is identified.

The long form takes every architecture, dtype and way of attention, with and without gradients, and writes tables into
the folder that LABKIT_HUGGING_FACE names, or a temporary one.
"""

import copy
import os
from pathlib import Path

import pytest
import torch

import whywrong

pytest.importorskip("transformers")

from tools import hugging_face as models  # beside this file


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = Path(os.environ.get("LABKIT_HUGGING_FACE") or tmp_path_factory.mktemp("hugging_face"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "attention", "layers"), [("llama", "sdpa", 1), ("bert", "eager", 1), ("mamba", "none", 2)]
)
def test_a_right_model_is_not_flagged(name, attention, layers, dtype):
    case = models.measure(name, dtype, attention, backward=False, num_hidden_layers=layers)
    assert not case.accused, f"{case.first}: {case.words}"


def test_a_right_model_with_gradients_is_not_flagged():
    case = models.measure("bert", "float32", "eager", backward=True, num_hidden_layers=1)
    assert not case.accused, f"{case.first}: {case.words}"


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixtral", "mixtral_one_by_one"])
def test_a_right_mixture_of_experts_with_gradients_is_not_flagged(name):
    """Its router computes in float32, and what autograd adds up in bfloat16 before that is no step."""
    case = models.measure(name, "bfloat16", "eager", backward=True)
    assert not case.accused, f"{case.first}: {case.words}"


def test_a_broken_module_is_identified():
    (fault,) = models.measure_faults("llama", "bfloat16", "eager", ("a head of zeros",))
    assert fault.found
    assert fault.right, f"{fault.first} in place of {fault.module}"


def _transposed(model, port, monkeypatch):
    port.model.layers[1].self_attn.q_proj.weight.data = model.model.layers[1].self_attn.q_proj.weight.data.T.clone()


def _another_eps(model, port, monkeypatch):
    port.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-3


def _mask_off_by_one(model, port, monkeypatch):
    from transformers.models.llama import modeling_llama

    def mask(*args, **named):
        right = whole(*args, **named)
        return torch.full(right.shape, torch.finfo(right.dtype).min).triu(2)

    whole = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("fault", "place", "kinds"),
    [
        (_transposed, "model.layers.1.self_attn.q_proj/", {"transpose"}),
        (_another_eps, "model.layers.1.post_attention_layernorm/", {"eps"}),
        (_mask_off_by_one, "model.layers.0.self_attn/", {"mask", "shift"}),
    ],
)
def test_what_was_broken_by_hand_is_named_from_outside(monkeypatch, fault, place, kinds):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="eager")).eval()
    port, given = copy.deepcopy(model), {"input_ids": torch.randint(0, 97, (2, 13)), "use_cache": False}
    weights = dict(model.named_parameters())
    with torch.no_grad():
        golden = whywrong.golden(model, **given)
        with monkeypatch.context() as broken:
            fault(model, port, broken)
            observed = whywrong.capture(port, **given)
        steps = {name: weights.get(name, observed[name]) for name in observed.names}  # the file of both is the same
        found = whywrong.explain(whywrong.Trace(steps, observed.about), golden)
    assert found.step.startswith(place)
    assert (found.verdict, found.causes[0].kind in kinds) == ("cause", True), found


def test_every_fault_has_a_place_in_some_architecture():
    model = models.make("llama", "float32", "eager"), models.make("bert", "float32", "eager")
    none = [fault for fault in models.FAULTS if not any(models.places(one, fault) for one in model)]
    assert none == []


def _broken(rows, wrong):
    return [f"{r.architecture} {r.dtype} {r.attention}: {r.first}: {r.words}" for r in rows if wrong(r)]


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("dtype", models.DTYPES)
def test_no_right_model_is_flagged(dtype, backward, tables):
    rows = [models.measure(*case, backward) for case in models.cases((dtype,), (), ("eager", "sdpa"))]
    models.write(tables / f"right_{dtype}_{'gradients' if backward else 'forward'}.csv", rows, models.Case)
    assert _broken(rows, lambda row: row.accused) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", models.DTYPES)
def test_every_fault_above_the_noise_of_its_type_is_found_in_its_module(dtype, tables):
    chosen = models.cases((dtype,), (), ("eager", "sdpa"))
    rows = [row for case in chosen for row in models.measure_faults(*case)]
    models.write(tables / f"faults_{dtype}.csv", rows, models.Fault)
    assert _broken(rows, lambda row: row.size > 4.0 * row.noise and not row.right) == []
