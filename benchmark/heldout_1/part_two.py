"""Training and estimation: Adafactor, InfoNCE with a hand-written backward, EM for a Gaussian mixture, a Kalman filter."""

from __future__ import annotations

import math

import numpy as np
import torch

from benchmark.base import D, Port, bf16, program, rand, randint, randn, step


@program("q05", variants=("f32", "bf16"), wide=("w", "new_w", "row", "col", "new_row", "new_col"))
class adafactor_step:
    """Adafactor's eighth step for a 14 x 22 matrix; the port sums in blocks of 6 rows."""

    def make(g):
        return dict(
            w=randn(g, 14, 22, scale=0.5),
            grad=randn(g, 14, 22, scale=0.03) * (1 + rand(g, 1, 22, high=2.0)),
            row=rand(g, 14, low=0.0005, high=0.003),
            col=rand(g, 22, low=0.0005, high=0.003),
        )

    def reference(w, grad, row, col):
        beta = 1 - 8**-0.8
        sq = grad.square() + 1e-4
        row = step("new_row", beta * row + (1 - beta) * sq.mean(1))
        col = step("new_col", beta * col + (1 - beta) * sq.mean(0))
        v = row[:, None] * col[None, :] / row.mean()
        u = step("update", grad * torch.rsqrt(v))
        u = step("clipped", u / (u.square().mean().sqrt() / 0.8).clamp(min=1.0))
        lr = 0.05 * w.square().mean().sqrt().clamp(min=1e-3)
        return {"new_w": w * (1 - 0.02) - lr * u}

    def port(P: Port):
        w, grad, row, col = P["w"], P["grad"], P["row"], P["col"]
        t = 7 if P.d("step_counts_from_zero") else 8
        expo = -0.5 if P.d("decay_exponent_half") else -0.8
        beta = P.f(1 - t**expo)
        sq = grad * grad if P.d("eps_left_for_later") else grad * grad + P.f(1e-4)
        rs, cs = np.zeros(14, w.dtype), np.zeros(22, w.dtype)
        stop = 12 if P.d("rows_beyond_blocks_missing") else 14
        for r in range(0, stop, 6):
            part = sq[r : r + 6]
            rs[r : r + 6] = part.sum(1)
            if P.d("column_sum_overwritten") and r == 6:  # two blocks add to the same columns without an atomic
                cs[8:14] = part.sum(0)[8:14]
                cs[:8] += part.sum(0)[:8]
                cs[14:] += part.sum(0)[14:]
            else:
                cs += part.sum(0)
        if P.d("row_sum_over_rows"):
            rs = rs / P.f(14)
        else:
            rs = rs / P.f(22)
        if P.d("rows_beyond_blocks_missing"):
            cs = cs * 0 + sq.sum(0)
        cs = cs / P.f(14)
        if P.d("eps_left_for_later"):
            rs = rs + P.f(1e-8)
        old = row
        row = P.put("new_row", beta * row + (1 - beta) * rs)
        if P.d("column_moment_restarts"):
            col = P.put("new_col", (1 - beta) * cs)
        else:
            col = P.put("new_col", beta * col + (1 - beta) * cs)
        r = old if P.d("old_rows_in_update") else row
        if P.d("row_mean_not_divided"):
            v = r[:, None] * col[None]
        else:
            v = r[:, None] * (col[None] / (row.sum() / P.f(14)))
        u = grad / v if P.d("no_root") else grad / np.sqrt(v)
        u = P.put("update", u)
        rms = np.sqrt((u * u).sum() / P.f(14 if P.d("rms_by_rows_only") else 308)) / P.f(0.8)
        u = P.put("clipped", u / np.maximum(rms, P.f(1)))
        lr = P.f(0.05) * np.maximum(P.f(1e-3), np.sqrt((w * w).sum() / P.f(308)))
        decay = P.f(0.02)
        kept = w * (1 + decay) if P.d("weight_decay_sign") else w * (1 - decay)
        if P.d("learning_rate_not_relative"):
            lr = P.f(0.05)
        P.put("new_w", kept - lr * u)

    defects = [
        D("step_counts_from_zero", "new_row", "shift", "the step is 7 instead of 8", accept=("constant",)),
        D("decay_exponent_half", "new_row", "constant", "the decay's exponent is -0.5 instead of -0.8"),
        D(
            "eps_left_for_later",
            "new_row",
            "eps",
            "1e-4 isn't added to the squares; the means get 1e-8",
            accept=("drop_term", "constant"),
        ),
        D(
            "rows_beyond_blocks_missing",
            "new_row",
            "truncate",
            "rows 12 and 13 are not summed",
            accept=("zero", "drop_term"),
        ),
        D(
            "row_sum_over_rows",
            "new_row",
            "scale",
            "the sum of 22 columns is divided by 14",
            accept=("axis", "constant", "factor"),
        ),
        D(
            "column_sum_overwritten",
            "new_col",
            "race",
            "for columns 8 to 13 the second block's sum overwrites the first's",
            accept=("stale", "truncate", "drop_term", "other"),
        ),
        D("column_moment_restarts", "new_col", "drop_term", "beta times the old moment is not added"),
        D("old_rows_in_update", "update", "stale", "the update uses the row moment from before the step"),
        D("row_mean_not_divided", "update", "factor", "the outer product isn't divided by the rows' mean"),
        D("no_root", "update", "function", "divided by v instead of its square root"),
        D(
            "rms_by_rows_only",
            "clipped",
            "scale",
            "the mean square is the sum over 14 instead of 308",
            accept=("axis", "constant", "factor"),
        ),
        D("weight_decay_sign", "new_w", "sign", "w * (1 + 0.02) instead of w * (1 - 0.02)"),
        D("learning_rate_not_relative", "new_w", "factor", "the rate isn't multiplied by the weights' RMS"),
    ]


