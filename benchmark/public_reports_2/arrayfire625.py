"""arrayfire#625: a __syncthreads() is missing in reduce_first: the first warp may add partial sums of the second before
that one has added the last quarter of the column to them."""
import numpy as np, torch, whywrong
def reference(x):                                           # [128, columns]
    total = whywrong.step("total", x.sum(0))
    mean = whywrong.step("mean", total / x.shape[0])
    spread = whywrong.step("spread", ((x - mean) ** 2).mean(0))
    return whywrong.step("scaled", (x - mean) / torch.sqrt(spread + 1e-5))
def port(x, rng=None):                                      # rng: with the race, lost in about a fifth of the columns
    a = x.numpy()
    total = np.zeros(a.shape[1], np.float32)
    for c in range(a.shape[1]):                             # a block of 128 threads a column, a tree in shared memory
        s = a[:, c].copy()
        s[:32] += s[64:96]
        early = rng is not None and rng.random() < 0.2
        if early:
            s[:32] += s[32:64]                              # before the second warp's own addition
        s[32:64] += s[96:128]
        if not early:
            s[:32] += s[32:64]
        for half in (16, 8, 4, 2, 1):
            s[:half] += s[half:2 * half]
        total[c] = s[0]
    mean = total / np.float32(len(a))
    spread = ((a - mean) ** 2).mean(0)
    made = {"total": total, "mean": mean, "spread": spread, "scaled": (a - mean) / np.sqrt(spread + np.float32(1e-5))}
    return {"x": x, **{n: torch.from_numpy(v) for n, v in made.items()}}
torch.manual_seed(118)
x = torch.rand(128, 40)
rng = np.random.default_rng(118)
runs = [port(x, rng) for _ in range(4)]
P = whywrong.Precision("float32")
g = whywrong.golden(reference, x=x)
