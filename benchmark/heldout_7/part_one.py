"""YaRN rotary embedding with grouped-query attention, a dilated conv block with its gradients, and an MDCT codec."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randn, sigmoid, step

HEADS, KV, DIM, PAST, NEW, WINDOW, CAP = 15, 3, 12, 10, 7, 11, 6.0
MSCALE = 0.1 * math.log(4.0) + 1.0


@program("z01", variants=("bf16", "f32", "bf16reg"), wide=("sinks", "angles", "scores", "lse"))
class yarn_gqa:
    """7 tokens after 10 cached ones: QK norm, YaRN, soft cap, sliding window, sinks; flash tiles of 6 keys."""

    def make(g):
        return dict(
            x=randn(g, 2, NEW, 22),
            w_qkv=randn(g, (HEADS + 2 * KV) * DIM, 22, scale=0.25),
            q_gain=randn(g, DIM, scale=0.3, shift=1.6),
            k_gain=randn(g, DIM, scale=0.3, shift=1.4),
            k_cache=randn(g, 2, PAST, KV, DIM, scale=1.3),  # with norm and rotation already
            v_cache=randn(g, 2, PAST, KV, DIM),
            positions=torch.arange(PAST, PAST + NEW),
            sinks=randn(g, HEADS, scale=0.8, shift=1.0),
            w_out=randn(g, 22, HEADS * DIM, scale=0.1),
        )

    def reference(x, w_qkv, q_gain, k_gain, k_cache, v_cache, positions, sinks, w_out):
        n, t, _ = x.shape
        qkv = step("qkv", x @ w_qkv.T).view(n, t, HEADS + 2 * KV, DIM)
        q, k, v = qkv.split([HEADS, KV, KV], dim=2)
        q = step("q_norm", q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-5) * q_gain)
        k = step("k_norm", k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-5) * k_gain)

        base, longer, trained = 200.0, 4.0, 48.0
        extra = base ** (-torch.arange(0, DIM, 2, dtype=sinks.dtype) / DIM)

        def dimension(turns):
            return DIM * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), DIM - 1)
        ramp = ((torch.arange(DIM // 2, dtype=sinks.dtype) - low) / (high - low)).clamp(0, 1)
        inv_freq = extra / longer * ramp + extra * (1 - ramp)
        angles = step("angles", positions[:, None] * inv_freq)
        cos = torch.cat([angles, angles], -1).cos()[:, None] * MSCALE
        sin = torch.cat([angles, angles], -1).sin()[:, None] * MSCALE

        def rotate_half(z):
            return torch.cat([-z[..., DIM // 2 :], z[..., : DIM // 2]], -1)

        q = step("q_rot", q * cos + rotate_half(q) * sin)
        k = step("k_rot", k * cos + rotate_half(k) * sin)
        keys = torch.cat([k_cache, k], 1).repeat_interleave(HEADS // KV, dim=2)
        values = torch.cat([v_cache, v], 1).repeat_interleave(HEADS // KV, dim=2)
        scores = torch.einsum("nthd,nshd->nhts", q, keys) * DIM**-0.5
        scores = step("scores", CAP * torch.tanh(scores / CAP))
        row, col = positions[:, None], torch.arange(PAST + NEW)[None]
        seen = (col <= row) & (col > row - WINDOW)
        masked = scores.masked_fill(~seen, -math.inf)
        sink = sinks.view(1, HEADS, 1, 1).expand(n, HEADS, t, 1)
        lse = step("lse", torch.logsumexp(torch.cat([masked, sink], -1), -1))
        attn = step("attn", torch.einsum("nhts,nshd->nhtd", torch.exp(masked - lse[..., None]), values))
        return attn.transpose(1, 2).reshape(n, t, HEADS * DIM) @ w_out.T

    def port(P: Port):
        x, w = P["x"], P["w_qkv"]
        dt = x.dtype
        qkv = np.zeros((2, NEW, (HEADS + 2 * KV) * DIM), dt)
        for k in range(0, 22, 8):
            qkv += np.einsum("ntk,ok->nto", x[..., k : k + 8], w[:, k : k + 8])
        qkv = P.put("qkv", qkv)

        def normed(first, heads, gain):
            out = np.empty((2, NEW, heads, DIM), dt)
            for h in range(heads):
                part = qkv[..., (first + h) * DIM : (first + h + 1) * DIM]
                out[:, :, h] = part / np.sqrt((part * part).sum(-1, keepdims=True) / DIM + P.f(1e-5)) * gain
            return out

        q = P.put("q_norm", normed(0, HEADS, P["q_gain"]))
        k = P.put("k_norm", normed(HEADS, KV, P["k_gain"]))
        v = qkv[..., (HEADS + KV) * DIM :].reshape(2, NEW, KV, DIM)

        angles = np.empty((NEW, DIM // 2), dt)
        for i in range(DIM // 2):
            theta = 200.0 ** (-2 * i / DIM)
            mix = min(i / 3, 1.0)
            if P.d("ramp_the_other_way"):
                mix = 1 - mix
            for t in range(NEW):
                place = t if P.d("positions_from_zero") else int(P["positions"][t])
                angles[t, i] = place * P.f(theta * (mix / 4 + 1 - mix))
        angles = P.put("angles", angles)

        def rotated(z):
            out = np.empty_like(z)
            for i in range(DIM // 2):
                a, b = (2 * i, 2 * i + 1) if P.d("rotary_pairs_interleaved") else (i, i + DIM // 2)
                c, s = np.cos(angles[:, i])[None, :, None], np.sin(angles[:, i])[None, :, None]
                out[..., a] = (z[..., a] * c - z[..., b] * s) * P.f(MSCALE)
                out[..., b] = (z[..., b] * c + z[..., a] * s) * P.f(MSCALE)
            return out

        q, k = P.put("q_rot", rotated(q)), P.put("k_rot", rotated(k))

        total = PAST + NEW
        keys, values = np.empty((2, total, KV, DIM), dt), np.empty((2, total, KV, DIM), dt)
        keys[:, :PAST], keys[:, PAST:] = P["k_cache"], k
        values[:, :PAST], values[:, PAST:] = P["v_cache"], v

        def kv_of(h):
            return h % KV if P.d("kv_head_by_remainder") else h // (HEADS // KV)

        softmax_scale = P.f(DIM**-0.5)
        if P.d("mscale_also_in_softmax"):
            softmax_scale = softmax_scale * P.f(MSCALE**2)
        cap = P.f(CAP)
        scores = np.empty((2, HEADS, NEW, total), dt)
        for n in range(2):
            for h in range(HEADS):
                dot = q[n, :, h] @ keys[n, :, kv_of(h)].T
                if P.d("cap_before_the_scale"):
                    scores[n, h] = cap * np.tanh(dot / cap) * softmax_scale
                else:
                    scores[n, h] = cap * np.tanh(dot * (softmax_scale / cap))
        scores = P.put("scores", scores)

        lse = np.empty((2, HEADS, NEW), dt)
        attn = np.empty((2, HEADS, NEW, DIM), dt)
        for n in range(2):
            for h in range(HEADS):
                for t in range(NEW):
                    if P.d("sink_not_in_the_sum"):
                        m, total_p = P.f(-np.inf), P.f(0)
                    else:
                        m, total_p = P["sinks"][h], P.f(1)
                    acc = np.zeros(DIM, dt)
                    last = t if P.d("causal_from_the_top_left") else PAST + t
                    for j in range(0, total, 6):
                        stop = min(j + 6, total)
                        cols = np.arange(j, stop)
                        seen = (cols <= last) & (cols > last - WINDOW)
                        if not seen.any():
                            continue
                        s = np.where(seen, scores[n, h, t, j:stop], P.f(-np.inf))
                        new = np.maximum(m, s.max())
                        keep, p = np.exp(m - new), np.exp(s - new)
                        at = j - 6 if P.d("value_tile_of_the_round_before") and j else j
                        total_p = total_p * keep + p.sum()
                        acc = acc * keep + p @ values[n, at : at + len(cols), kv_of(h)]
                        m = new
                    lse[n, h, t] = m + np.log(total_p)
                    attn[n, h, t] = acc / total_p
        P.put("lse", lse)
        attn = P.put("attn", attn)

        merged = np.empty((2, NEW, HEADS * DIM), dt)
        if P.d("heads_merged_without_transposing"):
            merged[:] = attn.reshape(2, NEW, HEADS * DIM)
        else:
            for h in range(HEADS):
                merged[..., h * DIM : (h + 1) * DIM] = attn[:, h]
        P.put("output", merged @ P["w_out"].T)

    defects = [
        D(
            "positions_from_zero",
            "angles",
            "shift",
            "The new tokens' positions start at 0, not after the cached ones.",
            ("drop_term", "constant", "other"),
        ),
        D(
            "ramp_the_other_way",
            "angles",
            "swap",
            "YaRN interpolates the fast dimensions and keeps the slow ones: the ramp's two sides are exchanged.",
            ("flip", "factor", "scale", "other", "function"),
        ),
        D(
            "rotary_pairs_interleaved",
            "q_rot",
            "layout",
            "Neighbours are rotated as pairs (GPT-J), where the two halves of a head should be (NeoX).",
            ("permute", "swap", "shift"),
        ),
        D(
            "kv_head_by_remainder",
            "scores",
            "permute",
            "Query head h reads key head h % 3, not h // 5.",
            ("layout", "swap", "transpose"),
        ),
        D(
            "mscale_also_in_softmax",
            "scores",
            "scale",
            "YaRN's attention factor is in the rotation and once more in the softmax scale.",
            ("factor", "constant"),
        ),
        D(
            "cap_before_the_scale",
            "scores",
            "function",
            "The soft cap is put on the dot products, and what it gives is scaled.",
            ("other", "scale", "factor", "swap"),
        ),
        D(
            "causal_from_the_top_left",
            "lse",
            "mask",
            "The causal mask is aligned to the first key, not to the last: it does not count the cached tokens.",
            ("shift", "truncate"),
        ),
        D(
            "sink_not_in_the_sum",
            "lse",
            "drop_term",
            "The sink is missing in the softmax's denominator.",
            ("mask", "zero"),
        ),
        D(
            "value_tile_of_the_round_before",
            "attn",
            "stale",
            "From the second tile on, the weights meet the values still in the buffer from the tile before.",
            ("race", "shift", "permute"),
        ),
        D(
            "heads_merged_without_transposing",
            "output",
            "layout",
            "(heads, tokens, dim) is read as (tokens, heads * dim) in memory order.",
            ("transpose", "permute"),
        ),
    ]


@program("z02", variants=("f32", "bf16", "bf16reg"), wide=("output",))
class conv_block:
    """Reflected, strided, dilated conv, group norm, SiLU, causal depthwise conv, layer scale, skip; with gradients."""

    def make(g):
        return dict(
            x=randn(g, 2, 5, 13, 15, shift=0.3),
            conv_w=randn(g, 12, 5, 3, 3, scale=0.2),
            conv_b=randn(g, 12, scale=0.3),
            gn_w=randn(g, 12, scale=0.3, shift=1.0),
            gn_b=randn(g, 12, scale=0.3),
            dw_w=randn(g, 12, 4, scale=0.5),
            gamma=randn(g, 12, scale=0.2, shift=0.6),
            skip_w=randn(g, 12, 5, scale=0.4),
            target=randn(g, 2, 12, 7, 15),
        )

    def reference(x, conv_w, conv_b, gn_w, gn_b, dw_w, gamma, skip_w, target):
        padded = F.pad(x, (2, 2, 1, 1), mode="reflect")
        c = step("conv", F.conv2d(padded, conv_w, conv_b, stride=(2, 1), dilation=(1, 2)))
        a = step("norm", F.group_norm(c, 3, gn_w, gn_b, eps=1e-3))
        a = step("act", F.silu(a))
        d = step("depthwise", F.conv2d(F.pad(a, (6, 0)), dw_w[:, None, None], dilation=(1, 2), groups=12))
        skip = step("skip", F.conv2d(x, skip_w[:, :, None, None], stride=(2, 1)))
        out = step("block", skip + gamma.view(1, 12, 1, 1) * d)
        return 0.5 * (out - target).square().mean()

    def port(P: Port):
        x, cw, dw, gamma, sw = P["x"], P["conv_w"], P["dw_w"], P["gamma"], P["skip_w"]
        dt = x.dtype

        def mirrored(i, size):
            edge = 1 if P.d("reflection_repeats_the_edge") else 0
            return -i - edge if i < 0 else 2 * size - 2 + edge - i if i >= size else i

        rows = np.array([[mirrored(2 * i + u - 1, 13) for i in range(7)] for u in range(3)])
        hop = 1 if P.d("dilation_left_out") else 2
        cols = np.array([[mirrored(j + hop * v - 2, 15) for j in range(15)] for v in range(3)])
        c = np.zeros((2, 12, 7, 15), dt) + P["conv_b"][:, None, None]
        for u in range(3):
            for v in range(3):
                patch = x[:, :, rows[u][:, None], cols[v][None]]
                c += np.einsum("ncij,oc->noij", patch, cw[:, :, u, v])
        c = P.put("conv", c)

        hat, inv = np.empty_like(c), np.empty((2, 3), dt)
        count = 4 * 7 * 15

        def members(k):
            return slice(k, 12, 3) if P.d("groups_interleaved") else slice(4 * k, 4 * k + 4)

        for n in range(2):
            for k in range(3):
                part = c[n, members(k)]
                mean = part.sum() / P.f(count)
                m2 = ((part - mean) ** 2).sum()
                var = m2 / P.f(count - 1 if P.d("unbiased_variance") else count)
                if P.d("eps_beside_the_root"):
                    inv[n, k] = 1 / (np.sqrt(var) + P.f(1e-3))
                else:
                    inv[n, k] = 1 / np.sqrt(var + P.f(1e-3))
                hat[n, members(k)] = (part - mean) * inv[n, k]
        norm = P.put("norm", hat * P["gn_w"][:, None, None] + P["gn_b"][:, None, None])
        act = P.put("act", norm * sigmoid(norm))

        d = np.zeros_like(act)
        ahead = 2 if P.d("causal_padding_on_both_sides") else 0
        for j in range(15):
            for m in range(4):  # m taps back
                at = j - 2 * m + ahead
                if 0 <= at < 15:
                    tap = m if P.d("depthwise_kernel_reversed") else 3 - m
                    d[..., j] += dw[:, tap, None] * act[..., at]
        d = P.put("depthwise", d)

        skip = P.put("skip", np.tensordot(sw, x[:, :, ::2], axes=(1, 1)).transpose(1, 0, 2, 3))
        g3 = gamma[:, None, None]
        out = g3 * (skip + d) if P.d("layer_scale_on_the_skip_too") else skip + g3 * d
        out = P.put("block", out)
        gap = out - P["target"]
        P.put("output", (gap * gap).sum() / P.f(2 * gap.size))

        d_out = gap / P.f(gap.size)
        P.put("grad:gamma", (d_out * d).sum((0, 2, 3)))
        P.put("grad:skip_w", np.einsum("noij,ncij->oc", d_out, x[:, :, ::2]))
        d_dw, d_act, d_d = np.zeros_like(dw), np.zeros_like(act), d_out * g3
        for m in range(4):
            span = 15 - 2 * m
            d_dw[:, 3 - m] = (d_d[..., 2 * m :] * act[..., :span]).sum((0, 2, 3))
            d_act[..., :span] += d_d[..., 2 * m :] * dw[:, 3 - m, None, None]
        P.put("grad:dw_w", d_dw)
        s = sigmoid(norm)
        d_norm = d_act * s * (1 + norm * (1 - s))
        P.put("grad:gn_w", (d_norm * hat).sum((0, 2, 3)))
        P.put("grad:gn_b", d_norm.sum((0, 2, 3)))

        d_hat, d_c = d_norm * P["gn_w"][:, None, None], np.empty_like(c)
        for n in range(2):
            for k in range(3):
                dh, h = d_hat[n, members(k)], hat[n, members(k)]
                along = (dh * h).sum() / P.f(count)
                d_c[n, members(k)] = inv[n, k] * (dh - dh.sum() / P.f(count) - h * along)
        P.put("grad:conv_b", d_c.sum((0, 2, 3)))
        d_cw, d_x = np.zeros_like(cw), np.zeros_like(x)
        for n in range(2):  # a block an image
            for u in range(3):
                for v in range(3):
                    patch = x[n][:, rows[u][:, None], cols[v][None]]
                    part = np.einsum("oij,cij->oc", d_c[n], patch)
                    d_cw[:, :, u, v] = part + (0 if P.d("weight_gradient_stored_not_added") else d_cw[:, :, u, v])
                    back = np.einsum("oij,oc->cij", d_c[n], cw[:, :, u, v])
                    if P.d("padding_gradient_not_folded_back"):
                        inside = (rows[u] == 2 * np.arange(7) + u - 1)[:, None] & (cols[v] == np.arange(15) + 2 * v - 2)
                        back = back * inside
                    np.add.at(d_x[n], (slice(None), rows[u][:, None], cols[v][None]), back)
        P.put("grad:conv_w", d_cw)
        d_x[:, :, ::2] += np.einsum("noij,oc->ncij", d_out, sw)
        P.put("grad:x", d_x)

    defects = [
        D(
            "reflection_repeats_the_edge",
            "conv",
            "shift",
            "The padding mirrors about the border and repeats the edge, where reflection is about the edge's centre.",
            ("other", "mask", "function", "permute"),
        ),
        D(
            "dilation_left_out",
            "conv",
            "other",
            "The three columns of the kernel read neighbours, not every second column.",
            ("shift", "layout", "constant", "permute"),
        ),
        D(
            "groups_interleaved",
            "norm",
            "permute",
            "Channel c is in group c % 3, not in group c // 4.",
            ("layout", "axis", "other"),
        ),
        D(
            "unbiased_variance",
            "norm",
            "ddof",
            "The variance of a group is divided by n - 1.",
            ("scale", "factor", "eps"),
        ),
        D(
            "eps_beside_the_root",
            "norm",
            "eps",
            "Epsilon is added to the standard deviation, not to the variance.",
            ("function", "other"),
        ),
        D(
            "depthwise_kernel_reversed",
            "depthwise",
            "flip",
            "The depthwise kernel is run through the other way round: a convolution, not a correlation.",
            ("permute", "swap"),
        ),
        D(
            "causal_padding_on_both_sides",
            "depthwise",
            "shift",
            "A part of the padding is on the right, so that an output sees columns after it.",
            ("mask", "other"),
        ),
        D(
            "layer_scale_on_the_skip_too",
            "block",
            "factor",
            "The layer scale multiplies the sum of branch and skip, not the branch.",
            ("other", "scale", "swap"),
        ),
        D(
            "weight_gradient_stored_not_added",
            "grad:conv_w",
            "race",
            "The images' blocks store their part of the weight gradient; what the last one writes remains.",
            ("truncate", "drop_term", "stale", "zero", "axis"),
        ),
        D(
            "padding_gradient_not_folded_back",
            "grad:x",
            "drop_term",
            "What the reflected border gets as gradient is thrown away, not added to the pixels that it mirrors.",
            ("mask", "truncate", "zero"),
        ),
    ]


BANDS = (0, 2, 5, 10)


@program("z03", variants=("f32", "f16"))
class mdct_codec:
    """Stereo MDCT codec with smoothed band gains and AAC's power quantiser; the port folds into a DCT-IV of 10."""

    def make(g):
        t = torch.arange(57, dtype=torch.float64)
        tone = torch.sin(0.31 * t + rand(g, 1, high=6.0)) + 0.5 * torch.sin(1.37 * t + rand(g, 1, high=6.0))
        return dict(
            x=0.4 * tone * rand(g, 2, 1, low=0.6, high=1.2) + randn(g, 2, 57, scale=0.15),
            band_steps=rand(g, 3, low=0.15, high=0.4),
        )

    def reference(x, band_steps):
        pre = step("emphasis", x - 0.85 * F.pad(x, (1, 0))[:, :-1])
        ms = step("mid_side", torch.stack([pre[0] + pre[1], pre[0] - pre[1]]) / math.sqrt(2))
        n, k = torch.arange(20, dtype=x.dtype), torch.arange(10, dtype=x.dtype)
        window = torch.sin(math.pi / 20 * (n + 0.5))
        basis = torch.cos(math.pi / 10 * (n[None] + 0.5 + 5) * (k[:, None] + 0.5)) * math.sqrt(2 / 10)
        framed = step("windowed", F.pad(ms, (10, 13)).unfold(1, 20, 10) * window)
        coef = step("mdct", framed @ basis.T)
        rms = [coef[..., a:b].square().mean(-1).sqrt() for a, b in zip(BANDS, BANDS[1:])]
        energy = step("energy", torch.stack(rms, -1))
        gains = [energy[:, 0]]
        for t in range(1, 7):
            gains.append(0.6 * gains[-1] + 0.4 * energy[:, t])
        gain = step("gain", torch.stack(gains, 1))
        width = (gain * band_steps).repeat_interleave(torch.tensor([2, 3, 5]), dim=-1)
        quant = torch.sign(coef) * torch.floor((coef.abs() / width) ** 0.75 + 0.4054)
        quant = step("quant", quant.to(torch.int16)).to(x.dtype)
        deq = step("dequant", torch.sign(quant) * quant.abs() ** (4 / 3) * width)
        seg = step("imdct", deq @ basis * window)
        ola = torch.zeros(2, 80, dtype=x.dtype)
        for t in range(7):
            ola = ola + F.pad(seg[:, t], (10 * t, 60 - 10 * t))
        ola = step("overlap", ola[:, 10:67])
        lr = step("left_right", torch.stack([ola[0] + ola[1], ola[0] - ola[1]]) / math.sqrt(2))
        out, y = [], torch.zeros(2, dtype=x.dtype)
        for t in range(57):
            y = lr[:, t] + 0.85 * y
            out.append(y)
        return torch.stack(out, 1)

    def port(P: Port):
        x, steps = P["x"], P["band_steps"]
        dt = x.dtype
        pre = np.empty_like(x)
        before = P.f(0)
        for ch in range(2):
            if not P.d("filter_state_kept_between_channels"):
                before = P.f(0)
            for t in range(57):
                pre[ch, t] = x[ch, t] - P.f(0.85) * before
                before = x[ch, t]
        pre = P.put("emphasis", pre)
        half = P.f(math.sqrt(0.5))
        ms = np.empty_like(pre)
        ms[0], ms[1] = (pre[0] + pre[1]) * half, (pre[0] - pre[1]) * half
        ms = P.put("mid_side", ms)

        window = np.sin(np.pi / 40 * (2 * np.arange(20) + 1)).astype(dt)
        framed = np.zeros((2, 7, 20), dt)
        for t in range(7):
            for i in range(20):
                at = 10 * (t - 1) + i
                if 0 <= at < 57:
                    framed[:, t, i] = ms[:, at] * window[i]
        framed = P.put("windowed", framed)

        i = np.arange(10)
        dct4 = (np.cos(np.pi / 40 * np.outer(2 * i + 1, 2 * i + 1)) * np.sqrt(0.2)).astype(dt)
        a, b, c, d = (framed[..., 5 * s : 5 * s + 5] for s in range(4))
        back = c if P.d("third_quarter_not_reversed") else c[..., ::-1]
        folded = np.concatenate([-back - d, a - b[..., ::-1]], -1)
        coef = P.put("mdct", folded @ dct4)

        energy = np.zeros((2, 7, 3), dt)
        for band in range(3):
            lo, hi = BANDS[band], BANDS[band + 1]
            for m in range(lo, hi):
                energy[..., band] += coef[..., m] * coef[..., m]
            energy[..., band] /= P.f(5 if P.d("every_band_as_wide_as_the_last") else hi - lo)
        energy = P.put("energy", np.sqrt(energy))

        gain = np.empty_like(energy)
        gain[:, 0] = energy[:, 0]
        for t in range(1, 7):
            held = energy[:, t - 1] if P.d("smoothing_from_the_raw_energy") else gain[:, t - 1]
            gain[:, t] = held + P.f(0.4) * (energy[:, t] - held)
        gain = P.put("gain", gain)

        band_of = np.searchsorted(np.array(BANDS), np.arange(10), side="right") - 1
        width = gain[..., band_of] * steps[band_of]
        level = np.abs(coef) / width
        level = np.sqrt(level * np.sqrt(level))
        whole = np.floor(level + P.f(0.5 if P.d("rounded_at_a_half") else 0.4054)).astype(np.int16)
        quant = P.put("quant", np.where(coef < 0, -whole, whole).astype(np.int16))

        deq = np.zeros_like(coef)
        for k in range(0, 8 if P.d("last_tile_not_dequantised") else 10, 4):
            q = quant[..., k : k + 4]
            size = np.abs(q).astype(dt)
            value = size * np.cbrt(size) * width[..., k : k + 4]
            deq[..., k : k + 4] = value if P.d("sign_not_put_back") else np.where(q < 0, -value, value)
        deq = P.put("dequant", deq)

        half4 = deq @ dct4
        p, q = half4[..., :5], half4[..., 5:]
        seg = np.concatenate([q, -q[..., ::-1], -p[..., ::-1], -p], -1)
        seg = P.put("imdct", seg if P.d("no_window_after_the_inverse") else seg * window)

        line = np.zeros((2, 80), dt)
        for t in range(7):
            if P.d("overlap_stored_not_added"):
                line[:, 10 * t : 10 * t + 20] = seg[:, t]
            else:
                line[:, 10 * t : 10 * t + 20] += seg[:, t]
        line = P.put("overlap", line[:, 10:67])

        lr = np.empty_like(line)
        left, right = (1, 0) if P.d("left_and_right_exchanged") else (0, 1)
        lr[left], lr[right] = (line[0] + line[1]) * half, (line[0] - line[1]) * half
        lr = P.put("left_right", lr)
        out = np.empty_like(lr)
        for ch in range(2):
            y = P.f(0)
            for t in range(57):
                y = lr[ch, t] + P.f(0.85) * y
                out[ch, t] = y
        P.put("output", out)

    defects = [
        D(
            "filter_state_kept_between_channels",
            "emphasis",
            "stale",
            "The emphasis filter of the second channel starts with the first one's last sample.",
            ("mask", "zero", "other", "shift"),
        ),
        D(
            "third_quarter_not_reversed",
            "mdct",
            "flip",
            "In the fold before the DCT-IV a frame's third quarter is not run through backwards.",
            ("permute", "other"),
        ),
        D(
            "every_band_as_wide_as_the_last",
            "energy",
            "scale",
            "The mean over a band is divided by 5 for all bands, not by the band's width.",
            ("factor", "constant"),
        ),
        D(
            "smoothing_from_the_raw_energy",
            "gain",
            "other",
            "A gain is smoothed with the energy before it, not with the smoothed gain before it: no recurrence.",
            ("stale", "function", "drop_term", "swap", "shift"),
        ),
        D("rounded_at_a_half", "quant", "constant", "0.5 is added before the floor, not 0.4054.", ("function",)),
        D(
            "last_tile_not_dequantised",
            "dequant",
            "truncate",
            "The loop goes over whole tiles of 4; the last two coefficients stay 0.",
            ("zero", "mask"),
        ),
        D(
            "sign_not_put_back",
            "dequant",
            "sign",
            "The power is taken of the magnitude, and no sign is put back.",
            ("function",),
        ),
        D(
            "no_window_after_the_inverse",
            "imdct",
            "factor",
            "The window is missing after the inverse transform.",
            ("drop_term", "scale"),
        ),
        D(
            "overlap_stored_not_added",
            "overlap",
            "race",
            "Frames are stored over each other where their halves should be added.",
            ("drop_term", "stale", "truncate", "zero"),
        ),
        D(
            "left_and_right_exchanged",
            "left_right",
            "swap",
            "Mid plus side goes to the right channel and mid minus side to the left.",
            ("permute", "flip", "sign"),
        ),
    ]
