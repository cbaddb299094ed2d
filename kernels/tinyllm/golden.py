"""The TinyLLM in PyTorch float64, step by step, with the same names, and what each step and gradient may be off.

A pre-norm transformer: x + attention(norm(x)), then x + down(gelu(up(norm(x)))); a norm before the head. Shapes as
`tinyllm.steps` has them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from kernels.tinyllm.tinyllm import Config
from labkit.numerics.bounds import Bound, confidence, perturbed, roundings, sum_of_products
from labkit.trace.steps import Trace

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


def forward(w: Weights, tokens: Tensor, targets: Tensor, config: Config) -> dict[str, Tensor]:
    """Every step by name; `loss` [1] is differentiable."""
    s: dict[str, Tensor] = {}
    x = s["x0"] = w["table"][tokens] + w["positions"][: tokens.shape[1]]
    for i in range(config.layers):
        at = f"L{i}."
        s[at + "ln1"] = norm(x, w[at + "ln1.gain"], w[at + "ln1.shift"])
        qkv = s[at + "heads"] = heads(s[at + "ln1"] @ w[at + "qkv.w"] + w[at + "qkv.b"], config.heads, 3)
        s[at + "p"] = softmax(qkv)
        s[at + "mixed"] = s[at + "p"] @ qkv[2]
        s[at + "attention"] = s[at + "mixed"].transpose(1, 2).flatten(2)
        s[at + "x1"] = x + s[at + "attention"] @ w[at + "o.w"] + w[at + "o.b"]
        s[at + "ln2"] = norm(s[at + "x1"], w[at + "ln2.gain"], w[at + "ln2.shift"])
        s[at + "up"] = s[at + "ln2"] @ w[at + "up.w"] + w[at + "up.b"]
        s[at + "gelu"] = functional.gelu(s[at + "up"])
        x = s[at + "out"] = s[at + "x1"] + s[at + "gelu"] @ w[at + "down.w"] + w[at + "down.b"]
    s["lnf"] = norm(x, w["lnf.gain"], w["lnf.shift"])
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
    parameters: dict[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray, config: Config, rng: np.random.Generator
) -> Trace:
    """The golden as a trace with bounds, for `labkit.localise`.

    A step's own bound is that of its product (Higham and Mary) or of its formula perturbed; what it may inherit, and
    what a gradient may be off, is the whole model in float32 on parameters moved by a rounding.
    """
    w = {name: value.detach() for name, value in weights(parameters).items()}
    ids, wanted = torch.tensor(tokens, dtype=torch.long), torch.tensor(targets, dtype=torch.long)
    exact = everything(weights(parameters), ids, wanted, config)
    inherited = chain(parameters, exact, ids, wanted, config, rng)
    trace = Trace()

    def add(name: str, inputs: tuple[str, ...], run: Callable[..., tuple[Tensor, Bound]]) -> None:
        own = run(*(trace[step] for step in inputs))[1]
        trace.add(name, exact[name], inputs, Bound(own.absolute, own.why) + inherited[name], run)

    def dense(name: str, extra: int) -> Callable[..., tuple[Tensor, Bound]]:
        def run(x: Tensor, *residual: Tensor) -> tuple[Tensor, Bound]:
            matrix, bias = w[name + ".w"], w[name + ".b"]
            value, size = x @ matrix, x.abs() @ matrix.abs()
            bound = sum_of_products(size, x.shape[-1], value=value, squares=(x * x) @ (matrix * matrix))
            total = value + bias + sum(residual)
            return total, bound + roundings(size.abs() + sum(r.abs() for r in residual), extra)

        return run

    def by_rounding(run: Callable[..., Tensor], length: int) -> Callable[..., tuple[Tensor, Bound]]:
        return lambda *xs: (run(*xs), perturbed(run, xs, rng, length=length, times=4))

    def normed(name: str) -> Callable[..., tuple[Tensor, Bound]]:
        gain, shift = w[name + ".gain"], w[name + ".shift"]
        return by_rounding(lambda x: norm(x, gain.to(x.dtype), shift.to(x.dtype)), 4)

    def split(x: Tensor, name: str) -> tuple[Tensor, Bound]:
        value, bound = dense(name, 2)(x)
        assert bound.noise is not None
        return heads(value, config.heads, 3), Bound(
            heads(bound.absolute, config.heads, 3), bound.why, heads(bound.noise, config.heads, 3), 0.0
        )

    def mixed(p: Tensor, qkv: Tensor) -> tuple[Tensor, Bound]:
        v = qkv[2]
        value = p @ v
        return value, sum_of_products(p @ v.abs(), p.shape[-1], value=value, squares=(p * p) @ (v * v))

    trace.add("x0", exact["x0"], bound=roundings(exact["x0"], 2))
    x = "x0"
    for i in range(config.layers):
        at = f"L{i}."
        add(at + "ln1", (x,), normed(at + "ln1"))
        add(at + "heads", (at + "ln1",), lambda v, at=at: split(v, at + "qkv"))
        # a sum of e products in each score, and the exponentials: e + 8 roundings
        add(at + "p", (at + "heads",), by_rounding(softmax, config.width // config.heads + 8))
        add(at + "mixed", (at + "p", at + "heads"), mixed)
        add(at + "attention", (at + "mixed",), lambda v: (v.transpose(1, 2).flatten(2), Bound(0.0, "moved")))
        add(at + "x1", (at + "attention", x), dense(at + "o", 3))
        add(at + "ln2", (at + "x1",), normed(at + "ln2"))
        add(at + "up", (at + "ln2",), dense(at + "up", 2))
        add(at + "gelu", (at + "up",), by_rounding(functional.gelu, 4))
        add(at + "out", (at + "gelu", at + "x1"), dense(at + "down", 3))
        x = at + "out"
    add("lnf", (x,), normed("lnf"))
    add("logits", ("lnf",), dense("head", 2))
    add("losses", ("logits",), by_rounding(
        lambda v: functional.cross_entropy(v.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted),
        8))  # fmt: skip
    add("loss", ("losses",), lambda v: (v.mean()[None], sum_of_products(v.abs().mean()[None], v.numel())))
    for name in w:
        trace.add(f"d {name}", exact[f"d {name}"], bound=inherited[f"d {name}"])
    return trace


def chain(
    parameters: dict[str, np.ndarray], exact: dict[str, Tensor], ids: Tensor, wanted: Tensor, config: Config,
    rng: np.random.Generator, times: int = 6, u: float = 2.0**-24,
) -> dict[str, Bound]:  # fmt: skip
    """What the whole model may be off, by experiment: its spread in float32 about float64, as in `perturbed`.

    Parameters are moved by a rounding of `u` (2^-11 for TF32) each time; sqrt(16) allows for other orders of the sums.
    """
    squares = {name: torch.zeros_like(value) for name, value in exact.items()}
    device = ids.device.type
    for _ in range(times):
        moved = {
            name: (value.astype(np.float64) * (1.0 + rng.uniform(-u, u, value.shape))).astype(np.float32)
            for name, value in parameters.items()
        }
        for name, value in everything(weights(moved, torch.float32, device), ids, wanted, config).items():
            squares[name] += (value.double() - exact[name]).square()
    bounds = {}
    for name, value in exact.items():
        spread = (squares[name] / times).sqrt()
        spread = torch.maximum(spread, spread.square().mean().sqrt()) + u * value.abs()
        factor = confidence(1, max(1, value.numel())) * 4.0
        bounds[name] = Bound(factor * spread, "the model in float32, perturbed")
    return bounds
