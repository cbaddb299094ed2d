"""bitsandbytes-foundation/bitsandbytes#1992: Lion over some steps, with the decay of the weights in the gradient."""

import numpy as np
import torch

import whywrong

STEPS, RATE, DECAY, B1, B2 = 4, 2e-3, 0.1, 0.9, 0.99


def reference(p, grads):  # [n], [STEPS, n]
    m = torch.zeros_like(p)
    for t, slope in enumerate(grads):
        direction = torch.sign(B1 * m + (1 - B1) * slope)
        p = whywrong.step(f"p.{t}", (1 - RATE * DECAY) * p - RATE * direction)
        m = whywrong.step(f"m.{t}", B2 * m + (1 - B2) * slope)
    return p


def port(p, grads, fault=False):
    f = np.float32
    x, made = p.numpy(), {}
    m = np.zeros_like(x)
    for t, slope in enumerate(grads.numpy()):
        if fault:
            slope = slope + f(DECAY) * x
        else:
            x = x - f(RATE * DECAY) * x
        x = x - f(RATE) * np.sign(f(B1) * m + f(1 - B1) * slope)
        m = m + f(1 - B2) * (slope - m)
        made |= {f"p.{t}": torch.from_numpy(x), f"m.{t}": torch.from_numpy(m)}
    return {"p": p, "grads": grads} | made


torch.manual_seed(214)
i = {"p": torch.randn(500), "grads": 0.3 * torch.randn(STEPS, 500)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
