"""EleutherAI/gpt-neox#1003: the rotary tables are made in float16, the angles position * inv_freq included."""
import numpy as np, torch, whywrong
D, BASE = 32, 10000.0
def reference(x, pos):                                      # [tokens, heads, D], [tokens]
    inv = BASE ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    angle = whywrong.step("angle", pos[:, None] * inv[None])
    cos = whywrong.step("cos", torch.cos(angle))
    sin = whywrong.step("sin", torch.sin(angle))
    a, b = x[..., : D // 2], x[..., D // 2:]
    c, s = cos[:, None], sin[:, None]
    return whywrong.step("rotated", torch.cat([a * c - b * s, b * c + a * s], -1))
def port(x, pos, fault=False):
    inv = (1.0 / BASE ** (np.arange(0, D, 2) / D)).astype(np.float32)
    kind = np.float16 if fault else np.float32              # the type of the tables
    angle = np.multiply.outer(pos.numpy().astype(kind), inv.astype(kind))
    cos, sin = (f(angle.astype(np.float64)).astype(kind).astype(np.float32) for f in (np.cos, np.sin))
    xs = x.numpy()
    out = np.empty_like(xs)
    for n in range(D // 2):
        turn = (xs[..., n] + 1j * xs[..., n + D // 2]) * (cos[:, n] + 1j * sin[:, n])[:, None]
        out[..., n], out[..., n + D // 2] = turn.real, turn.imag
    made = {"angle": angle.astype(np.float32), "cos": cos, "sin": sin, "rotated": out}
    return {"x": x, "pos": pos, **{n: torch.from_numpy(v) for n, v in made.items()}}
torch.manual_seed(107)
i = dict(x=torch.randn(48, 2, D), pos=torch.arange(48).float() * 43 + 9)      # up to 2030, each exact in float16
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
