"""huggingface/transformers#39408: flash attention gets window_size = sliding_window, whose bound is inclusive, so
that each token sees one key more than the window has."""
import torch, whywrong
WINDOW, D = 8, 16
def reference(q, k, v):                                     # [heads, tokens, D]
    scores = whywrong.step("scores", q @ k.transpose(-1, -2) * D ** -0.5)
    n = q.shape[-2]
    back = torch.arange(n)[:, None] - torch.arange(n)[None]
    seen = (back >= 0) & (back < WINDOW)
    p = whywrong.step("p", torch.softmax(scores.masked_fill(~seen, float("-inf")), -1))
    mixed = whywrong.step("mixed", p @ v)
    return whywrong.step("merged", mixed.transpose(0, 1).reshape(n, -1))
def port(q, k, v, fault=False):
    heads, n, _ = q.shape
    left = WINDOW if fault else WINDOW - 1                  # keys i - left .. i, both included
    scores = torch.zeros(heads, n, n)
    p = torch.zeros(heads, n, n)
    mixed = torch.zeros(heads, n, D)
    qs, ks, vs = q.float(), k.float(), v.float()
    for i in range(n):
        scores[:, i] = torch.einsum("hd,hnd->hn", qs[:, i], ks) * 0.25
        first = max(0, i - left)
        part = scores[:, i, first:i + 1]
        e = torch.exp(part - part.amax(1, keepdim=True))
        p[:, i, first:i + 1] = e / e.sum(1, keepdim=True)
        mixed[:, i] = torch.einsum("hn,hnd->hd", p[:, i, first:i + 1].bfloat16().float(), vs[:, first:i + 1])
    made = {"scores": scores, "p": p, "mixed": mixed, "merged": mixed.permute(1, 0, 2).flatten(1)}
    return {"q": q, "k": k, "v": v, **{n: t.bfloat16() for n, t in made.items()}}
torch.manual_seed(109)
q, k, v = torch.randn(3, 3, 36, D).bfloat16()
P = whywrong.Precision("bf16")
g = whywrong.golden(reference, q=q, k=k, v=v)
