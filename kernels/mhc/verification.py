"""The correct kernels as a trace, and the golden recorded, so that own and inherited errors part."""

from __future__ import annotations

import torch

import whywrong
from kernels.mhc import golden, launch
from kernels.mhc.problem import Constants, Inputs

Tensor = torch.Tensor

DECLARED = {
    torch.float32: whywrong.Precision(products="tf32x3"),
    torch.float16: whywrong.Precision(products="bfloat16x2"),
    torch.bfloat16: whywrong.Precision(products="bfloat16x2"),
}
"""By x's dtype: a step is kept in its own dtype; a float32 factor goes into tensor cores in two parts or three."""


def observed(inputs: Inputs, c: Constants) -> whywrong.Trace:
    """Every step of the Triton kernels, forward and backward, on the inputs' device."""
    x, phi, b, alpha = inputs.x, inputs.phi, inputs.b, inputs.alpha
    s = launch.forward(x, phi, b, alpha, c)
    trace = whywrong.Trace({name: getattr(inputs, name) for name in inputs.__dataclass_fields__})
    for name in ("r", "mix", "pre", "post", "p", "x_in"):
        trace.add(name, s[name])
    trace.add("out", launch.expand(x, inputs.y, s["post"], s["p"]))
    dy, dpost, dp = launch.expand_backward(x, inputs.y, s["post"], inputs.dout)
    d = launch.backward(x, phi, b, alpha, s, inputs.dx_in, dpost, dp, inputs.dout, c)
    for name, value in {"dy": dy, "dpost": dpost, "dp": dp, **d}.items():
        trace.add(name, value)
    return trace


def exact(inputs: Inputs, c: Constants) -> dict[str, Tensor]:
    """Every step of the golden, forward and backward, from the values as the kernels got them; float64."""
    return _steps(inputs.double(), c)


def _steps(i: Inputs, c: Constants) -> dict[str, Tensor]:
    s = golden.forward(i.x, i.phi, i.b, i.alpha, i.y, c)
    return {name: value for name, value in s.items() if name != "y"} | golden.backward(i, s, c)


def reference(inputs: Inputs, c: Constants) -> whywrong.Golden:
    """The same, recorded, so that any step can be run again."""
    given = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    return whywrong.golden(lambda **tensors: _steps(Inputs(**tensors), c), **given)


def check_operator(inputs: Inputs, c: Constants) -> whywrong.Localisation:
    """The kernels, step by step, against the golden within what they declare."""
    return whywrong.localise(observed(inputs, c), reference(inputs, c), precision=DECLARED[inputs.x.dtype])
