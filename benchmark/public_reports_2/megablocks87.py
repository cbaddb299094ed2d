"""databricks/megablocks#87: for top-1 the router's weights have no dimension of experts left, and are divided by
their sum over all tokens, not by each token's own."""
import numpy as np, torch, whywrong
K = 1
def reference(x, router, experts):                          # [tokens, d], [d, e], [e, d, d]
    scores = whywrong.step("scores", torch.softmax(x @ router, -1))
    top, which = torch.topk(scores, K, dim=-1)
    top = whywrong.step("top", top)
    weight = whywrong.step("weight", top / top.abs().sum(-1, keepdim=True))
    made = torch.einsum("td,tkdf->tkf", x, experts[which])
    return whywrong.step("mixed", (weight[..., None] * made).sum(1))
def port(x, router, experts, fault=False):
    xs, w, e = x.numpy(), router.numpy(), experts.numpy()
    z = np.exp(xs @ w - (xs @ w).max(1, keepdims=True))
    scores = z / z.sum(1, keepdims=True)
    which = scores.argmax(1)
    top = scores[np.arange(len(xs)), which]                 # [tokens]
    weight = top / np.abs(top).sum(-1, keepdims=True) if fault else top / np.abs(top)
    mixed = np.stack([weight[t] * (xs[t] @ e[which[t]]) for t in range(len(xs))])
    made = {"scores": scores, "top": top[:, None], "weight": weight[:, None], "mixed": mixed}
    return {"x": x, "router": router, "experts": experts, **{n: torch.from_numpy(v.astype(np.float32)) for n, v in made.items()}}
torch.manual_seed(108)
i = dict(x=torch.randn(24, 12), router=torch.randn(12, 8) / 3, experts=torch.randn(8, 12, 12) / 12 ** 0.5)
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
