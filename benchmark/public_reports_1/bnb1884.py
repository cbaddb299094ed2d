"""bitsandbytes-foundation/bitsandbytes#1884: 4-bit blocks of 64: where the count is no multiple of 64, the largest value
of the last block is taken over memory behind the end too."""

import numpy as np
import torch

import whywrong

BLOCK = 64
LEVELS = torch.linspace(-1, 1, 15)


def reference(x):  # [rows, columns]
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).unflatten(0, (-1, BLOCK))
    largest = whywrong.step("largest", blocks.abs().amax(1))
    unit = whywrong.step("unit", blocks / largest[:, None])
    levels = LEVELS.to(x.dtype)
    nearest = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)
    return whywrong.step("dequantised", (levels[nearest] * largest[:, None]).flatten()[: x.numel()].reshape(x.shape))


def port(x, fault=False):
    flat, levels = x.numpy().ravel(), LEVELS.numpy()
    memory = np.zeros(-(-len(flat) // BLOCK) * BLOCK, np.float32)
    if fault:
        memory[:] = np.linspace(-6, 6, len(memory))  # what was there before
    memory[: len(flat)] = flat
    largest, unit, out = [], [], np.empty_like(memory)
    for first in range(0, len(memory), BLOCK):
        block = memory[first : first + BLOCK]
        largest.append(np.abs(block).max())
        unit.append(block / largest[-1])
        out[first : first + BLOCK] = levels[np.abs(unit[-1][:, None] - levels).argmin(1)] * largest[-1]
    made = {"largest": np.array(largest), "unit": np.stack(unit), "dequantised": out[: len(flat)].reshape(x.shape)}
    return {"x": x} | {n: torch.from_numpy(v) for n, v in made.items()}


torch.manual_seed(207)
i = {"x": torch.randn(23, 29)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
