"""frgfm/Holocron#1: RAdam divides the first moment by its bias correction in place, so that the state stays divided."""

import numpy as np
import torch

import whywrong

STEPS, RATE, B1, B2, EPS = 7, 0.02, 0.9, 0.999, 1e-8
LONGEST = 2 / (1 - B2) - 1


def rectified(t):
    """The factor of a step, or None where the second moment is not used yet."""
    n = LONGEST - 2 * t * B2**t / (1 - B2**t)
    return (((n - 4) * (n - 2) * LONGEST) / ((LONGEST - 4) * (LONGEST - 2) * n)) ** 0.5 if n > 4 else None


def reference(p, grads):  # [n], [STEPS, n]
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t in range(1, STEPS + 1):
        slope, factor = grads[t - 1], rectified(t)
        m = whywrong.step(f"m.{t}", B1 * m + (1 - B1) * slope)
        v = whywrong.step(f"v.{t}", B2 * v + (1 - B2) * slope.square())
        change = m / (1 - B1**t)
        if factor is not None:
            change = factor * change / ((v / (1 - B2**t)).sqrt() + EPS)
        p = whywrong.step(f"p.{t}", p - RATE * change)
    return p


def port(p, grads, fault=False):
    f = np.float32
    x, made = p.numpy().copy(), {}
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, slope in enumerate(grads.numpy(), 1):
        m += f(1 - B1) * (slope - m)
        v += f(1 - B2) * (slope * slope - v)
        made |= {f"m.{t}": m.copy(), f"v.{t}": v.copy()}
        if fault:
            m /= f(1 - B1**t)
        change = m if fault else m / f(1 - B1**t)
        if factor := rectified(t):
            change = f(factor) * change / (np.sqrt(v / f(1 - B2**t)) + f(EPS))
        x = x - f(RATE) * change
        made[f"p.{t}"] = x
    return {"p": p, "grads": grads} | {n: torch.from_numpy(y) for n, y in made.items()}


torch.manual_seed(211)
i = {"p": torch.randn(300), "grads": torch.randn(STEPS, 300)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
