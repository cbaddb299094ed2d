"""Is every port its reference, mathematically? Both are run in float64; the largest difference of each step over the
step's largest value. With `narrow` as an argument: also the port in each variant, against the float64 reference from
the same inputs, in roundings of the step's format (no limit; errors of steps add up there)."""

from __future__ import annotations

import sys

import base
import torch

KEPT: dict[str, torch.Tensor] = {}


def keep(name: str, x: torch.Tensor) -> torch.Tensor:
    count, full = 1, name
    while full in KEPT:
        count += 1
        full = f"{name}#{count}"
    KEPT[full] = x.detach().clone()
    return x


base.step = keep
from programs import PROGRAMS, inputs_of, run_port  # noqa: E402

ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def reference(p, inputs, grads):
    KEPT.clear()
    torch.set_default_dtype(torch.float64)
    args = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
    result = p.reference(**args)
    named = result if isinstance(result, dict) else {"output": result}
    found = {**KEPT, **{k: v.detach() for k, v in named.items()}}
    if grads:
        got = torch.autograd.grad(p.loss(result) if p.loss else result, [args[n[5:]] for n in grads])
        found.update(zip(grads, got, strict=True))
    torch.set_default_dtype(torch.float32)
    return found


def off(a, b):
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    if not bool(a.isfinite().all() & b.isfinite().all()):
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))


def main() -> int:
    wrong = 0
    names = [a for a in sys.argv[1:] if a != "narrow"]
    for p in PROGRAMS.values():
        if names and p.id not in names:
            continue
        for variant in ("f64", *(p.variants if "narrow" in sys.argv else ())):
            worst: dict[str, float] = {}
            for seed in range(3):
                inputs = inputs_of(p, p.variants[0] if variant == "f64" else variant, seed)
                seen = run_port(p, inputs, variant, None).observed
                found = reference(p, inputs, [n for n in seen if n.startswith("grad:")])
                if set(seen) != set(found):
                    print(f"{p.id}: only in one of them: {set(seen) ^ set(found)}")
                    wrong += 1
                for n in seen:
                    unit = 1 if variant == "f64" or seen[n].dtype not in ROUNDING else ROUNDING[seen[n].dtype]
                    key = n.split("#")[0]
                    worst[key] = max(worst.get(key, 0.0), off(seen[n], found.get(n, torch.tensor(float("nan")))) / unit)
            most = max(worst.values())
            bad = variant == "f64" and not most < 1e-11
            wrong += bad
            print(f"{p.id} {p.name} {variant}: {'WRONG' if bad else 'right' if variant == 'f64' else 'roundings'}")
            print("   ", " ".join(f"{n}={e:.1e}" if variant == "f64" else f"{n}={e:.1f}" for n, e in worst.items()))
    print("wrong:", wrong)
    return wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
