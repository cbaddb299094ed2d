"""Graphics, molecular dynamics, statistics: Gaussian splatting, non-bonded forces, Gaussian-process regression."""

from __future__ import annotations

import math

import numpy as np
import torch

from benchmark.base import D, Port, program, rand, randint, randn, step


@program("w04", wide=("means", "quats", "log_scales", "view", "cam", "cov3d", "cov2d", "conic"))
class gaussian_splatting:
    """Forward 3D Gaussian splatting; the port renders tiles of 4 by 4 pixels, Gaussians in batches of 8."""

    def make(g):
        q, r = torch.linalg.qr(randn(g, 3, 3))
        q = q * torch.sign(torch.diagonal(r))
        q = q * torch.sign(torch.linalg.det(q))
        t = randn(g, 3, scale=0.5)
        z = rand(g, 14, low=2.5, high=6.0)
        z[4] = -1.5
        cam = torch.stack([rand(g, 14, low=-0.55, high=0.55) * z, rand(g, 14, low=-0.4, high=0.4) * z, z], 1)
        return dict(
            means=(cam - t) @ q,
            quats=randn(g, 14, 4),
            log_scales=rand(g, 14, 3, low=-1.8, high=0.0),
            opacity=randn(g, 14, scale=1.2, shift=0.8),
            colours=rand(g, 14, 3),
            view=torch.cat([q, t[:, None]], 1),
            background=rand(g, 3, low=0.2, high=0.9),
        )

    def reference(means, quats, log_scales, opacity, colours, view, background):
        W, H, f = 12, 9, 10.0
        rot, t = view[:, :3], view[:, 3]
        cam = step("cam", means @ rot.T + t)
        w, x, y, z = (quats / quats.norm(dim=-1, keepdim=True)).unbind(-1)
        R = torch.stack(
            [
                *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
                *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
                *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
            ],
            -1,
        ).view(-1, 3, 3)
        M = R * log_scales.exp()[:, None, :]
        cov3d = step("cov3d", M @ M.transpose(1, 2))
        cx, cy, cz = cam.unbind(-1)
        tx = (cx / cz).clamp(-1.3 * W / 2 / f, 1.3 * W / 2 / f)
        ty = (cy / cz).clamp(-1.3 * H / 2 / f, 1.3 * H / 2 / f)
        zero = torch.zeros_like(cz)
        J = torch.stack([f / cz, zero, -f * tx / cz, zero, f / cz, -f * ty / cz], -1).view(-1, 2, 3) @ rot
        cov2d = step("cov2d", J @ cov3d @ J.transpose(1, 2) + 0.3 * torch.eye(2, dtype=J.dtype))
        inv = torch.linalg.inv(cov2d)
        conic = step("conic", torch.stack([inv[:, 0, 0], inv[:, 0, 1], inv[:, 1, 1]], -1))
        px = f * cx / cz + (W - 1) / 2
        py = f * cy / cz + (H - 1) / 2
        dx = (px[:, None] - torch.arange(W, dtype=px.dtype))[:, None, :]
        dy = (py[:, None] - torch.arange(H, dtype=py.dtype))[:, :, None]
        a, b, c = (v[:, None, None] for v in conic.unbind(-1))
        power = -0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy
        alpha = (torch.sigmoid(opacity)[:, None, None] * power.exp()).clamp(max=0.99)
        drawn = (alpha >= 1 / 255) & (cz > 0.2)[:, None, None]
        alpha = step("alpha", torch.where(drawn, alpha, torch.zeros_like(alpha)))
        order = torch.argsort(cz)
        near = alpha[order]
        T = torch.cumprod(1 - near, 0)
        final = step("final_t", T[-1])
        T = torch.cat([torch.ones_like(T[:1]), T[:-1]])
        return torch.einsum("nhw,nc->hwc", near * T, colours[order]) + final[..., None] * background

    def port(P: Port):
        W, H, f, n = 12, 9, 10.0, 14
        view = P["view"]
        rot = np.ascontiguousarray(view[:, :3])
        cam = P.put("cam", np.einsum("nj,ij->ni", P["means"], rot) + view[:, 3])

        cov3d = np.empty((n, 3, 3), cam.dtype)
        for i in range(n):
            q = P["quats"][i]
            # S = sum over axes of scale^2 times the rotated axis with itself, axes rotated by v + 2 w (u x v) + 2 u x (u x v)
            w, u = (q[3], q[:3]) if P.d("quaternions_as_xyzw") else (q[0], q[1:])
            norm2 = w * w + (u * u).sum()
            S = np.zeros((3, 3), cam.dtype)
            for k in range(3):
                axis = np.zeros(3, cam.dtype)
                axis[k] = 1
                once = np.cross(u, axis)
                axis = axis + 2 / norm2 * (w * once + np.cross(u, once))
                S += np.exp(2 * P["log_scales"][i, k]) * np.outer(axis, axis)
            cov3d[i] = S
        cov3d = P.put("cov3d", cov3d)

        cov2d = np.empty((n, 2, 2), cam.dtype)
        turn = rot.T if P.d("view_read_by_columns") else rot
        for i in range(n):
            rz = 1 / cam[i, 2]
            tx = min(max(cam[i, 0] * rz, P.f(-0.78)), P.f(0.78))
            ty = min(max(cam[i, 1] * rz, P.f(-0.585)), P.f(0.585))
            j0 = f * rz * (turn[0] - tx * turn[2])
            j1 = f * rz * (turn[1] - ty * turn[2])
            s0, s1 = cov3d[i] @ j0, cov3d[i] @ j1
            cov2d[i] = [[j0 @ s0 + P.f(0.3), j0 @ s1], [j0 @ s1, j1 @ s1 + P.f(0.3)]]
        cov2d = P.put("cov2d", cov2d)
        det = cov2d[:, 0, 0] * cov2d[:, 1, 1] - cov2d[:, 0, 1] * cov2d[:, 0, 1]
        first, last = (0, 1) if P.d("conic_ends_not_exchanged") else (1, 0)
        conic = np.stack([cov2d[:, first, first] / det, -cov2d[:, 0, 1] / det, cov2d[:, last, last] / det], 1)
        conic = P.put("conic", conic)

        alpha = np.zeros((n, H, W), cam.dtype)
        half = 0.5 if P.d("pixel_centres_at_halves") else 0
        for i in range(n):
            if cam[i, 2] <= P.f(0.2):
                continue
            peak = 1 / (1 + np.exp(-P["opacity"][i]))
            dx = f * cam[i, 0] / cam[i, 2] + 5.5 - (P.f(np.arange(W)) + half)
            dy = f * cam[i, 1] / cam[i, 2] + 4.0 - (P.f(np.arange(H)) + half)
            a, b, c = conic[i]
            for r in range(H):
                al = np.minimum(peak * np.exp(-(a * dx * dx / 2 + dy[r] * (b * dx + c * dy[r] / 2))), P.f(0.99))
                alpha[i, r] = np.where(al < P.f(1 / 255), P.f(0), al)
        alpha = P.put("alpha", alpha)

        order = np.argsort(cam[:, 2], kind="stable")
        if P.d("sorted_far_to_near"):
            order = order[::-1]
        image, final = np.zeros((H, W, 3), cam.dtype), np.ones((H, W), cam.dtype)
        for y0 in range(0, H, 4):
            for x0 in range(0, W, 4):
                at = (slice(y0, min(y0 + 4, H)), slice(x0, x0 + 4))
                T, C = np.ones(final[at].shape, cam.dtype), np.zeros(image[at].shape, cam.dtype)
                shared = np.zeros(8, np.int64)
                for n0 in range(0, n, 8):
                    count = min(8, n - n0)
                    shared[:count] = order[n0 : n0 + count]
                    for i in shared if P.d("last_batch_not_cut") else shared[:count]:
                        C += (alpha[i][at] * T)[..., None] * P["colours"][i]
                        T = T - T * alpha[i][at]
                image[at], final[at] = C, T
        final = P.put("final_t", final)
        P.put("output", image + final[..., None] * P["background"])

    defects = [
        D("quaternions_as_xyzw", "cov3d", "permute",
          "Quaternions are read as (x, y, z, w); they are stored as (w, x, y, z).", ("swap", "layout", "shift")),
        D("view_read_by_columns", "cov2d", "transpose",
          "The view's rotation is read column by column for the projected covariance, which transposes it.",
          ("layout",)),
        D("conic_ends_not_exchanged", "conic", "swap",
          "The inverse of the 2 by 2 covariance has its two diagonal entries in each other's place.",
          ("permute", "transpose", "flip", "layout")),
        D("pixel_centres_at_halves", "alpha", "shift",
          "Pixel centres are taken at half numbers, where projected means have them at whole ones.", ("constant",)),
        D("last_batch_not_cut", "final_t", "stale",
          "The last batch goes over all 8 slots, two of which still hold Gaussians of the batch before.",
          ("race", "truncate")),
        D("sorted_far_to_near", "output", "flip",
          "Gaussians are composited from far to near with the formula for near to far.", ("permute", "swap", "sign")),
    ]  # fmt: skip


