"""CrispStrobe/CrispASR#106 (issue 102): LSTM weights in ONNX order (i, o, f, c) are read in PyTorch's (i, f, g, o)."""
import numpy as np, torch, whywrong
def reference(x, w, r, b, head):                            # [time, batch, in], [4 h, in], [4 h, h], [4 h], [h, speakers]
    pre = whywrong.step("pre", x @ w.T + b)
    h = c = torch.zeros(x.shape[1], r.shape[1], dtype=x.dtype)
    cells, hidden = [], []
    for t in range(x.shape[0]):
        i, o, f, u = (pre[t] + h @ r.T).chunk(4, -1)        # ONNX: input, output, forget, cell
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        cells.append(c)
        hidden.append(h)
    whywrong.step("c", torch.stack(cells))
    h = whywrong.step("h", torch.stack(hidden))
    return whywrong.step("speakers", torch.sigmoid(h @ head))
def port(x, w, r, b, head, fault=False):
    xs, wi, wr, bs, wo = (t.numpy() for t in (x, w, r, b, head))
    n = wr.shape[1]
    sig = lambda a: 1 / (1 + np.exp(-a))
    pre = np.einsum("tbi,gi->tbg", xs, wi) + bs
    names = ("i", "f", "u", "o") if fault else ("i", "o", "f", "u")
    at = {name: slice(k * n, (k + 1) * n) for k, name in enumerate(names)}
    cs, hs = (np.zeros((len(xs), xs.shape[1], n), np.float32) for _ in range(2))
    for s in range(xs.shape[1]):
        h, c = np.zeros(n, np.float32), np.zeros(n, np.float32)
        for t in range(len(xs)):
            gate = pre[t, s] + wr @ h
            c = sig(gate[at["f"]]) * c + sig(gate[at["i"]]) * np.tanh(gate[at["u"]])
            h = sig(gate[at["o"]]) * np.tanh(c)
            cs[t, s], hs[t, s] = c, h
    made = {"pre": pre, "c": cs, "h": hs, "speakers": sig(hs @ wo)}
    return dict(x=x, w=w, r=r, b=b, head=head) | {n: torch.from_numpy(v.astype(np.float32)) for n, v in made.items()}
torch.manual_seed(117)
a = dict(x=torch.randn(7, 3, 10), w=torch.randn(32, 10) / 3, r=torch.randn(32, 8) / 3, b=0.3 * torch.randn(32), head=torch.randn(8, 4) / 2)
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **a)
