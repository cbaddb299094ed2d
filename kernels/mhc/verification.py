"""The right kernels as a trace, and the golden with what each step may be off, so that own and inherited error part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.mhc import golden, launch
from kernels.mhc.problem import Constants, Inputs
from labkit.numerics.bounds import Bound, confidence, perturbed, roundings, sum_of_products
from labkit.trace.steps import Trace

Tensor = torch.Tensor
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def observed(inputs: Inputs, c: Constants) -> Trace:
    """Every step of the Triton kernels, forward and backward, on the inputs' device."""
    x, phi, b, alpha = inputs.x, inputs.phi, inputs.b, inputs.alpha
    s = launch.forward(x, phi, b, alpha, c)
    trace = Trace(
        {"x": x, "phi": phi, "b": b, "alpha": alpha, "y": inputs.y, "dout": inputs.dout, "dx_in": inputs.dx_in}
    )
    for name in ("r", "mix", "pre", "post", "p", "x_in"):
        trace.add(name, s[name])
    trace.add("out", launch.expand(x, inputs.y, s["post"], s["p"]))
    dy, dpost, dp = launch.expand_backward(x, inputs.y, s["post"], inputs.dout)
    d = launch.backward(x, phi, b, alpha, s, inputs.dx_in, dpost, dp, inputs.dout, c)
    for name, value in {"dy": dy, "dpost": dpost, "dp": dp, **d}.items():
        trace.add(name, value)
    return trace


def reference(inputs: Inputs, c: Constants, rng: np.random.Generator) -> Trace:
    """The golden as a trace with bounds of each step by itself, for `labkit.localise`.

    Products: Higham and Mary, with 2^-15 of sum|a||b| beside it where a float32 factor goes in as two bfloat16.
    What is elementwise or Sinkhorn, forward and backward: the golden's own formulas in float32, perturbed.
    """
    dtype = NAMES[inputs.x.dtype]
    g = inputs.double()
    n, k = g.x.shape[-2], g.phi.shape[0]
    s = golden.forward(g.x, g.phi, g.b, g.alpha, g.y, c)
    d = golden.backward(g, s, c)
    trace = Trace({name: getattr(g, name) for name in ("x", "phi", "b", "alpha", "y", "dout", "dx_in")})

    inherited = _inherited(inputs, s | d, c, rng)

    def add(name: str, value: Tensor, steps: tuple[str, ...], run: Callable[..., tuple[Tensor, Bound]]) -> None:
        own = run(*(trace[step] for step in steps))[1]
        trace.add(name, value, steps, Bound(own.absolute, own.why) + inherited[name], run)

    def stored(value: Tensor, bound: Bound) -> tuple[Tensor, Bound]:
        return value, bound + roundings(value.abs() + bound.absolute, 1, dtype)

    def product(a: Tensor, b: Tensor, *, length: int, split: bool) -> tuple[Tensor, Bound]:
        value, size = a @ b, a.abs() @ b.abs()
        bound = sum_of_products(size, length, value=value, squares=(a * a) @ (b * b))
        loss = 2.0**-15 if split else 2.0**-21  # two bfloat16; the products of TF32's low parts
        drift = length * 2.0**-24 if dtype != "float32" else 0.0  # tensor cores truncate as they add
        return value, bound + Bound(size * (loss + drift), "split factor, truncated sums", size * loss, size * drift)

    split = dtype == "bfloat16"

    def mix(x: Tensor, phi: Tensor, r: Tensor) -> tuple[Tensor, Bound]:
        value, bound = product(x.flatten(-2), phi, length=k, split=split)
        return value * r[:, None], bound.scaled(r[:, None]) + roundings(value * r[:, None], 4)

    def norm(x: Tensor) -> tuple[Tensor, Bound]:
        r = golden.projection(x, g.phi, c)[0]
        return r, Bound(r * (k**0.5 * 8.0 + 4.0) * 2.0**-24, "a sum of squares, and a root", r * 2.0**-24 * k**0.5)

    def by_rounding(run: Callable[..., Any], length: int = 1) -> Callable[..., tuple[Tensor, Bound]]:
        return lambda *xs: (run(*xs), perturbed(run, xs, rng, length=length))

    def coefficient(i: int) -> Callable[..., tuple[Tensor, Bound]]:
        return by_rounding(lambda m, b, a: golden.coefficients(m, b, a, n, c)[i], 2 * c.iterations)

    add("r", s["r"], ("x",), norm)
    add("mix", s["mix"], ("x", "phi", "r"), mix)
    for i, name in enumerate(("pre", "post", "p")):
        add(name, s[name], ("mix", "b", "alpha"), coefficient(i))
    add("x_in", s["x_in"], ("x", "pre"), lambda x, pre: stored(golden.aggregate(x, pre), _few(x.abs(), pre)))
    add("out", s["out"], ("x", "y", "post", "p"), lambda x, y, post, p: stored(
        golden.expand(x, y, post, p), _sized(golden.expand(x.abs(), y.abs(), post, p), n + 1)))  # fmt: skip

    def expand_part(i: int, length: int) -> Callable[..., tuple[Tensor, Bound]]:
        def run(x: Tensor, y: Tensor, post: Tensor, dout: Tensor) -> tuple[Tensor, Bound]:
            value = golden.expand_backward(x, y, post, dout)[i]
            size = golden.expand_backward(x.abs(), y.abs(), post, dout.abs())[i]
            bound = _sized(size, length, split or dtype == "float16")
            return stored(value, bound) if i == 0 else (value, bound)

        return run

    width = g.x.shape[-1]
    for i, name in enumerate(("dy", "dpost", "dp")):
        add(name, d[name], ("x", "y", "post", "dout"), expand_part(i, n if i == 0 else width))
    add("dpre", d["dpre"], ("x", "dx_in"), lambda x, dx_in: (
        (x @ dx_in[..., None])[..., 0], _sized((x.abs() @ dx_in.abs()[..., None])[..., 0], width)))  # fmt: skip
    add("g", d["g"], ("mix", "b", "alpha", "dpre", "dpost", "dp"), by_rounding(
        lambda *xs: golden.coefficients_backward(*xs, c), 2 * c.iterations))  # fmt: skip
    tokens = g.x.shape[0]
    add("db", d["db"], ("g",), lambda v: (v.sum(0), _sized(v.abs().sum(0), tokens)))
    terms = tokens * n * n
    add("dalpha", d["dalpha"], ("g", "mix"), lambda v, m: (
        golden.alpha_gradient(v, m, n), _sized(golden.alpha_gradient(v.abs(), m.abs(), n), terms)))  # fmt: skip
    add("dprojection", d["dprojection"], ("g", "alpha", "r"), lambda v, a, r: (
        (out := v * golden.spread_alpha(a, n) * r[:, None]), roundings(out, 3)))  # fmt: skip
    add("shrink", d["shrink"], ("g", "alpha", "mix", "r"), lambda v, a, m, r: (
        r.square() * (v * golden.spread_alpha(a, n) * m).sum(-1) / k,
        _sized(r.square() * (v * golden.spread_alpha(a, n) * m).abs().sum(-1) / k, 3 * n * n + 8)))  # fmt: skip
    add("dphi", d["dphi"], ("x", "dprojection"), lambda x, v: product(x.flatten(-2).T, v, length=tokens, split=split))

    def stream(*xs: Tensor) -> tuple[Tensor, Bound]:
        x, phi, pre, p, dout, dx_in, dprojection, shrink = xs
        value = golden.stream_gradient(*xs)
        size = golden.stream_gradient(
            x.abs(), phi.abs(), pre, p, dout.abs(), dx_in.abs(), dprojection.abs(), -shrink.abs()
        )
        return stored(value, _sized(size, n * n + 3 * n + 3, split))

    add("dx", d["dx"], ("x", "phi", "pre", "p", "dout", "dx_in", "dprojection", "shrink"), stream)
    return trace


