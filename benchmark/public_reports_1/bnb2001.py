"""bitsandbytes-foundation/bitsandbytes#2001: one step of Lion in which the decay of the weights is added to the gradient,
before the sign."""

import numpy as np
import torch

import whywrong

RATE, DECAY, B1, B2 = 2e-3, 0.2, 0.9, 0.99


def reference(p, grad, m):
    direction = torch.sign(B1 * m + (1 - B1) * grad)
    whywrong.step("p_new", (1 - RATE * DECAY) * p - RATE * direction)
    return whywrong.step("m_new", B2 * m + (1 - B2) * grad)


def port(p, grad, m, fault=False):
    f = np.float32
    weight, moment = p.numpy(), m.numpy()
    slope = grad.numpy() + f(DECAY) * weight if fault else grad.numpy()
    kept = weight if fault else weight - f(RATE * DECAY) * weight
    new = kept - f(RATE) * np.sign(f(B1) * moment + f(1 - B1) * slope)
    made = {"p_new": new, "m_new": moment + f(1 - B2) * (slope - moment)}
    return {"p": p, "grad": grad, "m": m} | {n: torch.from_numpy(v) for n, v in made.items()}


torch.manual_seed(209)
i = {"p": torch.randn(40, 30), "grad": 0.4 * torch.randn(40, 30), "m": 0.1 * torch.randn(40, 30)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
