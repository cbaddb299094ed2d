"""Attention, layer normalisation, cross-entropy with its gradient, and Adam, step by step, in any precision.

Each system is one function `system(at, **inputs)` that returns its steps by name, in order. Recorded by
`whywrong.golden` in float64 it is the golden; on float32, bfloat16 or float16 inputs it is the implementation, run by
torch's kernels. `at(name, value, steps)` sees each step before it is kept and used further, and may return another
value: that is how a fault is planted or another right way is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import whywrong

Tensor = torch.Tensor
Steps = dict[str, Tensor]
At = Callable[[str, Tensor, Steps], Tensor]
System = Callable[..., Steps]


@dataclass(frozen=True)
class Size:
    """Heads, rows (tokens), and the width of a head, a row or a class."""

    heads: int
    rows: int
    width: int


SIZES = (Size(3, 37, 29), Size(4, 64, 64), Size(8, 128, 64))
"""Odd, square (where layout faults like to hide), and larger."""


def unchanged(name: str, value: Tensor, steps: Steps) -> Tensor:
    """The `at` of a run that nobody touches."""
    return value


class _Recorder:
    """The steps so far, inputs among them; each one goes through `at` first."""

    def __init__(self, at: At, inputs: Steps) -> None:
        self._at, self._inputs, self.steps = at, set(inputs), dict(inputs)

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.steps[name] = self._at(name, value, self.steps)
        return self.steps[name]

    @property
    def computed(self) -> Steps:
        """The steps without the inputs."""
        return {name: value for name, value in self.steps.items() if name not in self._inputs}


def attention(at: At = unchanged, **x: Tensor) -> Steps:
    """q, k, v [heads, rows, width] -> K^T, QK, scaled, masked, softmax, PV; causal."""
    step = _Recorder(at, x)
    n, d = x["q"].shape[-2:]
    kt = step("kt", x["k"].mT)
    qk = step("qk", x["q"] @ kt)
    scaled = step("scaled", qk * d**-0.5)
    hidden = torch.ones(n, n, dtype=torch.bool, device=qk.device).triu(1)
    masked = step("masked", scaled.masked_fill(hidden, -torch.inf))
    probs = step("probs", torch.softmax(masked, -1))
    step("pv", probs @ x["v"])
    return step.computed


def layernorm(at: At = unchanged, **x: Tensor) -> Steps:
    """x [rows, width], weight and bias [width] -> normalised (eps = 1e-5), scaled, shifted."""
    step = _Recorder(at, x)
    normal = step("normal", torch.nn.functional.layer_norm(x["x"], x["x"].shape[-1:], eps=1e-5))
    weighted = step("weighted", normal * x["weight"])
    step("shifted", weighted + x["bias"])
    return step.computed


def cross_entropy(at: At = unchanged, **x: Tensor) -> Steps:
    """h [rows, width], w [classes, width], labels [rows] -> logits, lse, loss of each row, gradient of the mean."""
    step = _Recorder(at, x)
    labels = x["labels"].long()
    logits = step("logits", x["h"] @ x["w"].T)
    lse = step("lse", torch.logsumexp(logits, -1))
    step("loss", lse - logits.gather(-1, labels[:, None])[:, 0])
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[-1])
    gradient = step("dlogits", ((torch.softmax(logits, -1) - one_hot) / len(labels)).to(logits.dtype))
    step("dw", gradient.T @ x["h"])
    return step.computed


def adam(at: At = unchanged, **x: Tensor) -> Steps:
    """p, g1, g2, g3 [rows, width] -> three steps of Adam (lr 1e-3, betas 0.9 and 0.999, eps 1e-8)."""
    step = _Recorder(at, x)
    p, m, v = x["p"], torch.zeros_like(x["p"]), torch.zeros_like(x["p"])
    for t in (1, 2, 3):
        g = x[f"g{t}"]
        m = step(f"t{t}.m", 0.9 * m + 0.1 * g)
        v = step(f"t{t}.v", 0.999 * v + 0.001 * (g * g))
        update = step(f"t{t}.update", (m / (1.0 - 0.9**t)) / ((v / (1.0 - 0.999**t)).sqrt() + 1e-8))
        p = step(f"t{t}.p", p - 1e-3 * update)
    return step.computed


SYSTEMS: dict[str, System] = {
    "attention": attention,
    "layernorm": layernorm,
    "cross_entropy": cross_entropy,
    "adam": adam,
}


def inputs(system: str, size: Size, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Steps:
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


def golden(system: str, x: Steps) -> whywrong.Golden:
    """The system recorded in float64, from the values as the implementation got them."""
    return whywrong.golden(SYSTEMS[system], **x)


def run(system: str, x: Steps, at: At = unchanged) -> whywrong.Trace:
    """The system as it is run: its inputs and its steps."""
    return whywrong.Trace(x | SYSTEMS[system](at, **x))
