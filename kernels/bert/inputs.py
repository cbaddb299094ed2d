"""What reaches the encoder: its standard deviation, and what tokens, positions and token types have in its variance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels.bert import golden
from kernels.bert.model import MaskedLM, scaled

Tensor = torch.Tensor


@dataclass(frozen=True)
class Inputs:
    """Of one batch, over all its elements: standard deviations, and shares that add up to 1."""

    std: float
    """Of what the first layer gets."""
    tokens: float
    """Share of the token embeddings in the sum of the parts' variances; the two that follow likewise."""
    positions: float
    types: float

    def as_json(self) -> dict[str, float]:
        """For a row of results."""
        return asdict(self)


@torch.no_grad()
def measure(model: Any, ids: Tensor) -> Inputs:
    """The inputs that `ids` [B, S] give in eval mode; `model` is a MaskedLM or Hugging Face's BertForMaskedLM."""
    if not isinstance(model, MaskedLM):
        config = golden.sizes(model)
        with torch.device(ids.device):
            ours = MaskedLM(config)
        model = golden.load(ours, golden.from_hugging_face(golden.parameters(model), config))
    training, e = model.training, model.eval().embeddings
    kinds = e.types[0].expand(ids.shape[1], -1) if e.types is not None else torch.zeros(1, device=ids.device)
    factor = model.config.hidden**0.5 if model.switches.scale_tokens else 1.0
    places = scaled(e.positions[: ids.shape[1]], model.switches.position_factor)
    parts = [float(part.double().var(correction=0)) for part in (scaled(e.tokens[ids], factor), places, kinds)]
    std = float(e(ids).double().std(correction=0))
    model.train(training)
    return Inputs(std, *(part / sum(parts) for part in parts))
