"""huggingface/diffusers#1864: the average of a model's weights: the decay of a step is written over the largest decay, so
that from some step on it stays at a half."""

import numpy as np
import torch

import whywrong

STEPS, LARGEST = 14, 0.9999


def reference(w):  # [STEPS + 1, rows, columns]: the weights after each update
    mean = w[0]
    for t in range(1, STEPS + 1):
        decay = min(LARGEST, (1 + t) / (10 + t))
        mean = whywrong.step(f"mean.{t}", decay * mean + (1 - decay) * w[t])
    return mean


def port(w, fault=False):
    x, largest, made = w.numpy(), LARGEST, {}
    mean = x[0]
    for t in range(1, STEPS + 1):
        taken = 1 - min(largest, (1 + t) / (10 + t))
        if fault:
            largest = taken
        mean = mean + np.float32(taken) * (x[t] - mean)
        made[f"mean.{t}"] = torch.from_numpy(mean)
    return {"w": w} | made


torch.manual_seed(210)
i = {"w": torch.cumsum(0.2 * torch.randn(STEPS + 1, 20, 16), 0)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
