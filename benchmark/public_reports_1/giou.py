"""mikel-brostrom/boxmot#1749: the generalised overlap of boxes takes the intersection where the union belongs."""

import numpy as np
import torch

import whywrong


def reference(a, b):  # [n, 4], [m, 4]: left, top, right, bottom
    a, b = a[:, None], b[None]
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inner
    return whywrong.step("overlap", inner / union - (hull - union) / hull)


def port(a, b, fault=False):
    x, y = a.numpy(), b.numpy()
    out = np.empty((len(x), len(y)), np.float32)
    for r, (left, top, right, bottom) in enumerate(x):
        for c, (l2, t2, r2, b2) in enumerate(y):
            inner = max(min(right, r2) - max(left, l2), 0) * max(min(bottom, b2) - max(top, t2), 0)
            union = (right - left) * (bottom - top) + (r2 - l2) * (b2 - t2) - inner
            hull = (max(right, r2) - min(left, l2)) * (max(bottom, b2) - min(top, t2))
            out[r, c] = inner / union - (hull - (inner if fault else union)) / hull
    return {"a": a, "b": b, "overlap": torch.from_numpy(out)}


def boxes(n):
    corner = 50 * torch.rand(n, 2)
    return torch.cat((corner, corner + 6 + 30 * torch.rand(n, 2)), 1)


torch.manual_seed(213)
i = {"a": boxes(17), "b": boxes(13)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
