"""What the notebook measures of models that are not trained: gradients, the epsilon, single differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels.bert import golden
from kernels.bert.inputs import Inputs, measure
from kernels.bert.model import (
    BERT,
    IGNORED,
    PRESETS,
    REPORT,
    Config,
    MaskedLM,
    Switches,
    preset,
    scaled,
    sinusoids,
)
from kernels.bert.training import Data
from whywrong.recording.golden import GRADIENT
from whywrong.recording.recorder import listening
from whywrong.recording.steps import Trace

Tensor = torch.Tensor


def frequency_loss(data: Data) -> float:
    """Nats: the loss on the held-out masks of one who knows how often each token is in the training text, plus once."""
    seen = torch.from_numpy(data.training.astype(np.int64)).flatten()
    counts = torch.bincount(seen, minlength=data.tokens.get_vocab_size()).double() + 1.0
    labels = data.held_out()[1]
    return -float((counts / counts.sum()).log()[labels[labels != IGNORED]].mean())


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of the gradient of the loss."""

    input: float
    """At the encoder's input."""
    tokens: float
    """At the token embeddings, which the decoder uses too: both ways together."""
    tokens_by_input: float
    """At the token embeddings, through the encoder's input alone."""


def masked_labels(ids: Tensor, share: float, seed: int) -> Tensor:
    """Labels for ids: this share of the tokens, sampled at random, one at least; -100 elsewhere."""
    draws = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where((draws < share) | (draws == draws.min()), ids, IGNORED)


def twin(model: MaskedLM, switches: Switches) -> MaskedLM:
    """A model built as `switches` say, with the weights of `model`, its dtype and its mode.

    Weights that `model` lacks are as a new model has them; those that the twin lacks are left out.
    """
    made = MaskedLM(model.config, switches).to(next(model.parameters()))
    with torch.no_grad():
        given = golden.parameters(model)
        for name, p in made.named_parameters():
            if name in given:
                p.copy_(given[name])
    return made.train(model.training)


def gradient_norms(model: MaskedLM, ids: Tensor, labels: Tensor) -> Norms:
    """Gradients of the loss of ids [B, S] in the model's mode."""
    steps: dict[str, Tensor] = {}
    with listening(steps.__setitem__):
        loss = model.loss(ids, labels)
    tokens, reached = model.embeddings.tokens, steps["embeddings.output"]
    at_input, both = torch.autograd.grad(loss, (reached, tokens), retain_graph=True)
    (by_input,) = torch.autograd.grad(reached, tokens, at_input)
    return Norms(*(float(g.double().norm()) for g in (at_input, both, by_input)))


