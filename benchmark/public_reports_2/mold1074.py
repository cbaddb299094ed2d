"""utensils/mold#1074: Gemma's RMS norm multiplies by 1 + w although the GGUF file has the 1 in w already."""
import torch, whywrong
EPS = 1e-6
def reference(x, w, wq, wg):                                # [tokens, d], [d] (as in the file), [d, e], [d, e]
    unit = whywrong.step("unit", x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS))
    normed = whywrong.step("normed", unit * w)
    up = whywrong.step("up", normed @ wq)
    gate = whywrong.step("gate", torch.nn.functional.gelu(normed @ wg, approximate="tanh"))
    return whywrong.step("product", up * gate)
def port(x, w, wq, wg, fault=False):
    xs, ws, a, b = (t.float() for t in (x, w, wq, wg))
    keep = lambda t: t.bfloat16().float()
    unit = torch.stack([row / (row.dot(row) / len(row) + EPS).sqrt() for row in xs])
    normed = unit * (1 + ws if fault else ws)
    up = torch.einsum("td,de->te", keep(normed), a)
    z = torch.einsum("td,de->te", keep(normed), b)
    gate = 0.5 * z * (1 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z ** 3)))
    made = {"unit": unit, "normed": normed, "up": up, "gate": gate, "product": keep(up) * keep(gate)}
    return {"x": x, "w": w, "wq": wq, "wg": wg, **{n: t.bfloat16() for n, t in made.items()}}
torch.manual_seed(120)
i = dict(x=(3 * torch.randn(20, 48)).bfloat16(), w=(1 + 0.6 * torch.randn(48)).bfloat16(), wq=(torch.randn(48, 16) / 7).bfloat16(), wg=(torch.randn(48, 16) / 7).bfloat16())
P = whywrong.Precision("bf16")
g = whywrong.golden(reference, **i)
