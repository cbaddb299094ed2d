"""pytorch_geometric#224: GATConv's softmax runs over the edges with the same source, not with the same target."""
import numpy as np, torch, whywrong
def reference(x, w, left, right, source, target):           # [nodes, in], [in, out], [out], [out], [edges], [edges]
    h = whywrong.step("h", x @ w)
    raw = (h @ left)[source] + (h @ right)[target]
    logit = whywrong.step("logit", torch.where(raw > 0, raw, 0.2 * raw))
    e = torch.exp(logit - logit.max())
    below = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, target, e)
    alpha = whywrong.step("alpha", e / below[target])
    mixed = torch.zeros_like(h).index_add(0, target, alpha[:, None] * h[source])
    return whywrong.step("mixed", mixed)
def port(x, w, left, right, source, target, fault=False):
    s, t = source.numpy(), target.numpy()
    h = x.numpy() @ w.numpy()
    raw = (h @ left.numpy())[s] + (h @ right.numpy())[t]
    logit = np.maximum(raw, np.float32(0.2) * raw)
    alpha, by = np.zeros_like(logit), s if fault else t
    for node in set(by.tolist()):
        own = np.flatnonzero(by == node)
        e = np.exp(logit[own] - logit[own].max())
        alpha[own] = e / e.sum()
    mixed = np.zeros_like(h)
    for n in range(len(s)):
        mixed[t[n]] += alpha[n] * h[s[n]]
    made = {"h": h, "logit": logit, "alpha": alpha, "mixed": mixed}
    given = dict(x=x, w=w, left=left, right=right, source=source, target=target)
    return given | {n: torch.from_numpy(v) for n, v in made.items()}
torch.manual_seed(115)
pairs = torch.randperm(14 * 14)[:56]                        # a directed graph, each node with a loop
edges = torch.cat([torch.stack([pairs // 14, pairs % 14])[:, pairs // 14 != pairs % 14], torch.arange(14).expand(2, 14)], 1)
i = dict(x=torch.randn(14, 10), w=torch.randn(10, 6) / 3, left=torch.randn(6), right=torch.randn(6), source=edges[0], target=edges[1])
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
