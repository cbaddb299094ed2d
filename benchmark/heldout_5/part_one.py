"""Latent attention decoding, a triangle update of pair features, Gaussian splatting."""

from __future__ import annotations

import math

import numpy as np
import torch

from benchmark.base import D, Port, program, rand, randint, randn, sigmoid, step


@program("v01", variants=("f32", "bf16", "bf16reg", "f16"), wide=("lse",))
class latent_attention_decode:
    """One decoding step of multi-head latent attention. The port absorbs the key and value up-projections into the
    query and the context, and splits the cache among workers, whose partial results it merges."""

    def make(g):
        lens = torch.tensor([29, 18, 11]) - randint(g, 0, 3, 3)
        return dict(
            x=randn(g, 3, 40, scale=0.8),
            w_dq=randn(g, 24, 40, scale=0.16),
            q_gamma=randn(g, 24, scale=0.15, shift=1.0),
            w_uq=randn(g, 4 * 20, 24, scale=0.22),
            cache=randn(g, 3, 29, 22, scale=0.9),
            cache_rope=randn(g, 3, 29, 8, scale=0.8),
            w_uk=randn(g, 4, 12, 22, scale=0.22),
            w_uv=randn(g, 4, 10, 22, scale=0.22),
            w_o=randn(g, 40, 40, scale=0.16),
            lens=lens,
        )

    def reference(x, w_dq, q_gamma, w_uq, cache, cache_rope, w_uk, w_uv, w_o, lens):
        def rotate(t, pos):  # neighbouring numbers are a pair
            freq = 10000.0 ** (-torch.arange(4, dtype=t.dtype) / 4)
            angle = pos.to(t.dtype)[..., None] * freq
            c, s = angle.cos(), angle.sin()
            a, b = t[..., 0::2], t[..., 1::2]
            return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)

        t = x @ w_dq.T
        ql = step("q_latent", t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * q_gamma)
        q = (ql @ w_uq.T).view(3, 4, 20)
        qr = step("q_rope", rotate(q[..., 12:], (lens - 1)[:, None].expand(3, 4)))
        kr = step("k_rope", rotate(cache_rope, torch.arange(29).expand(3, 29)))
        k = torch.einsum("hdc,btc->bhtd", w_uk, cache)
        s = torch.einsum("bhd,bhtd->bht", q[..., :12], k) + torch.einsum("bhr,btr->bht", qr, kr)
        s = step("scores", s / math.sqrt(20))
        inside = (torch.arange(29) < lens[:, None])[:, None]
        masked = s.masked_fill(~inside, float("-inf"))
        step("lse", masked.logsumexp(-1))
        ctx = step("context", torch.einsum("bht,btc->bhc", masked.softmax(-1), cache))
        return torch.einsum("bhc,hdc->bhd", ctx, w_uv).reshape(3, 40) @ w_o.T

    def port(P: Port):
        x, cache, cr, lens = P["x"], P["cache"], P["cache_rope"], P["lens"]
        wuk, wuv, wo = P["w_uk"], P["w_uv"], P["w_o"]
        t = np.zeros((3, 24), x.dtype)
        for k0 in range(0, 40, 16):
            t = t + x[:, k0 : k0 + 16] @ P["w_dq"][:, k0 : k0 + 16].T
        ql = t / np.sqrt((t * t).sum(-1, keepdims=True) / 24 + P.f(1e-6)) * P["q_gamma"]
        ql = P.put("q_latent", ql)
        q = np.stack([ql @ P["w_uq"][20 * h : 20 * h + 20].T for h in range(4)], 1)

        inv = P.f([10000.0 ** (-i / 4) for i in range(4)])

        def rotated(t, pos, halves=False):
            z = np.exp(1j * (P.f(pos)[..., None] * inv)).astype(np.result_type(t.dtype, np.complex64))
            out = np.empty_like(t)
            one, two = (slice(0, 4), slice(4, 8)) if halves else (slice(0, 8, 2), slice(1, 8, 2))
            z = (t[..., one] + 1j * t[..., two]).astype(z.dtype) * z
            out[..., one], out[..., two] = z.real, z.imag
            return out

        qr = rotated(q[..., 12:], np.repeat((lens - 1)[:, None], 4, 1), P.d("query_rope_pairs_halves"))
        qr = P.put("q_rope", qr)
        pos = np.repeat(np.arange(29)[None], 3, 0)
        if P.d("cache_positions_from_one"):
            pos = pos + 1
        kr = P.put("k_rope", rotated(cr, pos))

        scale = P.f(1 / math.sqrt(22 + 8 if P.d("scale_from_latent_width") else 20))
        absorbed = np.einsum("bhd,hdc->bhc", q[..., :12], wuk)
        wide_q = np.concatenate([absorbed, qr], -1) * scale
        wide_k = np.concatenate([cache, kr], -1)
        s = P.put("scores", np.stack([wide_q[b] @ wide_k[b].T for b in range(3)]))

        lse, ctx = np.empty((3, 4), x.dtype), np.empty((3, 4, 22), x.dtype)
        log2e, ln2 = P.f(math.log2(math.e)), P.f(math.log(2))
        for b in range(3):
            n, parts = int(lens[b]), []
            for t0 in range(0, n, 8):  # one worker a block of 8, on a base-2 scale
                end = min(t0 + 8, 29) if P.d("last_block_beyond_length") else min(t0 + 8, n)
                block = s[b, :, t0:end] * log2e
                m = block.max(-1)
                p = np.exp2(block - m[:, None])
                parts.append((m, p.sum(-1), p @ cache[b, t0:end]))
            top = np.max([m for m, _, _ in parts], 0)
            total = sum(l * np.exp2(m - top) for m, l, _ in parts)
            if P.d("partial_contexts_not_rescaled"):
                acc = sum(o for _, _, o in parts)
            else:
                acc = sum(o * np.exp2(m - top)[:, None] for m, _, o in parts)
            lse[b] = top + np.log2(total)
            if not P.d("lse_left_in_base_two"):
                lse[b] = lse[b] * ln2
            ctx[b] = acc / total[:, None]
        P.put("lse", lse)
        ctx = P.put("context", ctx)

        out = np.zeros((3, 40), x.dtype)
        for h in range(4):
            out = out + (ctx[:, h] @ wuv[h].T) @ wo[:, 10 * h : 10 * h + 10].T
        P.put("output", out)

    defects = [
        D(
            "query_rope_pairs_halves",
            "q_rope",
            "permute",
            "Query rotation pairs number i with i + 4 instead of its neighbour.",
            ("layout", "swap", "axis", "shift", "function", "other"),
        ),
        D(
            "cache_positions_from_one",
            "k_rope",
            "shift",
            "Cached keys are rotated for their position plus one.",
            ("constant", "function", "other"),
        ),
        D(
            "scale_from_latent_width",
            "scores",
            "factor",
            "Scores are divided by the root of the absorbed width, 30, instead of the head's width, 20.",
            ("scale", "constant"),
        ),
        D(
            "lse_left_in_base_two",
            "lse",
            "factor",
            "The log-sum-exp is stored in base two, without the factor ln 2.",
            ("scale", "function", "constant"),
        ),
        D(
            "last_block_beyond_length",
            "lse",
            "mask",
            "The last block of the cache is not cut at the sequence's length, so that old entries take part.",
            ("stale", "truncate", "drop_term"),
        ),
        D(
            "partial_contexts_not_rescaled",
            "context",
            "factor",
            "Partial contexts of the splits are added without scaling from their own maximum to the common one.",
            ("scale", "drop_term", "function", "other"),
        ),
    ]


