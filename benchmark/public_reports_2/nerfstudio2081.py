"""nerfstudio#2081: two of the 25 spherical harmonics are wrong: (4, -1) lacks its factor z, (4, 4) has the coefficient
of the complex function, smaller by the root of 2."""
import math, numpy as np, torch, whywrong
def reference(rays, weights):                               # [n, 3], [25, 3]
    d = whywrong.step("d", rays / rays.square().sum(-1, keepdim=True).sqrt())
    x, y, z = d.unbind(-1)
    xx, yy, zz = x * x, y * y, z * z
    sh = whywrong.step("sh", torch.stack([
        0.28209479177387814 * torch.ones_like(x),
        0.4886025119029199 * y, 0.4886025119029199 * z, 0.4886025119029199 * x,
        1.0925484305920792 * x * y, 1.0925484305920792 * y * z, 0.31539156525252005 * (3 * zz - 1),
        1.0925484305920792 * x * z, 0.5462742152960396 * (xx - yy),
        0.5900435899266435 * y * (3 * xx - yy), 2.890611442640554 * x * y * z, 0.4570457994644658 * y * (5 * zz - 1),
        0.3731763325901154 * z * (5 * zz - 3), 0.4570457994644658 * x * (5 * zz - 1), 1.445305721320277 * z * (xx - yy),
        0.5900435899266435 * x * (xx - 3 * yy),
        2.5033429417967046 * x * y * (xx - yy), 1.7701307697799304 * y * z * (3 * xx - yy),
        0.9461746957575601 * x * y * (7 * zz - 1), 0.6690465435572892 * y * z * (7 * zz - 3),
        0.10578554691520431 * (35 * zz * zz - 30 * zz + 3), 0.6690465435572892 * x * z * (7 * zz - 3),
        0.47308734787878004 * (xx - yy) * (7 * zz - 1), 1.7701307697799304 * x * z * (xx - 3 * yy),
        0.6258357354491761 * (xx * (xx - 3 * yy) - yy * (3 * xx - yy))], -1))
    raw = whywrong.step("raw", sh @ weights)
    return whywrong.step("rgb", torch.sigmoid(raw))
def port(rays, weights, fault=False):
    r = rays.numpy()
    d = r / np.linalg.norm(r, axis=1, keepdims=True)
    turn, z = d[:, 0] + 1j * d[:, 1], d[:, 2]               # (x + i y)^m has cos m phi and sin m phi in it
    sh = np.zeros((len(r), 25), np.float32)
    for l in range(5):
        for m in range(l + 1):                              # the m-th derivative of Legendre's polynomial
            poly = np.polynomial.legendre.Legendre.basis(l).convert(kind=np.polynomial.Polynomial).deriv(m)
            scale = math.sqrt((2 * l + 1) / (4 * math.pi) * math.factorial(l - m) / math.factorial(l + m) * (2 if m else 1))
            part = np.float32(scale) * poly(z).astype(np.float32) * turn ** m
            sh[:, l * l + l + m], imag = part.real, part.imag
            if m:
                sh[:, l * l + l - m] = imag
    if fault:
        sh[:, 19] = np.float32(0.6690465435572892) * d[:, 1] * (7 * z * z - 3)
        sh[:, 24] = np.float32(0.4425326924449826) * (turn ** 4).real
    raw = sh @ weights.numpy()
    made = {"d": d, "sh": sh, "raw": raw, "rgb": 1 / (1 + np.exp(-raw))}
    return {"rays": rays, "weights": weights, **{n: torch.from_numpy(v.astype(np.float32)) for n, v in made.items()}}
torch.manual_seed(112)
i = dict(rays=torch.randn(40, 3), weights=0.4 * torch.randn(25, 3))
P = whywrong.Precision("float32")
g = whywrong.golden(reference, **i)
