"""What the notebook measures: distributions over draws, sums in other orders, and whether a backward is a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kernels.mhc import counterfactual, golden
from kernels.mhc.faulty import RIGHT, Access, Problem
from kernels.mhc.problem import Constants, Inputs
from labkit.tables import Table

Tensor = torch.Tensor


def draws(tokens: int, n: int, d: int, seeds: Sequence[int], accesses: dict[str, Access]) -> dict[str, np.ndarray]:
    """dalpha [draw, 3] of each access in float64, on the same draws; `right` among them."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("right", *accesses)}
    for seed in seeds:
        p = Problem.draw(tokens, n, d, seed, Constants(), "cpu")
        for name, access in {"right": RIGHT, **accesses}.items():
            found[name].append(counterfactual.dalpha(p, access).numpy())
    return {name: np.stack(values) for name, values in found.items()}


def ratios(found: dict[str, np.ndarray], reported: float) -> Table:
    """A row an access: quantiles of wrong over right, and how often it is within 10% of the reported ratio."""
    rows = []
    for name, values in found.items():
        if name == "right":
            continue
        ratio = values[:, 0] / found["right"][:, 0]
        others = np.array_equal(values[:, 1:], found["right"][:, 1:])
        near = float(np.mean(np.abs(ratio / reported - 1.0) <= 0.1))
        rows.append(
            (name, *(float(np.quantile(ratio, q)) for q in (0.1, 0.5, 0.9)), near, "unchanged" if others else "")
        )
    return Table(
        ("what is read wrongly", "ratio, 10%", "50%", "90%", f"share within 10% of {reported:.4f}", "post and res"),
        rows,
    )


def orders(products: Tensor, times: int, rng: np.random.Generator) -> dict[str, float]:
    """A float32 sum of `products`: in sequence, its spread over shuffled orders, by Kahan, and in float64."""
    terms = products.flatten().cpu().numpy().astype(np.float32)
    shuffled = [_sequence(rng.permutation(terms)) for _ in range(times)]
    return {
        "in sequence": float(_sequence(terms)),
        "largest distance between shuffled orders": float(np.max(shuffled) - np.min(shuffled)),
        "Kahan": float(_kahan(terms)),
        "float64": float(terms.astype(np.float64).sum()),
    }


def _sequence(terms: np.ndarray) -> np.float32:
    return np.cumsum(terms, dtype=np.float32)[-1]


def _kahan(terms: np.ndarray) -> np.float32:
    total = lost = np.float32(0.0)
    for term in terms:
        y = term - lost
        grown = total + y
        lost = (grown - total) - y
        total = grown
    return total


def with_gamma(inputs: Inputs, gamma: Tensor, c: Constants) -> dict[str, Tensor]:
    """The backward with a norm weight gamma [n D] that the forward does not apply, as the report's source has it.

    Where the projection's gradient meets the normalised x, gamma stands beside it: in dphi, and in dx through phi.
    """
    s = golden.forward(inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y, c)
    d = golden.backward(inputs, s, c)
    through = (d["dprojection"] @ inputs.phi.T).view_as(inputs.x)
    weight = gamma.view(inputs.x.shape[1:])
    return d | {"dphi": gamma[:, None] * d["dphi"], "dx": d["dx"] + (weight - 1.0) * through}


def by_autograd(inputs: Inputs, c: Constants) -> dict[str, Tensor]:
    """The gradients of the forward, by autograd in float64."""
    x, phi, b, alpha = (getattr(inputs, name).clone().requires_grad_() for name in ("x", "phi", "b", "alpha"))
    s = golden.forward(x, phi, b, alpha, inputs.y, c)
    torch.autograd.backward([s["out"], s["x_in"]], [inputs.dout, inputs.dx_in])
    return {"dx": x.grad, "dphi": phi.grad, "db": b.grad, "dalpha": alpha.grad}


def directional(inputs: Inputs, gradients: dict[str, Tensor], c: Constants, seed: int, step: float = 1e-5) -> Table:
    """Each gradient along a random direction, beside the forward's difference quotient, which needs no autograd."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for name in ("x", "phi", "b", "alpha"):
        value = getattr(inputs, name)
        direction = torch.randn(value.shape, generator=rng, dtype=torch.float64)
        ends = [_pull(replace(inputs, **{name: value + sign * step * direction}), c) for sign in (1.0, -1.0)]
        quotient = (ends[0] - ends[1]) / (2.0 * step)
        along = float((gradients[f"d{name}"] * direction).sum())
        rows.append((f"d{name}", along, quotient, abs(along - quotient) / max(abs(quotient), 1e-300)))
    return Table(("gradient", "along a direction", "difference quotient", "relative difference"), rows)


def _pull(inputs: Inputs, c: Constants) -> float:
    s = golden.forward(inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.y, c)
    return float((s["out"] * inputs.dout).sum() + (s["x_in"] * inputs.dx_in).sum())
