"""Are the labels right? The reference is run in float64 with what a port observed put in place of each step.

A step has an error of its own where what the reference computes from the observed steps before it is not what was
observed. A correct port must have none in float64, and none beyond rounding in its variants. The first own error of a
port with a defect must be at the step of its label, in float64 and in the variant that it is shown in, far beyond
rounding there. Own errors of gradients come after all steps; of them, only the one of the label may be wrong.
"""

from __future__ import annotations

import time

import torch

from benchmark import programs
from benchmark.base import OBSERVER, inputs_of, run_port

SUBSTITUTE: dict[str, torch.Tensor] | None = None
COMPUTED: dict[str, torch.Tensor] = {}


def observed_step(name: str, x: torch.Tensor) -> torch.Tensor:
    """What was observed, with the gradient of what is computed."""
    count, full = 1, name
    while full in COMPUTED:
        count += 1
        full = f"{name}#{count}"
    COMPUTED[full] = x.detach().clone()
    if SUBSTITUTE is None or full not in SUBSTITUTE:
        return x
    seen = SUBSTITUTE[full].to(x.dtype)
    if not x.is_floating_point() or seen.shape != x.shape:
        return seen
    return x + (seen - x).detach()


CLOSE = 1e-10
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def rerun(p, inputs, observed):
    """What the reference computes for each step from the observed steps before it."""
    global SUBSTITUTE
    COMPUTED.clear()
    SUBSTITUTE = {k: v.double() if v.is_floating_point() else v for k, v in observed.items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    token = OBSERVER.set(observed_step)
    try:
        args = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
        result = p.reference(**args)
        named = result if isinstance(result, dict) else {"output": result}
        found = {**COMPUTED, **{k: v.detach().clone() for k, v in named.items()}}
        grads = [n for n in observed if n.startswith("grad:")]
        if grads:
            loss = p.loss(result) if p.loss else result
            for n, g in zip(grads, torch.autograd.grad(loss, [args[n[5:]] for n in grads]), strict=True):
                found[n] = g
        return found
    finally:
        OBSERVER.reset(token)
        SUBSTITUTE = None
        torch.set_default_dtype(before)


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference over the largest value; Inf for other shapes and where one side is not finite."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    d = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    if not bool(d.isfinite().all()):
        return float("inf")
    size = b[b.isfinite()].abs()
    return float(d.max() / size.max().clamp(min=1e-300)) if len(size) else 0.0


def own(p, inputs, observed, close):
    """Steps with an error of their own beyond `close` roundings of their format, and its size in roundings."""
    again = rerun(p, inputs, observed)
    found = {}
    for n in again:
        if n in observed:
            size = off(observed[n], again[n]) / ROUNDING.get(observed[n].dtype, 1e-12)
            if size > close:
                found[n] = size
    return found, [n for n in observed if n not in again]


def main(names: list[str]) -> int:
    wrong, kinds = 0, {}
    for p in programs(names):
        shown = p.variants[0]
        inputs = inputs_of(p, shown, 0)
        start = time.perf_counter()
        for _ in range(3):
            rerun(p, inputs, {})
        took = (time.perf_counter() - start) / 3
        for variant in (
            dict.fromkeys(("f64", *p.variants)) if p.defects else ("f64",)
        ):  # narrow, correct ports alone may differ
            for seed in range(3):
                ins = inputs_of(p, shown if variant == "f64" else variant, seed)
                port = run_port(p, ins, variant, None)
                if variant.endswith("reg"):  # goes on with other values than it stores, for float32 steps too
                    close = 4.0
                else:
                    close = CLOSE / ROUNDING[torch.float64] if variant == "f64" else 40.0 if variant == "f32" else 1.01
                bad, missing = own(p, ins, port.observed, close)
                most = {1.01: 40, 4.0: 4 * 2**16}.get(close, close)  # roundings of float32
                bad = {n: e for n, e in bad.items() if port.observed[n].dtype != torch.float32 or e > most}
                if bad or missing:
                    wrong += 1
                    print(
                        f"{p.id} {variant} {seed}: correct port is off by roundings {bad}; not in reference: {missing}"
                    )
        right = run_port(p, inputs, shown, None).observed
        print(f"{p.id} {p.name}: {len(p.defects)} defects, shown in {shown}, float64 run {1000 * took:.1f} ms")
        for d in p.defects:
            kinds[d.kind] = kinds.get(d.kind, 0) + 1
            errors = []
            bad64, _ = own(p, inputs, run_port(p, inputs, "f64", d.name).observed, CLOSE / ROUNDING[torch.float64])
            seen = run_port(p, inputs, shown, d.name).observed
            if all(n in right and torch.equal(x, right[n]) for n, x in seen.items()):
                errors.append("same as the correct run")
            bad, missing = own(p, inputs, seen, 8.0 if shown != "f32" else 100.0)
            first64, first = next(iter(bad64), None), next(iter(bad), None)
            if missing:
                errors.append(f"not in the reference: {missing}")
            if first64 != d.step:
                errors.append(f"first in float64: {first64}, all {list(bad64)[:6]}")
            if first != d.step:
                errors.append(f"first in {shown}: {first}, all {list(bad)[:6]}")
            if d.step.startswith("grad:") and len([n for n in bad64 if n.startswith("grad:")]) > 1:
                errors.append(f"several gradients: {list(bad64)}")
            if not torch.isfinite(torch.tensor([float(x.double().sum()) for x in seen.values()])).all():
                errors.append("not finite")
            size = bad.get(d.step, 0)
            print(f"  {d.name:36} {d.kind:10} {d.step:12} own error {size:9.0f} roundings", "; ".join(errors))
            wrong += bool(errors)
    print("kinds:", dict(sorted(kinds.items())), "total", sum(kinds.values()))
    print("wrong labels:", wrong)
    return wrong > 0