def _inherited(inputs: Inputs, exact: dict[str, Tensor], c: Constants, rng: np.random.Generator) -> dict[str, Bound]:
    """What the steps before may make a step off: the whole golden in float32, on inputs moved by a rounding.

    phi is moved by what packing it as two bfloat16 costs, where it is packed.
    """
    squares = {name: torch.zeros_like(value) for name, value in exact.items()}
    times = 6
    for _ in range(times):
        moved = {}
        for name in inputs.__dataclass_fields__:
            value = getattr(inputs, name)
            u = 2.0**-16 if name == "phi" and inputs.x.dtype == torch.bfloat16 else 2.0**-24
            noise = torch.from_numpy(rng.uniform(-u, u, tuple(value.shape))).to(value.device)
            moved[name] = (value.double() * (1.0 + noise)).float()
        one = Inputs(**moved)
        s = golden.forward(one.x, one.phi, one.b, one.alpha, one.y, c)
        for name, value in (s | golden.backward(one, s, c)).items():
            squares[name] += (value.double() - exact[name]).square()
    bounds = {}
    for name, value in exact.items():
        spread = (squares[name] / times).sqrt()
        whole = spread.square().mean().sqrt() if spread.numel() else spread
        factor = confidence(1, max(1, value.numel())) * (2.0 * c.iterations) ** 0.5
        bounds[name] = Bound(factor * torch.maximum(spread, whole), "the chain in float32, perturbed")
    return bounds


def _few(x: Tensor, pre: Tensor) -> Bound:
    return _sized(golden.aggregate(x, pre), x.shape[-2])


def _sized(size: Tensor, length: int, split: bool = False) -> Bound:
    """Bound of sums of `length` products whose sum|a||b| is `size`; no structure is looked for."""
    bound = sum_of_products(size, length)
    return Bound(bound.absolute + size * (2.0**-15 if split else 2.0**-21), bound.why)
