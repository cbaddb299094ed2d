"""pie-project/pie#603: rotary positions of a part of the head: the frequencies are by the head's size, not the part's,
and channel i is turned with i + half the head, not i + half the part."""

import numpy as np
import torch

import whywrong

HEAD, PART, BASE = 48, 16, 10000.0


def turned(x):
    position = torch.arange(len(x), dtype=x.dtype)
    angle = torch.outer(position, BASE ** (-torch.arange(0, PART, 2, dtype=x.dtype) / PART))[:, None]
    first, second, rest = x.split([PART // 2, PART // 2, HEAD - PART], -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def reference(q, k):  # [tokens, heads, HEAD]
    q, k = whywrong.step("q_turned", turned(q)), whywrong.step("k_turned", turned(k))
    return whywrong.step("scores", torch.einsum("thd,shd->hts", q, k) * HEAD**-0.5)


def port(q, k, fault=False):
    def turn(x):
        x, out = x.numpy(), x.numpy().copy()
        for c in range(PART // 2):
            other = c + (HEAD if fault else PART) // 2
            angle = np.arange(len(x)) * BASE ** (-2 * c / (HEAD if fault else PART))
            cos, sin = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))
            out[..., c] = x[..., c] * cos - x[..., other] * sin
            out[..., other] = x[..., other] * cos + x[..., c] * sin
        return out

    a, b = turn(q), turn(k)
    scores = np.stack([a[:, h] @ b[:, h].T for h in range(a.shape[1])]) * np.float32(HEAD**-0.5)
    made = {"q_turned": a, "k_turned": b, "scores": scores}
    return {"q": q, "k": k} | {n: torch.from_numpy(x) for n, x in made.items()}


torch.manual_seed(203)
i = {"q": torch.randn(40, 2, HEAD), "k": torch.randn(40, 2, HEAD)}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