@program("v02")
class triangle_update:
    """Triangle multiplicative update with outgoing edges. The port makes all projections in one product, runs the
    statistics by merging chunks, and the triangle as a product a channel with tiles along the third residue."""

    def make(g):
        present = (rand(g, 13) > 0.12).double()
        present[:2] = 1
        return dict(
            z=randn(g, 13, 13, 18, scale=0.9, shift=0.15),
            mask=present[:, None] * present[None],
            gamma_in=randn(g, 18, scale=0.2, shift=1.0),
            beta_in=randn(g, 18, scale=0.1),
            w_a=randn(g, 14, 18, scale=0.11),
            w_b=randn(g, 14, 18, scale=0.11),
            g_a=randn(g, 14, 18, scale=0.2),
            g_b=randn(g, 14, 18, scale=0.2),
            gamma_out=randn(g, 14, scale=0.2, shift=1.0),
            beta_out=randn(g, 14, scale=0.1),
            w_out=randn(g, 18, 14, scale=0.25),
            w_gate=randn(g, 18, 18, scale=0.2),
            b_gate=randn(g, 18, scale=0.3, shift=0.6),
        )

    def reference(z, mask, gamma_in, beta_in, w_a, w_b, g_a, g_b, gamma_out, beta_out, w_out, w_gate, b_gate):
        def norm(t, gamma, beta):
            return torch.nn.functional.layer_norm(t, t.shape[-1:], gamma, beta, 1e-5)

        n = step("normed", norm(z, gamma_in, beta_in))
        m = mask[..., None]
        a = step("left", m * torch.sigmoid(n @ g_a.T) * (n @ w_a.T))
        b = step("right", m * torch.sigmoid(n @ g_b.T) * (n @ w_b.T))
        t = step("triangle", torch.einsum("ikc,jkc->ijc", a, b))
        o = step("normed_out", norm(t, gamma_out, beta_out))
        gate = step("gate", torch.sigmoid(n @ w_gate.T + b_gate))
        return z + gate * (o @ w_out.T)

    def port(P: Port):
        z, mask = P["z"], P["mask"].reshape(169, 1)

        def norm(t, gamma, beta, eps, chunk, ddof=0):
            rows = t.reshape(169, -1)
            width = rows.shape[1]
            count, mean, m2 = 0, np.zeros((169, 1), t.dtype), np.zeros((169, 1), t.dtype)
            for c in range(0, width, chunk):
                part = rows[:, c : c + chunk]
                k = part.shape[1]
                pm = part.sum(1, keepdims=True) / k
                delta = pm - mean
                m2 = m2 + ((part - pm) ** 2).sum(1, keepdims=True) + delta * delta * P.f(count * k / (count + k))
                mean = mean + delta * P.f(k / (count + k))
                count += k
            return ((rows - mean) / np.sqrt(m2 / (width - ddof) + P.f(eps)) * gamma + beta).reshape(t.shape)

        ddof = 1 if P.d("variance_over_n_minus_one") else 0
        n = P.put("normed", norm(z, P["gamma_in"], P["beta_in"], 1e-5, 8, ddof))
        rows = n.reshape(169, 18)

        packed = np.concatenate([P["w_a"], P["g_a"], P["w_b"], P["g_b"]])
        all_four = rows @ packed.T
        wa, ga, wb, gb = (all_four[:, 14 * i : 14 * i + 14] for i in range(4))
        if P.d("gates_of_the_two_sides_exchanged"):
            ga, gb = gb, ga
        a = P.put("left", (mask * wa / (1 + np.exp(-ga))).reshape(13, 13, 14))
        b = P.put("right", (mask * wb / (1 + np.exp(-gb))).reshape(13, 13, 14))

        tri = np.empty((14, 13, 13), z.dtype)
        for c in range(14):
            left, right = np.ascontiguousarray(a[..., c]), np.ascontiguousarray(b[..., c])
            if P.d("incoming_edges_instead"):
                left, right = left.T, right.T
            acc = np.zeros((13, 13), z.dtype)
            for k in range(0, 13 // 4 * 4 if P.d("last_residue_tile_left_out") else 13, 4):
                acc = acc + left[:, k : k + 4] @ right[:, k : k + 4].T
            tri[c] = acc
        tri = P.put("triangle", tri.transpose(1, 2, 0))

        eps = 1e-3 if P.d("second_norm_with_other_epsilon") else 1e-5
        o = P.put("normed_out", norm(tri, P["gamma_out"], P["beta_out"], eps, 5))

        pre = rows @ P["w_gate"].T
        if not P.d("gate_without_bias"):
            pre = pre + P["b_gate"]
        gate = P.put("gate", sigmoid(pre).reshape(13, 13, 18))

        out = np.empty_like(z)
        for i in range(0, 13, 5):  # row bands
            band = o[i : i + 5].reshape(-1, 14)
            out[i : i + 5] = (band @ P["w_out"].T).reshape(-1, 13, 18) * gate[i : i + 5] + z[i : i + 5]
        P.put("output", out)

    defects = [
        D(
            "variance_over_n_minus_one",
            "normed",
            "ddof",
            "The input norm divides the squares by 17 instead of 18.",
            ("factor", "scale"),
        ),
        D(
            "gates_of_the_two_sides_exchanged",
            "left",
            "swap",
            "Left projections are gated with the right gate and the other way round.",
            ("permute", "layout", "shift", "stale"),
        ),
        D(
            "incoming_edges_instead",
            "triangle",
            "transpose",
            "Products run over edges k to i and k to j instead of i to k and j to k.",
            ("axis", "permute", "swap", "layout"),
        ),
        D(
            "last_residue_tile_left_out",
            "triangle",
            "truncate",
            "The thirteenth residue, the only one in the last tile, is left out of the sum.",
            ("drop_term", "mask", "zero"),
        ),
        D(
            "second_norm_with_other_epsilon",
            "normed_out",
            "eps",
            "The second norm has 1e-3 for epsilon instead of 1e-5.",
            ("constant",),
        ),
        D(
            "gate_without_bias",
            "gate",
            "drop_term",
            "The bias of the output gate is not added.",
            ("shift", "constant", "zero"),
        ),
    ]


@program("v03", wide=("means", "quats", "log_scales", "cov3d", "mean2d", "cov2d", "conic"))
class gaussian_splatting:
    """Projection of 3D Gaussians and blending from front to back. The port writes out all small matrix products and
    goes over the image in tiles of 4 by 4 pixels, and over sorted Gaussians in batches of 8."""

    def make(g):
        z = rand(g, 30, low=2.0, high=6.0)
        xy = rand(g, 30, 2, low=-0.55, high=0.55) * z[:, None]
        return dict(
            means=torch.cat([xy, z[:, None]], 1),
            quats=randn(g, 30, 4),
            log_scales=randn(g, 30, 3, scale=0.35, shift=-1.0),
            opacity=randn(g, 30, scale=1.0, shift=-0.3),
            colors=rand(g, 30, 3),
            background=rand(g, 3, low=0.3, high=1.0),
        )

    def reference(means, quats, log_scales, opacity, colors, background):
        fx, fy, cx, cy, width, height = 10.0, 11.0, 6.0, 4.5, 12, 9
        r, i, j, k = (quats / quats.norm(dim=-1, keepdim=True)).unbind(-1)
        rot = torch.stack(
            (
                *(1 - 2 * (j * j + k * k), 2 * (i * j - r * k), 2 * (i * k + r * j)),
                *(2 * (i * j + r * k), 1 - 2 * (i * i + k * k), 2 * (j * k - r * i)),
                *(2 * (i * k - r * j), 2 * (j * k + r * i), 1 - 2 * (i * i + j * j)),
            ),
            -1,
        ).view(-1, 3, 3)
        m = rot * log_scales.exp()[:, None]
        cov3 = step("cov3d", m @ m.transpose(1, 2))
        x, y, z = means.unbind(-1)
        mean2 = step("mean2d", torch.stack((fx * x / z + cx, fy * y / z + cy), -1))
        o = torch.zeros_like(z)
        jac = torch.stack((fx / z, o, -fx * x / z**2, o, fy / z, -fy * y / z**2), -1).view(-1, 2, 3)
        c = jac @ cov3 @ jac.transpose(1, 2)
        cov2 = step("cov2d", torch.stack((c[:, 0, 0] + 0.3, c[:, 0, 1], c[:, 1, 1] + 0.3), -1))
        det = cov2[:, 0] * cov2[:, 2] - cov2[:, 1] ** 2
        conic = step("conic", torch.stack((cov2[:, 2], -cov2[:, 1], cov2[:, 0]), -1) / det[:, None])
        px = torch.arange(width, dtype=z.dtype) + 0.5
        py = torch.arange(height, dtype=z.dtype) + 0.5
        dx = px[None, :, None] - mean2[:, 0]
        dy = py[:, None, None] - mean2[:, 1]
        power = -0.5 * (conic[:, 0] * dx**2 + conic[:, 2] * dy**2) - conic[:, 1] * dx * dy
        alpha = step("alpha", (torch.sigmoid(opacity) * power.exp()).clamp(max=0.99))
        order = torch.sort(z, stable=True).indices
        a = alpha[..., order]
        through = torch.cumprod(1 - a, -1)
        before = torch.cat((torch.ones_like(through[..., :1]), through[..., :-1]), -1)
        w = step("weights", a * before)
        left = step("transmittance", through[..., -1])
        return w @ colors[order] + left[..., None] * background

    def port(P: Port):
        fx, fy, cx, cy = P.f([10.0, 11.0, 6.0, 4.5])
        means, q, bg = P["means"], P["quats"], P["background"]
        g = len(means)
        q = q / np.sqrt((q * q).sum(1, keepdims=True))
        w, x, y, z = (q[:, n] for n in ((3, 0, 1, 2) if P.d("quaternion_read_with_real_part_last") else (0, 1, 2, 3)))
        s = np.exp(P["log_scales"])
        one, two = P.f(1), P.f(2)
        rot = (
            (one - two * (y * y + z * z), two * (x * y - w * z), two * (x * z + w * y)),
            (two * (x * y + w * z), one - two * (x * x + z * z), two * (y * z - w * x)),
            (two * (x * z - w * y), two * (y * z + w * x), one - two * (x * x + y * y)),
        )
        cov = np.empty((g, 3, 3), means.dtype)
        s2 = s * s
        for a in range(3):
            for b in range(a, 3):
                cov[:, a, b] = cov[:, b, a] = sum(rot[a][c] * rot[b][c] * s2[:, c] for c in range(3))
        cov = P.put("cov3d", cov)

        X, Y, iz = means[:, 0], means[:, 1], 1 / means[:, 2]
        m2 = P.put("mean2d", np.stack([X * iz * fx + cx, Y * iz * fy + cy], 1))

        a0, b0 = fx * iz, fy * iz
        a2, b2 = -a0 * X * iz, -b0 * Y * iz
        c00 = a0 * a0 * cov[:, 0, 0] + 2 * a0 * a2 * cov[:, 0, 2] + a2 * a2 * cov[:, 2, 2]
        c11 = b0 * b0 * cov[:, 1, 1] + 2 * b0 * b2 * cov[:, 1, 2] + b2 * b2 * cov[:, 2, 2]
        c01 = a0 * b0 * cov[:, 0, 1] + a0 * b2 * cov[:, 0, 2] + a2 * b0 * cov[:, 1, 2] + a2 * b2 * cov[:, 2, 2]
        blur = P.f(0 if P.d("screen_filter_missing") else 0.3)
        c2 = P.put("cov2d", np.stack([c00 + blur, c01, c11 + blur], 1))

        inv = 1 / (c2[:, 0] * c2[:, 2] - c2[:, 1] * c2[:, 1])
        cross = c2[:, 1] * inv
        conic = np.stack([c2[:, 2] * inv, cross if P.d("conic_cross_term_sign") else -cross, c2[:, 0] * inv], 1)
        conic = P.put("conic", conic)

        op = sigmoid(P["opacity"])
        middle = P.f(0 if P.d("pixel_corner_for_its_centre") else 0.5)
        alpha = np.empty((9, 12, g), means.dtype)
        log2e = P.f(math.log2(math.e))
        for v in range(9):
            for u in range(12):
                dx, dy = P.f(u) + middle - m2[:, 0], P.f(v) + middle - m2[:, 1]
                form = dx * (conic[:, 0] * dx + 2 * conic[:, 1] * dy) + conic[:, 2] * dy * dy
                alpha[v, u] = np.minimum(P.f(0.99), op * np.exp2(form * (log2e * P.f(-0.5))))
        alpha = P.put("alpha", alpha)

        order = np.argsort(means[:, 2], kind="stable")
        weights = np.empty((9, 12, g), means.dtype)
        last = np.empty((9, 12), means.dtype)
        for v in range(0, 9, 4):
            for u in range(0, 12, 4):
                tile = np.s_[v : min(v + 4, 9), u : u + 4]
                left = np.ones_like(last[tile])
                for first in range(0, g, 8):
                    for n in range(first, min(first + 8, g)):
                        al = alpha[tile][..., order[n]]
                        if P.d("transmittance_updated_before_blending"):
                            left = left * (1 - al)
                            weights[tile][..., n] = al * left
                        else:
                            weights[tile][..., n] = al * left
                            left = left * (1 - al)
                last[tile] = left
        weights = P.put("weights", weights)
        last = P.put("transmittance", last)

        image = last[..., None] * bg
        if P.d("background_not_dimmed"):
            image = np.ones_like(last)[..., None] * bg
        col = P["colors"][order]
        for first in range(0, g, 8):
            image = image + weights[..., first : first + 8] @ col[first : first + 8]
        P.put("output", image)

    defects = [
        D(
            "quaternion_read_with_real_part_last",
            "cov3d",
            "permute",
            "Quaternions are read as x, y, z, w but are stored as w, x, y, z.",
            ("layout", "shift", "swap", "axis"),
        ),
        D(
            "screen_filter_missing",
            "cov2d",
            "drop_term",
            "The 0.3 of the screen-space filter is not added to the diagonal.",
            ("constant", "eps", "shift"),
        ),
        D("conic_cross_term_sign", "conic", "sign", "The mixed entry of the inverse covariance has the wrong sign."),
        D(
            "pixel_corner_for_its_centre",
            "alpha",
            "shift",
            "Gaussians are evaluated at pixel corners instead of centres half a pixel further.",
            ("constant", "drop_term"),
        ),
        D(
            "transmittance_updated_before_blending",
            "weights",
            "shift",
            "A Gaussian is dimmed by itself since the transmittance is updated before it is used.",
            ("factor", "race", "stale", "other", "function"),
        ),
        D(
            "background_not_dimmed",
            "output",
            "factor",
            "The background is added in full instead of times what light is left.",
            ("drop_term", "scale", "mask", "constant"),
        ),
    ]