@program("q06", variants=("f32", "bf16"), wide=("log_temp", "lse_rows", "lse_cols", "output", "grad:log_temp"))
class info_nce:
    """Symmetric contrastive loss of 18 pairs with a learned temperature, and its backward by hand."""

    def make(g):
        q = randn(g, 18, 24)
        return dict(q=q, k=0.6 * q + 0.8 * randn(g, 18, 24), log_temp=randn(g, 1, scale=0.1, shift=1.6))

    def reference(q, k, log_temp):
        qn = step("qn", q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6))
        kn = step("kn", k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6))
        s = step("logits", log_temp.exp() * (qn @ kn.T))
        rows = step("lse_rows", torch.logsumexp(s, 1))
        cols = step("lse_cols", torch.logsumexp(s, 0))
        right = s.diagonal()
        return ((rows - right).mean() + (cols - right).mean()) / 2

    def port(P: Port):
        q, k = P["q"], P["k"]
        lt = P["log_temp"]
        temp = np.exp(lt)[0]
        nq, nk = np.sqrt((q * q).sum(1) + P.f(1e-6)), np.sqrt((k * k).sum(1) + P.f(1e-6))
        if P.d("normalised_over_batch"):
            qn = P.put("qn", q / np.sqrt((q * q).sum(0, keepdims=True) + P.f(1e-6)))
        else:
            qn = P.put("qn", q / nq[:, None])
        if P.d("eps_not_squared"):
            kn = P.put("kn", k / (np.sqrt((k * k).sum(1)) + P.f(0.01))[:, None])
        else:
            kn = P.put("kn", k / nk[:, None])
        s = np.empty((18, 18), q.dtype)
        for i in range(0, 18, 5):
            for j in range(0, 18, 5):
                block = qn[i : i + 5] @ kn[j : j + 5].T
                if P.d("blocks_stored_transposed") and block.shape == (5, 5):
                    block = block.T
                s[i : i + 5, j : j + 5] = block
        if P.d("temperature_divides"):
            s = s / temp
        elif P.d("temperature_without_exp"):
            s = s * lt[0]
        else:
            s = s * temp
        s = P.put("logits", s)
        mr, mc = s.max(1), s.max(0)
        if P.d("own_pair_left_out"):
            lr = mr + np.log(np.exp(s - mr[:, None]).sum(1) - np.exp(np.diagonal(s) - mr))
        else:
            lr = mr + np.log(np.exp(s - mr[:, None]).sum(1))
        lr = P.put("lse_rows", lr)
        ec = np.exp(s - mc)
        if P.d("columns_tile_tail"):
            ec = ec[:15]
        lc = P.put("lse_cols", mc + np.log(ec.sum(0)))
        idx = (np.arange(18) + 1) % 18 if P.d("label_of_next") else np.arange(18)
        right = s[np.arange(18), idx]
        total = ((lr - right).sum() + (lc - right).sum()) / P.f(18 if P.d("not_halved") else 36)
        P.put("output", total)
        # backward
        pr = np.exp(s - (mr + np.log(np.exp(s - mr[:, None]).sum(1)))[:, None])
        pc = np.exp(s - (mc + np.log(np.exp(s - mc).sum(0)))[None])
        eye = np.eye(18, dtype=q.dtype)
        ds = (pr + pc - 2 * eye) / P.f(36)
        dq_n = temp * ((pr - eye) / P.f(36) if P.d("column_part_not_in_grad_q") else ds) @ kn
        dk_n = temp * (ds if P.d("grad_k_without_transpose") else ds.T) @ qn
        gq = dq_n if P.d("norm_not_differentiated") else dq_n - qn * (qn * dq_n).sum(1, keepdims=True)
        gk = dk_n - kn * (kn * dk_n).sum(1, keepdims=True)
        gq, gk = gq / nq[:, None], gk / nk[:, None]
        if P.d("grad_k_lost_updates"):
            part = temp * (ds[10:15].T @ qn[10:15])
            part = (part - kn * (kn * part).sum(1, keepdims=True)) / nk[:, None]
            lost = np.random.default_rng(6).random(gk.shape) < 0.08
            gk = gk - part * lost
        P.put("grad:q", gq)
        P.put("grad:k", gk)
        gt = (ds * s).sum() / temp if P.d("grad_of_temperature_itself") else (ds * s).sum()
        P.put("grad:log_temp", np.reshape(-gt if P.d("grad_temperature_sign") else gt, 1))

    defects = [
        D("normalised_over_batch", "qn", "axis", "q is normalised over the batch instead of the channels"),
        D("eps_not_squared", "kn", "eps", "|k| + 0.01 instead of sqrt(|k|^2 + 1e-6)", accept=("constant",)),
        D(
            "blocks_stored_transposed",
            "logits",
            "transpose",
            "each whole 5 x 5 block is stored transposed",
            accept=("layout",),
        ),
        D(
            "temperature_divides",
            "logits",
            "other",
            "divided by exp(log_temp) instead of multiplied",
            accept=("function", "factor", "sign", "scale"),
        ),
        D("temperature_without_exp", "logits", "function", "multiplied by log_temp without exp", accept=("factor",)),
        D("own_pair_left_out", "lse_rows", "mask", "the pair itself is not in the row's sum", accept=("drop_term",)),
        D(
            "columns_tile_tail",
            "lse_cols",
            "truncate",
            "rows 15 to 17 are not in the columns' sums",
            accept=("mask", "drop_term"),
        ),
        D("label_of_next", "output", "shift", "the right answer of row i is taken at i + 1", accept=("permute",)),
        D("not_halved", "output", "scale", "the sum of both means is not halved", accept=("factor", "constant")),
        D("column_part_not_in_grad_q", "grad:q", "drop_term", "q's gradient has only the rows' softmax"),
        D(
            "norm_not_differentiated",
            "grad:q",
            "drop_term",
            "the part of the gradient along q is not taken off",
            accept=("factor", "function"),
        ),
        D(
            "grad_k_without_transpose",
            "grad:k",
            "transpose",
            "k's gradient uses the logits' gradient, 18 x 18, without transposing it",
        ),
        D(
            "grad_k_lost_updates",
            "grad:k",
            "race",
            "8% of k's gradients lack what one block of rows adds",
            accept=("drop_term", "truncate", "other"),
        ),
        D(
            "grad_of_temperature_itself",
            "grad:log_temp",
            "factor",
            "the factor exp(log_temp) of the chain rule is missing",
            accept=("function", "scale"),
        ),
        D("grad_temperature_sign", "grad:log_temp", "sign", "the gradient of the log temperature is negated"),
    ]


