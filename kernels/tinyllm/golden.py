"""The TinyLLM in PyTorch float64, step by step, with the same names; recorded with its gradients.

A pre-norm transformer: x + attention(norm(x)), then x + down(gelu(up(norm(x)))); a norm before the head. Shapes as
`tinyllm.steps` has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

import whywrong
from kernels.tinyllm.tinyllm import Config

Tensor = torch.Tensor
Weights = dict[str, Tensor]


def weights(parameters: dict[str, np.ndarray], dtype: torch.dtype = torch.float64, device: str = "cpu") -> Weights:
    """Parameters as leaves that want gradients."""
    return {
        name: torch.tensor(value, dtype=dtype, device=device).requires_grad_() for name, value in parameters.items()
    }


def heads(x: Tensor, count: int, parts: int = 1) -> Tensor:
    """[s, t, parts D] -> [parts, s, heads, t, D / heads]."""
    s, t, width = x.shape
    return x.view(s, t, parts, count, width // (parts * count)).permute(2, 0, 3, 1, 4)


def norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Layer normalisation with epsilon 1e-5."""
    return functional.layer_norm(x, x.shape[-1:], gain, shift, 1e-5)


def softmax(qkv: Tensor) -> Tensor:
    """Causal attention weights [s, h, t, t] of heads [3, s, h, t, e]."""
    q, k = qkv[0], qkv[1]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def forward(
    w: Weights, tokens: Tensor, targets: Tensor, config: Config, *, norms: bool = True, residuals: bool = True
) -> dict[str, Tensor]:
    """Every step by name; `loss` [1] is differentiable. Without `norms` or `residuals` these are left out."""
    normed = norm if norms else (lambda x, gain, shift: x)
    plus = (lambda x, y: x + y) if residuals else (lambda x, y: y)
    s: dict[str, Tensor] = {}
    x = s["x0"] = w["table"][tokens] + w["positions"][: tokens.shape[1]]
    for i in range(config.layers):
        at = f"L{i}."
        s[at + "ln1"] = normed(x, w[at + "ln1.gain"], w[at + "ln1.shift"])
        qkv = s[at + "heads"] = heads(s[at + "ln1"] @ w[at + "qkv.w"] + w[at + "qkv.b"], config.heads, 3)
        s[at + "p"] = softmax(qkv)
        s[at + "mixed"] = s[at + "p"] @ qkv[2]
        s[at + "attention"] = s[at + "mixed"].transpose(1, 2).flatten(2)
        s[at + "x1"] = plus(x, s[at + "attention"] @ w[at + "o.w"]) + w[at + "o.b"]
        s[at + "ln2"] = normed(s[at + "x1"], w[at + "ln2.gain"], w[at + "ln2.shift"])
        s[at + "up"] = s[at + "ln2"] @ w[at + "up.w"] + w[at + "up.b"]
        s[at + "gelu"] = functional.gelu(s[at + "up"])
        x = s[at + "out"] = plus(s[at + "x1"], s[at + "gelu"] @ w[at + "down.w"]) + w[at + "down.b"]
    s["lnf"] = normed(x, w["lnf.gain"], w["lnf.shift"])
    s["logits"] = s["lnf"] @ w["head.w"] + w["head.b"]
    s["losses"] = functional.cross_entropy(s["logits"].flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets
    )
    s["loss"] = s["losses"].mean()[None]
    return s


def everything(w: Weights, tokens: Tensor, targets: Tensor, config: Config) -> dict[str, Tensor]:
    """Every step, and every gradient as "d <parameter>"."""
    s = forward(w, tokens, targets, config)
    gradients = torch.autograd.grad(s["loss"].sum(), list(w.values()))
    return {name: value.detach() for name, value in s.items()} | {
        f"d {name}": value for name, value in zip(w, gradients, strict=True)
    }


def reference(
    parameters: dict[str, np.ndarray], tokens: Any, targets: Any, config: Config, gradients: bool = True
) -> whywrong.Golden:
    """The model and its gradients, recorded in float64 from the float32 parameters, where tokens and targets are.

    Parameters are inputs by their names, and so are `tokens` and `targets` [sequences, tokens], whole numbers. Without
    `gradients`, the steps of the forward pass alone.
    """
    ids, wanted = torch.as_tensor(tokens, dtype=torch.long), torch.as_tensor(targets, dtype=torch.long)

    def run(tokens: Tensor, targets: Tensor, **given: Tensor) -> dict[str, Tensor]:
        if not gradients:
            return forward(given, tokens, targets, config)
        leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
        return everything(leaves, tokens, targets, config)

    given = {name: torch.as_tensor(value, device=ids.device) for name, value in parameters.items()}
    return whywrong.golden(run, tokens=ids, targets=wanted, **given)
