"""microsoft/onnxruntime#3893: in a GRU the buffer of h times the recurrent weight is cleared for the first two rows of a
batch alone, so that the others add up over time."""

import numpy as np
import torch

import whywrong


def reference(x, wi, wh):  # [time, batch, inputs], [3 hidden, inputs], [3 hidden, hidden]
    h = x.new_zeros(x.shape[1], wh.shape[1])
    for t, row in enumerate(x):
        (ri, zi, ni), (rh, zh, nh) = (row @ wi.T).chunk(3, 1), (h @ wh.T).chunk(3, 1)
        z = torch.sigmoid(zi + zh)
        h = whywrong.step(f"h.{t}", (1 - z) * torch.tanh(ni + torch.sigmoid(ri + rh) * nh) + z * h)
    return h


def port(x, wi, wh, fault=False):
    a, b = wi.numpy(), wh.numpy()
    n = b.shape[1]
    h = np.zeros((x.shape[1], n), np.float32)
    buffer, made = np.zeros_like(h), {}
    for t, row in enumerate(x.numpy()):
        buffer[: 2 if fault else None] = 0
        buffer += h @ b[2 * n :].T
        r, z = (1 / (1 + np.exp(-(row @ a[k : k + n].T + h @ b[k : k + n].T))) for k in (0, n))
        h = np.tanh(row @ a[2 * n :].T + r * buffer) * (1 - z) + z * h
        made[f"h.{t}"] = torch.from_numpy(h)
    return {"x": x, "wi": wi, "wh": wh} | made


torch.manual_seed(215)
i = {"x": torch.randn(6, 4, 8), "wi": torch.randn(15, 8) / 3, "wh": torch.randn(15, 5) / 2}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
