"""seisbench/seisbench#96 and #102: a port of EQTransformer. `eps`: the norms have 1e-5 where the weights were trained with
1e-7. `maximum`: additive attention subtracts the maximum of its input, not that of its scores, before exp."""

import numpy as np
import torch

import whywrong

EPS, SMALL = 1e-7, 1e-5


def norm(x, gain, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * gain


def reference(x, gain, wt, wx, wa):  # [time, c], [2, c], [c, units], [c, units], [units]
    first = whywrong.step("norm1", norm(x, gain[0], EPS))
    scores = torch.tanh((first @ wt)[:, None] + (first @ wx)[None]) @ wa
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    mixed = whywrong.step("attended", e / (e.sum(-1, keepdim=True) + SMALL) @ first)
    return whywrong.step("norm2", norm(first + mixed, gain[1], EPS))


def port(x, gain, wt, wx, wa, fault=""):
    f = np.float32
    eps = f(1e-5 if fault == "eps" else EPS)

    def normed(t, k):
        t = t - t.mean(1, keepdims=True)
        return t * (gain[k].numpy() / np.sqrt((t * t).mean(1, keepdims=True) + eps))

    first = normed(x.numpy(), 0)
    query, key = first @ wt.numpy(), first @ wx.numpy()
    scores = np.stack([np.tanh(row + key) @ wa.numpy() for row in query])
    top = first.max(1, keepdims=True) if fault == "maximum" else scores.max(1, keepdims=True)
    e = np.exp(scores - top)
    mixed = e / (e.sum(1, keepdims=True) + f(SMALL)) @ first
    made = {"norm1": first, "attended": mixed, "norm2": normed(first + mixed, 1)}
    return dict(x=x, gain=gain, wt=wt, wx=wx, wa=wa) | {n: torch.from_numpy(v) for n, v in made.items()}


torch.manual_seed(217)
i = {
    "x": 0.04 * torch.randn(25, 14),
    "gain": 1 + 0.2 * torch.randn(2, 14),
    "wt": torch.randn(14, 10) / 4,
    "wx": torch.randn(14, 10) / 4,
    "wa": torch.randn(10),
}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
