"""What the notebook measures of models that are not trained: gradients, the epsilon, single differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kernels.bert import golden
from kernels.bert.model import IGNORED, Config, MaskedLM, Switches
from labkit.trace.recorder import listening

Tensor = torch.Tensor


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of the gradient of the loss."""

    input: float
    """At the encoder's input."""
    tokens: float
    """At the token embeddings, which the decoder uses too: both ways together."""
    tokens_by_input: float
    """At the token embeddings, through the encoder's input alone."""


def batch(ids: Tensor, share: float, seed: int) -> Tensor:
    """Labels for ids: this share of the tokens, drawn at random, one at least; -100 elsewhere."""
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


def norms(model: MaskedLM, ids: Tensor, labels: Tensor) -> Norms:
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
    found = golden.gradients(model)
    model.zero_grad(set_to_none=True)
    return found


@dataclass(frozen=True)
class EpsilonEffect:
    """What 1e-5 in the place of 1e-12 changes, relative to the norm of what is there with 1e-12; in float64."""

    logits: float
    loss: float
    gradients: float
    """Of all parameters together."""


def epsilon(model: MaskedLM, ids: Tensor, labels: Tensor, other: float = 1e-5) -> EpsilonEffect:
    """`model` is float64, its own epsilon replaced by 1e-12 and by `other`, the weights being the same."""
    two = [twin(model, replace(model.switches, eps=eps)) for eps in (1e-12, other)]
    with torch.no_grad():
        logits = [one(ids) for one in two]
        losses = [one.loss(ids, labels) for one in two]
    grads = [torch.cat([g.flatten() for g in all_gradients(one, ids, labels).values()]) for one in two]
    return EpsilonEffect(*(relative(b, a) for a, b in (logits, losses, grads)))


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, by the Euclidean norm."""
    return float((a - b).norm() / b.norm())


def full_size(switches: Switches, vocabulary: int, length: int, layers: int = 12) -> MaskedLM:
    """An untrained model of the report's sizes, hidden 768 and 12 heads, in eval mode, with this vocabulary."""
    return MaskedLM(Config(vocabulary, layers=layers, positions=length), switches).eval()


def contributions(
    base: MaskedLM, others: Mapping[str, Switches], ids: Tensor, labels: Tensor
) -> dict[str, dict[str, float]]:
    """For each way to build the model with the same weights: how far each step that both have is off, relative RMS."""
    with torch.no_grad():
        right = forward(base, ids, labels)
        found = {}
        for name, switches in others.items():
            made = forward(twin(base, switches), ids, labels)
            found[name] = {step: relative(made[step], right[step]) for step in right if step in made}
    return found


def forward(model: MaskedLM, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The steps of a forward pass by name, the loss among them."""
    steps: dict[str, Tensor] = {}
    with listening(steps.__setitem__), torch.no_grad():
        model.loss(ids, labels)
    return steps
