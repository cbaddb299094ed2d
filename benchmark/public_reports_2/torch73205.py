"""pytorch/pytorch#73205: cross entropy with label smoothing: the smooth part includes samples that are to be ignored,
in its sum and in its count."""
import numpy as np, torch, whywrong
EPS, IGNORE = 0.2, -100
def reference(logits, target):                              # [samples, classes], [samples]
    logp = whywrong.step("logp", torch.log_softmax(logits, -1))
    used = target != IGNORE
    picked = torch.gather(logp, 1, torch.where(used, target, 0)[:, None])[:, 0]
    nll = whywrong.step("nll", torch.where(used, -picked, 0.0))
    smooth = whywrong.step("smooth", torch.where(used, -logp.sum(-1), 0.0))
    hard = whywrong.step("hard", nll.sum() / used.sum())
    soft = whywrong.step("soft", smooth.sum() / used.sum() / logits.shape[-1])
    return whywrong.step("loss", (1 - EPS) * hard + EPS * soft)
def port(logits, target, fault=False):
    z, t = logits.numpy(), target.numpy()
    top = z.max(1, keepdims=True)
    logp = z - top - np.log(np.exp(z - top).sum(1, keepdims=True))
    nll, smooth, count = np.zeros(len(z), np.float32), np.zeros(len(z), np.float32), 0
    for n in range(len(z)):
        if t[n] != IGNORE:
            nll[n] = -logp[n, t[n]]
            count += 1
        if t[n] != IGNORE or fault:
            smooth[n] = -logp[n].sum()
    hard = nll.sum() / np.float32(count)
    soft = smooth.sum() / np.float32(len(z) if fault else count) / np.float32(z.shape[1])
    made = {"logp": logp, "nll": nll, "smooth": smooth, "hard": hard, "soft": soft, "loss": np.float32(1 - EPS) * hard + np.float32(EPS) * soft}
    return dict(logits=logits, target=target) | {n: torch.as_tensor(np.asarray(v, np.float32)) for n, v in made.items()}
torch.manual_seed(116)
target = torch.randint(0, 10, (32,))
target[torch.tensor([2, 3, 9, 14, 15, 22, 29])] = IGNORE
i = dict(logits=2 * torch.randn(32, 10), target=target)
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