@program(
    "q07",
    variants=("f32", "bf16"),
    wide=(
        "means",
        "variances",
        "shares",
        "log_prob",
        "log_norm",
        "mass",
        "new_means",
        "new_variances",
        "new_shares",
        "score",
    ),
)
class em_diagonal_gaussians:
    """One EM step of 5 diagonal Gaussians in 7 dimensions on 150 points; the port goes through points in blocks of 64."""

    def make(g):
        centres = randn(g, 5, 7, scale=1.5, shift=40.0)
        x = centres[randint(g, 0, 5, 150)] + randn(g, 150, 7)
        return dict(
            x=x,
            means=centres + randn(g, 5, 7, scale=0.6),
            variances=rand(g, 5, 7, low=0.7, high=1.8),
            shares=torch.softmax(randn(g, 5, scale=0.4), 0),
        )

    def reference(x, means, variances, shares):
        d = (x[:, None] - means).square() / variances
        lp = step("log_prob", shares.log() - 0.5 * (d.sum(-1) + variances.log().sum(-1) + 7 * math.log(2 * math.pi)))
        ln = step("log_norm", torch.logsumexp(lp, -1))
        r = step("resp", torch.exp(lp - ln[:, None]))
        mass = step("mass", r.sum(0))
        mu = step("new_means", r.T @ x / mass[:, None])
        var = step("new_variances", torch.einsum("nk,nkd->kd", r, (x[:, None] - mu).square()) / mass[:, None] + 1e-3)
        return {"new_shares": mass / 150, "score": ln.mean(), "spread": var.sqrt().mean(-1)}

    def port(P: Port):
        x, mu0, var0, shares = P["x"], P["means"], P["variances"], P["shares"]
        lp = np.empty((150, 5), x.dtype)
        for k in range(5):
            quad = np.zeros(150, x.dtype)
            for j in range(7):
                quad += (x[:, j] - mu0[k, j]) ** 2 / (
                    np.sqrt(var0[k, j]) if P.d("divided_by_deviation") else var0[k, j]
                )
            const = P.f(7 * math.log(2 * math.pi))
            if P.d("normaliser_without_dimensions"):
                const = P.f(math.log(2 * math.pi))
            logdet = np.log(var0[k]).sum()
            if P.d("log_determinant_doubled"):
                logdet = 2 * logdet
            lp[:, k] = (P.f(0) if P.d("shares_not_in_log_prob") else np.log(shares[k])) - (quad + logdet + const) / 2
        lp = P.put("log_prob", lp)
        ln = np.empty(150, x.dtype)
        for n in range(0, 150, 64):
            b = lp[n : n + 64]
            m = b.max(1)
            z = np.exp(b - m[:, None]).sum(1)
            ln[n : n + 64] = m + (np.log2(z) if P.d("log_base_two") else np.log(z))
        ln = P.put("log_norm", ln)
        r = np.exp(lp - ln[:, None])
        if P.d("normalised_over_points"):
            r = np.exp(lp - lp.max(0))
            r = r / r.sum(0)
        r = P.put("resp", r)
        mass = np.zeros(5, x.dtype)
        for n in range(0, 128 if P.d("mass_whole_blocks_only") else 150, 64):
            for w in range(n, min(n + 64, 150), 16):
                part = r[w : w + 16].sum(0)
                if P.d("mass_adds_lost") and w in (32, 80, 112):  # two warps read the same old value
                    part = part * np.array([1, 0, 1, 1, 0], x.dtype)
                mass += part
        mass = P.put("mass", mass)
        if P.d("sums_of_column_major_points"):
            xs = np.ascontiguousarray(x).reshape(7, 150).T
        else:
            xs = x
        off = xs.mean(0)
        mu = np.stack([((xs - off) * r[:, k : k + 1]).sum(0) / mass[k] for k in range(5)])
        mu = mu + off * (r.sum(0) / mass)[:, None]
        mu = P.put("new_means", mu)
        about = mu0 if P.d("variance_about_old_means") else mu
        var = np.empty((5, 7), x.dtype)
        for k in range(5):
            div = mass[k] - 1 if P.d("mass_less_one") else mass[k]
            if P.d("one_pass_variance"):
                x32, r32 = x.astype(np.float32), r[:, k : k + 1].astype(np.float32)
                second = (r32 * x32 * x32).sum(0) / np.float32(mass[k])
                var[k] = second - mu[k].astype(np.float32) ** 2
            else:
                var[k] = (r[:, k : k + 1] * (x - about[k]) ** 2).sum(0) / div
        floor = P.f(1e-3)
        var = np.maximum(var, floor) if P.d("floor_instead_of_added") else var + floor
        var = P.put("new_variances", var)
        P.put("new_shares", mass / P.f(5 if P.d("shares_over_components") else 150))
        P.put("score", ln.sum() / P.f(150))
        P.put("spread", np.sqrt(var).sum(1) / P.f(7))

    defects = [
        D(
            "divided_by_deviation",
            "log_prob",
            "function",
            "squares are divided by the deviation instead of the variance",
            accept=("factor", "other"),
        ),
        D(
            "normaliser_without_dimensions",
            "log_prob",
            "constant",
            "log(2 pi) once instead of 7 times",
            accept=("factor", "scale", "drop_term"),
        ),
        D(
            "log_determinant_doubled",
            "log_prob",
            "scale",
            "the log determinant counts twice",
            accept=("factor", "constant"),
        ),
        D(
            "shares_not_in_log_prob",
            "log_prob",
            "drop_term",
            "the components' log shares are left out",
            accept=("factor",),
        ),
        D("log_base_two", "log_norm", "function", "log2 instead of the natural logarithm", accept=("scale",)),
        D(
            "normalised_over_points",
            "resp",
            "axis",
            "responsibilities sum to one over the points instead of the components",
        ),
        D(
            "mass_whole_blocks_only",
            "mass",
            "truncate",
            "points 128 to 149, less than a block, are not summed",
            accept=("drop_term", "mask"),
        ),
        D(
            "mass_adds_lost",
            "mass",
            "race",
            "for two components three warps' partial sums are lost",
            accept=("drop_term", "other", "truncate"),
        ),
        D(
            "sums_of_column_major_points",
            "new_means",
            "layout",
            "the points are read as if stored column by column",
            accept=("transpose",),
        ),
        D(
            "variance_about_old_means",
            "new_variances",
            "stale",
            "the variance is taken about the means from before the step",
            accept=("swap", "other"),
        ),
        D("mass_less_one", "new_variances", "ddof", "divided by mass - 1"),
        D(
            "one_pass_variance",
            "new_variances",
            "precision",
            "E[x^2] - E[x]^2 in float32, with means near 40",
            accept=("function",),
        ),
        D(
            "floor_instead_of_added",
            "new_variances",
            "eps",
            "max(variance, 1e-3) instead of variance + 1e-3",
            accept=("function", "drop_term"),
        ),
        D(
            "shares_over_components",
            "new_shares",
            "scale",
            "divided by the 5 components instead of the 150 points",
            accept=("constant", "axis", "factor"),
        ),
    ]


