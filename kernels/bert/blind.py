"""A model built with one difference that is not told, and which difference explains what it gives.

The hidden model and the one it is held against have the same weights, as two implementations have that load one file.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

import whywrong
from kernels.bert import experiments
from kernels.bert.model import BERT, DIFFERENCES, Config, MaskedLM, Switches, preset
from whywrong.comparing.bounds import Bound
from whywrong.explaining.hypotheses import Weighing

Tensor = torch.Tensor
NONE = "none"
HYPOTHESES = {NONE: BERT} | {name: preset(f"bert-{name}") for name in DIFFERENCES}
"""What the hidden model is compared with: BERT as it is, and with each difference alone."""
OUTSIDE = {
    "GELU by its tanh formula": replace(BERT, activation="gelu_tanh"),
    "positions times 0.5": replace(BERT, position_factor=0.5),
    "epsilon 1e-3": replace(BERT, eps=1e-3),
    "ReLU and Pre-LN": replace(BERT, activation="relu", norm="pre"),
}
"""Differences that no hypothesis has."""
SHOWN = {
    name: switches
    for name, switches in HYPOTHESES.items()
    if name not in (NONE, "embedding_dropout", "attention_dropout", "initial")
}
"""The differences that act on a forward pass without dropout, the weights being given."""
STEPS = {
    "embeddings.sum": "sum of the embeddings",
    "embeddings.output": "the encoder's input",
    "layers.0.qkv": "query, key, value",
    "layers.0.probabilities": "attention's probabilities",
    "layers.0.attention": "attention",
    "layers.0.middle": "sum after the attention",
    "layers.0.inner": "before the activation",
    "layers.0.active": "after the activation",
    "layers.0.output": "the layer's output",
    "head": "input of the decoder",
    "logits": "logits",
}
"""The steps of a forward pass that the notebook shows, and what each is."""
CONFIG = Config(vocabulary=97, hidden=24, layers=1, heads=4, inner=40, positions=41)
FLOAT32 = whywrong.Precision("float32")


class Setting(NamedTuple):
    """Weights and a batch, drawn from `seed`; `dropout`: look at the dropouts in training, else at the steps."""

    seed: int
    dropout: bool = False


SETTINGS = {"steps": Setting(1), "fresh draw": Setting(2), "in training": Setting(1, dropout=True)}


def hidden(defect: str, seed: int) -> tuple[str, Switches]:
    """Name and switches of the hidden model: `defect` itself, or with `blind` one drawn, a fifth from OUTSIDE."""
    draws = torch.Generator().manual_seed(seed)
    if defect != "blind":
        return defect, HYPOTHESES[defect]
    pool = OUTSIDE if float(torch.rand((), generator=draws)) < 0.2 else HYPOTHESES
    name = list(pool)[int(torch.randint(len(pool), (), generator=draws))]
    return name, pool[name]


def drawn(setting: Setting) -> tuple[MaskedLM, Tensor, Tensor]:
    """A BERT whose gains and biases are random too, ids [3, 17] and labels."""
    torch.manual_seed(setting.seed)
    model = MaskedLM(CONFIG).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    ids = torch.randint(1, CONFIG.vocabulary, (3, 17))
    return model, ids, experiments.masked_labels(ids, 0.3, setting.seed)


def observe(switches: Switches, setting: Setting) -> Any:
    """What a model with these switches gives in float32: its steps, or which dropouts act."""
    model, ids, labels = drawn(setting)
    made = experiments.twin(model, switches)
    if setting.dropout:
        return dropouts(made, ids)
    steps = experiments.forward(made, ids, labels)
    return whywrong.Trace({"ids": ids} | steps | {"output": steps["loss"]})


def step_errors(others: dict[str, Switches], setting: Setting) -> dict[str, dict[str, float]]:
    """For each way to build the model with the weights of a BERT: the relative RMS error of each step."""
    return experiments.step_errors(drawn(setting)[0], others, *drawn(setting)[1:])


@cache
def expect(switches: Switches, setting: Setting) -> Any:
    """The same in float64, with what float32 may be off."""
    model, ids, labels = drawn(setting)
    made = experiments.twin(model.double(), switches)
    if setting.dropout:
        return dropouts(made, ids), Bound(torch.zeros(2, dtype=torch.float64), "exact")
    return whywrong.bounded(whywrong.golden(lambda ids: made.loss(ids, labels), ids=ids), precision=FLOAT32)


def dropouts(model: MaskedLM, ids: Tensor) -> Tensor:
    """In training, whether two calls on one input differ: of the embeddings, and of the first layer's attention."""
    model.train()
    with torch.no_grad():
        x = model.embeddings.tokens[ids]
        pairs = [[model.embeddings(ids) for _ in range(2)], [model.layers[0].attention(x, None) for _ in range(2)]]
    return torch.tensor([float(not torch.equal(a, b)) for a, b in pairs], dtype=torch.float64)


def identify(switches: Switches) -> Weighing:
    """Every hypothesis against a model with these switches, dropped at the first setting that refutes it."""
    return whywrong.weigh(
        lambda setting: observe(switches, setting),
        {name: (lambda setting, one=one: expect(one, setting)) for name, one in HYPOTHESES.items()},
        settings=SETTINGS,
        thorough=False,
    )
