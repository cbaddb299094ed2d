"""Convolution, quantisation, audio, probability, molecules, a camera and a filter: right ports, by other means."""

from __future__ import annotations

import math

import numpy as np
import scipy.linalg
import scipy.special
import torch
import torch.nn.functional as F

from benchmark.base import Port, program, rand, randint, randn, step

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


@program(
    "b08", variants=("f32", "bf16", "f16", "bf16reg"), wide=("gamma", "beta", "rmean", "rvar", "run_mean", "run_var")
)
class conv_norm_pool:
    """A 3x3 convolution, batch norm in training, ReLU and overlapping max pooling, and back. The port convolves by
    Winograd's F(2x2, 3x3), has one-pass statistics, ReLU after pooling, and the fused gradient of the norm."""

    def make(g):
        return dict(
            x=randn(g, 2, 3, 8, 10, scale=1.1, shift=0.4),
            w=randn(g, 5, 3, 3, 3, scale=0.25),
            gamma=randn(g, 5, scale=0.3, shift=1.0),
            beta=randn(g, 5, scale=0.3, shift=0.2),
            rmean=randn(g, 5, scale=0.5),
            rvar=rand(g, 5, low=0.5, high=2.0),
            dout=randn(g, 2, 5, 4, 5),
        )

    def reference(x, w, gamma, beta, rmean, rvar, dout):
        y = step("conv", F.conv2d(x, w, padding=1))
        run_mean, run_var = rmean.detach().clone(), rvar.detach().clone()
        y = F.batch_norm(y, run_mean, run_var, gamma, beta, training=True, momentum=0.1, eps=1e-5)
        step("run_mean", run_mean)
        step("run_var", run_var)
        y = step("normed", y)
        y = step("pooled", F.max_pool2d(F.relu(y), 3, 2, 1))
        return (y * dout).sum()

    def loss(result):
        return result

    def port(P: Port):
        x, w, gamma, beta, do = P["x"], P["w"], P["gamma"], P["beta"], P["dout"]
        dt, f = x.dtype, P.f
        BT = f([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
        G = f([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
        AT = f([[1, 1, 1, 0], [0, 1, -1, -1]])
        pad = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        U = np.einsum("ai,ocij,bj->aboc", G, w, G)
        tiles = np.stack([[pad[:, :, i : i + 4, j : j + 4] for j in range(0, 10, 2)] for i in range(0, 8, 2)])
        V = np.einsum("ai,tsncij,bj->abctsn", BT, tiles, BT).reshape(4, 4, 3, 40)
        M = np.matmul(U, V)  # 16 products of matrices
        Y = np.einsum("pa,abok,qb->okpq", AT, M, AT).reshape(5, 4, 5, 2, 2, 2)
        y = P.put("conv", Y.transpose(3, 0, 1, 4, 2, 5).reshape(2, 5, 8, 10))

        N = 160
        s1, s2 = y.sum((2, 3)).sum(0), np.einsum("nchw,nchw->nc", y, y).sum(0)
        mean = s1 * f(1 / N)
        var = np.maximum(s2 * f(1 / N) - mean * mean, 0)
        P.put("run_mean", P["rmean"] + f(0.1) * (mean - P["rmean"]))
        P.put("run_var", P["rvar"] + f(0.1) * (var * f(N / (N - 1)) - P["rvar"]))
        rstd = 1 / np.sqrt(var + f(1e-5))
        scale = gamma * rstd
        C = (slice(None), None, None)
        z = P.put("normed", y * scale[C] + (beta - mean * scale)[C])

        wide = np.pad(z, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        best, at = np.full((2, 5, 4, 5), -np.inf, dt), np.zeros((2, 5, 4, 5), np.int8)
        for k in range(9):
            tap = wide[:, :, k // 3 : k // 3 + 7 : 2, k % 3 : k % 3 + 9 : 2]
            more = tap > best
            best, at = np.where(more, tap, best), np.where(more, np.int8(k), at)
        pooled = P.put("pooled", np.maximum(best, 0))
        P.put("output", np.einsum("nchw,nchw->n", pooled, do).sum())

        dz = np.zeros_like(wide)
        live = np.where(best > 0, do, f(0))
        for k in range(9):
            dz[:, :, k // 3 : k // 3 + 7 : 2, k % 3 : k % 3 + 9 : 2] += np.where(at == k, live, f(0))
        dz = dz[:, :, 1:-1, 1:-1]
        d_beta = dz.sum((0, 2, 3))
        xmu = y - mean[C]
        dot = np.einsum("nchw,nchw->c", dz, xmu)
        P.put("grad:beta", d_beta)
        P.put("grad:gamma", dot * rstd)
        dy = (dz - (d_beta * f(1 / N))[C] - xmu * (dot * f(1 / N) * rstd * rstd)[C]) * scale[C]
        dw = np.zeros((5, 27), dt)
        cols = np.stack([pad[:, :, i : i + 8, j : j + 10] for i in range(3) for j in range(3)], 2).reshape(2, 27, 80)
        for n in range(2):
            for lo in range(0, 80, 32):  # split K
                dw += dy[n].reshape(5, 80)[:, lo : lo + 32] @ cols[n, :, lo : lo + 32].T
        P.put("grad:w", dw.reshape(5, 3, 3, 3))
        back = np.matmul(w.reshape(5, 27).T, dy.reshape(2, 5, 80)).reshape(2, 3, 3, 3, 8, 10)
        dx = np.zeros_like(pad)  # col2im
        for i in range(3):
            for j in range(3):
                dx[:, :, i : i + 8, j : j + 10] += back[:, :, i, j]
        P.put("grad:x", dx[:, :, 1:-1, 1:-1])

    defects = []


@program("b09", variants=("f32", "bf16", "f16"), wide=("scale", "w_scale", "w_min", "y_scale"))
class quantised_linear:
    """Activations in int8 by blocks, weights of four bits with scales and minima, and an output of uint8. The port
    multiplies integers, and takes the minima by the blocks' sums, as llama.cpp does."""

    def make(g):
        x = randn(g, 5, 64, scale=0.9, shift=0.1)
        x[:, 11] *= 9
        return dict(
            x=x,
            w_q=randint(g, 0, 16, 11, 64),
            w_scale=rand(g, 11, 2, low=0.01, high=0.05),
            w_min=rand(g, 11, 2, low=0.05, high=0.4),
            bias=randn(g, 11, scale=0.4),
            y_scale=torch.tensor(0.0437, dtype=torch.float64),
        )

    def reference(x, w_q, w_scale, w_min, bias, y_scale):
        blocks = x.view(5, 2, 32)
        scale = step("scale", blocks.abs().amax(-1, keepdim=True) / 127)
        q = step("quantised", torch.round(blocks / scale).clamp(-127, 127).to(torch.int8))
        w = w_q.view(11, 2, 32) * w_scale[..., None] - w_min[..., None]
        y = (q * scale).view(5, 64) @ w.view(11, 64).T + bias
        y = step("gelu", F.gelu(y))
        y8 = step("requantised", (torch.round(y / y_scale) + 23).clamp(0, 255).to(torch.uint8))
        return (y8.to(x.dtype) - 23) * y_scale

    def port(P: Port):
        x, wq, ws, wm = P["x"].reshape(5, 2, 32), P["w_q"].reshape(11, 2, 32), P["w_scale"], P["w_min"]
        top = np.maximum(x.max(-1), -x.min(-1))
        scale = P.put("scale", (top * P.f(1 / 127))[..., None])
        q = P.put("quantised", np.clip(np.rint(x * (1 / scale)), -127, 127).astype(np.int8)).astype(np.int32)
        dot = np.einsum("nbk,obk->nob", q, wq.astype(np.int32)).astype(scale.dtype)
        sums = q.sum(-1).astype(scale.dtype) * scale[..., 0]
        y = (dot * ws[None] * scale[:, None, :, 0]).sum(-1) - sums @ wm.T + P["bias"]
        # erfc keeps what 1 + erf loses for negative numbers
        y = P.put("gelu", P.f(0.5) * y * scipy.special.erfc(-y * P.f(0.5**0.5)))
        y8 = np.clip(np.rint(y * (1 / P["y_scale"])).astype(np.int32) + 23, 0, 255).astype(np.uint8)
        y8 = P.put("requantised", y8)
        P.put("output", (y8.astype(np.int32) - 23).astype(scale.dtype) * P["y_scale"])

    defects = []


@program("b10", variants=("f32",))
class audio_features:
    """Pre-emphasis and a filter, a wavelet level, a spectrogram, mel energies and cepstra. The port filters by overlap-
    save with one fused filter, lifts the wavelet, transforms reals as half as many complex numbers, and the DCT too."""

    def make(g):
        centre = torch.linspace(2, 14, 6, dtype=torch.float64)[:, None]
        t = torch.arange(240, dtype=torch.float64)
        tone = 2 * torch.sin(0.31 * t) + 0.3 * torch.sin(1.7 * t + 1)
        return dict(
            x=tone + randn(g, 2, 240, scale=0.2, shift=0.1),
            fir=torch.hann_window(17, dtype=torch.float64) * 0.2 + randn(g, 17, scale=0.05),
            mel=(1 - (torch.arange(17, dtype=torch.float64) - centre).abs() / 2.6).clamp(min=0),
        )

    def reference(x, fir, mel):
        y = torch.cat([x[:, :1], x[:, 1:] - 0.97 * x[:, :-1]], 1)
        y = step("filtered", F.conv1d(F.pad(y, (16, 0))[:, None], fir.flip(0)[None, None])[:, 0])
        ext = F.pad(y[:, None], (2, 2), mode="reflect")
        low = y.new_tensor([-0.125, 0.25, 0.75, 0.25, -0.125])
        step("wavelet_low", F.conv1d(ext, low[None, None], stride=2)[:, 0, :120])
        step("wavelet_high", F.conv1d(ext[..., 2:], y.new_tensor([-0.5, 1, -0.5])[None, None], stride=2)[:, 0, :120])
        window = torch.hann_window(32, dtype=y.dtype)
        power = torch.stft(y, 32, 12, window=window, center=True, return_complex=True).abs().square()
        power = step("power", power)
        logs = step("log_mel", torch.log(torch.clamp(mel @ power, min=1e-6)))
        n = torch.arange(6, dtype=y.dtype)
        dct = torch.cos(math.pi / 6 * (n[None] + 0.5) * n[:, None]) * (2 / 6) ** 0.5
        dct = torch.cat([dct[:1] / 2**0.5, dct[1:]])
        return dct @ logs

    def port(P: Port):
        x, fir, f = P["x"], P["fir"], P.f
        dt = x.dtype
        cplx = np.complex64 if dt == np.float32 else np.complex128
        fused = np.append(fir, f(0)) - f(0.97) * np.insert(fir, 0, f(0))
        spectrum = np.fft.rfft(fused.astype(dt), 64)
        ext = np.pad(x, ((0, 0), (17, 64)))
        blocks = [np.fft.irfft(np.fft.rfft(ext[:, i : i + 64]) * spectrum, 64)[:, 17:] for i in range(0, 240, 47)]
        y = P.put("filtered", np.concatenate(blocks, 1)[:, :240].astype(dt))

        even, odd = y[:, ::2], y[:, 1::2]
        d = odd - f(0.5) * (even + np.concatenate([even[:, 1:], even[:, -1:]], 1))
        P.put("wavelet_low", even + f(0.25) * (np.concatenate([d[:, :1], d[:, :-1]], 1) + d))
        P.put("wavelet_high", d)

        k = np.arange(32)
        window = f(np.sin(np.pi * k / 32) ** 2)
        padded = np.pad(y, ((0, 0), (16, 16)), mode="reflect")
        frames = np.stack([padded[:, i : i + 32] for i in range(0, 241, 12)], 1) * window
        Z = np.fft.fft((frames[..., ::2] + 1j * frames[..., 1::2]).astype(cplx))
        Z = np.concatenate([Z, Z[..., :1]], -1)
        R = Z[..., ::-1].conj()
        turn = (-0.5j * np.exp(-2j * np.pi * np.arange(17) / 32)).astype(cplx)
        X = f(0.5) * (Z + R) + turn * (Z - R)
        power = P.put("power", (X.real * X.real + X.imag * X.imag).transpose(0, 2, 1))

        energy = np.zeros((2, 6, 21), dt)
        for m in range(6):  # only where the triangle is not zero
            for b in np.flatnonzero(P["mel"][m]):
                energy[:, m] += P["mel"][m, b] * power[:, b]
        logs = P.put("log_mel", np.log2(np.maximum(energy, f(1e-6))) * f(LN2))
        v = logs[:, [0, 2, 4, 5, 3, 1]]  # Makhoul
        n = np.arange(6)
        c = np.exp(-1j * np.pi * n / 12) * np.where(n == 0, (1 / 6) ** 0.5, (2 / 6) ** 0.5)
        P.put("output", (np.fft.fft(v, axis=1) * c.astype(cplx)[:, None]).real.astype(dt))

    defects = []


def trigamma(x):
    """As ATen has it: reflection, six shifts up and the asymptotic series, by Horner (within 1e-9 of the truth)."""
    low = x < 0.5
    sin = np.sin(x.dtype.type(np.pi) * x)
    x, r = np.where(low, 1 - x, x), np.zeros_like(x)
    for _ in range(6):
        r += 1 / (x * x)
        x = x + 1
    i = 1 / x
    v = i * i
    r += i * (1 + i * x.dtype.type(0.5) + v * (x.dtype.type(1 / 6) - v * (x.dtype.type(1 / 30) - v / 42)))
    return np.where(low, x.dtype.type(np.pi**2) / (sin * sin) - r, r)


@program("b11", variants=("f32",))
class variational_terms:
    """Divergences and densities of an objective: Dirichlet, Gaussian, counts of a Dirichlet-multinomial, Student's t,
    and a relaxed sample, with gradients. The port has rising factorials, beta functions, expm1, and powers."""

    def make(g):
        counts = randint(g, 0, 6, 9, 5)
        return dict(
            raw=randn(g, 9, 5, scale=2.0, shift=1.5),
            prior=rand(g, 5, low=0.5, high=3.0),
            mu=randn(g, 9, 6, shift=0.3),
            logvar=randn(g, 9, 6, scale=0.7, shift=-1.0),
            counts=counts,
            u=rand(g, 9, 5, low=0.01, high=0.99),
            x=randn(g, 9, 4, scale=3.0, shift=5.0),
            loc=randn(g, 4, shift=5.0),
            log_scale=randn(g, 4, scale=0.4, shift=0.3),
            df=rand(g, 4, low=2.5, high=9.0),
        )

    def reference(raw, prior, mu, logvar, counts, u, x, loc, log_scale, df):
        D = torch.distributions
        alpha = step("alpha", F.softplus(raw) + 0.1)
        kl = D.kl_divergence(D.Dirichlet(alpha, validate_args=False), D.Dirichlet(prior, validate_args=False))
        kl = step("kl_dirichlet", kl)
        kl_z = step("kl_normal", 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(-1))
        k = counts.to(raw.dtype)
        total, n = alpha.sum(-1), k.sum(-1)
        ll = torch.lgamma(n + 1) - torch.lgamma(k + 1).sum(-1) + torch.lgamma(total) - torch.lgamma(total + n)
        ll = step("log_counts", ll + (torch.lgamma(alpha + k) - torch.lgamma(alpha)).sum(-1))
        t = D.StudentT(df, loc, log_scale.exp(), validate_args=False).log_prob(x)
        t = step("log_t", t)
        gumbel = -torch.log(-torch.log(u))
        y = step("relaxed", torch.softmax((alpha.log() + gumbel) / 0.7, -1))
        return (kl + kl_z - ll).sum() - t.sum() + y.square().sum()

    def loss(result):
        return result

    def port(P: Port):
        sp, f = scipy.special, P.f
        raw, prior, mu, lv, k = P["raw"], P["prior"], P["mu"], P["logvar"], P["counts"]
        dt = raw.dtype
        alpha = P.put("alpha", np.logaddexp(raw, f(0)) + f(0.1))
        total = alpha.sum(-1)
        lg = sp.gammaln
        gap = sp.psi(alpha) - sp.psi(total)[:, None]
        # lgamma of the two in pairs, so that like sizes cancel
        const = f(lg(prior.sum()) - lg(prior).sum())
        kl = lg(total) - const - lg(alpha).sum(-1) + ((alpha - prior) * gap).sum(-1)
        kl = P.put("kl_dirichlet", kl)
        kl_z = P.put("kl_normal", f(0.5) * np.einsum("ij->i", mu * mu + (np.expm1(lv) - lv)))
        n = k.sum(-1)
        logs, slope = np.zeros_like(total), np.zeros_like(alpha)
        for j in range(5):
            on = k > j
            logs += np.where(on, np.log((alpha + j) * f(1 / (j + 1))), f(0)).sum(-1)  # over k! too
            slope += np.where(on, 1 / (alpha + j), f(0))
        for j in range(int(n.max())):
            on = n > j
            logs -= np.where(on, np.log((total + j) * f(1 / (j + 1))), f(0))
            slope -= np.where(on, 1 / (total + j), f(0))[:, None]
        ll = P.put("log_counts", logs)

        x, loc, df = P["x"], P["loc"], P["df"]
        inv = np.exp(-P["log_scale"])
        y = (x - loc) * inv
        w = y * y * (1 / df)
        norm = sp.betaln(f(0.5), f(0.5) * df).astype(dt) + f(0.5) * np.log(df) + P["log_scale"]
        t = P.put("log_t", f(-0.5) * (df + 1) * np.log1p(w) - norm)

        ratio = alpha / -np.log(P["u"])
        p = np.exp2(np.log2(ratio / ratio.max(-1, keepdims=True)) * f(1 / 0.7))
        r = P.put("relaxed", p * (1 / p.sum(-1, keepdims=True)))
        P.put("output", (kl + kl_z - ll).sum() - t.sum() + np.vdot(r, r))

        tri, tri_total = trigamma(alpha), trigamma(total)[:, None]
        extra = (total - prior.sum())[:, None]
        d_kl = (alpha - prior) * tri - tri_total * extra
        d_r = 2 * r * (r - (r * r).sum(-1, keepdims=True)) * (f(1 / 0.7) / alpha)
        P.put("grad:raw", (d_kl - slope + d_r) * (1 / (1 + np.exp(-raw))))
        P.put("grad:mu", mu)
        P.put("grad:logvar", f(0.5) * np.expm1(lv))
        pull = (df + 1) * y / (df + y * y)
        P.put("grad:loc", -(pull * inv).sum(0))
        P.put("grad:log_scale", f(9) - (pull * y).sum(0))
        d_df = f(0.5) * (np.log1p(w) - (df + 1) / df * (w / (1 + w)) + 1 / df)
        d_df = d_df - f(0.5) * (sp.psi(f(0.5) * (df + 1)) - sp.psi(f(0.5) * df))
        P.put("grad:df", d_df.sum(0))

    defects = []


@program("b12", variants=("f32",))
class bonded_forces:
    """Bonds, angles, dihedrals and 1-4 pairs of a chain, and the gradient by positions. The port has forces by hand, an
    angle by atan2, dihedrals as polynomials of the cosine without an angle, and C6, C12 with a reciprocal root."""

    def make(g):
        i = torch.arange(14, dtype=torch.float64)
        return dict(
            pos=torch.stack([0.5 * i + 3, torch.cos(1.8 * i), torch.sin(1.8 * i) - 2], 1) + randn(g, 14, 3, scale=0.12),
            length=rand(g, 13, low=1.3, high=1.7),
            k_bond=rand(g, 13, low=80, high=200),
            theta=rand(g, 12, low=1.4, high=1.9),
            k_angle=rand(g, 12, low=20, high=60),
            k_dih=randn(g, 11, 3, scale=2.0),
            flip=randint(g, 0, 2, 11, 3),
            sigma=rand(g, 11, low=1.2, high=1.6),
            epsilon=rand(g, 11, low=0.1, high=0.5),
            charge=randn(g, 14, scale=0.5),
        )

    def reference(pos, length, k_bond, theta, k_angle, k_dih, flip, sigma, epsilon, charge):
        b = pos[1:] - pos[:-1]
        bond = step("bond", 0.5 * k_bond * (b.norm(dim=-1) - length).square())
        cos = -(b[:-1] * b[1:]).sum(-1) / (b[:-1].norm(dim=-1) * b[1:].norm(dim=-1))
        angle = step("angle", 0.5 * k_angle * (torch.acos(cos) - theta).square())
        b1, b2, b3 = b[:-2], b[1:-1], b[2:]
        n1, n2 = torch.linalg.cross(b1, b2), torch.linalg.cross(b2, b3)
        phi = torch.atan2(b2.norm(dim=-1) * (b1 * n2).sum(-1), (n1 * n2).sum(-1))
        n = torch.arange(1, 4, dtype=pos.dtype)
        dih = step("dihedral", (k_dih * (1 + torch.cos(n * phi[:, None] - math.pi * flip))).sum(-1))
        r = (pos[3:] - pos[:-3]).norm(dim=-1)
        sr6 = (sigma / r) ** 6
        pair = step("pair", 4 * epsilon * (sr6.square() - sr6) * 0.5 + charge[3:] * charge[:-3] / r * 0.8333)
        return bond.sum() + angle.sum() + dih.sum() + pair.sum()

    def loss(result):
        return result

    def port(P: Port):
        pos, f = P["pos"], P.f
        grad = np.zeros_like(pos)
        dot = lambda a, b: np.einsum("ni,ni->n", a, b)  # noqa: E731
        b = pos[1:] - pos[:-1]
        r2 = dot(b, b)
        rinv = 1 / np.sqrt(r2)
        dr, kd = r2 * rinv - P["length"], P["k_bond"]
        e_bond = P.put("bond", f(0.5) * (kd * dr) * dr)
        fb = (kd * dr * rinv)[:, None] * b
        grad[1:] += fb
        grad[:-1] -= fb

        u, v = -b[:-1], b[1:]
        c = np.cross(u, v)
        sin_, cos_ = np.sqrt(dot(c, c)), dot(u, v)
        dth = np.arctan2(sin_, cos_) - P["theta"]
        e_angle = P.put("angle", f(0.5) * P["k_angle"] * dth * dth)
        # d theta / du = -(v - u (u.v) / u2) / |u x v|
        st = P["k_angle"] * dth / sin_
        gu = (st * cos_ * rinv[:-1] ** 2)[:, None] * u - st[:, None] * v
        gv = (st * cos_ * rinv[1:] ** 2)[:, None] * v - st[:, None] * u
        grad[:-2] += gu
        grad[2:] += gv
        grad[1:-1] -= gu + gv

        rij, rkj, rkl = -b[:-2], b[1:-1], -b[2:]
        m, n = np.cross(rij, rkj), np.cross(rkj, rkl)
        im, in_ = 1 / dot(m, m), 1 / dot(n, n)
        root = np.sqrt(im * in_)
        nrkj = np.sqrt(r2[1:-1])
        cp, sp = dot(m, n) * root, nrkj * dot(rij, n) * root
        k = P["k_dih"]
        s = k * (1 - 2 * P["flip"]).astype(k.dtype)
        c0 = k.sum(1) - s[:, 1]
        e_dih = P.put("dihedral", ((4 * s[:, 2] * cp + 2 * s[:, 1]) * cp + (s[:, 0] - 3 * s[:, 2])) * cp + c0)
        slope = -sp * ((12 * s[:, 2] * cp + 4 * s[:, 1]) * cp + (s[:, 0] - 3 * s[:, 2]))
        fi, fl = (-slope * nrkj * im)[:, None] * m, (slope * nrkj * in_)[:, None] * n
        inv2 = rinv[1:-1] ** 2
        sv = (dot(rij, rkj) * inv2)[:, None] * fi - (dot(rkl, rkj) * inv2)[:, None] * fl
        grad[:-3] -= fi
        grad[1:-2] += fi - sv
        grad[2:-1] += fl + sv
        grad[3:] -= fl

        s2 = P["sigma"] * P["sigma"]
        c6 = 2 * P["epsilon"] * (s2 * s2 * s2)
        c12 = c6 * (s2 * s2 * s2)
        qq = f(0.8333) * P["charge"][3:] * P["charge"][:-3]
        d = pos[3:] - pos[:-3]
        ri2 = 1 / dot(d, d)
        ri6 = ri2 * ri2 * ri2
        v12, v6, vc = c12 * ri6 * ri6, c6 * ri6, qq * np.sqrt(ri2)
        e_pair = P.put("pair", v12 - v6 + vc)
        fp = ((6 * v6 - 12 * v12 - vc) * ri2)[:, None] * d
        grad[3:] += fp
        grad[:-3] -= fp
        P.put("output", np.concatenate([e_bond, e_angle, e_dih, e_pair]).sum())
        P.put("grad:pos", grad)

    defects = []


GEOMETRY = ("quat", "trans", "pts", "focal", "centre", "lens", "camera", "pixels")
RGB = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = [0.95047, 1.0, 1.08883]


@program("b13", variants=("f32", "f16"), wide=GEOMETRY)
class camera_colours:
    """Points turned by a quaternion, through a lens, to an image's colours in CIELAB, with the gradient of the image.
    The port turns by two cross products, lerps, and has the white point in the matrix, and powers in base 2."""

    def make(g):
        return dict(
            quat=torch.tensor([1.0, 0.1, -0.2, 0.15], dtype=torch.float64) + randn(g, 4, scale=0.1),
            trans=randn(g, 3, scale=0.2) + torch.tensor([0.0, 0.0, 6.0], dtype=torch.float64),
            pts=randn(g, 41, 3, scale=1.1),
            focal=rand(g, 2, low=17, high=21),
            centre=torch.tensor([7.3, 5.8], dtype=torch.float64),
            lens=torch.tensor([-0.12, 0.03], dtype=torch.float64),
            image=rand(g, 3, 12, 16, low=0.0, high=1.0),
            dlab=randn(g, 41, 3),
        )

    def reference(quat, trans, pts, focal, centre, lens, image, dlab):
        w, x, y, z = quat / quat.norm()
        rows = [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)]
        rows += [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)]
        rows += [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]
        cam = step("camera", pts @ torch.stack(rows).view(3, 3).T + trans)
        xy = cam[:, :2] / cam[:, 2:]
        r2 = xy.square().sum(-1, keepdim=True)
        px = step("pixels", focal * (xy * (1 + lens[0] * r2 + lens[1] * r2**2)) + centre)
        grid = (2 * px + 1) / px.new_tensor([16, 12]) - 1
        rgb = F.grid_sample(image[None], grid[None, None], mode="bilinear", padding_mode="border", align_corners=False)
        rgb = step("sampled", rgb[0, :, 0].T)
        linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb.clamp(min=0.04) + 0.055) / 1.055) ** 2.4)
        xyz = step("xyz", linear @ rgb.new_tensor(RGB).T)
        t = xyz / xyz.new_tensor(WHITE)
        cube = t > (6 / 29) ** 3
        f = torch.where(cube, t.clamp(min=1e-3) ** (1 / 3), t / (3 * (6 / 29) ** 2) + 4 / 29)
        lab = [116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])]
        lab = step("lab", torch.stack(lab, 1))
        return (lab * dlab).sum() / 41

    def loss(result):
        return result

    def port(P: Port):
        f, q, img, dlab = P.f, P["quat"], P["image"], P["dlab"]
        dt, pts = img.dtype, P["pts"]
        two = 2 / (q @ q)
        axis = q[None, 1:]
        c = np.cross(axis, pts)
        cam = P.put("camera", pts + two * (q[0] * c + np.cross(axis, c)) + P["trans"])
        iz = 1 / cam[:, 2:]
        xy = cam[:, :2] * iz
        r2 = xy[:, :1] * xy[:, :1] + xy[:, 1:] * xy[:, 1:]
        k1, k2 = P["lens"]
        px = P.put("pixels", (P["focal"] * ((k2 * r2 + k1) * r2 + 1)) * xy + P["centre"])

        at = np.clip(px, 0, f([15, 11]))
        low = np.minimum(at.astype(np.int64), [14, 10])
        fx, fy = (at - low.astype(dt)).T
        x0, y0 = low.T
        top = img[:, y0, x0] + fx * (img[:, y0, x0 + 1] - img[:, y0, x0])
        bottom = img[:, y0 + 1, x0] + fx * (img[:, y0 + 1, x0 + 1] - img[:, y0 + 1, x0])
        rgb = P.put("sampled", (top + fy * (bottom - top)).T)

        base = (rgb + f(0.055)) * f(1 / 1.055)
        power = np.exp2(f(2.4) * np.log2(base))
        curved = rgb > f(0.04045)
        linear = np.where(curved, power, rgb * f(1 / 12.92))
        xyz = P.put("xyz", np.stack([linear @ row for row in f(RGB)], 1))
        t = xyz * f(1 / np.array(WHITE))
        root = np.cbrt(t)
        cube = t > f((6 / 29) ** 3)
        g = np.where(cube, root, t * f(841 / 108) + f(4 / 29))
        L = 116 * g[:, 1] - 16
        lab = P.put("lab", np.stack([L, 500 * (g[:, 0] - g[:, 1]), 200 * (g[:, 1] - g[:, 2])], 1))
        P.put("output", np.vdot(lab, dlab) * f(1 / 41))

        d = dlab * f(1 / 41)
        dg = np.stack([500 * d[:, 1], 116 * d[:, 0] - 500 * d[:, 1] + 200 * d[:, 2], -200 * d[:, 2]], 1)
        with np.errstate(divide="ignore"):
            dt_ = dg * np.where(cube, 1 / (3 * root * root), f(841 / 108))
        dlin = dt_ @ f(np.array(RGB) / np.array(WHITE)[:, None])  # the white point in the matrix
        drgb = dlin * np.where(curved, f(2.4 / 1.055) * (power / base), f(1 / 12.92))
        grad = np.zeros((12, 16, 3), dt)
        wx, wy = fx[:, None], fy[:, None]
        right, lower = drgb * wx, drgb * wy
        both = right * wy
        np.add.at(grad, (y0, x0), drgb - right - lower + both)
        np.add.at(grad, (y0, x0 + 1), right - both)
        np.add.at(grad, (y0 + 1, x0), lower - both)
        np.add.at(grad, (y0 + 1, x0 + 1), both)
        P.put("grad:image", grad.transpose(2, 0, 1))

    defects = []


