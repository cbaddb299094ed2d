"""Decoding with a paged cache, a mixture of experts, and a training step of a normalised classifier head."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, randint, randn, sigmoid, silu, step


def rotated(x, pos):
    """The first 6 of 10 dimensions rotated, in halves."""
    freq = 500.0 ** (-torch.arange(3, dtype=x.dtype) / 3)
    angle = pos[:, None, None] * freq
    c, s = angle.cos(), angle.sin()
    a, b = x[..., :3], x[..., 3:6]
    return torch.cat([a * c - b * s, b * c + a * s, x[..., 6:]], -1)


@program("a01", variants=("f32", "bf16", "bf16reg"), wide=("sinks", "scores", "lse"))
class paged_decode:
    """One decoding step of grouped attention over a paged cache, with partial rotary embedding, a soft cap, a sliding
    window of 9 and a sink for each head. The port goes through the cache in splits of two blocks and merges them."""

    def make(g):
        return dict(
            q=randn(g, 3, 6, 10, scale=1.6),
            k_new=randn(g, 3, 2, 10),
            v_new=randn(g, 3, 2, 10),
            k_cache=randn(g, 17, 4, 2, 10),
            v_cache=randn(g, 17, 4, 2, 10),
            block_table=torch.randperm(17, generator=g)[:15].view(3, 5),
            lengths=torch.tensor([13, 6, 18])[torch.randperm(3, generator=g)],  # the new token counts
            sinks=randn(g, 6, scale=0.7, shift=0.5),
            w_o=randn(g, 7, 60, scale=0.2),
        )

    def reference(q, k_new, v_new, k_cache, v_cache, block_table, lengths, sinks, w_o):
        pos = lengths - 1
        q = step("q_rot", rotated(q, pos))
        k = step("k_rot", rotated(k_new, pos))
        at = (block_table.gather(1, (pos // 4)[:, None])[:, 0], pos % 4)
        j = torch.arange(20)
        valid = j[None] < lengths[:, None]
        here = valid[..., None, None]
        keys = step("keys", k_cache.index_put(at, k)[block_table].reshape(3, 20, 2, 10) * here)
        values = step("values", v_cache.index_put(at, v_new)[block_table].reshape(3, 20, 2, 10) * here)
        s = torch.einsum("bhd,bjhd->bhj", q, keys.repeat_interleave(3, 2)) / 10**0.5
        s = step("scores", 3.0 * torch.tanh(s / 3.0))
        seen = valid & (j[None] > pos[:, None] - 9)
        s = s.masked_fill(~seen[:, None], float("-inf"))
        lse = step("lse", torch.logaddexp(torch.logsumexp(s, -1), sinks.expand(3, 6)))
        p = torch.exp(s - lse[..., None])
        attn = step("attn", torch.einsum("bhj,bjhd->bhd", p, values.repeat_interleave(3, 2)))
        return attn.reshape(3, 60) @ w_o.T

    def port(P: Port):
        table, lengths, sinks = P["block_table"], P["lengths"], P["sinks"]
        dt = sinks.dtype

        def turn(x, pos):
            out = x.copy()
            for n in range(3):
                for i in range(3):
                    angle = P.f(pos[n]) * P.f(500.0 ** (-i / 3))
                    one, two = (2 * i, 2 * i + 1) if P.d("rotary_pairs_interleaved") else (i, i + 3)
                    z = (x[n, :, one] + 1j * x[n, :, two]) * (np.cos(angle) + 1j * np.sin(angle))
                    out[n, :, one], out[n, :, two] = z.real, z.imag
            return out

        q = P.put("q_rot", turn(P["q"], lengths - 1))
        k_new = P.put("k_rot", turn(P["k_new"], lengths if P.d("key_position_one_late") else lengths - 1))

        kc, vc = P["k_cache"], P["v_cache"]
        for n in range(3):
            pos = lengths[n] - 1
            vc[table[n, pos // 4], pos % 4] = P["v_new"][n]
            if P.d("new_key_one_slot_late"):
                pos += 1
            kc[table[n, pos // 4], pos % 4] = k_new[n]
        keys, values = np.zeros((3, 20, 2, 10), dt), np.zeros((3, 20, 2, 10), dt)
        for n in range(3):
            for b in range(5):
                rows = max(0, min(4, lengths[n] - 4 * b))
                kb, vb = kc[table[n, b]], vc[table[n, b]]
                if P.d("value_block_read_head_major"):
                    vb = vb.reshape(2, 4, 10).transpose(1, 0, 2)
                keys[n, 4 * b : 4 * b + rows] = kb[:rows]
                values[n, 4 * b : 4 * b + rows] = vb[:rows]
        keys, values = P.put("keys", keys), P.put("values", values)

        scores = np.zeros((3, 6, 20), dt)
        kv_of = [h % 2 if P.d("heads_dealt_in_turn") else h // 3 for h in range(6)]
        inv = P.f((6 if P.d("scale_of_rotary_width") else 10) ** -0.5)
        for n in range(3):
            for h in range(6):
                raw = keys[n, :, kv_of[h]] @ q[n, h]
                if P.d("cap_before_scale"):
                    scores[n, h] = np.tanh(raw / 3) * 3 * inv
                else:
                    scores[n, h] = np.tanh(raw * inv / 3) * 3
        scores = P.put("scores", scores)

        window = 10 if P.d("window_one_too_wide") else 9
        lse, splits = np.empty((3, 6), dt), {}
        for n in range(3):
            first = max(0, lengths[n] - window)
            for h in range(6):
                parts = []
                for t in range(0, lengths[n], 8):
                    s = slice(max(t, first), min(t + 8, lengths[n]))
                    if s.start < s.stop:
                        m = scores[n, h, s].max()
                        e = np.exp(scores[n, h, s] - m)
                        parts.append((m, e.sum(), e @ values[n, s, kv_of[h]]))
                top = max(m for m, _, _ in parts)
                total = sum(l * np.exp(m - top) for m, l, _ in parts)
                for _ in parts if P.d("sink_in_each_split") else [0]:
                    total = total + np.exp(sinks[h] - top)
                lse[n, h] = top + np.log(total)
                splits[n, h] = parts
        lse = P.put("lse", lse)

        attn = np.zeros((3, 6, 10), dt)
        for (n, h), parts in splits.items():
            top = max(m for m, _, _ in parts)
            for m, _, acc in parts:
                attn[n, h] += acc * np.exp((top if P.d("splits_merged_without_own_maximum") else m) - lse[n, h])
        attn = P.put("attn", attn)

        w_o = P["w_o"]
        out = np.zeros((3, 7), dt)
        for h in range(6):
            out += attn[:, h] @ w_o[:, 10 * h : 10 * h + 10].T
        P.put("output", out)

    defects = [
        D(
            "rotary_pairs_interleaved",
            "q_rot",
            "layout",
            "The rotary embedding turns neighbouring dimensions (GPT-J) where the two halves belong together (NeoX).",
            ("permute", "swap", "transpose"),
        ),
        D(
            "key_position_one_late",
            "k_rot",
            "shift",
            "The new key is rotated by the length, which is one more than its position.",
            ("constant", "other"),
        ),
        D(
            "new_key_one_slot_late",
            "keys",
            "shift",
            "The new key is written one slot after its own, so that its slot keeps what the cache had there.",
            ("stale", "other"),
        ),
        D(
            "value_block_read_head_major",
            "values",
            "layout",
            "A block of the value cache is read as [head, slot, dim]; it is stored as [slot, head, dim].",
            ("transpose", "permute"),
        ),
        D(
            "heads_dealt_in_turn",
            "scores",
            "layout",
            "Query head h reads key head h % 2 where three neighbouring query heads share one (h // 3).",
            ("permute", "swap", "other"),
        ),
        D(
            "scale_of_rotary_width",
            "scores",
            "constant",
            "The softmax scale is the root of the rotary width 6, not of the head's width 10.",
            ("scale", "factor"),
        ),
        D(
            "cap_before_scale",
            "scores",
            "other",
            "The soft cap is applied to the raw products and the softmax scale after it; the scale comes first.",
            ("function", "swap", "scale", "factor"),
        ),
        D(
            "window_one_too_wide",
            "lse",
            "mask",
            "The sliding window lets one token more through.",
            ("shift", "constant", "truncate"),
        ),
        D(
            "sink_in_each_split",
            "lse",
            "factor",
            "Each split of the cache adds the head's sink to its sum, so that it counts several times.",
            ("scale", "other", "constant"),
        ),
        D(
            "splits_merged_without_own_maximum",
            "attn",
            "factor",
            "A split's partial result is weighted as if its scores had been taken relative to the overall maximum.",
            ("scale", "drop_term", "stale", "other"),
        ),
    ]


@program("a02", variants=("bf16", "f32"), wide=("router_w", "router_b", "scores", "weights"))
class moe_block:
    """A residual block of routed experts (sigmoid scores, a bias for the choice only, as in DeepSeek-V3) and a gated
    shared expert. The port sorts the picks by expert and goes through each expert's rows in blocks of 4."""

    def make(g):
        return dict(
            x=randn(g, 11, 14) * torch.exp(randn(g, 11, 1, scale=0.8, shift=-2.5)),
            norm_w=randn(g, 14, scale=0.2, shift=1.0),
            router_w=randn(g, 5, 14, scale=0.3),
            router_b=randn(g, 5, scale=0.35),
            w13=randn(g, 5, 18, 14, scale=0.35),
            w2=randn(g, 5, 14, 9, scale=0.4),
            shared_w13=randn(g, 12, 14, scale=0.3),
            shared_w2=randn(g, 14, 6, scale=0.3),
            shared_gate=randn(g, 14, scale=0.3),
        )

    def reference(x, norm_w, router_w, router_b, w13, w2, shared_w13, shared_w2, shared_gate):
        y = step("normed", x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * norm_w)
        scores = step("scores", torch.sigmoid(y @ router_w.T))
        picked = step("picked", (scores + router_b).topk(2, -1).indices)
        w = scores.gather(1, picked)
        w = step("weights", 1.5 * w / w.sum(-1, keepdim=True))
        gate, up = torch.einsum("td,tkfd->tkf", y, w13[picked]).chunk(2, -1)
        act = step("act", F.silu(gate) * up)
        expert = step("expert", torch.einsum("tkf,tkdf->tkd", act, w2[picked]))
        combined = step("combined", (w[..., None] * expert).sum(1))
        gate, up = (y @ shared_w13.T).chunk(2, -1)
        shared = torch.sigmoid(y @ shared_gate)[:, None] * ((F.silu(gate) * up) @ shared_w2.T)
        shared = step("shared", shared)
        return x + combined + shared

    def port(P: Port):
        x, norm_w = P["x"], P["norm_w"]
        dt = P.f(0).dtype
        y = np.empty_like(x)
        for t in range(11):
            ss = P.f(0)
            for k in range(0, 14, 8):
                ss = ss + (x[t, k : k + 8] ** 2).sum()
            ms = ss / (16 if P.d("mean_over_padded_width") else 14)
            rms = np.sqrt(ms) + P.f(1e-3) if P.d("eps_outside_root") else np.sqrt(ms + P.f(1e-3))
            y[t] = x[t] / rms * norm_w
        y = P.put("normed", y)

        lin = np.einsum("td,ed->te", y, P["router_w"])
        if P.d("router_product_in_half"):
            lin = bf16(lin)
        scores = P.put("scores", sigmoid(lin))
        biased = scores if P.d("choice_without_bias") else scores + P["router_b"]
        picked = P.put("picked", np.argsort(-biased, axis=1, kind="stable")[:, :2])

        raw = np.take_along_axis(scores + P["router_b"] if P.d("bias_in_weights") else scores, picked, 1)
        if P.d("weights_not_normalised"):
            w = P.f(1.5) * raw
        else:
            w = raw * (P.f(1.5) / (raw[:, :1] + raw[:, 1:]))
        w = P.put("weights", w)

        w13, w2 = P["w13"], P["w2"]
        flat = picked.reshape(-1)
        order = np.argsort(flat, kind="stable")
        starts = np.searchsorted(flat[order], np.arange(6))
        act = np.zeros((22, 9), dt)
        for e in range(5):
            wg, wu = w13[e, :9], w13[e, 9:]
            if P.d("gate_and_up_rows_interleaved"):
                wg, wu = w13[e, 0::2], w13[e, 1::2]
            for s in range(starts[e], starts[e + 1], 4):
                rows = order[s : min(s + 4, starts[e + 1])]
                block = y[rows // 2]
                act[rows] = silu(block @ wg.T) * (block @ wu.T)
        act = P.put("act", act.reshape(11, 2, 9)).reshape(22, 9)

        expert = np.zeros((22, 14), dt)
        for e in range(5):
            end = starts[e + 1]
            if P.d("last_block_of_an_expert_left_out"):
                end = starts[e] + (end - starts[e]) // 4 * 4
            for s in range(starts[e], end, 4):
                rows = order[s : min(s + 4, end)]
                expert[rows] = act[rows] @ w2[e].T
        expert = P.put("expert", expert.reshape(11, 2, 14)).reshape(22, 14)

        combined = np.zeros((11, 14), dt)
        for i, row in enumerate(order):
            combined[row // 2] += w.reshape(-1)[i if P.d("weights_by_sorted_row") else row] * expert[row]
        combined = P.put("combined", combined)

        both = y @ P["shared_w13"].T
        shared = (both[:, :6] * sigmoid(both[:, :6]) * both[:, 6:]) @ P["shared_w2"].T
        shared = P.put("shared", shared * sigmoid((y * P["shared_gate"]).sum(1))[:, None])
        P.put("output", (y if P.d("residual_of_normed_input") else x) + (combined + shared))

    defects = [
        D(
            "mean_over_padded_width",
            "normed",
            "constant",
            "The mean square divides by 16, the width padded to a tile, not by 14.",
            ("factor", "scale", "ddof"),
        ),
        D(
            "eps_outside_root",
            "normed",
            "eps",
            "Epsilon is added to the root of the mean square, not under the root.",
            ("other", "function"),
        ),
        D(
            "router_product_in_half",
            "scores",
            "precision",
            "The router's products are rounded to bfloat16 before the sigmoid; they should stay in float32.",
        ),
        D(
            "choice_without_bias",
            "picked",
            "drop_term",
            "Experts are chosen by their scores alone, without the balancing bias.",
            ("other", "swap", "permute"),
        ),
        D(
            "bias_in_weights",
            "weights",
            "other",
            "The balancing bias, which is for the choice only, is in the experts' weights too.",
            ("drop_term", "constant", "swap", "stale"),
        ),
        D(
            "weights_not_normalised",
            "weights",
            "factor",
            "The weights of the chosen experts are not divided by their sum.",
            ("drop_term", "scale"),
        ),
        D(
            "gate_and_up_rows_interleaved",
            "act",
            "layout",
            "Gate and up projections are taken from even and odd rows; they are stored one after the other.",
            ("permute", "swap", "transpose"),
        ),
        D(
            "last_block_of_an_expert_left_out",
            "expert",
            "truncate",
            "Rows of an expert's last block that is not full are not computed and stay zero.",
            ("zero", "mask", "drop_term"),
        ),
        D(
            "weights_by_sorted_row",
            "combined",
            "permute",
            "The expert's weight is read at the row in sorted order, not at the row that was sorted there.",
            ("swap", "layout", "other", "shift"),
        ),
        D(
            "residual_of_normed_input",
            "output",
            "other",
            "The normalised input is added as the residual, not the input itself.",
            ("swap", "stale", "scale", "factor"),
        ),
    ]


@program("a03", variants=("f32", "bf16"), wide=("mean", "rstd", "lse", "token_loss", "output"))
class norm_and_loss_step:
    """A residual sum, a layer norm and a classifier with label smoothing, a z-loss and ignored targets. The port works
    the vocabulary in tiles of 5 and has its gradients by hand, each in a kernel of its own."""

    def make(g):
        targets = randint(g, 0, 17, 2, 7)
        targets.view(-1)[torch.randperm(14, generator=g)[:4]] = -100
        return dict(
            x=randn(g, 2, 7, 12, scale=0.05),
            res=randn(g, 2, 7, 12, scale=0.05, shift=0.6) + randn(g, 2, 7, 1, scale=0.4),
            gamma=randn(g, 12, scale=0.3, shift=1.0),
            beta=randn(g, 12, scale=0.3),
            w=randn(g, 17, 12, scale=0.5),
            bias=randn(g, 17, scale=0.5),
            targets=targets,
        )

    def reference(x, res, gamma, beta, w, bias, targets):
        h = step("sum", x + res)
        mean = step("mean", h.mean(-1, keepdim=True))
        rstd = step("rstd", torch.rsqrt((h - mean).square().mean(-1, keepdim=True) + 1e-5))
        y = step("normed", (h - mean) * rstd * gamma + beta)
        logits = step("logits", F.linear(y, w, bias))
        lse = step("lse", torch.logsumexp(logits, -1))
        at = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        tok = 0.9 * (lse - at) + 0.1 * (lse - logits.mean(-1)) + 0.03 * lse.square()
        tok = step("token_loss", tok * (targets >= 0))
        return tok.sum() / (targets >= 0).sum()

    def port(P: Port):
        gamma, w, targets = P["gamma"], P["w"], P["targets"].reshape(-1)
        dt = gamma.dtype
        h = P.put("sum", P["x"] + P["res"]).reshape(14, 12)
        mean = np.zeros((14, 1), dt)
        for k in range(12):
            mean[:, 0] += h[:, k]
        mean /= 12
        if P.d("mean_kept_in_half"):
            mean = bf16(mean)
        mean = P.put("mean", mean.reshape(2, 7, 1)).reshape(14, 1)
        d = h - mean
        var = np.einsum("nk,nk->n", d, d)[:, None] / (11 if P.d("sample_variance") else 12)
        eps = P.f(1e-12 if P.d("eps_of_another_model") else 1e-5)
        rstd = P.put("rstd", (1 / np.sqrt(var + eps)).reshape(2, 7, 1)).reshape(14, 1)
        hat = d * rstd
        y = P.put("normed", (hat * gamma + P["beta"]).reshape(2, 7, 12)).reshape(14, 12)

        logits = np.empty((14, 17), dt)
        for v in range(0, 17, 5):
            logits[:, v : v + 5] = np.einsum("nk,vk->nv", y, w[v : v + 5]) + P["bias"][v : v + 5]
        logits = P.put("logits", logits.reshape(2, 7, 17)).reshape(14, 17)

        m, s = np.full(14, -np.inf, dt), np.zeros(14, dt)
        for v in range(0, 15 if P.d("last_tile_of_vocabulary_left_out") else 17, 5):
            part = logits[:, v : v + 5]
            new = np.maximum(m, part.max(1))
            s = s * np.exp(m - new) + np.exp(part - new[:, None]).sum(1)
            m = new
        lse = P.put("lse", (m + np.log(s)).reshape(2, 7)).reshape(14)

        tok = np.zeros(14, dt)
        for n in range(14):
            if targets[n] >= 0:
                at = logits[n, targets[n]]
                if P.d("smoothing_over_other_classes_only"):
                    smooth = P.f(0.9) * at + P.f(0.1) * (logits[n].sum() - at) / 16
                else:
                    smooth = P.f(0.9) * at + P.f(0.1) * logits[n].sum() / 17
                tok[n] = lse[n] * (1 + P.f(0.03) * lse[n]) - smooth
        tok = P.put("token_loss", tok.reshape(2, 7)).reshape(14)
        kept = targets >= 0
        count = P.f(14 if P.d("mean_over_ignored_too") else kept.sum())
        P.put("output", tok.sum() / count)

        prob = np.exp(logits - lse[:, None])
        dl = prob * (1 + P.f(0.06) * lse[:, None]) - P.f(0.1) / 17
        for n in range(14):
            dl[n, targets[n] if kept[n] else 0] -= P.f(0.9)
        dl /= count
        unmasked = dl.copy()
        dl[~kept] = 0

        dy = dl @ w
        dh = dy * gamma
        c1 = dh.sum(1, keepdims=True) / 12
        c2 = (dh * hat).sum(1, keepdims=True) / 12
        if P.d("variance_term_left_out"):
            dx = (dh - c1) * rstd
        else:
            dx = (dh - c1 - hat * c2) * rstd
        P.put("grad:x", dx.reshape(2, 7, 12))

        dgamma, dbeta, dw = np.zeros(12, dt), np.zeros(12, dt), np.zeros((17, 12), dt)
        for n in range(0, 14, 4):
            t = slice(n, n + 4)
            dgamma += (dy[t] * (d[t] if P.d("gamma_gradient_without_rstd") else hat[t])).sum(0)
            dbeta += dy[t].sum(0)
            part = dl[t].T @ y[t]
            dw = part if P.d("tiles_overwrite_weight_gradient") else dw + part
        P.put("grad:gamma", dgamma)
        P.put("grad:beta", dbeta)
        P.put("grad:w", dw)
        P.put("grad:bias", (unmasked if P.d("bias_gradient_of_ignored_too") else dl).sum(0))

    defects = [
        D(
            "mean_kept_in_half",
            "mean",
            "precision",
            "The row's mean is rounded to bfloat16; it should stay in float32.",
        ),
        D(
            "sample_variance",
            "rstd",
            "ddof",
            "The variance divides by n - 1, not by n.",
            ("factor", "scale", "constant"),
        ),
        D(
            "eps_of_another_model",
            "rstd",
            "eps",
            "Epsilon is 1e-12, as in BERT, not 1e-5.",
            ("constant", "drop_term"),
        ),
        D(
            "last_tile_of_vocabulary_left_out",
            "lse",
            "truncate",
            "The sum of exponentials leaves out the last two classes, a tile that is not full.",
            ("drop_term", "mask"),
        ),
        D(
            "smoothing_over_other_classes_only",
            "token_loss",
            "function",
            "The smoothing mass goes to the 16 classes that are not the target; it should be spread over all 17.",
            ("constant", "other", "factor", "mask", "ddof", "drop_term"),
        ),
        D(
            "mean_over_ignored_too",
            "output",
            "factor",
            "The loss is divided by the number of all tokens, ignored ones included.",
            ("scale", "constant", "mask", "ddof"),
        ),
        D(
            "variance_term_left_out",
            "grad:x",
            "drop_term",
            "The layer norm's gradient lacks the term that goes through the variance.",
        ),
        D(
            "gamma_gradient_without_rstd",
            "grad:gamma",
            "factor",
            "The gradient of gamma is taken with the centred input, which is not divided by its deviation.",
            ("scale", "drop_term", "swap", "other"),
        ),
        D(
            "tiles_overwrite_weight_gradient",
            "grad:w",
            "race",
            "Each tile of tokens overwrites the weight's gradient where it should add to it; the last tile remains.",
            ("stale", "drop_term", "truncate", "other", "mask"),
        ),
        D(
            "bias_gradient_of_ignored_too",
            "grad:bias",
            "mask",
            "The bias's gradient sums ignored tokens as well.",
            ("other", "drop_term", "truncate"),
        ),
    ]
