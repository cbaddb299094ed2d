"""BobMcDear/attorch#17: in the gradient of an RMSNorm, a number of each row lacks [:, None], so that within a square tile
row j's stands in column j."""

import numpy as np
import torch

import whywrong

EPS = 1e-5


def reference(x, w, dy):  # [rows, columns], [columns], [rows, columns]
    r = torch.rsqrt((x * x).mean(1, keepdim=True) + EPS)
    whywrong.step("dw", (dy * x * r).sum(0))
    along = (dy * w * x).mean(1, keepdim=True)
    return whywrong.step("dx", r * (dy * w) - x * r**3 * along)


def port(x, w, dy, fault=False):
    a, gain, up = x.numpy(), w.numpy(), dy.numpy()
    tile = a.shape[1]
    dx, dw = np.empty_like(a), np.zeros_like(gain)
    for first in range(0, len(a), tile):
        rows = slice(first, first + tile)
        t = a[rows]
        r = 1 / np.sqrt((t * t).sum(1) / np.float32(tile) + np.float32(EPS))
        factor = r * r * r * (up[rows] * gain * t).sum(1) / np.float32(tile)
        spread = np.pad(factor, (0, tile - len(factor))) if fault else factor[:, None]
        dx[rows] = r[:, None] * (up[rows] * gain) - t * spread
        dw += (up[rows] * t * r[:, None]).sum(0)
    return {"x": x, "w": w, "dy": dy, "dw": torch.from_numpy(dw), "dx": torch.from_numpy(dx)}


torch.manual_seed(205)
i = {"x": torch.randn(72, 32), "w": 1 + 0.3 * torch.randn(32), "dy": torch.randn(72, 32)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
