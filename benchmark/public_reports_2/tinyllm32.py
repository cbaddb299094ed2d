"""skyzh/tiny-llm#32: top-p sums the sorted log-probabilities, not the probabilities, so no token is ever cut."""
import numpy as np, torch, whywrong
TOP_P, T = 0.8, 0.9
def reference(logits):                                      # [batch, vocabulary]
    logp = whywrong.step("logp", torch.log_softmax(logits / T, -1))
    ordered, order = torch.sort(logp, dim=-1, descending=True)
    ordered = whywrong.step("ordered", ordered)
    cum = whywrong.step("cum", torch.cumsum(torch.exp(ordered), -1))
    first = torch.arange(logits.shape[-1]) == 0
    kept = torch.where((cum < TOP_P) | first, torch.exp(ordered), torch.zeros_like(ordered))
    back = torch.gather(kept, -1, torch.argsort(order, -1))
    return whywrong.step("probs", back / back.sum(-1, keepdim=True))
def port(logits, fault=False):
    z = logits.numpy() / np.float32(T)
    top = z.max(-1, keepdims=True)
    logp = z - top - np.log(np.exp(z - top).sum(-1, keepdims=True))
    made = {"logp": logp, "ordered": np.zeros_like(logp), "cum": np.zeros_like(logp), "probs": np.zeros_like(logp)}
    for b in range(len(logp)):
        order = np.argsort(-logp[b], kind="stable")
        so_far = np.float32(0)
        for place, token in enumerate(order):
            made["ordered"][b, place] = logp[b, token]
            so_far += logp[b, token] if fault else np.exp(logp[b, token])
            made["cum"][b, place] = so_far
            if so_far < TOP_P or place == 0:
                made["probs"][b, token] = np.exp(logp[b, token])
        made["probs"][b] /= made["probs"][b].sum()
    return {"logits": logits, **{n: torch.from_numpy(v) for n, v in made.items()}}
torch.manual_seed(103)
logits = 1.7 * torch.randn(5, 40)
P = whywrong.Precision("float32")
g = whywrong.golden(reference, logits=logits)
