"""The operator beside its peers, an identity for the layer: forward, and forward plus backward, in one run.

The floor counts what must move through memory: forward 18 T D elements (x for the projection, which everything else
waits for; x and x_in; x, y and the result), backward 28 (dout, x, y, dy; x, dx_in; x, dout, dx_in, dx). A peer is
right if the RMS error of its result and of each gradient is what bfloat16 storage and TF32 products explain; torch may
use TF32 for float32 products here, as the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.mhc import golden, peers
from kernels.mhc.problem import Constants, Inputs, draw
from labkit.bench import Case, Provider
from labkit.compare import Comparison, compare
from labkit.device import Device

Tensor = torch.Tensor
SIZES = ((128, 128), (4096, 4096), (16384, 4096))
STREAMS = 4
ALLOWED = {"out": 2.0**-8, "dx": 2.0**-7, "dphi": 2.0**-8, "db": 2.0**-8, "dalpha": 2.0**-8}
"""Relative RMS error: two roundings to bfloat16 for what is stored so, 2^-8 for sums of TF32 products."""
SLOW = 4096 * 4096
"""Liger's projection unrolls K and compiles anew for each count of tokens, for minutes from this size on."""


def cases(device: Device) -> Iterator[Case]:
    """A case a size and mode."""
    device.needs_cuda("labkit bench mhc", "the interpreter's times are none")
    torch.backends.cuda.matmul.allow_tf32 = True
    for tokens, d in SIZES:
        inputs = draw(tokens, STREAMS, d, np.random.default_rng(0), torch.bfloat16).to(device.kind)
        exact: dict[Any, dict[str, Tensor]] = {}
        for mode, units in (("forward", 18), ("full", 46)):
            providers = []
            for peer in peers.PEERS:
                if peer.name.startswith("liger") and tokens * d >= SLOW:
                    continue
                try:
                    operator = peer.make()
                except ModuleNotFoundError as missing:
                    print(f"  left out: {peer.name}: {missing}")
                    continue
                key = (peer.constants, peer.transposed)
                if key not in exact:
                    exact[key] = _exact(inputs, *key)
                providers.append(_provider(peer, operator, inputs, mode, exact[key]))
            yield Case(
                kernel="mhc", mode=mode, x_name="tokens x D", x_value=f"{tokens} x {d}", providers=providers,
                bytes=units * tokens * d * 2, operations=0, memory=True,
            )  # fmt: skip
        del exact
        torch.cuda.empty_cache()


def _exact(inputs: Inputs, c: Constants, transposed: bool) -> dict[str, Tensor]:
    """Result and gradients in float64, kept in float32, with the identity for the layer."""
    i = inputs.double()
    s = golden.forward(i.x, i.phi, i.b, i.alpha, lambda x: x, c, transposed)
    dy, _, _ = golden.expand_backward(i.x, s["y"], s["post"], i.dout)
    found = {"out": s["out"]} | golden.backward(i, s, c, dy, transposed)
    return {name: found[name].float() for name in ALLOWED}


def _provider(
    peer: peers.Peer, operator: Callable[..., Tensor], inputs: Inputs, mode: str, exact: dict[str, Tensor]
) -> Provider:
    mine = (inputs.x, inputs.phi, inputs.b, inputs.alpha, inputs.dout)
    x, phi, b, alpha, dout = (v.detach().clone() for v in (peer.arranged(*mine)))
    leaves = [v.requires_grad_() for v in (x, phi, b, alpha)]
    kept: dict[str, Any] = {}
    facts: dict[str, float] = {}

    def run(keep: bool = False) -> None:
        out = operator(*leaves)
        gradients = torch.autograd.grad(out, leaves, dout) if mode == "full" or keep else ()
        if keep:
            kept["found"] = peer.back(out.detach(), *gradients)

    def check() -> Comparison:
        run(keep=True)
        names = tuple(ALLOWED) if mode == "full" else ("out",)
        errors = [_relative(kept["found"][name], exact[name]) for name in names]
        kept.clear()
        facts.update({f"rms_error_{name}": error for name, error in zip(names, errors, strict=True)})
        facts["repeats_identical"] = float(_identical(run_once))
        return compare(np.array(errors), np.zeros(len(errors)), torch.tensor([ALLOWED[name] for name in names]))

    def run_once() -> tuple[Tensor, ...]:
        return (out := operator(*leaves)).detach(), *torch.autograd.grad(out, leaves, dout)

    return Provider(peer.name, partial(run), lambda: None, check, lambda: facts)


def _relative(found: Tensor, exact: Tensor) -> float:
    size = exact.double().square().mean().sqrt()
    return float((found.double() - exact.double()).square().mean().sqrt() / size)


def _identical(run: Callable[[], tuple[Tensor, ...]], times: int = 20) -> bool:
    first = run()
    return all(all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)) for _ in range(times - 1))
