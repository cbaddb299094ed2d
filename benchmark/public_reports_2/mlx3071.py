"""ml-explore/mlx#3071 (issue 343): ALiBi's slopes are one geometric series also where the heads are no power of 2."""
import math, numpy as np, torch, whywrong
HEADS, N, D = 12, 18, 8
def slopes(heads):                                          # Press et al.: of the power of 2 below, then every second of the next
    below = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (h + 1) / below) for h in range(below)]
    return first + [2.0 ** (-4.0 * (h + 1) / below) for h in range(0, 2 * (heads - below), 2)]
def reference(q, k, v):                                     # [HEADS, N, D]
    scores = whywrong.step("scores", q @ k.transpose(-1, -2) * D ** -0.5)
    place = torch.arange(q.shape[-2])
    far = (place[:, None] - place[None]).abs()
    slope = torch.tensor(slopes(HEADS), dtype=q.dtype)
    biased = whywrong.step("biased", scores - slope[:, None, None] * far)
    p = whywrong.step("p", torch.softmax(biased, -1))
    return whywrong.step("mixed", p @ v)
def port(q, k, v, fault=False):
    qs, ks, vs = q.numpy(), k.numpy(), v.numpy()
    made = {n: np.zeros((HEADS, N, N), np.float32) for n in ("scores", "biased", "p")}
    mixed = np.zeros((HEADS, N, D), np.float32)
    far = np.abs(np.subtract.outer(np.arange(N), np.arange(N))).astype(np.float32)
    for h in range(HEADS):
        m = (2.0 ** 8) ** (-(h + 1) / HEADS) if fault else 0.5 ** (h + 1) if h < 8 else 0.5 ** (h - 7.5)
        made["scores"][h] = (qs[h] / np.float32(math.sqrt(D))) @ ks[h].T
        made["biased"][h] = made["scores"][h] - np.float32(m) * far
        e = np.exp(made["biased"][h] - made["biased"][h].max(1, keepdims=True))
        made["p"][h] = e / e.sum(1, keepdims=True)
        mixed[h] = made["p"][h] @ vs[h]
    return {"q": q, "k": k, "v": v, **{n: torch.from_numpy(x) for n, x in made.items()}, "mixed": torch.from_numpy(mixed)}
torch.manual_seed(110)
q, k, v = torch.randn(3, HEADS, N, D)
P = whywrong.Precision("float32")
g = whywrong.golden(reference, q=q, k=k, v=v)
