"""Parts of language models: attention over compressed keys, the gated delta rule, a fused linear cross entropy."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randint, randn, sigmoid, silu, step


@program("r01", variants=("bf16", "f32", "bf16reg"), wide=("angles", "lse"))
class latent_attention:
    """Multi-head latent attention with a cache of 6, YaRN's frequencies and nine new tokens.

    The reference expands keys and values; the port absorbs the expansion into the query and the result, and goes over
    the cache in two splits of blocks of 4 with an online softmax.
    """

    def make(g):
        return dict(
            x=randn(g, 2, 9, 40),
            cache_c=randn(g, 2, 6, 24, scale=0.9),
            cache_r=randn(g, 2, 6, 8),
            w_dq=randn(g, 20, 40, scale=0.16),
            g_q=randn(g, 20, scale=0.2, shift=1.0),
            w_uq=randn(g, 3 * 24, 20, scale=0.3),
            w_dkv=randn(g, 32, 40, scale=0.16),
            g_kv=randn(g, 24, scale=0.2, shift=1.0),
            w_ukv=randn(g, 3 * 28, 24, scale=0.25),
            w_o=randn(g, 40, 36, scale=0.2),
        )

    def reference(x, cache_c, cache_r, w_dq, g_q, w_uq, w_dkv, g_kv, w_ukv, w_o):
        def norm(y, gamma):
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma

        def rotated(y, angles):  # neighbours are a pair
            cos, sin = angles.cos(), angles.sin()
            a, b = y[..., 0::2], y[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

        B, T = x.shape[:2]
        past = cache_c.shape[1]
        i = torch.arange(4, dtype=x.dtype)
        plain = 10000 ** (-2 * i / 8)
        ramp = ((i - 0.5) / 2).clamp(0, 1)
        freq = plain * (1 - ramp) + plain / 4 * ramp
        angles = step("angles", (past + torch.arange(T, dtype=x.dtype))[:, None] * freq)
        q_latent = step("q_latent", norm(x @ w_dq.T, g_q))
        q = step("q", (q_latent @ w_uq.T).view(B, T, 3, 24))
        q_rope = step("q_rope", rotated(q[..., 16:], angles[:, None]))
        kv = step("kv_down", x @ w_dkv.T)
        c = step("c_new", norm(kv[..., :24], g_kv))
        r = step("r_new", rotated(kv[..., 24:], angles))
        c = step("latents", torch.cat([cache_c, c], 1))
        r = step("rope_keys", torch.cat([cache_r, r], 1))
        k, v = (c @ w_ukv.T).view(B, past + T, 3, 28).split([16, 12], -1)
        scale = 24**-0.5 * (0.1 * math.log(4) + 1) ** 2
        content = torch.einsum("bthd,bshd->bhts", q[..., :16], k)
        scores = step("scores", (content + torch.einsum("bthd,bsd->bhts", q_rope, r)) * scale)
        hidden = torch.arange(past + T) > past + torch.arange(T)[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
        lse = step("lse", scores.logsumexp(-1))
        context = step("context", torch.einsum("bhts,bshd->bthd", (scores - lse[..., None]).exp(), v))
        return context.flatten(-2) @ w_o.T

    def port(P: Port):
        x = P["x"]
        B, T, H, past = 2, 9, 3, 6
        S = past + T
        freq = []
        for i in range(4):
            plain = 10000.0 ** (-i / 4)
            ramp = min(max((i - 0.5) / 2, 0.0), 1.0)
            freq.append(plain * ((1 - ramp) + ramp / 4))
        pos = np.arange(T) + (0 if P.d("position_without_cache") else past)
        angles = P.f(np.outer(pos, freq))
        if P.d("angles_in_bf16"):
            angles = bf16(bf16(P.f(pos))[:, None] * bf16(P.f(freq))[None])
        angles = P.put("angles", angles)

        def norm(y, gamma):
            out = np.empty_like(y)
            for b in range(B):
                for t in range(T):
                    out[b, t] = y[b, t] / np.sqrt((y[b, t] * y[b, t]).sum() / y.shape[-1] + P.f(1e-6)) * gamma
            return out

        def rotated(y, t, halves=False):
            out = np.empty_like(y)
            for i in range(4):
                a, b = (i, i + 4) if halves else (2 * i, 2 * i + 1)
                c, s = np.cos(angles[t, i]), np.sin(angles[t, i])
                out[..., a] = y[..., a] * c - y[..., b] * s
                out[..., b] = y[..., a] * s + y[..., b] * c
            return out

        q_latent = P.put("q_latent", norm(x @ P["w_dq"].T, P["g_q"]))
        q = P.put("q", (q_latent @ P["w_uq"].T).reshape(B, T, H, 24))
        halves = P.d("rotated_in_halves")
        q_rope = P.put("q_rope", np.stack([rotated(q[:, t, :, 16:], t, halves) for t in range(T)], 1))
        kv = P.put("kv_down", x @ P["w_dkv"].T)
        c, r = kv[..., :24], kv[..., 24:]
        if P.d("norm_over_rope_part_too"):
            c = norm(kv, np.concatenate([P["g_kv"], np.ones(8, x.dtype)]))[..., :24]
        else:
            c = norm(c, P["g_kv"])
        c = P.put("c_new", c)
        r = P.put("r_new", np.stack([rotated(r[:, t], t, halves) for t in range(T)], 1))
        latents = np.zeros((B, S, 24), x.dtype)
        latents[:, :past], latents[:, past:] = P["cache_c"], c
        latents = P.put("latents", latents)
        keys = np.zeros((B, S, 8), x.dtype)
        keys[:, :past] = P["cache_r"]
        if P.d("rope_keys_one_slot_early"):
            keys[:, past - 1 : S - 1] = r
        else:
            keys[:, past:] = r
        keys = P.put("rope_keys", keys)

        up = P["w_ukv"]
        if P.d("all_keys_before_values"):
            w_k, w_v = up[:48].reshape(H, 16, 24), up[48:].reshape(H, 12, 24)
        else:
            w_k, w_v = up.reshape(H, 28, 24)[:, :16], up.reshape(H, 28, 24)[:, 16:]
        mscale = 0.1 * math.log(4) + 1
        scale = mscale**2 / math.sqrt(24)
        if P.d("mscale_not_squared"):
            scale /= mscale
        scores = np.empty((B, H, T, S), x.dtype)
        for h in range(H):
            absorbed = q[:, :, h, :16] @ w_k[h]
            scores[:, h] = (absorbed @ latents.swapaxes(1, 2) + q_rope[:, :, h] @ keys.swapaxes(1, 2)) * P.f(scale)
        scores = P.put("scores", scores)

        lse, context = np.empty((B, H, T), x.dtype), np.empty((B, T, H, 12), x.dtype)
        for b in range(B):
            for h in range(H):
                for t in range(T):
                    last = t + (0 if P.d("mask_without_cache") else past)
                    merged = []
                    for begin, end in ((0, 8), (8, S)):
                        m, total, acc = -np.inf, P.f(0), np.zeros(24, x.dtype)
                        for s in range(begin, end, 4):
                            e = min(s + 4, end, last + 1)
                            if e <= s:
                                continue
                            new = max(m, scores[b, h, t, s:e].max())
                            w = np.exp(scores[b, h, t, s:e] - new)
                            fix = np.exp(P.f(m - new))
                            total = total * fix + w.sum()
                            acc = acc * (1 if P.d("sum_not_rescaled") else fix) + w @ latents[b, s:e]
                            m = new
                        if total > 0:
                            merged.append((m, total, acc))
                    top = max(m for m, _, _ in merged)
                    total = sum(np.exp(m - top) * n for m, n, _ in merged)
                    acc = sum(np.exp(m - top) * a for m, _, a in merged)
                    lse[b, h, t] = top + np.log(total)
                    context[b, t, h] = w_v[h] @ (acc / total)
        P.put("lse", lse)
        context = P.put("context", context)
        flat = context.swapaxes(2, 3) if P.d("heads_innermost") else context
        P.put("output", flat.reshape(B, T, 36) @ P["w_o"].T)

    defects = [
        D(
            "position_without_cache",
            "angles",
            "shift",
            "positions start at 0 and not behind the 6 cached tokens",
            accept=("drop_term", "constant", "other"),
        ),
        D("angles_in_bf16", "angles", "precision", "positions, frequencies and angles are in bfloat16"),
        D(
            "rotated_in_halves",
            "q_rope",
            "permute",
            "i and i + 4 are a pair, and not 2i and 2i + 1",
            accept=("layout", "swap", "function"),
        ),
        D(
            "norm_over_rope_part_too",
            "c_new",
            "other",
            "the norm is over all 32 columns, with the 8 of the rotated key",
            accept=("factor", "mask", "axis"),
        ),
        D(
            "rope_keys_one_slot_early",
            "rope_keys",
            "shift",
            "the new rotated keys are written one slot early; the last slot stays empty",
            accept=("zero", "stale"),
        ),
        D(
            "all_keys_before_values",
            "scores",
            "layout",
            "w_ukv is read as all heads' keys and then all heads' values",
            accept=("permute",),
        ),
        D(
            "mscale_not_squared",
            "scores",
            "scale",
            "YaRN's factor is in the scale once and not twice",
            accept=("factor", "constant"),
        ),
        D("mask_without_cache", "lse", "mask", "token t sees keys up to t and not up to t + 6", accept=("shift",)),
        D(
            "sum_not_rescaled",
            "context",
            "factor",
            "the weighted sum isn't rescaled when a larger score comes",
            accept=("drop_term", "stale", "other"),
        ),
        D(
            "heads_innermost",
            "output",
            "layout",
            "the context is flattened with the heads innermost",
            accept=("transpose", "permute", "axis"),
        ),
    ]


@program("r02", variants=("f32", "bf16", "bf16reg"), wide=("log_decay", "state"))
class gated_delta_rule:
    """Linear attention by the delta rule with a decay a head, and a gated norm. The port works in chunks of 8 tokens.

    In a chunk, the writes u solve a lower triangular system; 19 tokens are two chunks and three tokens.
    """

    def make(g):
        return dict(
            q=randn(g, 2, 19, 2, 12, scale=0.1),
            k=randn(g, 2, 19, 2, 12, scale=0.06),
            v=randn(g, 2, 19, 2, 10),
            a=randn(g, 2, 19, 2),
            b=randn(g, 2, 19, 2),
            a_log=rand(g, 2, low=-1.5, high=0.3),
            dt_bias=randn(g, 2, scale=0.8),
            s0=randn(g, 2, 2, 12, 10, scale=0.6),
            z=randn(g, 2, 19, 2, 10),
            gamma=randn(g, 10, scale=0.2, shift=1.0),
        )

    def reference(q, k, v, a, b, a_log, dt_bias, s0, z, gamma):
        def unit(y):
            return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)

        q = step("q_unit", unit(q) * 12**-0.5)
        k = step("k_unit", unit(k))
        log_decay = step("log_decay", -a_log.exp() * F.softplus(a + dt_bias))
        beta = step("beta", b.sigmoid())
        decay = log_decay.exp()[..., None, None]
        s, u = s0, []
        for t in range(q.shape[1]):
            s = s * decay[:, t]
            u.append(beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])))
            s = s + k[:, t, :, :, None] * u[t][:, :, None]
        u = step("u", torch.stack(u, 1))
        s, o = s0, []
        for t in range(q.shape[1]):
            s = s * decay[:, t] + k[:, t, :, :, None] * u[:, t, :, None]
            o.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
        o = step("o", torch.stack(o, 1))
        normed = step("normed", o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * gamma)
        return {"output": normed * F.silu(z), "state": s}

    def port(P: Port):
        q, k, v, z = P["q"], P["k"], P["v"], P["z"]
        B, T, H, K, V, C = 2, 19, 2, 12, 10, 8
        eps = P.f(1e-5 if P.d("eps_of_the_other_norm") else 1e-6)

        def unit(y):
            axes = (2, 3) if P.d("length_over_heads_too") else (3,)
            return y / np.sqrt(np.sum(y * y, axes, keepdims=True) + eps)

        q = P.put("q_unit", unit(q) * P.f(1 if P.d("q_not_scaled") else 1 / math.sqrt(K)))
        k = P.put("k_unit", unit(k))
        bias = 0 if P.d("no_dt_bias") else P["dt_bias"]
        log_decay = P.put("log_decay", -np.exp(P["a_log"]) * np.logaddexp(P.f(0), P["a"] + bias))
        beta = P.put("beta", sigmoid(P["b"]))

        u, o = np.zeros_like(v), np.zeros_like(v)
        end = np.empty((B, H, K, V), v.dtype)

        def chunks():
            for b in range(B):
                for h in range(H):
                    for t0 in range(0, T, C):
                        c = slice(t0, min(t0 + C, T))
                        G = np.cumsum(log_decay[b, c, h])
                        between = np.exp(np.minimum(G[:, None] - G[None], 0))  # from j to i, where j <= i
                        yield t0, (b, c, h), (b, h), G, between

        def after(s, at, G, uu):
            return np.exp(G[-1]) * s + (k[at] * np.exp(G[-1] - G)[:, None]).T @ uu

        s = before = P["s0"][0, 0]
        for t0, at, head, G, between in chunks():
            s = P["s0"][head] if t0 == 0 else s
            A = beta[at][:, None] * (k[at] @ k[at].T) * (1 if P.d("no_decay_in_triangle") else between)
            A = np.tril(A, 0 if P.d("triangle_with_diagonal") else -1)
            right = beta[at][:, None] * (v[at] - np.exp(G)[:, None] * (k[at] @ s))
            if P.d("inverse_to_first_order"):
                u[at] = right - A @ right
            else:
                for i in range(len(A)):
                    u[at][i] = (right[i] - A[i, :i] @ u[at][:i]) / (1 + A[i, i])
            s = after(s, at, G, u[at])
        u = P.put("u", u)
        for t0, at, head, G, between in chunks():
            s = P["s0"][head] if t0 == 0 else s
            seen = before if P.d("state_of_chunk_before") and t0 else s
            o[at] = np.exp(G)[:, None] * (q[at] @ seen) + np.tril((q[at] @ k[at].T) * between) @ u[at]
            before, s = s, after(s, at, G, u[at])
            end[head] = s
        o = P.put("o", o)
        gamma = P["gamma"]
        y = o * silu(z) if P.d("gate_before_norm") else o
        normed = np.empty_like(y)
        for i in np.ndindex(B, T, H):
            normed[i] = y[i] / np.sqrt(y[i] @ y[i] / V + P.f(1e-5)) * gamma
        normed = P.put("normed", normed)
        P.put("output", normed if P.d("gate_before_norm") else normed * silu(z))
        if P.d("state_kept_values_first"):  # the other kernel's layout
            end = np.ascontiguousarray(end.swapaxes(2, 3)).reshape(B, H, K, V)
        P.put("state", end)

    defects = [
        D(
            "eps_of_the_other_norm",
            "q_unit",
            "eps",
            "the unit length has the epsilon 1e-5 of the norm, and not 1e-6",
            accept=("constant",),
        ),
        D("q_not_scaled", "q_unit", "scale", "queries aren't divided by the root of 12", accept=("factor", "constant")),
        D("length_over_heads_too", "q_unit", "axis", "the length is taken over both heads together"),
        D("no_dt_bias", "log_decay", "drop_term", "the bias of the step is left out"),
        D(
            "triangle_with_diagonal",
            "u",
            "mask",
            "the triangular system has the diagonal: a token corrects itself",
            accept=("shift", "drop_term", "other"),
        ),
        D(
            "no_decay_in_triangle",
            "u",
            "factor",
            "no decay between the tokens of a chunk in the triangular system",
            accept=("drop_term", "other"),
        ),
        D(
            "inverse_to_first_order",
            "u",
            "truncate",
            "the inverse's series stops after its first term",
            accept=("drop_term", "function", "precision", "other"),
        ),
        D(
            "state_of_chunk_before",
            "o",
            "stale",
            "queries read the state at the start of the chunk before",
            accept=("shift",),
        ),
        D("gate_before_norm", "normed", "other", "the gate is applied before the norm", accept=("function", "factor")),
        D(
            "state_kept_values_first",
            "state",
            "layout",
            "the state's memory has the values first",
            accept=("transpose",),
        ),
    ]


@program("r03", variants=("f32", "bf16"), wide=("lse", "nll", "smooth", "per_token", "output"))
class linear_cross_entropy:
    """The last projection fused with its loss: soft cap, label smoothing, z-loss, ignored labels; and its gradients.

    The port goes over tokens in chunks of 6 and over the vocabulary of 37 in tiles of 16, and makes gradients on the way.
    """

    def make(g):
        labels = randint(g, 0, 37, 2, 10)
        labels[0, 4], labels[1, 1], labels[1, 9] = -100, -100, -100
        return dict(h=randn(g, 2, 10, 20), w=randn(g, 37, 20, scale=0.5), labels=labels)

    def reference(h, w, labels):
        hidden = h[:, :-1].reshape(-1, 20)
        target = labels[:, 1:].reshape(-1)
        logits = step("logits", hidden @ w.T)
        capped = step("capped", 5 * torch.tanh(logits / 5))
        lse = step("lse", capped.logsumexp(-1))
        kept = target != -100
        nll = lse - capped.gather(1, target.clamp(min=0)[:, None])[:, 0]
        nll = step("nll", torch.where(kept, nll, 0.0))
        smooth = step("smooth", torch.where(kept, lse - capped.mean(-1), 0.0))
        per_token = step("per_token", 0.9 * nll + 0.1 * smooth + torch.where(kept, 0.01 * lse**2, 0.0))
        return per_token.sum() / kept.sum()

    def loss(output):
        return output

    def port(P: Port):
        h, w, labels = P["h"], P["w"], P["labels"]
        x = h[:, :-1].reshape(18, 20)
        target = (labels[:, :-1] if P.d("labels_not_shifted") else labels[:, 1:]).reshape(18)
        N, V = 18, 37
        logits = np.zeros((N, V), x.dtype)
        for v0 in range(0, V, 16):
            logits[:, v0 : v0 + 16] = x @ w[v0 : v0 + 16].T
        logits = P.put("logits", logits)
        if P.d("cap_not_divided"):
            capped = 5 * np.tanh(logits)
        else:
            capped = 5 * np.tanh(logits / 5)
        capped = P.put("capped", capped)

        m, total = np.full(N, -np.inf, x.dtype), np.zeros(N, x.dtype)
        for v0 in range(0, V, 16):
            tile = capped[:, v0 : v0 + 16]
            if P.d("padding_in_the_sum") and tile.shape[1] < 16:
                tile = np.pad(tile, ((0, 0), (0, 16 - tile.shape[1])))
            new = np.maximum(m, tile.max(1))
            fix = 1 if P.d("sum_not_rescaled") else np.exp(m - new)
            total = total * fix + np.exp(tile - new[:, None]).sum(1)
            m = new
        lse = P.put("lse", m + np.log(total))
        kept = target >= 0
        nll, smooth = np.zeros(N, x.dtype), np.zeros(N, x.dtype)
        for i in range(N):
            if kept[i]:
                nll[i] = lse[i] - (logits if P.d("label_of_uncapped") else capped)[i, target[i]]
                rows = V - 1 if P.d("smoothing_over_others") else V
                smooth[i] = lse[i] - capped[i].sum() / rows
        nll, smooth = P.put("nll", nll), P.put("smooth", smooth)
        z = np.where(kept, P.f(0.01) * lse * lse, 0)
        if P.d("z_loss_to_ignored_too"):
            z = P.f(0.01) * lse * lse
        per_token = P.put("per_token", P.f(0.9) * nll + P.f(0.1) * smooth + z)
        count = N if P.d("mean_over_ignored_too") else kept.sum()
        P.put("output", per_token.sum() / P.f(count))

        count = P.f(kept.sum())
        grad_x, grad_w = np.zeros_like(x), np.zeros_like(w)
        for n0 in range(0, N, 6):
            rows = slice(n0, n0 + 6)
            p = np.exp(capped[rows] - lse[rows, None])
            dy = p * (1 + P.f(0.02) * lse[rows, None]) - P.f(0.1 / V)
            for i in range(6):
                if kept[n0 + i]:
                    dy[i, target[n0 + i]] -= P.f(0.9)
                else:
                    dy[i] = 0
            dy = dy * (1 - (capped[rows] / 5) ** 2) / count
            grad_x[rows] = dy @ w
            part = dy.T @ x[rows]
            if P.d("weight_gradient_in_bf16"):
                grad_w = bf16(grad_w + bf16(part))
            elif P.d("weight_gradient_of_last_chunk"):
                grad_w = part
            else:
                grad_w += part
        grad_h = np.zeros_like(h)
        grad_h[:, :-1] = grad_x.reshape(2, 9, 20)
        P.put("grad:h", grad_h)
        P.put("grad:w", grad_w)

    defects = [
        D(
            "cap_not_divided",
            "capped",
            "factor",
            "the cap is 5 tanh(x) and not 5 tanh(x / 5)",
            accept=("scale", "constant", "function"),
        ),
        D(
            "padding_in_the_sum",
            "lse",
            "mask",
            "the last tile's padding is in the sum with logits of zero",
            accept=("other", "drop_term", "constant"),
        ),
        D(
            "sum_not_rescaled",
            "lse",
            "factor",
            "the sum isn't rescaled when a tile has a larger logit",
            accept=("drop_term", "stale", "other"),
        ),
        D("labels_not_shifted", "nll", "shift", "a token is held against its own label and not the next one's"),
        D(
            "label_of_uncapped",
            "nll",
            "stale",
            "the label's logit is taken before the cap",
            accept=("other", "function", "swap"),
        ),
        D(
            "smoothing_over_others",
            "smooth",
            "ddof",
            "the mean logit is the sum over 36 and not 37",
            accept=("scale", "factor", "constant"),
        ),
        D("z_loss_to_ignored_too", "per_token", "mask", "ignored tokens have a z-loss"),
        D(
            "mean_over_ignored_too",
            "output",
            "factor",
            "divided by all 18 tokens and not by those with a label",
            accept=("scale", "mask", "constant", "ddof"),
        ),
        D(
            "weight_gradient_of_last_chunk",
            "grad:w",
            "drop_term",
            "only the last chunk's gradient of the weight is kept",
            accept=("truncate", "stale", "race", "other"),
        ),
        D("weight_gradient_in_bf16", "grad:w", "precision", "the gradient of the weight is summed in bfloat16"),
    ]
