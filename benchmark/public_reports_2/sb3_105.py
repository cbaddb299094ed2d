"""DLR-RM/stable-baselines3#105: the rollout keeps this step's done where the last one's belongs, so that the
advantages are cut by done[t + 1] where done[t] belongs."""
import numpy as np, torch, whywrong
GAMMA, LAM = 0.99, 0.95
def reference(reward, value, done, last):                   # [steps, environments]; last [environments]: V after the end
    steps = reward.shape[0]
    after = torch.cat([value[1:], last[None]])
    alive = 1 - done                                        # done[t] = 1: step t ended its episode
    delta = whywrong.step("delta", reward + GAMMA * after * alive - value)
    adv = [None] * steps
    running = torch.zeros_like(last)
    for t in reversed(range(steps)):
        running = delta[t] + GAMMA * LAM * alive[t] * running
        adv[t] = running
    adv = whywrong.step("adv", torch.stack(adv))
    returns = whywrong.step("returns", adv + value)
    scaled = whywrong.step("scaled", (adv - adv.mean()) / (adv.std() + 1e-8))
    return returns, scaled
def port(reward, value, done, last, fault=False):
    r, v, d, end = (t.numpy() for t in (reward, value, done, last))
    delta, adv = np.zeros_like(r), np.zeros_like(r)
    for e in range(r.shape[1]):                             # one environment at a time
        carry = np.float32(0)
        for t in range(len(r) - 1, -1, -1):
            final = t == len(r) - 1
            cut = d[t, e] if final or not fault else d[t + 1, e]
            nxt = end[e] if final else v[t + 1, e]
            delta[t, e] = r[t, e] - v[t, e] + (np.float32(0) if cut else np.float32(GAMMA) * nxt)
            carry = delta[t, e] + (np.float32(0) if cut else np.float32(GAMMA * LAM) * carry)
            adv[t, e] = carry
    scaled = (adv - adv.mean()) / (adv.std(ddof=1) + np.float32(1e-8))
    made = {"delta": delta, "adv": adv, "returns": adv + v, "scaled": scaled}
    return {"reward": reward, "value": value, "done": done, "last": last, **{n: torch.from_numpy(x) for n, x in made.items()}}
torch.manual_seed(105)
i = dict(reward=torch.randn(20, 6), value=1.5 + torch.randn(20, 6), done=(torch.rand(20, 6) < 0.15).float(), last=1.5 + torch.randn(6))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
