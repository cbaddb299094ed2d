"""Two solvers and a block of a speech encoder: LAMB, conjugate gradients, the convolution module of a Conformer."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randn, sigmoid, silu, step


@program(
    "s06",
    variants=("f32", "bf16"),
    wide=("lr", "grad_norm", "clip", "m_w", "v_w", "m_b", "v_b", "ema_w", "trust"),
)
class lamb_step:
    """LAMB's step 37 for a 14 x 23 matrix and a vector: three micro-batches, clipping by the global norm, an average.

    The port goes over the flat matrix in tiles of 64, the last of two numbers, and sums squares tile by tile.
    """

    def make(g):
        return dict(
            w=randn(g, 14, 23, scale=0.2),
            b=randn(g, 23, scale=0.1),
            grads_w=randn(g, 3, 14, 23, scale=80.0),
            grads_b=randn(g, 3, 23, scale=200.0),
            m_w=randn(g, 14, 23, scale=0.004),
            v_w=rand(g, 14, 23, low=1e-6, high=4e-5),
            m_b=randn(g, 23, scale=0.01),
            v_b=rand(g, 23, low=1e-5, high=2e-4),
            ema_w=randn(g, 14, 23, scale=0.2),
            t=torch.tensor(37),
        )

    def reference(w, b, grads_w, grads_b, m_w, v_w, m_b, v_b, ema_w, t):
        t = t.to(w.dtype)
        lr = step("lr", 0.02 * 0.5 * (1 + (math.pi * (t - 10) / 90).cos()))
        grad_w = step("grad_w", grads_w.mean(0) / 1024)
        grad_b = step("grad_b", grads_b.mean(0) / 1024)
        norm = step("grad_norm", (grad_w.pow(2).sum() + grad_b.pow(2).sum()).sqrt())
        clip = step("clip", (0.5 / (norm + 1e-6)).clamp(max=1.0))
        m_w = step("m_w", 0.9 * m_w + 0.1 * clip * grad_w)
        v_w = step("v_w", 0.98 * v_w + 0.02 * (clip * grad_w) ** 2)
        m_b = step("m_b", 0.9 * m_b + 0.1 * clip * grad_b)
        v_b = step("v_b", 0.98 * v_b + 0.02 * (clip * grad_b) ** 2)
        first, second = 1 - 0.9**t, 1 - 0.98**t
        update_w = step("update_w", m_w / first / ((v_w / second).sqrt() + 1e-6) + 0.3 * w)
        update_b = step("update_b", m_b / first / ((v_b / second).sqrt() + 1e-6))
        trust = step("trust", w.norm() / update_w.norm())
        w = step("w_next", w - lr * trust * update_w)
        b = step("b_next", b - lr * update_b)
        return {"output": 0.99 * ema_w + 0.01 * w, "change": (lr * update_b).abs().max()}

    def port(P: Port):
        w, b, t = P["w"], P["b"], int(P["t"])
        part = (t + 1 - 10 if P.d("schedule_one_step_on") else t - 10) / 90
        lr = P.put("lr", P.f(0.02 * math.cos(math.pi * part / 2) ** 2))

        def averaged(grads):
            total = np.zeros_like(grads[0])
            for grad in grads:
                total = total + grad
            return total / P.f(1024 if P.d("micro_batches_summed") else 3072)

        grad_w, grad_b = P.put("grad_w", averaged(P["grads_w"])), P.put("grad_b", averaged(P["grads_b"]))
        flat, n = grad_w.reshape(-1), grad_w.size
        squares = P.f(0)
        for i in range(0, n, 64):
            squares = squares + (flat[i : i + 64] ** 2).sum()
        if not P.d("norm_of_matrix_only"):
            squares = squares + (grad_b**2).sum()
        norm = P.put("grad_norm", np.sqrt(squares))
        clip = P.put("clip", min(P.f(0.5) / (norm + P.f(1e-6)), P.f(1)))

        first = 0.98 if P.d("mean_with_the_other_beta") else 0.9
        share = 1 if P.d("new_square_without_its_share") else 0.02

        def moments(m, v, g, tail=False):
            m, v, g = m.reshape(-1).copy(), v.reshape(-1).copy(), g.reshape(-1) * clip
            for i in range(0, m.size, 64):
                s = slice(i, min(i + 64, m.size))
                m[s] = m[s] + P.f(1 - first) * (g[s] - m[s])
                if not tail or s.stop - i == 64:
                    v[s] = P.f(0.98) * v[s] + P.f(share) * g[s] * g[s]
            return m, v

        m_w, v_w = moments(P["m_w"], P["v_w"], grad_w, P.d("last_tile_of_squares_kept"))
        m_b, v_b = moments(P["m_b"], P["v_b"], grad_b)
        if P.d("mean_stored_in_bf16"):
            m_w = bf16(m_w)
        m_w, v_w = P.put("m_w", m_w.reshape(w.shape)), P.put("v_w", v_w.reshape(w.shape))
        m_b, v_b = P.put("m_b", m_b), P.put("v_b", v_b)

        by_m, by_v = P.f(1 / (1 - 0.9**t)), P.f(1 / (1 - 0.98**t))

        def direction(m, v):
            if P.d("eps_under_the_root"):
                return m * by_m / np.sqrt(v * by_v + P.f(1e-6))
            return m * by_m / (np.sqrt(v * by_v) + P.f(1e-6))

        decay = P.f(-0.3 if P.d("weights_grow") else 0.3)
        update_w = P.put("update_w", direction(m_w, v_w) + decay * w)
        update_b = P.put("update_b", direction(m_b, v_b))
        sums = [(x.reshape(-1)[i : i + 64] ** 2).sum() for x in (w, update_w) for i in range(0, n, 64)]
        trust = P.put("trust", np.sqrt(sum(sums[:6]) / sum(sums[6:])))
        w_next = P.put("w_next", w - lr * trust * update_w)
        P.put("b_next", b - lr * update_b)
        ema = P["ema_w"]
        P.put("output", ema + P.f(0.01) * ((w if P.d("average_of_old_weights") else w_next) - ema))
        P.put("change", lr * max(abs(u) for u in update_b))

    defects = [
        D(
            "schedule_one_step_on",
            "lr",
            "shift",
            "the learning rate is that of step 38",
            accept=("constant", "ddof", "factor", "scale"),
        ),
        D(
            "micro_batches_summed",
            "grad_w",
            "scale",
            "gradients of the three micro-batches are added and not averaged",
            accept=("factor", "constant", "function"),
        ),
        D(
            "norm_of_matrix_only",
            "grad_norm",
            "drop_term",
            "the vector's gradient is left out of the global norm",
            accept=("truncate", "zero", "mask"),
        ),
        D(
            "mean_with_the_other_beta",
            "m_w",
            "constant",
            "the mean has the beta of the squares, 0.98",
            accept=("swap", "factor", "scale"),
        ),
        D("mean_stored_in_bf16", "m_w", "precision", "the mean is rounded to bfloat16"),
        D(
            "new_square_without_its_share",
            "v_w",
            "factor",
            "the new square isn't multiplied by 0.02",
            accept=("scale", "constant", "drop_term"),
        ),
        D(
            "last_tile_of_squares_kept",
            "v_w",
            "truncate",
            "the last two numbers, a tile of their own, aren't updated",
            accept=("stale", "mask", "drop_term"),
        ),
        D(
            "eps_under_the_root",
            "update_w",
            "eps",
            "epsilon is added under the root",
            accept=("function", "constant"),
        ),
        D("weights_grow", "update_w", "sign", "the weight decay has the other sign"),
        D(
            "average_of_old_weights",
            "output",
            "stale",
            "the moving average takes the weights before the step",
            accept=("swap", "shift", "drop_term"),
        ),
    ]


@program("s07", variants=("f32", "bf16"), wide=("alpha", "beta", "rz", "residual_norm"))
class line_preconditioned_cg:
    """Three iterations of conjugate gradients for two diffusion problems on 7 x 9 cells, preconditioned by lines.

    The reference solves dense tridiagonal systems; the port eliminates along the lines and loops over cells.
    """

    def make(g):
        return dict(
            rhs=randn(g, 2, 7, 9),
            x0=randn(g, 2, 7, 9, scale=0.3),
            cx=rand(g, 2, 7, 10, low=0.3, high=2.0),
            cy=rand(g, 2, 8, 9, low=0.3, high=3.0),
            react=rand(g, 2, 7, 9, low=0.1, high=1.0),
        )

    def reference(rhs, x0, cx, cy, react):
        diagonal = step("diagonal", react + cx[..., :-1] + cx[..., 1:] + cy[:, :-1] + cy[:, 1:])
        inner_x, inner_y = cx[..., 1:-1], cy[:, 1:-1]
        lines = torch.diag_embed(diagonal) - torch.diag_embed(inner_x, 1) - torch.diag_embed(inner_x, -1)

        def applied(u):
            left, right = F.pad(inner_x * u[..., :-1], (1, 0)), F.pad(inner_x * u[..., 1:], (0, 1))
            up, down = F.pad(inner_y * u[:, :-1], (0, 0, 1, 0)), F.pad(inner_y * u[:, 1:], (0, 0, 0, 1))
            return diagonal * u - left - right - up - down

        def dot(a, b):
            return (a * b).sum((1, 2))

        x = x0
        r = step("residual", rhs - applied(x))
        z = step("z", torch.linalg.solve(lines, r[..., None])[..., 0])
        before = rz = step("rz", dot(r, z))
        p = z
        for i in range(3):
            if i:
                beta = step("beta", rz / before)
                p = step("p", z + beta[:, None, None] * p)
            ap = step("ap", applied(p))
            alpha = step("alpha", rz / dot(p, ap))
            x = step("x", x + alpha[:, None, None] * p)
            r = step("residual", r - alpha[:, None, None] * ap)
            z = step("z", torch.linalg.solve(lines, r[..., None])[..., 0])
            before, rz = rz, step("rz", dot(r, z))
        return {"output": x + z, "residual_norm": dot(r, r).sqrt()}

    def port(P: Port):
        cx, cy = P["cx"], P["cy"]
        B, H, W = 2, 7, 9
        diagonal = P["react"].copy()
        for i in range(H):
            for j in range(W):
                if not (P.d("no_flow_through_the_side") and j == 0):
                    diagonal[:, i, j] += cx[:, i, j]
                diagonal[:, i, j] += cx[:, i, j + 1]
                diagonal[:, i, j] += cy[:, i, j] + cy[:, i + 1, j]
        diagonal = P.put("diagonal", diagonal)

        def applied(u, old=None):
            """The operator; `old` is what a neighbour's tile still has of u."""
            out = np.empty_like(u)
            flat = u.reshape(B, H * W)
            for i in range(H):
                for j in range(W):
                    n = i * W + j
                    total = diagonal[:, i, j] * u[:, i, j]
                    wraps = P.d("rows_run_into_each_other")
                    if j > 0 or (wraps and n > 0):
                        total = total - cx[:, i, j] * flat[:, n - 1]
                    if j < W - 1 or (wraps and n < H * W - 1):
                        total = total - cx[:, i, j + 1] * flat[:, n + 1]
                    if i > 0:
                        total = total - cy[:, i, j] * (old if old is not None and i == 4 else u)[:, i - 1, j]
                    if i < H - 1:
                        total = total - cy[:, i if P.d("face_of_the_row_itself") else i + 1, j] * u[:, i + 1, j]
                    out[:, i, j] = total
            return out

        def solved(r):
            out = np.empty_like(r)
            for n in range(B):
                for i in range(H):
                    c, d = np.zeros(W, r.dtype), np.zeros(W, r.dtype)
                    for j in range(W):
                        low = -cx[n, i, j] if j else P.f(0)
                        pivot = diagonal[n, i, j] - low * (c[j - 1] if j else 0)
                        c[j] = -cx[n, i, j + 1] / pivot
                        d[j] = (r[n, i, j] - low * (d[j - 1] if j else 0)) / pivot
                    if P.d("last_unknown_of_line_zero"):
                        d[W - 1] = 0
                    out[n, i, W - 1] = d[W - 1]
                    for j in range(W - 2, -1, -1):
                        out[n, i, j] = d[j] - c[j] * out[n, i, j + 1]
            return out

        def dot(a, b):
            return np.stack([sum(a[n, i] @ b[n, i] for i in range(H)) for n in range(B)])

        x, rhs = P["x0"], P["rhs"]
        r = P.put("residual", rhs + applied(x) if P.d("product_added") else rhs - applied(x))
        z = P.put("z", solved(r))
        rz = P.put("rz", dot(r, z))
        p, old, before, last = z, None, rz, r
        for i in range(3):
            if i:
                if P.d("residuals_without_preconditioner"):
                    beta = dot(r, r) / dot(last, last)
                else:
                    beta = rz / before
                beta = P.put("beta", beta)
                old, p = p, P.put("p", z + beta[:, None, None] * p)
            ap = P.put("ap", applied(p, old if P.d("tile_above_not_yet_updated") else None))
            curve = dot(p, ap)
            if P.d("both_systems_in_one_product"):
                alpha = np.full(B, rz.sum() / curve.sum())
            else:
                alpha = rz / curve
            alpha = P.put("alpha", alpha)[:, None, None]
            x = P.put("x", x + alpha * (z if P.d("moved_along_z") else p))
            last = r
            r = P.put("residual", r - ap if P.d("step_length_missing") else r - alpha * ap)
            z = P.put("z", solved(r))
            before, rz = rz, P.put("rz", dot(r, z))
        P.put("output", x + z)
        P.put("residual_norm", np.sqrt(dot(r, r)))

    defects = [
        D(
            "no_flow_through_the_side",
            "diagonal",
            "drop_term",
            "the first column's outer face isn't in the diagonal",
            accept=("mask", "zero", "truncate"),
        ),
        D("product_added", "residual", "sign", "the first residual is b + A x"),
        D(
            "rows_run_into_each_other",
            "residual",
            "mask",
            "the last cell of a row has the next row's first cell for a neighbour",
            accept=("shift", "other"),
        ),
        D(
            "face_of_the_row_itself",
            "residual",
            "shift",
            "the cell below is reached through the upper face",
            accept=("stale", "other", "swap"),
        ),
        D(
            "last_unknown_of_line_zero",
            "z",
            "zero",
            "the back substitution begins with zero in the last cell",
            accept=("drop_term", "truncate", "mask", "stale"),
        ),
        D(
            "both_systems_in_one_product",
            "alpha",
            "axis",
            "products are over both systems",
            accept=("factor", "other"),
        ),
        D(
            "moved_along_z",
            "x#2",
            "swap",
            "the solution moves along z and not along p: the same in the first iteration",
            accept=("drop_term", "stale", "other"),
        ),
        D(
            "step_length_missing",
            "residual#2",
            "factor",
            "the residual loses A p and not alpha A p",
            accept=("drop_term", "scale"),
        ),
        D(
            "residuals_without_preconditioner",
            "beta",
            "function",
            "beta is the ratio of r r and not of r z",
            accept=("swap", "drop_term", "factor"),
        ),
        D(
            "tile_above_not_yet_updated",
            "ap#2",
            "race",
            "row 4, the first of a tile, reads p of row 3 before it is updated",
            accept=("stale", "shift"),
        ),
    ]


