"""Attention, layer normalisation, cross-entropy with its gradient, and Adam, step by step, in any precision.

Each system is one function `system(inputs, at)` that records its steps in a Trace. On float64 inputs it is the golden;
on float32, bfloat16 or float16 inputs it is the implementation, run by torch's kernels. `at(name, value, steps)` sees
each step before it is recorded and used further, and may return another value: that is how a fault is planted or
another right way is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from labkit.trace.steps import Trace

Tensor = torch.Tensor
At = Callable[[str, Tensor, "dict[str, Tensor]"], Tensor]
System = Callable[["dict[str, Tensor]", At], Trace]


@dataclass(frozen=True)
class Size:
    """Heads, rows (tokens), and the width of a head, a row or a class."""

    heads: int
    rows: int
    width: int


SIZES = (Size(3, 37, 29), Size(4, 64, 64), Size(8, 128, 64))
"""Odd, square (where layout faults like to hide), and larger."""


def unchanged(name: str, value: Tensor, steps: dict[str, Tensor]) -> Tensor:
    """The `at` of a run that nobody touches."""
    return value


class _Recorder:
    """Adds steps to a trace through `at`; inputs as the implementation has them."""

    def __init__(self, inputs: dict[str, Tensor], at: At) -> None:
        self.trace, self.steps, self._at = Trace(), dict(inputs), at
        for name, value in inputs.items():
            self.trace.add(name, value, about={"op": "input"})

    def __call__(self, name: str, value: Tensor, op: str, *inputs: str, length: int | None = None) -> Tensor:
        kept = self.steps[name] = self._at(name, value, self.steps)
        about: dict[str, Any] = {"op": op, "inputs_complete": True}
        self.trace.add(name, kept, inputs, about=about | ({"K": length} if length else {}))
        return kept


def attention(x: dict[str, Tensor], at: At = unchanged) -> Trace:
    """q, k, v [heads, rows, width] -> K^T, QK, scaled, masked, softmax, PV; causal."""
    step = _Recorder(x, at)
    n, d = x["q"].shape[-2:]
    kt = step("kt", x["k"].mT, "transpose", "k")
    qk = step("qk", x["q"] @ kt, "matmul", "q", "kt", length=d)
    scaled = step("scaled", qk * d**-0.5, "scale 1/sqrt(d)", "qk")
    hidden = torch.ones(n, n, dtype=torch.bool, device=qk.device).triu(1)
    masked = step("masked", scaled.masked_fill(hidden, -torch.inf), "causal mask -inf", "scaled")
    probs = step("probs", torch.softmax(masked, -1), "softmax axis=-1", "masked")
    step("pv", probs @ x["v"], "matmul", "probs", "v", length=n)
    return step.trace


def layernorm(x: dict[str, Tensor], at: At = unchanged) -> Trace:
    """x [rows, width], weight and bias [width] -> normalised (eps = 1e-5), scaled, shifted."""
    step = _Recorder(x, at)
    normal = torch.nn.functional.layer_norm(x["x"], x["x"].shape[-1:], eps=1e-5)
    normal = step("normal", normal, "layernorm eps=1e-5", "x", length=x["x"].shape[-1])
    scaled = step("weighted", normal * x["weight"], "multiply by weight", "normal", "weight")
    step("shifted", scaled + x["bias"], "add bias", "weighted", "bias")
    return step.trace


def cross_entropy(x: dict[str, Tensor], at: At = unchanged) -> Trace:
    """h [rows, width], w [classes, width], labels [rows] -> logits, lse, loss of each row, gradient of the mean."""
    step = _Recorder(x, at)
    labels = x["labels"].long()
    logits = step("logits", x["h"] @ x["w"].T, "matmul", "h", "w", length=x["h"].shape[-1])
    lse = step("lse", torch.logsumexp(logits, -1), "logsumexp axis=-1", "logits", length=logits.shape[-1])
    chosen = logits.gather(-1, labels[:, None])[:, 0]
    step("loss", lse - chosen, "lse - logit[label]", "lse", "logits", "labels")
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[-1])
    gradient = (torch.softmax(logits, -1) - one_hot) / len(labels)
    gradient = step("dlogits", gradient.to(logits.dtype), "(softmax - onehot)/n", "logits", "labels")
    step("dw", gradient.T @ x["h"], "matmul", "dlogits", "h", length=len(labels))
    return step.trace


def adam(x: dict[str, Tensor], at: At = unchanged) -> Trace:
    """p, g1, g2, g3 [rows, width] -> three steps of Adam (lr 1e-3, betas 0.9 and 0.999, eps 1e-8)."""
    step = _Recorder(x, at)
    p, m, v = x["p"], torch.zeros_like(x["p"]), torch.zeros_like(x["p"])
    before = ("p", None, None)
    for t in (1, 2, 3):
        g = x[f"g{t}"]
        old = [name for name in before[1:] if name]
        m = step(f"t{t}.m", 0.9 * m + 0.1 * g, "ema beta1=0.9", *old[:1], f"g{t}")
        v = step(f"t{t}.v", 0.999 * v + 0.001 * (g * g), "ema of squares beta2=0.999", *old[1:], f"g{t}")
        update = (m / (1.0 - 0.9**t)) / ((v / (1.0 - 0.999**t)).sqrt() + 1e-8)
        update = step(f"t{t}.update", update, "m_hat / (sqrt(v_hat) + eps)", f"t{t}.m", f"t{t}.v")
        p = step(f"t{t}.p", p - 1e-3 * update, "p - lr*update", before[0], f"t{t}.update")
        before = (f"t{t}.p", f"t{t}.m", f"t{t}.v")
    return step.trace


SYSTEMS: dict[str, System] = {
    "attention": attention,
    "layernorm": layernorm,
    "cross_entropy": cross_entropy,
    "adam": adam,
}


def inputs(
    system: str, size: Size, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Inputs of a system, of `dtype`: what golden and implementation both start from."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    n, d = size.rows, size.width
    if system == "attention":
        return {name: normal(size.heads, n, d) for name in ("q", "k", "v")}
    if system == "layernorm":
        return {"x": normal(n, d) * 2 + 0.5, "weight": 1 + 0.1 * normal(d), "bias": 0.1 * normal(d)}
    if system == "cross_entropy":
        labels = torch.randint(0, 4 * d, (n,), generator=generator)
        return {"h": normal(n, d), "w": 0.3 * normal(4 * d, d), "labels": labels}
    return {"p": 0.1 * normal(n, d)} | {f"g{t}": 0.01 * normal(n, d) for t in (1, 2, 3)}


def golden(system: str, x: dict[str, Tensor]) -> Trace:
    """The system in float64, from the values as the implementation got them."""
    return SYSTEMS[system]({name: v.double() if v.is_floating_point() else v for name, v in x.items()}, unchanged)