PAIRS = [(i, j) for i in range(27) for j in range(i + 1, 27)]


@program(
    "w05", variants=("f32", "f16", "f16reg"),
    wide=("pos", "box", "charge", "sigma", "epsilon", "delta", "dist2"),
)  # fmt: skip
class nonbonded_forces:
    """Lennard-Jones with a switch and reaction-field Coulomb in a periodic box; the port goes by clusters of 4 atoms."""

    def make(g):
        box = torch.tensor([5.7, 6.3, 6.6], dtype=torch.float64)
        grid = torch.cartesian_prod(torch.arange(3), torch.arange(3), torch.arange(3)).double()
        pos = (grid + 0.5) / 3 * box + rand(g, 27, 3, low=-0.16, high=0.16)
        pos = pos + box * randint(g, -1, 2, 27, 3)  # a trajectory that was not wrapped
        link = torch.zeros(27, 27, dtype=torch.int64)
        for i in range(26):
            if i % 3 != 2:
                link[i, i + 1] = link[i + 1, i] = 1  # bonded: left out
            if i % 9 < 6:
                link[i, i + 3] = link[i + 3, i] = 2  # three bonds apart: scaled
        kind = torch.arange(27) % 3
        return dict(
            pos=pos,
            box=box,
            charge=randn(g, 27, scale=0.6),
            sigma=torch.tensor([1.9, 1.3, 1.6], dtype=torch.float64)[kind] + rand(g, 27, low=-0.05, high=0.05),
            epsilon=torch.tensor([0.4, 0.9, 0.6], dtype=torch.float64)[kind],
            link=link,
        )

    def reference(pos, box, charge, sigma, epsilon, link):
        rs, rc = 2.2, 2.8
        i, j = torch.triu_indices(27, 27, 1)
        d = pos[i] - pos[j]
        d = step("delta", d - box * torch.round(d / box).detach())
        r2 = step("dist2", (d * d).sum(-1))
        r = r2.sqrt()
        inside = r < rc
        kind = link[i, j]
        s6 = ((sigma[i] + sigma[j]) / 2 / r) ** 6
        u = ((r - rs) / (rc - rs)).clamp(0, 1)
        switch = 1 - 10 * u**3 + 15 * u**4 - 6 * u**5
        lj_scale = torch.tensor([1.0, 0.0, 0.5], dtype=pos.dtype)[kind]
        lj = 4 * (epsilon[i] * epsilon[j]).sqrt() * (s6 * s6 - s6) * switch * lj_scale
        lj = step("lj", torch.where(inside, lj, torch.zeros_like(lj)))
        k_rf = (78.0 - 1) / (2 * 78.0 + 1) / rc**3
        c_rf = 1 / rc + k_rf * rc**2
        q_scale = torch.tensor([1.0, 0.0, 1 / 1.2], dtype=pos.dtype)[kind]
        coulomb = charge[i] * charge[j] * (1 / r + k_rf * r2 - c_rf) * q_scale
        coulomb = step("coulomb", torch.where(inside, coulomb, torch.zeros_like(coulomb)))
        half = (lj + coulomb) / 2
        atom = step("atom", torch.zeros_like(charge).index_add(0, i, half).index_add(0, j, half))
        return atom.sum()

    def port(P: Port):
        pos, box, q, sigma, eps, link = (P[k] for k in ("pos", "box", "charge", "sigma", "epsilon", "link"))
        n, rs, rc = 27, 2.2, 2.8
        where = {p: k for k, p in enumerate(PAIRS)}
        tiles = []  # of pairs of clusters: atoms i, atoms j and the pairs' places
        for ci in range(0, n, 4):
            for cj in range(ci, n, 4):
                ij = [(a, b) for a in range(ci, min(ci + 4, n)) for b in range(cj, min(cj + 4, n)) if a < b]
                tiles.append((np.array([a for a, _ in ij]), np.array([b for _, b in ij]), [where[p] for p in ij]))
        tiles = [t for t in tiles if len(t[2])]

        delta = np.empty((len(PAIRS), 3), pos.dtype)
        for i, j, at in tiles:
            d = pos[i] - pos[j]
            turns = d * (1 / box)
            turns = np.trunc(turns + 0.5) if P.d("nearest_image_by_int_cast") else np.floor(turns + 0.5)
            delta[at] = d - turns * box
        delta = P.put("delta", delta)
        r2 = P.put("dist2", delta[:, 0] ** 2 + delta[:, 1] ** 2 + delta[:, 2] ** 2)

        lj, lj_slope = np.zeros_like(r2), np.zeros_like(r2)  # slopes are by r, over r
        half14 = P.f([1, 0, 1 if P.d("lj_of_1_4_not_scaled") else 0.5])
        for i, j, at in tiles:
            rr = r2[at]
            inv2 = 1 / rr
            r = np.sqrt(rr)
            if P.d("sigma_mixed_geometrically"):
                mix = sigma[i] * sigma[j]
            else:
                mix = (sigma[i] + sigma[j]) ** 2 / 4
            s2 = mix * inv2
            s6 = s2 * s2 * s2
            e4 = 4 * np.sqrt(eps[i]) * np.sqrt(eps[j]) * half14[link[i, j]] * (r < P.f(rc))
            raw, slope = e4 * s6 * (s6 - 1), e4 * s6 * (6 - 12 * s6) * inv2
            u = np.maximum((r - P.f(rs)) * P.f(1 / (rc - rs)), P.f(0))
            u = np.minimum(u, P.f(1))
            v = 1 - u
            switch = v * v * v * (1 + u * (3 + 6 * u))
            lj[at] = raw * switch
            lj_slope[at] = slope * switch
            if not P.d("slope_of_switch_left_out"):
                lj_slope[at] += raw * -30 * u * u * v * v * P.f(1 / (rc - rs)) / r
        lj = P.put("lj", lj)

        k_rf = 77 / 157 / rc**3
        c_rf = 1 / rc + k_rf * rc * rc
        pair = np.zeros_like(r2)  # Coulomb energy of unit charges
        q_slope = np.zeros_like(r2)
        q14 = P.f([1, 1 if P.d("bonded_pairs_have_coulomb") else 0, 1 / 1.2])
        for i, j, at in tiles:
            scale = q14[link[i, j]] * (np.sqrt(r2[at]) < P.f(rc))
            inv = 1 / np.sqrt(r2[at])
            pair[at] = scale * (inv + k_rf * r2[at] - c_rf)
            q_slope[at] = scale * q[i] * q[j] * (2 * k_rf - inv * inv * inv)
        first, second = np.array(PAIRS).T
        coulomb = P.put("coulomb", pair * q[first] * q[second])

        atom = np.zeros_like(q)
        for i, j, at in tiles:
            e = P.f(0.5) * (lj[at] + coulomb[at])
            np.add.at(atom, i, e)
            if P.d("adds_without_atomics"):
                atom[j] += e
            else:
                np.add.at(atom, j, e)
        atom = P.put("atom", atom)
        P.put("output", atom.sum())

        force, potential = np.zeros_like(pos), np.zeros_like(q)
        for i, j, at in tiles:
            push = delta[at] * (lj_slope[at] + q_slope[at])[:, None]
            np.add.at(force, i, -push)
            np.add.at(force, j, push)  # Newton's third law
            np.add.at(potential, i, q[j] * pair[at])
            np.add.at(potential, j, q[i] * pair[at])
        P.put("grad:pos", -force)
        P.put("grad:charge", potential)

    defects = [
        D("nearest_image_by_int_cast", "delta", "function",
          "The number of box lengths is found by a cast to int of x + 0.5, which is wrong for negative x.",
          ("truncate", "shift", "sign", "other")),
        D("sigma_mixed_geometrically", "lj", "function",
          "Sigmas are mixed by the geometric mean instead of the arithmetic one.", ("constant",)),
        D("lj_of_1_4_not_scaled", "lj", "factor",
          "Lennard-Jones energies of atoms three bonds apart lack their factor 0.5.",
          ("scale", "constant", "drop_term", "mask")),
        D("bonded_pairs_have_coulomb", "coulomb", "mask", "Bonded pairs are not excluded from the Coulomb energy.",
          ("zero",)),
        D("adds_without_atomics", "atom", "race",
          "Energies are added to atoms j without atomics, so that of several adds to an atom only one is kept.",
          ("drop_term", "stale")),
        D("slope_of_switch_left_out", "grad:pos", "drop_term",
          "The forces lack the term with the derivative of the switching function."),
    ]  # fmt: skip


