"""NVIDIA-NeMo/Automodel#2591: the bias of an expert's last layer is not weighted by the routing probability."""

import numpy as np
import torch

import whywrong

CHOSEN = 2


def reference(x, router, up, down, bias):  # [tokens, c], [c, e], [e, c, f], [e, f, c], [e, c]
    logits = whywrong.step("logits", x @ router)
    top, expert = logits.topk(CHOSEN)
    prob = whywrong.step("prob", top.softmax(-1))
    hidden = torch.nn.functional.silu(torch.einsum("tc,ecf->tef", x, up))
    made = torch.einsum("tef,efc->tec", hidden, down) + bias
    picked = made.gather(1, expert[:, :, None].expand(-1, -1, made.shape[2]))
    return whywrong.step("out", (prob[:, :, None] * picked).sum(1))


def port(x, router, up, down, bias, fault=False):
    tokens, w, u, d, b = (t.numpy() for t in (x, router, up, down, bias))
    logits = tokens @ w
    order = np.argsort(-logits, 1)[:, :CHOSEN]
    prob, out = np.zeros((len(tokens), CHOSEN), np.float32), np.zeros_like(tokens)
    for t, experts in enumerate(order):
        e = np.exp(logits[t, experts] - logits[t, experts[0]])
        prob[t] = e / e.sum()
        for p, expert in zip(prob[t], experts, strict=True):
            a = tokens[t] @ u[expert]
            out[t] += p * (a / (1 + np.exp(-a))) @ d[expert] + (1 if fault else p) * b[expert]
    made = {"logits": logits, "prob": prob, "out": out}
    return dict(x=x, router=router, up=up, down=down, bias=bias) | {n: torch.from_numpy(v) for n, v in made.items()}


torch.manual_seed(204)
i = {
    "x": torch.randn(30, 24),
    "router": torch.randn(24, 6) / 5,
    "up": torch.randn(6, 24, 40) / 5,
    "down": torch.randn(6, 40, 24) / 6,
    "bias": torch.randn(6, 24),
}
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