def all_gradients(model: MaskedLM, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    model.loss(ids, labels).backward()
    gradients = golden.gradients(model)
    model.zero_grad(set_to_none=True)
    return gradients


@dataclass(frozen=True)
class EpsilonEffect:
    """What 1e-5 in the place of 1e-12 changes, relative to the norm of what is there with 1e-12; in float64."""

    logits: float
    loss: float
    gradients: float
    """Of all parameters together."""


def epsilon_effects(config: Config, ids: Tensor, word: int, seed: int) -> dict[str, EpsilonEffect]:
    """Of a new model of each preset, on ids [1, S] in which `word` is to be predicted."""
    labels, effects = torch.where(ids == word, ids, IGNORED), {}
    for name in PRESETS:
        torch.manual_seed(seed)
        effects[name] = epsilon_effect(MaskedLM(config, preset(name)).double().eval(), ids, labels)
    return effects


def epsilon_effect(model: MaskedLM, ids: Tensor, labels: Tensor, other: float = 1e-5) -> EpsilonEffect:
    """`model` is float64, its own epsilon replaced by 1e-12 and by `other`, the weights being the same."""
    two = [twin(model, replace(model.switches, eps=eps)) for eps in (1e-12, other)]
    with torch.no_grad():
        logits = [built(ids) for built in two]
        losses = [built.loss(ids, labels) for built in two]
    grads = [torch.cat([g.flatten() for g in all_gradients(built, ids, labels).values()]) for built in two]
    return EpsilonEffect(*(relative(b, a) for a, b in (logits, losses, grads)))


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, by the Euclidean norm."""
    return float((a - b).norm() / b.norm())


def full_size(switches: Switches, vocabulary: int, length: int, layers: int = 12) -> MaskedLM:
    """An untrained model of the report's sizes, hidden 768 and 12 heads, in eval mode, with this vocabulary."""
    return MaskedLM(Config(vocabulary, layers=layers, positions=length), switches).eval()


def full_size_models(seed: int) -> dict[str, Any]:
    """One layer of the report's model, of the original Transformer and of Hugging Face's BERT at the report's sizes."""
    torch.manual_seed(seed)
    ours = {name: full_size(preset(name), 30522, 512, 1) for name in ("report", "vaswani")}
    return ours | {"Hugging Face": golden.hugging_face(Config(layers=1)).eval()}


def step_errors(
    base: MaskedLM, others: Mapping[str, Switches], ids: Tensor, labels: Tensor
) -> dict[str, dict[str, float]]:
    """For each way to build the model with the same weights: how far each step that both have is off, relative RMS."""
    with torch.no_grad():
        right = forward(base, ids, labels)
        errors = {}
        for name, switches in others.items():
            steps = forward(twin(base, switches), ids, labels)
            errors[name] = {step: relative(steps[step], right[step]) for step in right if step in steps}
    return errors


def forward(model: MaskedLM, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The steps of a forward pass by name, the loss among them."""
    steps: dict[str, Tensor] = {}
    with listening(steps.__setitem__), torch.no_grad():
        model.loss(ids, labels)
    return steps


def shared_weights(config: Config, seed: int) -> tuple[Any, MaskedLM]:
    """Hugging Face's model and our BERT with the same random weights, gains and biases too, in eval mode, float32."""
    torch.manual_seed(seed)
    theirs = golden.hugging_face(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.05 * torch.randn_like(p))
    weights = golden.from_hugging_face(golden.parameters(theirs), golden.sizes(theirs))
    return theirs, golden.load(MaskedLM(golden.sizes(theirs)).eval(), weights)


def shared(config: Config, shape: tuple[int, int], seed: int) -> tuple[Any, MaskedLM, Tensor, Tensor]:
    """Both models of :func:`shared_weights`, random ids [B, S] of this shape, and labels at every fourth place."""
    theirs, ours = shared_weights(config, seed)
    ids = torch.randint(1, config.vocabulary, shape, generator=torch.Generator().manual_seed(seed))
    return theirs, ours, ids, torch.where(torch.arange(shape[1]) % 4 == 1, ids, IGNORED)


def norms_of_samples(config: Config, sentence: Tensor, seed: int) -> dict[str, list[tuple[Norms, Norms, float]]]:
    """What :func:`norms_without_and_with` gives in five draws of each model, for the sentence and for random tokens;
    of the report's model also at full width."""
    ids = torch.randint(5, config.vocabulary, (4, 64), generator=torch.Generator().manual_seed(seed))
    samples = [(one, given) for one in range(seed, seed + 5) for given in (sentence, ids)]
    models = {"the report's model": REPORT, "BERT": BERT}
    draws = {
        name: [norms_without_and_with(config, model, given, one) for one, given in samples]
        for name, model in models.items()
    }
    full = Config(config.vocabulary, positions=config.positions)
    draws["the report's model"].append(norms_without_and_with(full, REPORT, sentence, seed))
    return draws


def norms_without_and_with(config: Config, switches: Switches, ids: Tensor, seed: int) -> tuple[Norms, Norms, float]:
    """Of a new model: gradients' norms without and with a LayerNorm on the embeddings, and the input's standard
    deviation without it. Weights and the masked 15% of ids [B, S] are drawn from `seed`."""
    torch.manual_seed(seed)
    without = MaskedLM(config, replace(switches, embedding_norm=False)).eval()
    labels = masked_labels(ids, 0.15, seed)
    normed = twin(without, replace(without.switches, embedding_norm=True))
    pair = (gradient_norms(model, ids, labels) for model in (without, normed))
    return *pair, measure(without, ids).std


def input_by_length(model: Any, lengths: Sequence[int], seed: int) -> dict[int, Inputs]:
    """What random tokens of these lengths give the encoder of a MaskedLM or of Hugging Face's model."""
    draws = torch.Generator().manual_seed(seed)
    vocabulary = golden.sizes(model).vocabulary if not isinstance(model, MaskedLM) else model.config.vocabulary
    return {length: measure(model, torch.randint(5, vocabulary, (1, length), generator=draws)) for length in lengths}


def position_shares(model: MaskedLM, inputs: Mapping[int, Inputs], length: int) -> tuple[float, float]:
    """The positions' share in the variance of the input, as they are, and as :func:`varying_share` has it."""
    return inputs[length].positions, varying_share(model, inputs[length], length)


def varying_share(model: MaskedLM, inputs: Inputs, length: int) -> float:
    """The positions' share in the variance of tokens and positions, where the vector that all positions have in common
    is left out of the positions. `inputs` is what inputs of this length give."""
    places = scaled(model.embeddings.positions[:length].detach(), model.switches.position_factor).double()
    varying = inputs.positions * _varying(places)
    return varying / (varying + inputs.tokens)


def _varying(places: Tensor) -> float:
    """The part of the variance of positions [S, H] that is left without the vector that they have in common."""
    return float(places.var(0, correction=0).mean() / places.var(correction=0))


def trained_input_std(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean standard deviation of the encoder's input in trained models, from their rows; None without rows."""
    std = [row["input"]["std"] for row in rows]
    return sum(std) / len(std) if std else None


def gradient_ratios(draws: Sequence[tuple[Norms, Norms, float]]) -> dict[str, list[float]]:
    """Of what :func:`norms_without_and_with` gives: the norms without the LayerNorm over those with it, a value a
    draw; and 1 over the input's standard deviation."""
    return {
        "at the input": [without.input / normed.input for without, normed, _ in draws],
        "of the token table": [without.tokens / normed.tokens for without, normed, _ in draws],
        "of the token table, through the input": [
            without.tokens_by_input / normed.tokens_by_input for without, normed, _ in draws
        ],
        "1 / input's deviation": [1.0 / std for _, _, std in draws],
    }


def scales(model: MaskedLM, length: int) -> dict[str, float]:
    """Standard deviations, over all elements, of the token embeddings and of sinusoids of this length."""
    places = sinusoids(length, model.config.hidden)
    return {"tokens": float(model.embeddings.tokens.detach().std()), "positions": float(places.std(correction=0))}


def layer_norm_rounding(std: float, eps: float, hidden: int, seed: int) -> float:
    """How far torch's float32 LayerNorm of rows of this standard deviation is from its formula in float64, relative."""
    x = std * torch.randn(64, hidden, generator=torch.Generator().manual_seed(seed))
    narrow, wide = (torch.nn.functional.layer_norm(one, (hidden,), eps=eps) for one in (x, x.double()))
    return relative(narrow.double(), wide)


def feed_forward_distance(model: MaskedLM, seed: int) -> dict[str, float]:
    """How far the first feed-forward layer is, with either activation, from max(0, x W1 + b1) W2 + b2; relative."""
    x = torch.randn(32, model.config.hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    distance = {}
    with torch.no_grad():
        for name in ("relu", "gelu"):
            layer = twin(model.double(), replace(model.switches, activation=name)).layers[0]
            inner = torch.clamp(x @ layer.up.weight.T + layer.up.bias, min=0.0)
            distance[name] = relative(layer.feed_forward(x), inner @ layer.down.weight.T + layer.down.bias)
    return distance


def types_folded(model: MaskedLM, ids: Tensor, into: str) -> float:
    """The largest change of a log probability when the token types' first row is added to each row of another table,
    `tokens` or `positions`, and the token types are left out; in float64."""
    model = model.double()
    plain = twin(model, replace(model.switches, token_types=False))
    with torch.no_grad():
        getattr(plain.embeddings, into).add_(model.embeddings.types[0])
        logits = [one(ids).log_softmax(-1) for one in (model, plain)]
    return float((logits[0] - logits[1]).abs().max())


def types_folded_by_model(config: Config, ids: Tensor, seed: int) -> dict[str, float]:
    """:func:`types_folded` of a new BERT, into its positions, and of the report's with token types, into its tokens."""
    folded = {}
    for name, into in (("bert", "positions"), ("report+token_types", "tokens")):
        torch.manual_seed(seed)
        folded[name] = types_folded(MaskedLM(config, preset(name)).eval(), ids, into)
    return folded


def shifted_logits(
    model: MaskedLM, ids: Tensor, at: int, word: int, by: Sequence[float]
) -> list[tuple[float, float, float]]:
    """Of a model whose logits are moved by a constant through the decoder's bias: that constant, and the logit and the
    probability that it gives a word at one place of ids [1, S]."""
    rows = []
    with torch.no_grad():
        for constant in by:
            model.head.bias += constant
            row = model(ids)[0, at].double()
            model.head.bias -= constant
            rows.append((constant, float(row[word]), float(row.softmax(-1)[word])))
    return rows


STEPS = {
    "scores": "attention's scores",
    "probabilities": "attention's probabilities",
    "context": "attention's context",
    "attention": "attention",
    "middle": "sum after the attention",
    "inner": "before the activation",
    "active": "after the activation",
    "feed_forward": "feed-forward",
    "output": "the layer's output",
}
"""The steps of a layer, in words."""


def step_words(config: Config) -> dict[str, str]:
    """Hugging Face's name of a step -> what it is, for the embeddings, the first layer, the head and the loss."""
    theirs = golden.step_map(config)
    layer = "bert.encoder.layer.0"
    words = {theirs["embeddings.output"]: "the encoder's input"}
    words |= {f"{layer}.attention.self.{name}": name for name in ("query", "key", "value")}
    words |= {theirs[f"layers.0.{name}"]: text for name, text in STEPS.items()}
    return words | {theirs["head"]: "input of the decoder", theirs["logits"]: "logits", theirs["loss"]: "loss"}


def steps_alone(observed: Trace) -> Trace:
    """The steps of a forward pass, without parameters and gradients."""
    ends = (".weight", ".bias")
    return Trace({s.name: s.value for s in observed if not s.name.startswith(GRADIENT) and not s.name.endswith(ends)})


def statistics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The mean training loss of all steps, and of the last tenth, from a row's curve."""
    last = row["curve"][-max(1, len(row["curve"]) // 10) :]
    return {"all steps": float(row["loss_all_steps"]), "last tenth": sum(last) / len(last)}
