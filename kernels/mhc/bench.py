"""The operator beside its baselines, an identity for the layer: forward, and forward plus backward, in one run.

The lower bound is stated twice. What our schedule moves through memory: forward 18 T D elements (x for the projection,
which everything else waits for; x and x_in; x, y and the result), backward 28 (dout, x, y, dy; x, dx_in; x, dout,
dx_in, dx). And what any schedule must, if all stays on the chip but while the layer runs: forward 14 (x and x_in; x, y
and the result), backward 23 (dout, x, y, dy; dx_in, x, dout, dx).

The error of `stored` is what float64 gives that keeps x_in, y, dy, the result and dx as bfloat16, and nothing else. A
baseline is right if the RMS error of its result and of each gradient is what bfloat16 storage and TF32 products
explain; torch may use TF32 for float32 products here, as the others do. Liger's projection unrolls K and compiles anew
for each count of tokens: more than a minute each at D = 4096.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from kernels.mhc import baselines, golden
from kernels.mhc.problem import Constants, Inputs, sample
from labkit.bench import Case, Provider
from labkit.session.device import Device
from whywrong.comparing.comparison import Comparison, compare

Tensor = torch.Tensor
STREAMS = 4
UNITS = {"forward": (18, 14), "full": (46, 37)}
"""T D elements that our schedule moves, and that any schedule must."""
ALLOWED = {"out": 2.0**-8, "dx": 2.0**-7, "dphi": 2.0**-8, "db": 2.0**-8, "dalpha": 2.0**-8}
"""Relative RMS error: two roundings to bfloat16 for what is stored so, 2^-8 for sums of TF32 products."""
DRAWS = {(128, 128): 32, (4096, 4096): 16, (16384, 4096): 16}
"""Of each tokens, D. db and dalpha are sums over all tokens, whose roundings cancel by chance: 24 and 3 numbers. With
gradients an error is RMS over so many draws, relative to RMS over the same draws."""


def cases(device: Device) -> Iterator[Case]:
    """A case a size and mode."""
    device.needs_cuda("labkit bench mhc", "the interpreter's times are none")
    torch.backends.cuda.matmul.allow_tf32 = True
    for (tokens, d), draws in DRAWS.items():
        with ThreadPoolExecutor(8) as pool:
            inputs = list(pool.map(partial(_sampled, tokens, d, device), range(draws)))
        operators: dict[str, baselines.Operator] = {}
        for mode, (units, compulsory) in UNITS.items():
            providers = []
            for baseline in baselines.BASELINES:
                try:
                    operator = operators[baseline.name] = operators.get(baseline.name) or baseline.make()
                except ModuleNotFoundError as missing:
                    print(f"  left out: {baseline.name}: {missing}")
                    continue
                providers.append(_provider(baseline, operator, inputs, mode))
            yield Case(
                kernel="mhc",
                mode=mode,
                x_name="tokens x D",
                x_value=f"{tokens} x {d}",
                providers=providers,
                bytes=units * tokens * d * 2,
                operations=0,
                memory=True,
                further_bounds={"compulsory traffic lower bound": compulsory * tokens * d * 2},
            )
        del inputs, providers
        torch.cuda.empty_cache()


def _sampled(tokens: int, d: int, device: Device, seed: int) -> Inputs:
    return sample(tokens, STREAMS, d, np.random.default_rng(seed), torch.bfloat16).to(device.kind)


def _exact(inputs: Inputs, c: Constants, transposed: bool, stored: bool = False) -> dict[str, Tensor]:
    """Result and gradients in float64, with the identity for the layer. `stored`: what is of x's type is rounded so."""
    i = inputs.double()

    def kept(x: Tensor) -> Tensor:
        return x.to(inputs.x.dtype).double() if stored else x

    s = golden.forward(i.x, i.phi, i.b, i.alpha, kept, c, transposed)
    dy, _, _ = golden.expand_backward(i.x, s["y"], s["post"], i.dout)
    found = {"out": s["out"]} | golden.backward(i, s, c, kept(dy), transposed)
    return {name: kept(found[name]) if name in ("out", "dx") else found[name] for name in ALLOWED}


def _provider(
    baseline: baselines.Baseline, operator: Callable[..., Tensor], inputs: list[Inputs], mode: str
) -> Provider:
    facts: dict[str, float] = {}

    def given(one: Inputs) -> tuple[list[Tensor], Tensor]:
        *leaves, dout = (v.detach().clone() for v in baseline.arranged(one.x, one.phi, one.b, one.alpha, one.dout))
        return [v.requires_grad_() for v in leaves], dout

    leaves, dout = given(inputs[0])

    def run() -> None:
        out = operator(*leaves)
        if mode == "full":
            torch.autograd.grad(out, leaves, dout)

    def run_once() -> tuple[Tensor, ...]:
        return (out := operator(*leaves)).detach(), *torch.autograd.grad(out, leaves, dout)

    def check() -> Comparison:
        names = tuple(ALLOWED) if mode == "full" else ("out",)
        wrong, size, least = np.zeros((3, len(names)))
        for one in inputs if mode == "full" else inputs[:1]:
            right = _exact(one, baseline.constants, baseline.transposed)
            mine, gradient = given(one)
            out = operator(*mine)
            found = baseline.back(out.detach(), *torch.autograd.grad(out, mine, gradient))
            wrong += [_squares(found[name].double() - right[name]) for name in names]
            size += [_squares(right[name]) for name in names]
            if baseline.with_stored:
                stored = _exact(one, baseline.constants, baseline.transposed, stored=True)
                least += [_squares(stored[name] - right[name]) for name in names]
        errors = np.sqrt(wrong / size)
        if baseline.with_stored:
            facts.update(
                {f"rms_error_{name}_stored": float(x) for name, x in zip(names, np.sqrt(least / size), strict=True)}
            )
        facts.update({f"rms_error_{name}": float(error) for name, error in zip(names, errors, strict=True)})
        facts["repeats_identical"] = float(_identical(run_once))
        return compare(errors, np.zeros(len(errors)), bound=torch.tensor([ALLOWED[name] for name in names]))

    return Provider(baseline.name, run, lambda: None, check, lambda: facts)


def _squares(x: Tensor) -> float:
    return float(x.square().mean())


def _identical(run: Callable[[], tuple[Tensor, ...]], times: int = 20) -> bool:
    first = run()
    return all(all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)) for _ in range(times - 1))
