"""pegainfer-project/pegainfer#350: where a length is a multiple of the page, the list of pages has one more, and the length
that the kernel works out from it is a page too long."""

import numpy as np
import torch

import whywrong

PAGE = 8


def reference(q, keys, values, table, length):  # [n, size], [pages, PAGE, size] twice, [n, most pages], [n]
    k, v = keys[table].flatten(1, 2), values[table].flatten(1, 2)
    scores = (k @ q[:, :, None])[:, :, 0] * q.shape[1] ** -0.5
    beyond = torch.arange(k.shape[1]) >= length[:, None]
    p = scores.masked_fill(beyond, -torch.inf).softmax(1)
    return whywrong.step("out", (p[:, None] @ v)[:, 0])


def port(q, keys, values, table, length, fault=False):
    out = []
    for row, pages, n in zip(q.numpy(), table.numpy(), length.tolist(), strict=True):
        used = -(-n // PAGE)
        last = n - (used - 1) * PAGE
        used += fault and n % PAGE == 0
        n = (used - 1) * PAGE + last
        k, v = (np.concatenate(pool.numpy()[pages[:used]])[:n] for pool in (keys, values))
        s = k @ row * np.float32(len(row) ** -0.5)
        e = np.exp(s - s.max())
        out.append(e @ v / e.sum())
    given = {"q": q, "keys": keys, "values": values, "table": table, "length": length}
    return given | {"out": torch.from_numpy(np.stack(out))}


torch.manual_seed(208)
i = {
    "q": torch.randn(7, 32),
    "keys": torch.randn(50, PAGE, 32),
    "values": torch.randn(50, PAGE, 32),
    "table": torch.randperm(50)[:42].reshape(7, 6),
    "length": torch.tensor([13, 24, 40, 31, 8, 37, 16]),
}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
