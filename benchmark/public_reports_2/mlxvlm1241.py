"""Blaizzy/mlx-vlm#1241: a position table is resized bicubically with Keys' a = -0.5 where PyTorch has a = -0.75."""
import numpy as np, torch, whywrong
H, W, C, NH, NW = 12, 14, 6, 9, 17                          # the table's grid, its channels, the grid of the image
def taps(n, m, like, a=-0.75):                              # of each of m outputs: four indices of n, four weights
    src = (torch.arange(m, dtype=like.dtype) + 0.5) * n / m - 0.5
    first = torch.floor(src)
    t = src - first
    near = lambda d: (a + 2) * d ** 3 - (a + 3) * d ** 2 + 1
    far = lambda d: a * d ** 3 - 5 * a * d ** 2 + 8 * a * d - 4 * a
    index = first.long()[:, None] + torch.arange(-1, 3)[None]
    return index.clamp(0, n - 1), torch.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1)
def reference(table, x, gain):                              # table [H, W, C], x [NH * NW, C], gain [C]
    iy, wy = taps(H, NH, table)
    ix, wx = taps(W, NW, table)
    rows = whywrong.step("rows", (table[:, ix] * wx[None, :, :, None]).sum(2))            # [H, NW, C]
    pos = whywrong.step("pos", (rows[iy] * wy[:, :, None, None]).sum(1))                  # [NH, NW, C]
    tokens = whywrong.step("tokens", x + pos.reshape(-1, pos.shape[-1]))
    return whywrong.step("normed", tokens * torch.rsqrt((tokens * tokens).mean(-1, keepdim=True) + 1e-5) * gain)
def matrix(n, m, a):                                        # the same weights as a dense matrix [m, n]
    out = np.zeros((m, n))
    for i in range(m):
        src = (i + 0.5) * n / m - 0.5
        for j in range(int(np.floor(src)) - 1, int(np.floor(src)) + 3):
            d = abs(src - j)
            w = ((a + 2) * d - (a + 3)) * d * d + 1 if d <= 1 else ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            out[i, min(max(j, 0), n - 1)] += w
    return out.astype(np.float32)
def port(table, x, gain, fault=False):
    a = -0.5 if fault else -0.75
    t = table.numpy()
    rows = np.einsum("hwc,ow->hoc", t, matrix(W, NW, a))
    pos = np.einsum("hoc,ph->poc", rows, matrix(H, NH, a))
    tokens = x.numpy() + pos.reshape(-1, C)
    normed = tokens / np.sqrt(np.mean(tokens ** 2, -1, keepdims=True) + np.float32(1e-5)) * gain.numpy()
    made = {"rows": rows, "pos": pos, "tokens": tokens, "normed": normed}
    return {"table": table, "x": x, "gain": gain, **{n: torch.from_numpy(v.astype(np.float32)) for n, v in made.items()}}
torch.manual_seed(101)
i = dict(table=torch.randn(H, W, C), x=torch.randn(NH * NW, C), gain=1 + 0.1 * torch.randn(C))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