@program("q08", variants=("f32",), notes="a loop: the second time's steps are called name#2")
class kalman_filter:
    """Three times of a Kalman filter, 4 tracks, 5 states, 3 measurements, some of them missing; the port goes track by track."""

    def make(g):
        a, q, r = randn(g, 4, 5, 5), randn(g, 5, 5, scale=0.4), randn(g, 3, 3, scale=0.4)
        seen = torch.ones(3, 4, dtype=torch.int64)
        seen[0, 2] = seen[1, 1] = seen[2, 3] = 0
        return dict(
            x0=randn(g, 4, 5),
            p0=a @ a.transpose(1, 2) / 5 + 0.5 * torch.eye(5),
            f=torch.eye(5) * 0.9 + randn(g, 5, 5, scale=0.25),
            q=q @ q.T + 0.1 * torch.eye(5),
            h=randn(g, 3, 5, scale=0.7),
            r=r @ r.T + 0.3 * torch.eye(3),
            z=randn(g, 3, 4, 3, scale=1.5),
            seen=seen,
        )

    def reference(x0, p0, f, q, h, r, z, seen):
        x, p = x0, p0
        total = 0
        for t in range(3):
            x = step("x_pred", x @ f.T)
            p = step("p_pred", f @ p @ f.T + q)
            s = step("s", h @ p @ h.T + r)
            gain = step("gain", torch.linalg.solve(s, h @ p).transpose(1, 2))
            y = z[t] - x @ h.T
            ok = seen[t].bool()
            quad = (y * torch.linalg.solve(s, y[..., None])[..., 0]).sum(-1)
            ll = -0.5 * (quad + torch.logdet(s) + 3 * math.log(2 * math.pi))
            total = total + step("loglik", torch.where(ok, ll, 0.0))
            x = step("x", torch.where(ok[:, None], x + (gain @ y[..., None])[..., 0], x))
            p = step("p", torch.where(ok[:, None, None], p - gain @ s @ gain.transpose(1, 2), p))
        return total

    def port(P: Port):
        x0, p0, f, q, h, r, z, seen = (P[n] for n in ("x0", "p0", "f", "q", "h", "r", "z", "seen"))
        dt = x0.dtype
        x, p = x0.copy(), p0.copy()
        total = np.zeros(4, dt)

        def chol(a):
            low = np.zeros_like(a)
            for i in range(3):
                for j in range(i + 1):
                    v = a[i, j] - (low[i, :j] * low[j, :j]).sum()
                    low[i, j] = np.sqrt(v) if i == j else v / low[j, j]
            return low

        def solve(low, b):
            y = np.zeros_like(b)
            for i in range(3):
                y[i] = (b[i] - low[i, :i] @ y[:i]) / low[i, i]
            w = np.zeros_like(b)
            for i in (2, 1, 0):
                w[i] = (y[i] - low[i + 1 :, i] @ w[i + 1 :]) / low[i, i]
            return w

        for t in range(3):
            old_p = p
            x = P.put("x_pred", np.stack([f @ x[b] for b in range(4)]))
            new = np.empty((4, 5, 5), dt)
            for b in range(4):
                pb = p[0] if P.d("first_tracks_covariance") and b == 1 else p[b]
                if P.d("f_transposed_in_covariance"):
                    new[b] = f.T @ pb @ f + q
                elif P.d("process_noise_missing"):
                    new[b] = f @ pb @ f.T
                else:
                    new[b] = f @ pb @ f.T + q
            p = P.put("p_pred", new)
            s = np.empty((4, 3, 3), dt)
            for b in range(4):
                noise = r * r if P.d("noise_squared_again") else r
                if P.d("noise_only_on_diagonal"):
                    noise = np.diag(np.diag(r))
                s[b] = h @ p[b] @ h.T + noise
            s = P.put("s", s)
            gain = np.empty((4, 5, 3), dt)
            for b in range(4):
                pp = old_p[b] if P.d("gain_from_old_covariance") else p[b]
                low = chol(s[b])
                hp = h @ pp
                if P.d("half_solve"):
                    y = np.zeros_like(hp)
                    for i in range(3):
                        y[i] = (hp[i] - low[i, :i] @ y[:i]) / low[i, i]
                    gain[b] = y.T
                else:
                    gain[b] = solve(low, hp).T
            if P.d("gain_in_bf16"):
                gain = bf16(gain)
            gain = P.put("gain", gain)
            ll = np.zeros(4, dt)
            nx, np_ = x.copy(), p.copy()
            for b in range(4):
                y = z[t, b] - h @ x[b]
                low = chol(s[b])
                logdet = (1 if P.d("log_determinant_of_factor") else 2) * np.log(np.diagonal(low)).sum()
                if seen[t, b]:
                    ll[b] = -(y @ solve(low, y) + logdet + P.f(3 * math.log(2 * math.pi))) / 2
                zb = z[t, b]
                if P.d("measurement_of_time_before") and t:
                    zb = z[t - 1, b]
                y = zb - h @ x[b]
                if P.d("innovation_sign"):
                    y = -y
                if seen[t, b] or P.d("missing_measurements_used"):
                    nx[b] = x[b] + gain[b] @ y
                if seen[t, b]:
                    if P.d("covariance_not_written_at_end") and t == 2 and b == 2:
                        np_[b] = 0
                    else:
                        np_[b] = (np.eye(5, dtype=dt) - gain[b] @ h) @ p[b]
            total = total + P.put("loglik", ll)
            x = P.put("x", nx)
            if P.d("covariance_update_only_triangle"):
                np_ = np.tril(np_)
            p = P.put("p", np_)
        P.put("output", total)

    defects = [
        D(
            "first_tracks_covariance",
            "p_pred",
            "stale",
            "track 1 goes on with track 0's covariance",
            accept=("shift", "other"),
        ),
        D("f_transposed_in_covariance", "p_pred", "transpose", "F' P F instead of F P F'"),
        D("process_noise_missing", "p_pred", "drop_term", "Q is not added"),
        D(
            "noise_squared_again",
            "s",
            "factor",
            "R's elements, variances already, are squared",
            accept=("function", "other"),
        ),
        D("noise_only_on_diagonal", "s", "mask", "only R's diagonal is added", accept=("drop_term", "zero", "other")),
        D("gain_from_old_covariance", "gain", "stale", "the gain uses the covariance from before the prediction"),
        D(
            "half_solve",
            "gain",
            "other",
            "only the forward half of the Cholesky solve is done",
            accept=("function", "drop_term", "factor"),
        ),
        D("gain_in_bf16", "gain", "precision", "the gain is computed in bfloat16"),
        D(
            "log_determinant_of_factor",
            "loglik",
            "scale",
            "the sum of the Cholesky factor's logs isn't doubled",
            accept=("factor", "constant"),
        ),
        D(
            "measurement_of_time_before",
            "x#2",
            "shift",
            "from the second time on, the measurement of the time before is used",
            accept=("stale",),
        ),
        D("innovation_sign", "x", "sign", "the innovation is negated"),
        D("missing_measurements_used", "x", "mask", "states are updated with measurements marked as missing"),
        D("covariance_not_written_at_end", "p#3", "zero", "the last covariance of track 2 is never written"),
        D(
            "covariance_update_only_triangle",
            "p",
            "mask",
            "only the lower triangle of the covariance is kept",
            accept=("zero", "truncate"),
        ),
    ]
