"""pegainfer-project/pegainfer#411: partial sums of the norms of q and of k share a buffer without a barrier between them,
so that some of k's are added up for q, others in each run."""

import torch

import whywrong

WARPS = 4


def reference(q, k):  # [tokens, heads, size]
    q = whywrong.step("qn", q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6))
    k = whywrong.step("kn", k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6))
    return whywrong.step("dot", (q * k).sum(-1))


def port(q, k, early=None):  # early [tokens, heads, WARPS]: whose sum of k came too soon
    of_q, of_k = (x.square().unflatten(-1, (WARPS, -1)).sum(-1) for x in (q, k))
    taken = of_q if early is None else torch.where(early, of_k, of_q)
    qn, kn = (x / torch.sqrt(s.sum(-1, keepdim=True) + 1e-6) for x, s in ((q, taken), (k, of_k)))
    return {"q": q, "k": k, "qn": qn, "kn": kn, "dot": (qn * kn).sum(-1)}


torch.manual_seed(206)
i = {"q": torch.randn(20, 6, 64), "k": 1.7 * torch.randn(20, 6, 64)}
runs = [port(**i, early=torch.rand(20, 6, WARPS) < 0.12) for _ in range(3)]
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