@program("b14", variants=("f32",))
class kalman_smoother:
    """A Kalman filter of a moving point with its log-likelihood, and the smoother of Rauch, Tung and Striebel. The port
    predicts by blocks, inverts by a factor of Cholesky, has Joseph's form, and solves in place of inverting."""

    def make(g):
        t = torch.arange(6, dtype=torch.float64)[:, None]
        return dict(
            z=torch.cat([3 + 0.8 * t, -2 + 0.4 * t], 1) + randn(g, 6, 2, scale=0.5),
            x0=randn(g, 4, scale=0.5) + torch.tensor([3.0, -2.0, 0.5, 0.5], dtype=torch.float64),
            p0=rand(g, 4, low=0.5, high=2.0),
            q=rand(g, 4, low=0.02, high=0.1),
            r=rand(g, 2, low=0.2, high=0.5),
        )

    def reference(z, x0, p0, q, r):
        A = torch.eye(4, dtype=z.dtype)
        A[0, 2] = A[1, 3] = 0.5
        H = torch.eye(4, dtype=z.dtype)[:2]
        Q, R, eye = torch.diag(q), torch.diag(r) + 0.1, torch.eye(4, dtype=z.dtype)
        x, cov, ll = x0, torch.diag(p0), 0
        kept = []
        for t in range(6):
            x_pred = step("x_pred", A @ x)
            p_pred = step("p_pred", A @ cov @ A.T + Q)
            S = step("innovation", H @ p_pred @ H.T + R)
            K = step("gain", p_pred @ H.T @ torch.linalg.inv(S))
            e = z[t] - H @ x_pred
            x = step("x", x_pred + K @ e)
            cov = step("cov", (eye - K @ H) @ p_pred)
            ll = ll - 0.5 * (e @ torch.linalg.inv(S) @ e + torch.logdet(S) + 2 * math.log(2 * math.pi))
            kept.append((x_pred, p_pred, x, cov))
        ll = step("log_likelihood", ll)
        for t in reversed(range(5)):
            x_pred, p_pred, _, _ = kept[t + 1]
            _, _, xf, pf = kept[t]
            C = pf @ A.T @ torch.linalg.inv(p_pred)
            x = step("x_smooth", xf + C @ (x - x_pred))
            cov = step("cov_smooth", pf + C @ (cov - p_pred) @ C.T)
        return torch.cat([x, cov.diagonal()])

    def port(P: Port):
        z, x, cov, q, r, f = P["z"], P["x0"], np.diag(P["p0"]), P["q"], P["r"], P.f
        dt, h = z.dtype, f(0.5)
        R = np.diag(r) + f(0.1)
        quad = logdet = f(0)
        kept = []
        for t in range(6):
            xp = P.put("x_pred", np.concatenate([x[:2] + h * x[2:], x[2:]]))
            pp, pv, vv = cov[:2, :2], cov[:2, 2:], cov[2:, 2:]
            cross = pv + h * vv
            top = pp + h * (pv.T + cross)
            p = np.block([[top, cross], [cross.T, vv]])
            p[np.arange(4), np.arange(4)] += q
            p = P.put("p_pred", p)
            S = P.put("innovation", p[:2, :2] + R)
            l00 = np.sqrt(S[0, 0])
            l10 = S[1, 0] / l00
            l11 = np.sqrt(S[1, 1] - l10 * l10)
            i0, i1 = 1 / l00, 1 / l11
            w0 = p[:, 0] * i0
            w1 = (p[:, 1] - l10 * w0) * i1  # rows of P H' L^-T
            k1 = w1 * i1
            K = P.put("gain", np.stack([(w0 - l10 * k1) * i0, k1], 1))
            e = z[t] - xp[:2]
            n0 = e[0] * i0
            n1 = (e[1] - l10 * n0) * i1
            quad = quad + n0 * n0 + n1 * n1
            logdet = logdet + np.log(l00 * l11)
            x = P.put("x", xp + K[:, 0] * e[0] + K[:, 1] * e[1])
            M = np.eye(4, dtype=dt)
            M[:, :2] -= K
            cov = P.put("cov", M @ p @ M.T + K @ R @ K.T)
            kept.append((xp, p, x, cov))
        P.put("log_likelihood", f(-0.5) * quad - logdet - f(6 * math.log(2 * math.pi)))
        for t in reversed(range(5)):
            xp, p = kept[t + 1][:2]
            xf, pf = kept[t][2:]
            right = pf.copy()
            right[:2] += h * pf[2:]  # A P
            C = scipy.linalg.cho_solve(scipy.linalg.cho_factor(p, lower=True), right).T.astype(dt)
            x = P.put("x_smooth", xf - C @ (xp - x))
            cov = P.put("cov_smooth", pf - C @ (p - cov) @ C.T)
        P.put("output", np.append(x, np.diagonal(cov)))

    defects = []
