"""ModelCloud/GPTQModel#2350: AWQ zero points are packed as z - 1 in 4 bits; 0 becomes -1, that is 15, and the kernel
adds the 1 again, so that a zero point of 0 counts as 16."""
import numpy as np, torch, whywrong
GROUP = 16
def reference(codes, zeros, scales, x):                     # [in, out], [groups, out], [groups, out], [tokens, in]
    z = zeros.repeat_interleave(GROUP, 0)
    s = scales.repeat_interleave(GROUP, 0)
    w = whywrong.step("w", (codes - z) * s)
    y = whywrong.step("y", x @ w)
    return whywrong.step("act", y * torch.sigmoid(y))
def port(codes, zeros, scales, x, fault=False):
    c, z, s, xs = (t.numpy() for t in (codes, zeros, scales, x))
    nibble = (z - 1) & 15 if fault else z - 1               # what the packed word holds
    w = np.zeros(c.shape, np.float32)
    for i in range(len(c)):
        w[i] = (c[i] - (nibble[i // GROUP] + 1)).astype(np.float32) * s[i // GROUP]
    y = xs @ w
    made = {"w": w, "y": y, "act": y / (1 + np.exp(-y))}
    return dict(codes=codes, zeros=zeros, scales=scales, x=x) | {n: torch.from_numpy(v) for n, v in made.items()}
torch.manual_seed(111)
i = dict(codes=torch.randint(0, 16, (64, 24)), zeros=(torch.randint(0, 19, (4, 24)) - 3).clamp(min=0), scales=0.02 + 0.03 * torch.rand(4, 24),
         x=torch.randn(6, 64))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
