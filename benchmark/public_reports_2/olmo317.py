"""allenai/OLMo-core#317 (and 309): SkipStepAdamW never counts its steps, so that both bias corrections stay those of
step 1 (a learning rate 2.2 times too large in the long run)."""
import numpy as np, torch, whywrong
LR, B1, B2, EPS, WD = 3e-2, 0.9, 0.95, 1e-8, 0.1
def reference(p, grads):                                    # [n], [steps, n]
    m = v = torch.zeros_like(p)
    first, second, moved = [], [], []
    for t in range(1, grads.shape[0] + 1):
        m = B1 * m + (1 - B1) * grads[t - 1]
        v = B2 * v + (1 - B2) * grads[t - 1] ** 2
        p = p * (1 - LR * WD) - LR * (m / (1 - B1 ** t)) / ((v / (1 - B2 ** t)).sqrt() + EPS)
        first.append(m)
        second.append(v)
        moved.append(p)
    whywrong.step("m", torch.stack(first))
    whywrong.step("v", torch.stack(second))
    return whywrong.step("path", torch.stack(moved))
def port(p, grads, fault=False):
    m, v, w = np.zeros(len(p), np.float32), np.zeros(len(p), np.float32), p.numpy().copy()
    made = {"m": [], "v": [], "path": []}
    count = 1
    for g in grads.numpy():
        m += np.float32(1 - B1) * (g - m)
        v += np.float32(1 - B2) * (g * g - v)
        size = LR / (1 - B1 ** count)
        below = np.sqrt(v) / np.float32(np.sqrt(1 - B2 ** count)) + np.float32(EPS)
        w *= np.float32(1 - LR * WD)
        w -= np.float32(size) * m / below
        for name, value in (("m", m), ("v", v), ("path", w)):
            made[name].append(value.copy())
        if not fault:
            count += 1
    return {"p": p, "grads": grads, **{n: torch.from_numpy(np.stack(x)) for n, x in made.items()}}
torch.manual_seed(119)
i = dict(p=torch.randn(48), grads=torch.randn(6, 48) + 0.5 * torch.randn(48))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