@program("w06", variants=("f32", "bf16"), wide=("chol", "weights", "output", "hyper"))
class gaussian_process:
    """Gaussian-process regression, Matern 5/2; the port has a blocked right-looking Cholesky factorisation."""

    def make(g):
        x, new = rand(g, 26, 3, low=-1.5, high=1.5), rand(g, 9, 3, low=-1.5, high=1.5)
        y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.8 + randn(g, 26, scale=0.3)
        return dict(
            x=x,
            y=y,
            new=new,
            log_length=torch.tensor([-0.3, 0.4, 0.1], dtype=torch.float64) + randn(g, 3, scale=0.1),
            hyper=torch.tensor([0.1, -0.9, 0.6], dtype=torch.float64),  # log amplitude, log noise, mean
        )

    def reference(x, y, new, log_length, hyper):
        amp2, noise2 = (2 * hyper[0]).exp(), (2 * hyper[1]).exp()

        def matern(a, b):
            d = (a[:, None] - b[None]) / log_length.exp()
            r = (5 * (d * d).sum(-1)).sqrt()
            return amp2 * (1 + r + r * r / 3) * torch.exp(-r)

        eye = torch.eye(26, dtype=x.dtype)
        K = step("kernel", matern(x, x) + (noise2 + 1e-6) * eye)
        L = step("chol", torch.linalg.cholesky(K))
        resid = y - hyper[2]
        alpha = step("weights", torch.cholesky_solve(resid[:, None], L)[:, 0])
        Ks = step("cross", matern(new, x))
        step("mean", hyper[2] + Ks @ alpha)
        v = torch.linalg.solve_triangular(L, Ks.T, upper=False)
        step("var", amp2 + noise2 - (v * v).sum(0))
        return -0.5 * resid @ alpha - L.diagonal().log().sum() - 13 * math.log(2 * math.pi)

    def port(P: Port):
        n, block = 26, 8
        hyper = P["hyper"]
        amp2, noise2, mu = np.exp(hyper[0]) ** 2, np.exp(hyper[1]) ** 2, hyper[2]
        scale = np.exp(-P["log_length"])
        x, new, y = P["x"] * scale, P["new"] * scale, P["y"]

        def matern(a, b):  # distances by |a|^2 + |b|^2 - 2 a b
            s = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * (a @ b.T)
            s = np.maximum(s, P.f(0)) * P.f(5)
            r = np.sqrt(s)
            return amp2 * np.exp(-r) * (1 + r + s * P.f(1 / 3))

        K = np.empty((n, n), x.dtype)
        jitter = P.f(1e-4 if P.d("jitter_1e4") else 1e-6)
        for i in range(n):  # one triangle
            K[i, :i] = matern(x[i : i + 1], x[:i])[0]
            K[:i, i] = K[i, :i]
            K[i, i] = amp2 + noise2 + jitter
        K = P.put("kernel", K)

        A = K.copy()
        for k0 in range(0, n, block):
            k1 = min(k0 + block, n)
            for c in range(k0, k1):  # the panel's columns
                A[c, c] = np.sqrt(A[c, c])
                A[c + 1 :, c] /= A[c, c]
                A[c + 1 :, c + 1 : k1] -= np.outer(A[c + 1 :, c], A[c + 1 : k1, c])
            end = n - n % block if P.d("tail_rows_not_updated") else n
            for t in range(k1, end, block):  # trailing row tiles
                s = slice(t, min(t + block, n))
                A[s, k1 : s.stop] -= A[s, k0:k1] @ A[k1 : s.stop, k0:k1].T
        L = P.put("chol", np.tril(A))

        def forward(b):
            z = b.copy()
            for c in range(n):
                z[c] = z[c] / L[c, c]
                z[c + 1 :] -= np.multiply.outer(L[c + 1 :, c], z[c])
            return z

        resid = y - mu
        z = forward(resid)
        if P.d("second_solve_not_transposed"):
            w = forward(z)
        else:
            w = z.copy()
            for c in range(n - 1, -1, -1):
                w[c] = w[c] / L[c, c]
                w[:c] -= L[c, :c] * w[c]
        w = P.put("weights", w)

        Ks = matern(x, new)  # (26, 9)
        Ks = Ks.reshape(9, 26) if P.d("cross_reshaped_for_transposed") else Ks.T
        Ks = P.put("cross", Ks)
        P.put("mean", mu + np.einsum("mn,n->m", Ks, w))
        v = forward(np.ascontiguousarray(Ks.T))
        var = amp2 - np.einsum("nm,nm->m", v, v)
        P.put("var", var if P.d("variance_without_noise") else var + noise2)
        logdet = np.log(np.diagonal(L)).sum()
        if P.d("logdet_halved_twice"):
            logdet = logdet / 2
        P.put("output", -(resid @ w) / 2 - logdet - P.f(13 * math.log(2 * math.pi)))

    defects = [
        D("jitter_1e4", "kernel", "eps", "The jitter on the kernel's diagonal is 1e-4 instead of 1e-6.", ("constant",)),
        D("tail_rows_not_updated", "chol", "truncate",
          "Trailing updates go over whole tiles of 8 rows only, so that the last two rows are never updated.",
          ("drop_term", "stale", "mask", "zero")),
        D("second_solve_not_transposed", "weights", "transpose",
          "The second triangular solve is with L again instead of its transpose."),
        D("cross_reshaped_for_transposed", "cross", "layout",
          "The (26, 9) cross kernel is reshaped to (9, 26) instead of transposed.", ("transpose", "permute")),
        D("variance_without_noise", "var", "drop_term",
          "The variance of predictions lacks the noise.", ("constant",)),
        D("logdet_halved_twice", "output", "factor",
          "The sum of the logarithms of L's diagonal, half the log-determinant already, is halved again.",
          ("scale", "constant")),
    ]  # fmt: skip
