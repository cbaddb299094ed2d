"""Postroggy/OC_SORT_CPP#3: `(F * P), F.transpose()` with a comma for *, so that F P is dropped from F P F^T."""
import numpy as np, torch, whywrong
ALPHA_SQ = 1.02
def reference(x, cov, motion, noise, spread, z):            # [7], [7, 7], F [7, 7], Q [7, 7], R [4, 4], [4]
    seen = torch.eye(4, 7, dtype=x.dtype)                   # H: the first four of the state are measured
    x_pred = whywrong.step("x_pred", motion @ x)
    p_pred = whywrong.step("p_pred", ALPHA_SQ * (motion @ cov @ motion.T) + noise)
    s = whywrong.step("s", seen @ p_pred @ seen.T + spread)
    gain = whywrong.step("gain", p_pred @ seen.T @ torch.linalg.inv(s))
    x_new = whywrong.step("x_new", x_pred + gain @ (z - seen @ x_pred))
    p_new = whywrong.step("p_new", (torch.eye(7, dtype=x.dtype) - gain @ seen) @ p_pred)
    return x_new, p_new
def port(x, cov, motion, noise, spread, z, fault=False):
    xs, c, f, q, r, zs = (t.numpy() for t in (x, cov, motion, noise, spread, z))
    x_pred = f @ xs
    p_pred = np.float32(ALPHA_SQ) * (f.T if fault else (f @ c) @ f.T) + q
    s = p_pred[:4, :4] + r
    gain = np.linalg.solve(s.T, p_pred[:, :4].T).T
    x_new = x_pred + gain @ (zs - x_pred[:4])
    p_new = p_pred - gain @ p_pred[:4]
    made = {"x_pred": x_pred, "p_pred": p_pred, "s": s, "gain": gain, "x_new": x_new, "p_new": p_new}
    given = dict(x=x, cov=cov, motion=motion, noise=noise, spread=spread, z=z)
    return {**given, **{n: torch.from_numpy(np.ascontiguousarray(v, np.float32)) for n, v in made.items()}}
torch.manual_seed(106)
root = 0.6 * torch.randn(7, 7)
F = torch.eye(7) + torch.diag(torch.ones(3), 4)             # x y s r, and the velocities of the first three
i = dict(x=torch.tensor([310.0, 205.0, 94.0, 0.6, 2.5, -1.25, 0.5]), cov=root @ root.T + torch.eye(7), motion=F,
         noise=torch.diag(torch.tensor([1, 1, 1, 1, 0.01, 0.01, 0.0001])), spread=torch.diag(torch.tensor([1.0, 1, 10, 10])),
         z=torch.tensor([313.5, 203.0, 95.5, 0.62]))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
