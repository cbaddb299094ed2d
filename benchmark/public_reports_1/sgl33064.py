"""sgl-project/sglang#33064: the shards' natural log-sum-exp are merged with exp2."""

import numpy as np
import torch

import whywrong

SHARDS = 4


def reference(q, k, v):  # [heads, size], [keys, size], [keys, values]
    scores = (q @ k.T / k.shape[1] ** 0.5).unflatten(1, (SHARDS, -1))
    lse = whywrong.step("lse", scores.logsumexp(-1))
    part = whywrong.step("part", scores.softmax(-1).transpose(0, 1) @ v.unflatten(0, (SHARDS, -1)))
    weight = whywrong.step("weight", lse.softmax(-1))
    return whywrong.step("out", (weight.T[:, :, None] * part).sum(0))


def port(q, k, v, fault=False):
    keys = len(k) // SHARDS
    lse, part = [], []
    for shard in range(SHARDS):
        rows = slice(shard * keys, (shard + 1) * keys)
        s = q.numpy() @ k.numpy()[rows].T * np.float32(k.shape[1] ** -0.5)
        e = np.exp(s - s.max(1, keepdims=True))
        lse.append(s.max(1) + np.log(e.sum(1)))
        part.append(e / e.sum(1, keepdims=True) @ v.numpy()[rows])
    lse, part = np.stack(lse, 1), np.stack(part)
    w = (np.exp2 if fault else np.exp)(lse - lse.max(1, keepdims=True))
    w /= w.sum(1, keepdims=True)
    made = {"lse": lse, "part": part, "weight": w, "out": np.einsum("hs,shv->hv", w, part)}
    return {"q": q, "k": k, "v": v} | {n: torch.from_numpy(x) for n, x in made.items()}


torch.manual_seed(201)
i = {"q": torch.randn(12, 48), "k": torch.randn(600, 48), "v": torch.randn(600, 32)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
