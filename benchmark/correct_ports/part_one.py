"""Attention, normalisation, losses, recurrences, optimisers and experts: right ports, by other means."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import Port, program, rand, randint, randn, step

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


@program("b01", variants=("bf16", "f32", "f16", "bf16reg"), wide=("lse",))
class rope_flash_attention:
    """Rotary embedding, then causal attention of grouped heads over padded keys, and its backward. The port rotates by
    complex numbers, keeps an online softmax in base 2 over tiles, saves the log-sum-exp, and recomputes backward."""

    def make(g):
        return dict(
            q=randn(g, 2, 4, 13, 8, scale=1.2, shift=0.2),
            k=randn(g, 2, 2, 13, 8, scale=1.3, shift=-0.3),
            v=randn(g, 2, 2, 13, 8, shift=0.4),
            dout=randn(g, 2, 4, 13, 8),
            lengths=torch.tensor([13, 9]),
            positions=torch.arange(13) + 37,
        )

    def reference(q, k, v, dout, lengths, positions):
        inv = 10000.0 ** (-torch.arange(0, 8, 2, dtype=q.dtype) / 8)
        angle = positions[:, None].to(q.dtype) * inv
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

        def rotate(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        q = step("q_rot", rotate(q))
        k = step("k_rot", rotate(k))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        at = torch.arange(13)
        keep = (at[None] <= at[:, None]) & (at < lengths[:, None])[:, None, None]
        s = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~keep, float("-inf"))
        step("lse", torch.logsumexp(s, -1))
        o = step("attn", torch.softmax(s, -1) @ v)
        return (o * dout).sum()

    def loss(result):
        return result

    def port(P: Port):
        v, do, lengths = P["v"], P["dout"], P["lengths"]
        dt = v.dtype
        inv = np.exp2(P.f(-2 * np.log2(10000.0) / 8) * np.arange(4).astype(dt))
        angle = P["positions"].astype(dt)[:, None] * inv
        turn = np.cos(angle) + 1j * np.sin(angle)

        def rotate(x, by):
            y = (x[..., :4] + 1j * x[..., 4:]) * by
            return np.concatenate([y.real, y.imag], -1)

        q = P.put("q_rot", rotate(P["q"], turn))
        k = P.put("k_rot", rotate(P["k"], turn))
        c = P.f(LOG2E / 8**0.5)
        o, lse = np.empty_like(q), np.empty(q.shape[:-1], dt)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)

        def scores(b, h, i, j):
            s = (c * q[b, h, i : i + 4]) @ k[b, h // 2, j : j + 5].T
            rows, cols = np.arange(i, i + len(s))[:, None], np.arange(j, j + s.shape[1])[None]
            return np.where((cols <= rows) & (cols < lengths[b]), s, P.f(-np.inf))

        for b in range(2):
            for h in range(4):
                for i in range(0, 13, 4):
                    n = min(4, 13 - i)
                    m, total, acc = np.full(n, -1e30, dt), np.zeros(n, dt), np.zeros((n, 8), dt)
                    for j in range(0, min(i + n, 13), 5):
                        s = scores(b, h, i, j)
                        new = np.maximum(m, s.max(-1))
                        alpha, p = np.exp2(m - new), np.exp2(s - new[:, None])
                        total = total * alpha + p.sum(-1)
                        acc = acc * alpha[:, None] + p @ v[b, h // 2, j : j + 5]
                        m = new
                    o[b, h, i : i + n] = acc * (1 / total)[:, None]
                    lse[b, h, i : i + n] = (m + np.log2(total)) * P.f(LN2)
        lse = P.put("lse", lse)
        o = P.put("attn", o)
        delta = (do * o).sum(-1)
        for b in range(2):
            for h in range(4):
                for j in range(0, 13, 5):
                    for i in range(j // 4 * 4, 13, 4):
                        r, t = slice(i, i + 4), slice(j, j + 5)
                        p = np.exp2(scores(b, h, i, j) - P.f(LOG2E) * lse[b, h, r, None])
                        dv[b, h // 2, t] += p.T @ do[b, h, r]
                        ds = p * (do[b, h, r] @ v[b, h // 2, t].T - delta[b, h, r, None])
                        dq[b, h, r] += ds @ k[b, h // 2, t]
                        dk[b, h // 2, t] += ds.T @ q[b, h, r]
        scale = P.f(8**-0.5)
        P.put("output", delta.sum())
        P.put("grad:q", rotate(dq * scale, turn.conj()))
        P.put("grad:k", rotate(dk * scale, turn.conj()))
        P.put("grad:v", dv)

    defects = []


@program("b02", variants=("f32", "bf16", "f16", "bf16reg"), wide=("mean", "rstd", "gamma", "beta"))
class norm_mlp_backward:
    """Residual add, layer norm, a weight-normed projection, tanh GELU, and a projection, with all gradients. The port
    merges Welford statistics of chunks, has GELU by a sigmoid, and the fused formulas backward."""

    def make(g):
        return dict(
            x=randn(g, 21, 24, scale=1.5, shift=0.7),
            r=randn(g, 21, 24, scale=0.8) + randn(g, 24, scale=1.0),
            gamma=randn(g, 24, scale=0.2, shift=1.0),
            beta=randn(g, 24, scale=0.2),
            v=randn(g, 32, 24, scale=0.7, shift=0.1),
            g=rand(g, 32, 1, low=0.6, high=1.6),
            b=randn(g, 32, scale=0.3),
            w2=randn(g, 24, 32, scale=0.25),
            target=randn(g, 21, 24, scale=1.5, shift=0.5),
        )

    def reference(x, r, gamma, beta, v, g, b, w2, target):
        h = step("resid", x + r)
        mean = step("mean", h.mean(-1, keepdim=True))
        rstd = step("rstd", torch.rsqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-5))
        n = step("normed", (h - mean) * rstd * gamma + beta)
        w = step("weight", g * v / v.norm(dim=1, keepdim=True))
        u = step("up", F.linear(n, w, b))
        a = step("act", F.gelu(u, approximate="tanh"))
        y = step("out", h + F.linear(a, w2))
        return F.smooth_l1_loss(y, target, reduction="sum")

    def loss(result):
        return result

    def port(P: Port):
        gamma, beta, v, g, w2 = P["gamma"], P["beta"], P["v"], P["g"], P["w2"]
        h = P.put("resid", P["x"] + P["r"])
        rows, dt = len(h), h.dtype
        mean, m2, count = np.zeros(rows, dt), np.zeros(rows, dt), 0
        for k in range(0, 24, 8):
            part = h[:, k : k + 8]
            pm = part.sum(-1) * P.f(1 / 8)
            p2 = np.square(part - pm[:, None]).sum(-1)
            d = pm - mean
            mean = mean + d * P.f(8 / (count + 8))
            m2 = m2 + p2 + d * d * P.f(count * 8 / (count + 8))
            count += 8
        mean = P.put("mean", mean[:, None])
        rstd = P.put("rstd", 1 / np.sqrt(m2[:, None] * P.f(1 / 24) + P.f(1e-5)))
        # x * a + b with a = rstd and b = -mean * rstd, as group and layer norms fuse it
        n = P.put("normed", (h * rstd + -mean * rstd) * gamma + beta)
        inv_norm = 1 / np.sqrt(np.einsum("oi,oi->o", v, v))[:, None]
        w = P.put("weight", v * (g * inv_norm))
        u = np.broadcast_to(P["b"], (rows, 32)).copy()
        for k in range(0, 24, 6):
            u += n[:, k : k + 6] @ w[:, k : k + 6].T
        u = P.put("up", u)
        k0, k1 = P.f(2 * (2 / np.pi) ** 0.5), P.f(0.044715)
        sg = 1 / (1 + np.exp2(-P.f(LOG2E) * (k0 * u * (1 + k1 * u * u))))
        a = P.put("act", u * sg)
        y = P.put("out", h + (w2 @ a.T).T)
        d = y - P["target"]
        c = np.clip(d, -1, 1)
        P.put("output", (c * (d - P.f(0.5) * c)).sum())

        P.put("grad:w2", np.einsum("no,ni->oi", c, a))
        da = c @ w2
        du = da * sg * (1 + u * (1 - sg) * k0 * (1 + 3 * k1 * u * u))
        P.put("grad:b", du.reshape(7, 3, 32).sum(0).sum(0))
        dw = np.zeros((32, 24), dt)
        for i in range(0, rows, 7):
            dw += du[i : i + 7].T @ n[i : i + 7]
        along = (dw * v).sum(1, keepdims=True) * inv_norm
        P.put("grad:g", along)
        P.put("grad:v", (g * inv_norm) * (dw - v * (along * inv_norm)))
        dn = du @ w
        xhat = (h - mean) * rstd
        P.put("grad:gamma", (dn * xhat).reshape(3, 7, 24).sum(1).sum(0))
        P.put("grad:beta", dn.reshape(3, 7, 24).sum(1).sum(0))
        wdy = dn * gamma
        c1 = (xhat * wdy).sum(-1, keepdims=True) * P.f(1 / 24)
        c2 = wdy.sum(-1, keepdims=True) * P.f(1 / 24)
        dh = c + (wdy - (xhat * c1 + c2)) * rstd
        P.put("grad:x", dh)
        P.put("grad:r", dh)

    defects = []


@program("b03", variants=("bf16", "f32", "bf16reg"), wide=("lse", "per_token", "output"))
class fused_linear_cross_entropy:
    """RMS norm, a head with capped logits, cross-entropy with smoothing, ignored labels and a z-loss, with gradients.
    The port goes over chunks of the vocabulary with an online log-sum-exp, and has the gradient in one pass."""

    def make(g):
        labels = randint(g, 0, 53, 19)
        labels[torch.tensor([2, 7, 15])] = -100
        return dict(
            hidden=randn(g, 19, 16, scale=3.0, shift=0.5) * rand(g, 19, 1, low=0.2, high=4.0),
            norm=randn(g, 16, scale=0.2, shift=1.0),
            weight=randn(g, 53, 16, scale=0.8),
            labels=labels,
        )

    def reference(hidden, norm, weight, labels):
        x = step("normed", hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * norm)
        logits = step("logits", 10 * torch.tanh(x @ weight.T / 10))
        lse = step("lse", torch.logsumexp(logits, -1))
        per = F.cross_entropy(logits, labels, ignore_index=-100, label_smoothing=0.1, reduction="none")
        per = step("per_token", per)
        valid = labels != -100
        return (per.sum() + 1e-3 * (lse.square() * valid).sum()) / valid.sum()

    def loss(result):
        return result

    def port(P: Port):
        h, norm, W, labels = P["hidden"], P["norm"], P["weight"], P["labels"]
        dt, N, V = h.dtype, 19, 53
        inv = 1 / np.sqrt(np.einsum("ni,ni->n", h, h) * P.f(1 / 16) + P.f(1e-6))[:, None]
        x = P.put("normed", h * (inv * norm))

        def capped(lo):  # tanh by a sigmoid
            raw = x @ W[lo : lo + 16].T
            return 2 / (1 + np.exp2(raw * P.f(-0.2 * LOG2E))) - 1

        logits = P.put("logits", np.concatenate([P.f(10) * capped(lo) for lo in range(0, V, 16)], 1))
        m, s, total = np.full(N, -np.inf, dt), np.zeros(N, dt), np.zeros(N, dt)
        for lo in range(0, V, 16):
            z = logits[:, lo : lo + 16]
            new = np.maximum(m, z.max(1))
            s = s * np.exp(m - new) + np.exp(z - new[:, None]).sum(1)
            m, total = new, total + z.sum(1)
        lse = P.put("lse", m + np.log(s))
        valid = labels != -100
        hit = logits[np.arange(N), np.where(valid, labels, 0)]
        per = P.put("per_token", np.where(valid, lse - P.f(0.9) * hit - P.f(0.1 / V) * total, P.f(0)))
        inv_n = P.f(1 / valid.sum())
        P.put("output", np.where(valid, per + P.f(1e-3) * lse * lse, P.f(0)).sum() * inv_n)

        dx, dW = np.zeros_like(x), np.zeros_like(W)
        for lo in range(0, V, 16):
            z = logits[:, lo : lo + 16]
            d = np.exp(z - lse[:, None]) * (1 + P.f(2e-3) * lse[:, None]) - P.f(0.1 / V)
            d -= P.f(0.9) * (labels[:, None] == np.arange(lo, lo + z.shape[1])[None])
            t = capped(lo)
            d = d * ((1 - t) * (1 + t)) * (valid * inv_n)[:, None]
            d = d.astype(dt)
            dx += d @ W[lo : lo + 16]
            dW[lo : lo + 16] = d.T @ x
        P.put("grad:weight", dW)
        P.put("grad:norm", (dx * (h * inv)).sum(0))
        gy = dx * norm
        P.put("grad:hidden", inv * (gy - h * ((gy * h).sum(-1, keepdims=True) * (inv * inv * P.f(1 / 16)))))

    defects = []


@program("b04", variants=("f32", "bf16", "bf16reg"), wide=("c", "c0"))
class lstm_backward:
    """A masked LSTM over time, and back through it. The port has one product for all inputs, gates by tanh alone, the
    state kept in float32, and recomputes gates backward."""

    def make(g):
        return dict(
            x=randn(g, 6, 3, 5, scale=1.2, shift=0.3),
            w_ih=randn(g, 28, 5, scale=0.4),
            w_hh=randn(g, 28, 7, scale=0.35),
            b_ih=randn(g, 28, scale=0.3),
            b_hh=randn(g, 28, scale=0.3, shift=0.2),
            h0=randn(g, 3, 7, scale=0.5),
            c0=randn(g, 3, 7, scale=0.8),
            mask=(torch.arange(6)[:, None] < torch.tensor([6, 4, 5])).long(),
            dout=randn(g, 6, 3, 7),
        )

    def reference(x, w_ih, w_hh, b_ih, b_hh, h0, c0, mask, dout):
        h, c, total = h0, c0, 0
        for t in range(6):
            i, f, g, o = (F.linear(x[t], w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
            m = mask[t, :, None]
            new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            c = step("c", m * new_c + (1 - m) * c)
            new_h = torch.sigmoid(o) * torch.tanh(c)
            h = step("h", m * new_h + (1 - m) * h)
            total = total + (h * dout[t]).sum()
        return total

    def loss(result):
        return result

    def port(P: Port):
        x, wi, wh, mask, dout = P["x"], P["w_ih"], P["w_hh"], P["mask"].astype(bool)[..., None], P["dout"]
        bias = P["b_ih"] + P["b_hh"]
        pre = (x.reshape(18, 5) @ wi.T + bias).reshape(6, 3, 28)
        half = np.full(28, 0.5, x.dtype)
        half[14:21] = 1
        a, b = half.copy(), 1 - half  # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, and tanh itself

        def gates(t, h):
            lin = pre[t].copy()
            for k in (slice(0, 4), slice(4, 7)):
                lin += h[:, k] @ wh[:, k].T
            return np.split(np.tanh(lin * half) * a + b, 4, -1)

        hs, cs = [P["h0"]], [P["c0"]]
        for t in range(6):
            i, f, g, o = gates(t, hs[-1])
            c = P.put("c", np.where(mask[t], f * cs[-1] + i * g, cs[-1]))
            h = P.put("h", np.where(mask[t], o * np.tanh(c), hs[-1]))
            cs.append(c)
            hs.append(h)
        P.put("output", np.einsum("tbh,tbh->", np.stack(hs[1:]), dout))

        dh, dc = np.zeros_like(hs[0]), np.zeros_like(cs[0])
        da = np.zeros_like(pre)
        for t in reversed(range(6)):
            i, f, g, o = gates(t, hs[t])
            dh = dh + dout[t]
            live = np.where(mask[t], dh, P.f(0))
            tc = np.tanh(cs[t + 1])
            dc = dc + live * o * (1 - tc * tc)
            new = np.where(mask[t], dc, P.f(0))
            da[t] = np.concatenate(
                [new * g * (i - i * i), new * cs[t] * (f - f * f), new * i * (1 - g * g), live * tc * (o - o * o)], -1
            )
            dh = da[t] @ wh + np.where(mask[t], P.f(0), dh)
            dc = np.where(mask[t], dc * f, dc)
        flat = da.reshape(18, 28)
        P.put("grad:x", (flat @ wi).reshape(6, 3, 5))
        P.put("grad:w_ih", flat.T @ x.reshape(18, 5))
        P.put("grad:w_hh", flat.T @ np.concatenate(hs[:-1]))
        P.put("grad:b_ih", flat.sum(0))
        P.put("grad:b_hh", flat.sum(0))
        P.put("grad:h0", dh)
        P.put("grad:c0", dc)

    defects = []


STATE = ("w1", "w2", "w3", "m1", "v1", "row", "col", "m3", "norm", "adamw", "exp_avg", "exp_avg_sq", "update")
STATE += ("adafactor", "row_avg", "col_avg", "lion", "lion_avg", "lamb")


@program("b05", variants=("f32", "bf16"), wide=STATE)
class optimisers:
    """Two steps, with the gradients clipped together, of AdamW with the trust ratio of LAMB, of Adafactor and of Lion.
    The port has lerps, bias corrections folded into the step, and reciprocal roots of factors."""

    def make(g):
        return dict(
            w1=randn(g, 12, 9, scale=0.3, shift=0.05),
            w2=randn(g, 10, 8, scale=0.2),
            w3=randn(g, 17, scale=0.1, shift=1.0),
            g1=randn(g, 2, 12, 9, scale=0.05) * 10 ** rand(g, 12, 1, low=-2, high=0.5),
            g2=randn(g, 2, 10, 8, scale=0.2) * 10 ** rand(g, 8, low=-1.5, high=0.5),
            g3=randn(g, 2, 17, scale=0.3),
            m1=randn(g, 12, 9, scale=0.02),
            v1=rand(g, 12, 9, low=1e-6, high=1e-3),
            row=rand(g, 10, low=1e-4, high=2e-2),
            col=rand(g, 8, low=1e-4, high=2e-2),
            m3=randn(g, 17, scale=0.2),
        )

    def reference(w1, w2, w3, g1, g2, g3, m1, v1, row, col, m3):
        lr, wd = 3e-3, 0.05
        for t in range(2):
            a, b, c = g1[t], g2[t], g3[t]
            norm = step("norm", torch.sqrt(a.square().sum() + b.square().sum() + c.square().sum()))
            scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
            a, b, c = a * scale, b * scale, c * scale
            n = t + 8
            m1 = step("exp_avg", 0.9 * m1 + 0.1 * a)
            v1 = step("exp_avg_sq", 0.999 * v1 + 0.001 * a.square())
            m_hat, v_hat = m1 / (1 - 0.9**n), v1 / (1 - 0.999**n)
            u = step("update", m_hat / (v_hat.sqrt() + 1e-8) + wd * w1)
            ratio = step("lamb", w1.norm() / u.norm())
            w1 = step("adamw", w1 - lr * ratio * u)

            sq = b.square() + 1e-30
            row = step("row_avg", 0.98 * row + 0.02 * sq.mean(1))
            col = step("col_avg", 0.98 * col + 0.02 * sq.mean(0))
            v = row[:, None] * col[None] / row.mean()
            u = b / v.sqrt()
            u = u / torch.clamp(u.square().mean().sqrt(), min=1.0)
            w2 = step("adafactor", w2 - 1e-2 * torch.clamp(w2.square().mean().sqrt(), min=1e-3) * u)

            w3 = step("lion", w3 * (1 - lr * wd) - lr * torch.sign(0.9 * m3 + 0.1 * c))
            m3 = step("lion_avg", 0.99 * m3 + 0.01 * c)
        return {"copy1": w1, "copy2": w2, "copy3": w3}

    def port(P: Port):
        w1, w2, w3 = P["w1"], P["w2"], P["w3"]
        m1, v1, row, col, m3 = P["m1"], P["v1"], P["row"], P["col"], P["m3"]
        f = P.f
        for t in range(2):
            a, b, c = P["g1"][t], P["g2"][t], P["g3"][t]
            parts = [np.dot(x.ravel(), x.ravel()) for x in (a, b, c)]  # multi-tensor: a partial sum each
            norm = P.put("norm", np.sqrt(np.sum(np.stack(parts))))
            scale = np.minimum(1 / (norm + f(1e-6)), f(1))
            a, b, c = a * scale, b * scale, c * scale
            n = t + 8
            m1 = P.put("exp_avg", m1 + f(0.1) * (a - m1))
            v1 = P.put("exp_avg_sq", v1 + f(0.001) * (a * a - v1))
            root = (1 - 0.999**n) ** 0.5
            u = P.put("update", f(root / (1 - 0.9**n)) * m1 / (np.sqrt(v1) + f(1e-8 * root)) + f(0.05) * w1)
            ratio = P.put("lamb", np.sqrt((w1 * w1).sum() / (u * u).sum()))
            w1 = P.put("adamw", w1 + (f(-3e-3) * ratio) * u)

            sq = b * b
            row = P.put("row_avg", row + f(0.02) * (sq.sum(1) * f(1 / 8) - row))
            col = P.put("col_avg", col + f(0.02) * (sq.sum(0) * f(1 / 10) - col))
            r, q = 1 / np.sqrt(row / (row.sum() * f(1 / 10))), 1 / np.sqrt(col)
            u = b * r[:, None] * q[None]
            inv = 1 / np.maximum(np.sqrt(np.einsum("ij,ij->", u, u) * f(1 / 80)), f(1))
            size = np.maximum(np.sqrt(np.einsum("ij,ij->", w2, w2) * f(1 / 80)), f(1e-3))
            w2 = P.put("adafactor", w2 - (f(1e-2) * size * inv) * u)

            u = np.sign(m3 + f(0.1) * (c - m3))
            w3 = P.put("lion", w3 - f(3e-3) * (u + f(0.05) * w3))
            m3 = P.put("lion_avg", m3 + f(0.01) * (c - m3))
        P.put("copy1", w1)
        P.put("copy2", w2)
        P.put("copy3", w3)

    defects = []


@program("b06", variants=("bf16", "f32", "bf16reg"), wide=("router", "gates", "balance"))
class mixture_of_experts:
    """Two of six SwiGLU experts a token, with a loss for balance, and gradients. The port sorts tokens by expert, has
    one product for both halves, weighs before the last product, and has gates from the difference of two logits."""

    def make(g):
        return dict(
            x=randn(g, 15, 12, scale=1.1, shift=0.2),
            w_r=randn(g, 6, 12, scale=0.5),
            w1=randn(g, 6, 10, 12, scale=0.35),
            w3=randn(g, 6, 10, 12, scale=0.35),
            w2=randn(g, 6, 12, 10, scale=0.4),
            dout=randn(g, 15, 12),
        )

    def reference(x, w_r, w1, w3, w2, dout):
        logits = step("router", x @ w_r.T)
        probs = torch.softmax(logits, -1)
        top, index = probs.topk(2, -1)
        index = step("experts", index)
        gates = step("gates", top / top.sum(-1, keepdim=True))
        fraction = F.one_hot(index, 6).to(x.dtype).mean((0, 1))
        balance = step("balance", 6 * (fraction * probs.mean(0)).sum())
        acts = []
        for k in range(2):
            e = index[:, k]
            a = torch.einsum("ni,nji->nj", x, w1[e])
            b = torch.einsum("ni,nji->nj", x, w3[e])
            acts.append(F.silu(a) * b)
        act = step("act", torch.stack(acts, 1))
        y = sum(gates[:, k, None] * torch.einsum("nj,nij->ni", act[:, k], w2[index[:, k]]) for k in range(2))
        y = step("mixed", y)
        return (y * dout).sum() + 0.05 * balance

    def loss(result):
        return result

    def port(P: Port):
        x, wr, w1, w3, w2, do = P["x"], P["w_r"], P["w1"], P["w3"], P["w2"], P["dout"]
        dt = x.dtype
        logits = P.put("router", np.stack([x @ wr[e] for e in range(6)], 1))
        index = P.put("experts", np.argsort(-logits, 1, kind="stable")[:, :2])
        pair = np.take_along_axis(logits, index, 1)
        second = 1 / (1 + np.exp(pair[:, 0] - pair[:, 1]))
        first = 1 / (1 + np.exp(pair[:, 1] - pair[:, 0]))
        gates = P.put("gates", np.stack([first, second], 1))
        ex = np.exp(logits - pair[:, :1])
        probs = ex * (1 / ex.sum(1, keepdims=True))
        counts = np.bincount(index.ravel(), minlength=6)
        load = counts.astype(dt) * P.f(6 / 30 / 15)
        balance = P.put("balance", (probs.sum(0) * load).sum())

        order = np.argsort(index.ravel(), kind="stable")
        ends = np.cumsum(counts)
        both = np.concatenate([w1, w3], 1)
        lin, act = np.empty((30, 20), dt), np.empty((30, 10), dt)
        for e in range(6):
            rows = order[ends[e] - counts[e] : ends[e]]
            lin[rows] = x[rows // 2] @ both[e].T
        a, b = lin[:, :10], lin[:, 10:]
        sg = 1 / (1 + np.exp2(P.f(-LOG2E) * a))
        act = P.put("act", (a * sg * b).reshape(15, 2, 10)).reshape(30, 10)
        y = np.zeros_like(x)
        flat = gates.reshape(30, 1)
        for e in range(6):
            rows = order[ends[e] - counts[e] : ends[e]]
            np.add.at(y, rows // 2, (flat[rows] * act[rows]) @ w2[e].T)
        y = P.put("mixed", y)
        P.put("output", np.vdot(y, do) + P.f(0.05) * balance)

        dgate, dx = np.empty(30, dt), np.zeros_like(x)
        d1, d3, d2 = np.zeros_like(w1), np.zeros_like(w3), np.zeros_like(w2)
        for e in range(6):
            rows = order[ends[e] - counts[e] : ends[e]]
            back = do[rows // 2] @ w2[e]  # before the gate: its product with the activation is the gate's gradient
            dgate[rows] = (back * act[rows]).sum(1)
            d2[e] = do[rows // 2].T @ (flat[rows] * act[rows])
            dact = flat[rows] * back
            da = dact * b[rows] * (sg[rows] * (1 + a[rows] * (1 - sg[rows])))
            db = dact * (a[rows] * sg[rows])
            dlin = np.concatenate([da, db], 1)
            d = dlin.T @ x[rows // 2]
            d1[e], d3[e] = d[:10], d[10:]
            np.add.at(dx, rows // 2, dlin @ both[e])
        dgate = dgate.reshape(15, 2)
        slope = first * second * (dgate[:, 0] - dgate[:, 1])
        dl = np.zeros_like(logits)
        np.put_along_axis(dl, index, np.stack([slope, -slope], 1), 1)
        dl += P.f(0.05) * probs * (load - (probs * load).sum(1, keepdims=True))
        P.put("grad:x", dx + dl @ wr)
        P.put("grad:w_r", dl.T @ x)
        P.put("grad:w1", d1)
        P.put("grad:w3", d3)
        P.put("grad:w2", d2)

    defects = []


@program("b07", variants=("f32", "bf16", "bf16reg"), wide=("A_log", "D", "bias", "state"))
class selective_scan:
    """Mamba's selective scan with a gate, and back. The port scans in parallel by doubling in chunks of four, in base
    2, and the gradient by a scan from the end."""

    def make(g):
        return dict(
            u=randn(g, 2, 11, 6, shift=0.3),
            delta=randn(g, 2, 11, 6, scale=0.8, shift=-1.0),
            bias=randn(g, 6, scale=0.4, shift=-0.5),
            A_log=torch.log(torch.arange(1.0, 5.0, dtype=torch.float64)).expand(6, 4) + randn(g, 6, 4, scale=0.1),
            B=randn(g, 2, 11, 4),
            C=randn(g, 2, 11, 4, shift=0.2),
            D=randn(g, 6, scale=0.2, shift=1.0),
            z=randn(g, 2, 11, 6, scale=1.5),
            dout=randn(g, 2, 11, 6),
        )

    def reference(u, delta, bias, A_log, B, C, D, z, dout):
        dt = step("dt", F.softplus(delta + bias))
        A = -torch.exp(A_log)
        h = u.new_zeros(2, 6, 4)
        ys = []
        for t in range(11):
            decay = torch.exp(dt[:, t, :, None] * A)
            h = decay * h + dt[:, t, :, None] * B[:, t, None] * u[:, t, :, None]
            ys.append((h * C[:, t, None]).sum(-1))
        step("state", h)
        y = step("scanned", torch.stack(ys, 1) + D * u)
        out = step("gated", y * F.silu(z))
        return (out * dout).sum()

    def loss(result):
        return result

    def port(P: Port):
        u, B, C, D, z, do = P["u"], P["B"], P["C"], P["D"], P["z"], P["dout"]
        raw = P["delta"] + P["bias"]
        dt = P.put("dt", np.maximum(raw, 0) + np.log1p(np.exp(-np.abs(raw))))
        A = -np.exp(P["A_log"])
        A2 = A * P.f(LOG2E)
        a = np.exp2(dt[..., None] * A2)
        b = (dt * u)[..., None] * B[:, :, None]

        def scan(a, b):
            h, carry = np.empty_like(b), np.zeros_like(b[:, 0])
            for lo in range(0, 11, 4):
                pa, pb = a[:, lo : lo + 4].copy(), b[:, lo : lo + 4].copy()
                for k in (1, 2):
                    na, nb = pa.copy(), pb.copy()
                    nb[:, k:] = pa[:, k:] * pb[:, :-k] + pb[:, k:]
                    na[:, k:] = pa[:, k:] * pa[:, :-k]
                    pa, pb = na, nb
                h[:, lo : lo + 4] = pa * carry[:, None] + pb
                carry = h[:, min(lo + 3, 10)]
            return h

        h = scan(a, b)
        P.put("state", h[:, -1])
        y = P.put("scanned", np.einsum("btdn,btn->btd", h, C) + D * u)
        sg = 1 / (1 + np.exp(-z))
        out = P.put("gated", y * (z * sg))
        P.put("output", (out * do).sum((1, 2)).sum())

        dy = do * (z * sg)
        P.put("grad:z", do * y * (sg * (1 + z * (1 - sg))))
        P.put("grad:D", (dy * u).sum(1).sum(0))
        P.put("grad:C", np.einsum("btdn,btd->btn", h, dy))
        later = np.concatenate([a[:, 1:], np.zeros_like(a[:, :1])], 1)
        dh = scan(later[:, ::-1], (dy[..., None] * C[:, :, None])[:, ::-1])[:, ::-1]
        # a h_{t-1} = h - b saves a shifted load; here the state before it is at hand
        before = np.concatenate([np.zeros_like(h[:, :1]), h[:, :-1]], 1)
        da = dh * before * a
        dB = np.einsum("btdn,btn->btd", dh, B)
        P.put("grad:u", dB * dt + D * dy)
        P.put("grad:B", np.einsum("btdn,btd->btn", dh, dt * u))
        P.put("grad:A_log", np.einsum("btdn,btd->dn", da, dt) * A)
        ddt = (np.einsum("btdn,dn->btd", da, A) + dB * u) * (1 / (1 + np.exp(-raw)))
        P.put("grad:delta", ddt)
        P.put("grad:bias", ddt.sum((0, 1)))

    defects = []
