"""kazewong/flowMC#78: HMC's acceptance ratio begins from the Hamiltonian of before the momentum was drawn anew."""
import numpy as np, torch, whywrong
EPS, STEPS = 0.15, 4
def reference(q, p_before, draw, mass, hess):               # [chains, d] three times, [d], [d, d]
    p = whywrong.step("p", draw * mass.sqrt())
    energy = lambda q, p: 0.5 * ((q @ hess) * q).sum(-1) + 0.5 * (p * p / mass).sum(-1)
    start = whywrong.step("start", energy(q, p))
    x, m = q, p - 0.5 * EPS * (q @ hess)
    for n in range(STEPS):
        x = x + EPS * m / mass
        m = m - (EPS if n < STEPS - 1 else 0.5 * EPS) * (x @ hess)
    x, m = whywrong.step("x", x), whywrong.step("m", m)
    end = whywrong.step("end", energy(x, m))
    return x, whywrong.step("accept", torch.exp((start - end).clamp(max=0)))
def port(q, p_before, draw, mass, hess, fault=False):
    qs, old, dr, ma, he = (t.numpy() for t in (q, p_before, draw, mass, hess))
    p = dr * np.sqrt(ma)
    pot = lambda a: np.einsum("ci,ij,cj->c", a, he, a, dtype=np.float32) / 2
    kin = lambda a: np.sum(a ** 2 / ma, 1) / 2
    start = pot(qs) + kin(old if fault else p)
    x, m = qs.copy(), p.copy()
    for _ in range(STEPS):                                  # velocity Verlet, a half kick on each side
        m = m - np.float32(EPS / 2) * (x @ he)
        x = x + np.float32(EPS) * (m / ma)
        m = m - np.float32(EPS / 2) * (x @ he)
    end = pot(x) + kin(m)
    made = {"p": p, "start": start, "x": x, "m": m, "end": end, "accept": np.minimum(np.exp(start - end), np.float32(1))}
    return dict(q=q, p_before=p_before, draw=draw, mass=mass, hess=hess) | {n: torch.from_numpy(v.astype(np.float32)) for n, v in made.items()}
torch.manual_seed(113)
root = torch.randn(4, 4)
mass = torch.tensor([0.7, 1.0, 1.6, 2.2])
i = dict(q=torch.randn(30, 4), p_before=torch.randn(30, 4) * mass.sqrt(), draw=torch.randn(30, 4), mass=mass, hess=root @ root.T / 3 + 0.5 * torch.eye(4))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