@program("s08", variants=("f32", "bf16", "f16"), wide=("bn_mean", "bn_var", "running_mean", "running_var"))
class conformer_convolution:
    """A Conformer's convolution module in training: GLU, five taps, batch norm over frames, layer scale, dropped paths.

    17 frames at most; the port goes utterance by utterance and in tiles of 6 frames, with gradients by hand.
    """

    def make(g):
        return dict(
            x=randn(g, 4, 17, 10) * (0.02 + 1.5 * rand(g, 4, 17, 1) ** 3),
            frames=torch.tensor([17, 13, 11, 16]),
            kept=torch.tensor([1, 1, 0, 1]),
            ln_w=randn(g, 10, scale=0.2, shift=1.0),
            ln_b=randn(g, 10, scale=0.2),
            w1=randn(g, 24, 10, scale=0.4),
            b1=randn(g, 24, scale=0.3),
            w_dw=randn(g, 12, 5, scale=0.2),
            bn_w=randn(g, 12, scale=0.3, shift=1.0),
            bn_b=randn(g, 12, scale=0.3),
            running_mean=randn(g, 12, scale=0.3),
            running_var=rand(g, 12, low=0.2, high=1.5),
            w2=randn(g, 10, 12, scale=0.4),
            layer_scale=randn(g, 10, scale=0.1, shift=0.5),
        )

    def reference(x, frames, kept, ln_w, ln_b, w1, b1, w_dw, bn_w, bn_b, running_mean, running_var, w2, layer_scale):
        inside = (torch.arange(17) < frames[:, None])[..., None]
        h = step("ln", F.layer_norm(x, (10,), ln_w, ln_b, 1e-5))
        h = step("expanded", h @ w1.T + b1)
        h = step("glu", torch.where(inside, F.glu(h, -1), 0.0))
        h = step("conv", F.conv1d(h.transpose(1, 2), w_dw[:, None], padding=2, groups=12).transpose(1, 2))
        n = frames.sum()
        mean = step("bn_mean", torch.where(inside, h, 0.0).sum((0, 1)) / n)
        var = step("bn_var", torch.where(inside, (h - mean) ** 2, 0.0).sum((0, 1)) / n)
        new_mean = step("running_mean", 0.9 * running_mean + 0.1 * mean)
        new_var = step("running_var", 0.9 * running_var + 0.1 * var * n / (n - 1))
        h = step("bn", (h - mean) * torch.rsqrt(var + 1e-5) * bn_w + bn_b)
        h = step("act", F.silu(h))
        h = step("branch", h @ w2.T * layer_scale)
        h = torch.where(inside, h, 0.0) * kept[:, None, None] / 0.8
        return {"output": x + h, "mean": new_mean.square().sum(), "var": new_var.sum()}

    def loss(output):
        y = output["output"]
        n = y.numel()
        return (y * ((torch.arange(n, dtype=y.dtype) * 7 % 23 - 11) / 16).view(y.shape)).sum()

    def port(P: Port):
        x, frames, kept, w_dw = P["x"], P["frames"], P["kept"], P["w_dw"]
        B, T, C = 4, 17, 12
        ln = np.empty_like(x)
        for b in range(B):
            for t in range(T):
                mean = x[b, t].sum() / 10
                rest = x[b, t] - mean
                var = (rest * rest).sum() / (9 if P.d("layer_norm_unbiased") else 10)
                ln[b, t] = rest / np.sqrt(var + P.f(1e-5)) * P["ln_w"] + P["ln_b"]
        ln = P.put("ln", ln)
        expanded = P.put("expanded", np.einsum("btc,oc->bto", ln, P["w1"]) + P["b1"])
        if P.d("gate_in_every_second_column"):
            value, gate = expanded[..., 0::2], expanded[..., 1::2]
        else:
            value, gate = expanded[..., :C], expanded[..., C:]
        glu = np.zeros((B, T, C), x.dtype)
        for b in range(B):
            n = frames[b]
            glu[b, :n] = value[b, :n] * sigmoid(gate[b, :n])
        glu = P.put("glu", glu)

        taps = w_dw
        if P.d("weight_read_taps_first"):
            taps = w_dw.reshape(5, C).T
        if P.d("taps_in_reverse"):
            taps = taps[:, ::-1]
        conv = np.zeros_like(glu)
        for b in range(B):
            for t0 in range(0, T, 6):
                t1 = min(t0 + 6, T)
                rows = np.zeros((t1 - t0 + 4, C), x.dtype)
                low, high = max(t0 - 2, 0), min(t1 + 2, T)
                if P.d("right_halo_not_loaded"):
                    high = t1
                rows[low - t0 + 2 : high - t0 + 2] = glu[b, low:high]
                for k in range(5):
                    conv[b, t0:t1] += rows[k : k + t1 - t0] * taps[:, k]
        conv = P.put("conv", conv)
        n = P.f(B * T if P.d("mean_divided_by_all_frames") else frames.sum())
        mean = P.put("bn_mean", sum(conv[b, : frames[b]].sum(0) for b in range(B)) / n)
        n = P.f(frames.sum())
        var = P.put("bn_var", sum(((conv[b, : frames[b]] - mean) ** 2).sum(0) for b in range(B)) / n)
        old_mean, old_var = P["running_mean"], P["running_var"]
        new_mean = P.put("running_mean", old_mean + P.f(0.1) * (mean - old_mean))
        unbiased = 1 if P.d("running_variance_biased") else n / (n - 1)
        new_var = P.put("running_var", old_var + P.f(0.1) * (var * unbiased - old_var))
        m, v = (new_mean, new_var) if P.d("normed_by_running_values") else (mean, var)
        rstd = 1 / np.sqrt(v + P.f(1e-3 if P.d("eps_of_keras") else 1e-5))
        a = P["bn_w"] * rstd
        bn = P.put("bn", conv * a + (P["bn_b"] - m * a))
        act = P.put("act", silu(bn))
        scaled = P["w2"] * P["layer_scale"][:, None]
        branch = P.put("branch", act @ scaled.T)
        out = x.copy()
        for b in range(B):
            if kept[b]:
                out[b, : frames[b]] += branch[b, : frames[b]] * P.f(1.25)
        P.put("output", out)
        P.put("mean", (new_mean * new_mean).sum())
        P.put("var", new_var.sum())

        g = P.f((np.arange(x.size) * 7 % 23 - 11).reshape(x.shape) / 16)
        inside = np.arange(T)[None, :] < frames[:, None]
        g = g * (inside * kept[:, None])[..., None] * P.f(1.25)
        s = sigmoid(bn)
        d_bn = g @ scaled * s * (1 + bn * (1 - s))
        rstd = 1 / np.sqrt(var + P.f(1e-5))
        unit = (conv - mean) * rstd
        d_unit = d_bn * P["bn_w"]
        rows = d_unit.reshape(-1, C)
        along = (rows * unit.reshape(-1, C)).sum(0)
        d_conv = d_unit.copy()
        if not P.d("statistics_not_differentiated"):
            d_conv -= inside[..., None] * (rows.sum(0) + unit * along) / n
        d_conv *= rstd
        d_w = np.zeros_like(w_dw)
        for k in range(5):
            for t in range(T):
                if 0 <= t + k - 2 < T:
                    d_w[:, k] += (d_conv[:, t] * glu[:, t + k - 2]).sum(0)
        P.put("grad:w_dw", d_w)
        P.put("grad:bn_w", (d_bn * unit).sum((0, 1)))

    defects = [
        D(
            "layer_norm_unbiased",
            "ln",
            "ddof",
            "the layer norm's variance is divided by 9 and not 10",
            accept=("constant", "scale", "factor"),
        ),
        D(
            "gate_in_every_second_column",
            "glu",
            "permute",
            "values and gates alternate and aren't two halves",
            accept=("layout", "swap", "transpose"),
        ),
        D(
            "taps_in_reverse",
            "conv",
            "flip",
            "the taps are in reverse, as in a convolution by the book",
        ),
        D(
            "weight_read_taps_first",
            "conv",
            "layout",
            "the weight's memory is read as 5 x 12",
            accept=("transpose", "permute"),
        ),
        D(
            "right_halo_not_loaded",
            "conv",
            "zero",
            "a tile doesn't load the two frames to its right, and has zeros there",
            accept=("mask", "truncate", "drop_term"),
        ),
        D(
            "mean_divided_by_all_frames",
            "bn_mean",
            "factor",
            "the sum over frames is divided by all 68, with the padding",
            accept=("scale", "constant", "ddof", "mask"),
        ),
        D(
            "running_variance_biased",
            "running_var",
            "ddof",
            "the running variance takes the biased variance",
            accept=("drop_term", "factor", "scale", "constant"),
        ),
        D(
            "normed_by_running_values",
            "bn",
            "stale",
            "the norm takes the running mean and variance, as in evaluation",
            accept=("swap", "other"),
        ),
        D("eps_of_keras", "bn", "eps", "the batch norm's epsilon is 1e-3 and not 1e-5", accept=("constant",)),
        D(
            "statistics_not_differentiated",
            "grad:w_dw",
            "drop_term",
            "the batch norm's gradient takes mean and variance for constants",
        ),
    ]
