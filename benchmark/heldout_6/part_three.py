"""A state-space block, decoding attention over a paged cache, and a detection head."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randn, silu, step


@program("y01", variants=("bf16", "f32", "bf16reg"))
class selective_scan:
    """A Mamba block: causal depthwise convolution, selective scan, gate; the port scans in chunks of 8."""

    def make(g):
        a = torch.arange(1, 7, dtype=torch.float64).log().expand(10, 6)
        return dict(
            u=randn(g, 2, 21, 10),
            z=randn(g, 2, 21, 10),
            conv_w=randn(g, 10, 4, scale=0.5),
            conv_b=randn(g, 10, scale=0.2),
            w_x=randn(g, 15, 10, scale=0.5),
            w_dt=randn(g, 10, 3, scale=0.5),
            dt_bias=randn(g, 10, scale=0.4, shift=-1.2),
            a_log=a + randn(g, 10, 6, scale=0.2),
            skip=randn(g, 10, scale=0.3, shift=1.0),
            w_out=randn(g, 7, 10, scale=0.4),
        )

    def reference(u, z, conv_w, conv_b, w_x, w_dt, dt_bias, a_log, skip, w_out):
        length = u.shape[1]
        c = F.conv1d(u.transpose(1, 2), conv_w[:, None], conv_b, padding=3, groups=10)[..., :length]
        x = step("conv", F.silu(c).transpose(1, 2))
        low, b, c = step("proj", x @ w_x.T).split([3, 6, 6], -1)
        dt = step("dt", F.softplus(low @ w_dt.T + dt_bias))
        a = -a_log.exp()
        h, all_h = torch.zeros_like(x[:, 0, :, None] * a), []
        for t in range(length):
            h = torch.exp(dt[:, t, :, None] * a) * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None, :]
            all_h.append(h)
        states = step("states", torch.stack(all_h, 1))
        y = step("y", torch.einsum("bldn,bln->bld", states, c) + skip * x)
        gated = step("gated", y * F.silu(z))
        return gated @ w_out.T

    def port(P: Port):
        u, z, w, skip = P["u"], P["z"], P["conv_w"], P["skip"]
        length = 21
        ahead = 1 if P.d("conv_padded_on_both_sides") else 0
        padded = np.zeros((2, length + 6, 10), u.dtype)
        padded[:, 3 : 3 + length] = u
        x = np.zeros_like(u) + P["conv_b"]
        for k in range(4):
            x = x + padded[:, k + ahead : k + ahead + length] * w[:, k]
        x = P.put("conv", silu(x))

        proj = P.put("proj", np.einsum("bld,ed->ble", x, P["w_x"]))
        low, b, c = proj[..., :3], proj[..., 3:9], proj[..., 9:]
        pre = sum(low[..., r, None] * P["w_dt"][:, r] for r in range(3))
        if P.d("dt_bias_outside_softplus"):
            dt = np.logaddexp(pre, 0) + P["dt_bias"]
        else:
            dt = np.logaddexp(pre + P["dt_bias"], 0)
        dt = P.put("dt", np.maximum(dt, 0))  # the usual limit, from 0 to infinity

        a = -np.exp(P["a_log"])
        states = np.zeros((2, length, 10, 6), x.dtype)
        b_used = c if P.d("b_and_c_swapped") else b
        carry = np.zeros((2, 10, 6), x.dtype)
        for t0 in range(0, length, 8):
            t1 = min(t0 + 8, length)
            decay = dt[:, t0:t1, :, None] * a
            cum = np.cumsum(decay, 1)
            add = (dt * x)[:, t0:t1, :, None] * b_used[:, t0:t1, None, :]
            for t in range(t1 - t0):
                local = (np.exp(cum[:, t : t + 1] - cum[:, : t + 1]) * add[:, : t + 1]).sum(1)
                states[:, t0 + t] = np.exp(cum[:, t]) * carry + local
            carry = local if P.d("chunk_carry_without_earlier_chunks") else states[:, t1 - 1]
        states = P.put("states", states)

        c_used = b if P.d("b_and_c_swapped") else c
        y = (states * c_used[:, :, None, :]).sum(-1) + skip * (u if P.d("skip_from_block_input") else x)
        y = P.put("y", y)
        gated = np.array(y)
        for d0 in range(0, 8 if P.d("gate_misses_channel_tail") else 10, 4):
            s = slice(d0, min(d0 + 4, 10))
            gated[..., s] = y[..., s] * silu(z[..., s])
        gated = P.put("gated", gated)
        P.put("output", np.einsum("bld,od->blo", gated, P["w_out"]))

    defects = [
        D(
            "conv_padded_on_both_sides",
            "conv",
            "shift",
            "The convolution is padded on both sides, so that its window reaches one time step into the future.",
            ("mask",),
        ),
        D(
            "dt_bias_outside_softplus",
            "dt",
            "function",
            "The bias of the time step is added after the softplus instead of before it.",
            ("other", "swap", "drop_term"),
        ),
        D(
            "chunk_carry_without_earlier_chunks",
            "states",
            "drop_term",
            "The state handed to the next chunk is the chunk's own contribution only; what came from the chunks before it is lost.",
            ("stale", "truncate", "zero", "other"),
        ),
        D(
            "b_and_c_swapped",
            "states",
            "swap",
            "B and C are taken from the projection in the wrong order.",
            ("permute", "layout", "shift"),
        ),
        D(
            "skip_from_block_input",
            "y",
            "other",
            "The skip term D multiplies the block's input instead of the convolved input.",
            ("swap", "stale", "function"),
        ),
        D(
            "gate_misses_channel_tail",
            "gated",
            "truncate",
            "The last two channels, which do not fill a tile, are not gated.",
            ("mask", "drop_term", "stale"),
        ),
    ]


def rotate(x, pos):
    half = x.shape[-1] // 2
    inv = 1 / 1000 ** (torch.arange(half, dtype=x.dtype, device=x.device) / half)
    ang = pos.to(x.dtype)[:, None, None] * inv
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * ang.cos() - x2 * ang.sin(), x2 * ang.cos() + x1 * ang.sin()], -1)


@program("y02", variants=("f16", "bf16", "f32"), wide=("lse",))
class paged_decode:
    """One decoding step with grouped heads over a paged cache, with a window and a soft cap; the port splits by page."""

    def make(g):
        return dict(
            q=randn(g, 3, 6, 12, scale=1.3),
            k_new=randn(g, 3, 2, 12, scale=1.3),
            v_new=randn(g, 3, 2, 12),
            k_cache=randn(g, 14, 4, 2, 12, scale=1.3),
            v_cache=randn(g, 14, 4, 2, 12),
            table=torch.randperm(14, generator=g)[:12].reshape(3, 4),
            lens=torch.tensor([14, 6, 15]),
            w_o=randn(g, 9, 72, scale=0.2),
        )

    def reference(q, k_new, v_new, k_cache, v_cache, table, lens, w_o):
        pos = lens - 1
        qr = step("q_rot", rotate(q, pos))
        kr = step("k_rot", rotate(k_new, pos))
        block = table[torch.arange(3), pos // 4]
        kc, vc = k_cache.clone(), v_cache.clone()
        kc[block, pos % 4] = kr
        vc[block, pos % 4] = v_new
        kc, vc = step("k_pages", kc), step("v_pages", vc)
        k = kc[table].reshape(3, 16, 2, 12).repeat_interleave(3, 2)
        v = vc[table].reshape(3, 16, 2, 12).repeat_interleave(3, 2)
        t = torch.arange(16)
        valid = ((t <= pos[:, None]) & (t > pos[:, None] - 11))[:, None]
        s = torch.einsum("bhd,bthd->bht", qr, k) / math.sqrt(12)
        s = step("scores", torch.where(valid, 8 * torch.tanh(s / 8), 0.0))
        lse = step("lse", torch.logsumexp(s.masked_fill(~valid, -math.inf), -1))
        p = torch.where(valid, torch.exp(s - lse[..., None]), 0.0)
        attn = step("attn", torch.einsum("bht,bthd->bhd", p, v))
        return attn.reshape(3, 72) @ w_o.T

    def port(P: Port):
        table, lens = P["table"], P["lens"]
        kc, vc = P["k_cache"], P["v_cache"]
        dtype = kc.dtype

        def rope(x, pairs):
            out = np.empty_like(x)
            for b in range(3):
                for i in range(6):
                    ang = P.f((lens[b] - 1) * 1000.0 ** (-i / 6))
                    lo, hi = (2 * i, 2 * i + 1) if pairs else (i, i + 6)
                    turned = (x[b, :, lo] + 1j * x[b, :, hi]) * np.exp(1j * np.float64(ang))
                    out[b, :, lo], out[b, :, hi] = turned.real, turned.imag
            return out

        qr = P.put("q_rot", rope(P["q"], P.d("rope_on_neighbouring_pairs")))
        kr = P.put("k_rot", rope(P["k_new"], P.d("rope_on_neighbouring_pairs")))
        for b in range(3):
            at = int(lens[b]) - 1
            kc[table[b, at // 4], at % 4] = kr[b]
            if P.d("value_written_one_slot_late"):
                at += 1
            vc[table[b, at // 4], at % 4] = P["v_new"][b]
        kc, vc = P.put("k_pages", kc), P.put("v_pages", vc)

        scores = np.zeros((3, 6, 16), dtype)
        valid = np.zeros((3, 16), bool)
        for b in range(3):
            pos = int(lens[b]) - 1
            low = max(0, pos - (11 if P.d("window_one_too_wide") else 10))
            valid[b, low : pos + 1] = True
            for h in range(6):
                kv = h % 2 if P.d("kv_head_by_modulo") else h // 3
                for t in range(low, pos + 1):
                    raw = (kc[table[b, t // 4], t % 4, kv] * qr[b, h]).sum() * P.f(1 / 12**0.5)
                    e = np.exp(raw / 4)  # 8 tanh(raw / 8)
                    scores[b, h, t] = 8 * (e - 1) / (e + 1)
        scores = P.put("scores", scores)

        m, l = np.full((3, 6, 4), -np.inf, dtype), np.zeros((3, 6, 4), dtype)
        acc = np.zeros((3, 6, 4, 12), dtype)
        for b in range(3):
            for page in range(4):
                ok = valid[b, page * 4 : page * 4 + 4]
                if not ok.any():
                    continue
                s = scores[b, :, page * 4 : page * 4 + 4][:, ok]
                m[b, :, page] = s.max(-1)
                e = np.exp(s - s.max(-1, keepdims=True))
                l[b, :, page] = e.sum(-1)
                for h in range(6):
                    kv = h % 2 if P.d("kv_head_by_modulo") else h // 3
                    acc[b, h, page] = e[h] @ vc[table[b, page], :, kv][ok]
        top = m.max(-1)
        w = np.exp(m - top[..., None])
        total = (w * l).sum(-1)
        if P.d("lse_in_base_two"):
            P.put("lse", np.log2(total) + top * P.f(1 / math.log(2)))
        else:
            P.put("lse", np.log(total) + top)
        if P.d("splits_merged_without_maxima"):
            attn = acc.sum(2) / l.sum(-1)[..., None]
        else:
            attn = (w[..., None] * acc).sum(2) / total[..., None]
        attn = P.put("attn", attn)
        out = sum(attn[:, h] @ P["w_o"][:, h * 12 : h * 12 + 12].T for h in range(6))
        P.put("output", out)

    defects = [
        D(
            "rope_on_neighbouring_pairs",
            "q_rot",
            "layout",
            "The rotation turns neighbouring pairs (2i, 2i+1) instead of the pairs (i, i + half) of the two halves.",
            ("permute", "swap", "shift", "axis", "other"),
        ),
        D(
            "value_written_one_slot_late",
            "v_pages",
            "shift",
            "The new value is written to the slot after the one of its token.",
            ("stale",),
        ),
        D(
            "kv_head_by_modulo",
            "scores",
            "permute",
            "A query head takes the key-value head h % 2 instead of h // 3.",
            ("layout", "swap", "other", "axis", "transpose", "shift"),
        ),
        D(
            "window_one_too_wide",
            "scores",
            "mask",
            "The window lets one key more in than it should.",
            ("shift", "truncate"),
        ),
        D(
            "lse_in_base_two",
            "lse",
            "scale",
            "The log-sum-exp is stored in base 2 instead of base e.",
            ("constant", "factor", "function"),
        ),
        D(
            "splits_merged_without_maxima",
            "attn",
            "drop_term",
            "The pages' partial sums are merged without the factor exp(m_page - m) for their own maxima.",
            ("factor", "scale", "function", "other"),
        ),
    ]


@program("y03", variants=("f32", "f16"))
class roi_head:
    """Box decoding, clipping, RoIAlign, class scores and matrix NMS; the port pools with two matrices of hat weights."""

    def make(g):
        centre = torch.tensor([[18.0, 15.0], [44.0, 33.0]], dtype=torch.float64)[[0, 0, 0, 1, 1, 1, 1, 0, 1]]
        centre = centre + randn(g, 9, 2, scale=4.0)
        size = rand(g, 9, 2, low=16.0, high=38.0)
        return dict(
            anchors=torch.cat([centre - size / 2, centre + size / 2], -1),
            deltas=randn(g, 9, 4),
            feat=randn(g, 5, 13, 17, scale=0.6, shift=0.3) + torch.linspace(-1, 1, 17, dtype=torch.float64),
            w=randn(g, 3, 30, scale=0.4),
            b=randn(g, 3, scale=0.3),
        )

    def reference(anchors, deltas, feat, w, b):
        size = anchors[:, 2:] - anchors[:, :2]
        centre = anchors[:, :2] + size / 2
        centre = centre + deltas[:, :2] * 0.1 * size
        size = size * torch.exp((deltas[:, 2:] * 0.2).clamp(max=math.log(1000 / 16)))
        boxes = step("boxes", torch.cat([centre - size / 2, centre + size / 2], -1))
        x1, y1, x2, y2 = boxes.unbind(-1)
        clipped = step("clipped", torch.stack([x1.clamp(0, 68), y1.clamp(0, 52), x2.clamp(0, 68), y2.clamp(0, 52)], -1))

        x1, y1, x2, y2 = (clipped / 4 - 0.5).unbind(-1)
        ky = (torch.arange(6, dtype=feat.dtype) + 0.5) / 6
        kx = (torch.arange(4, dtype=feat.dtype) + 0.5) / 4
        y = (y1[:, None] + (y2 - y1)[:, None] * ky).clamp(0, 12)[:, :, None].expand(-1, -1, 4)
        x = (x1[:, None] + (x2 - x1)[:, None] * kx).clamp(0, 16)[:, None, :].expand(-1, 6, -1)
        iy, ix = y.floor().long().clamp(max=11), x.floor().long().clamp(max=15)
        fy, fx = y - iy, x - ix
        s = feat[:, iy, ix] * (1 - fy) * (1 - fx) + feat[:, iy, ix + 1] * (1 - fy) * fx
        s = s + feat[:, iy + 1, ix] * fy * (1 - fx) + feat[:, iy + 1, ix + 1] * fy * fx
        pooled = step("pooled", s.reshape(5, 9, 3, 2, 2, 2).mean((3, 5)).transpose(0, 1))
        logits = step("logits", pooled.flatten(1) @ w.T + b)

        low, high = clipped[:, None, :2], clipped[:, None, 2:]
        inter = (torch.minimum(high, clipped[:, 2:]) - torch.maximum(low, clipped[:, :2])).clamp(min=0).prod(-1)
        area = (clipped[:, 2:] - clipped[:, :2]).prod(-1)
        iou = step("iou", inter / (area[:, None] + area - inter))
        out = []
        for c in range(3):
            above = logits[:, None, c] > logits[:, c]  # [i, j]: i comes before j
            o = torch.where(above, iou, 0.0)
            most = o.amax(0)  # of i with those before it
            decay = torch.exp(-(o**2 - most[:, None] ** 2) / 0.5)
            decay = torch.where(above, decay, 1.0).amin(0).clamp(max=1)
            out.append(torch.sigmoid(logits[:, c]) * decay)
        return torch.stack(out, -1)

    def port(P: Port):
        an, de, feat = P["anchors"], P["deltas"], P["feat"]
        boxes = np.empty_like(an)
        for r in range(9):
            for ax in range(2):
                side = an[r, 2 + ax] - an[r, ax] + (1 if P.d("legacy_plus_one") else 0)
                mid = an[r, ax] + side / 2 + de[r, ax] * P.f(0.1) * side
                half = side * np.exp(min(de[r, 2 + ax] * P.f(0.2), P.f(math.log(62.5)))) / 2
                boxes[r, ax], boxes[r, 2 + ax] = mid - half, mid + half
        boxes = P.put("boxes", boxes)
        limit = (52, 68) if P.d("clip_height_width_swapped") else (68, 52)
        clipped = boxes.copy()
        for i in range(4):
            clipped[:, i] = np.minimum(np.maximum(boxes[:, i], 0), limit[i % 2])
        clipped = P.put("clipped", clipped)

        def hats(lo, hi, bins, n):
            """Weights of pixels for each bin, two samples a bin."""
            off = 0 if P.d("half_pixel_left_out") else P.f(0.5)
            start, stop = lo / 4 - off, hi / 4 - off
            at = start + (stop - start) * (np.arange(2 * bins, dtype=feat.dtype) + P.f(0.5)) / (2 * bins)
            at = np.clip(at, 0, n - 1)
            weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(n, dtype=feat.dtype)))
            return (weights[::2] + weights[1::2]) / 2

        pooled = np.empty((9, 5, 3, 2), feat.dtype)
        for r in range(9):
            wy = hats(clipped[r, 1], clipped[r, 3], 3, 13)
            wx = hats(clipped[r, 0], clipped[r, 2], 2, 17)
            for c in range(5):
                pooled[r, c] = wy @ feat[c] @ wx.T
        pooled = P.put("pooled", pooled)

        flat = pooled.transpose(0, 2, 3, 1) if P.d("flattened_channels_last") else pooled
        logits = P.put("logits", np.einsum("rk,ck->rc", flat.reshape(9, 30), P["w"]) + P["b"])

        iou = np.zeros((9, 9), feat.dtype)
        for i in range(9):
            for j in range(9):
                a, b = clipped[i], clipped[j]
                w = max(0, min(a[2], b[2]) - max(a[0], b[0]))
                h = max(0, min(a[3], b[3]) - max(a[1], b[1]))
                union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
                if not P.d("union_counts_overlap_twice"):
                    union = union - w * h
                iou[i, j] = w * h / union
        iou = P.put("iou", iou)

        out = np.empty((9, 3), feat.dtype)
        for c in range(3):
            order = np.argsort(-logits[:, c], kind="stable")
            o = np.triu(iou[np.ix_(order, order)], 1)
            most = o.max(0)
            for j in range(9):
                decay = P.f(1)
                for i in range(j):
                    comp = most[j] if P.d("compensated_by_the_wrong_box") else most[i]
                    decay = min(decay, np.exp(-2 * o[i, j] ** 2) / np.exp(-2 * comp**2))
                out[order[j], c] = decay / (1 + np.exp(-logits[order[j], c]))
        P.put("output", out)

    defects = [
        D(
            "legacy_plus_one",
            "boxes",
            "constant",
            "Widths and heights of anchors are counted with the old + 1.",
            ("shift", "scale", "function", "other"),
        ),
        D(
            "clip_height_width_swapped",
            "clipped",
            "swap",
            "The x coordinates are clipped to the image's height and the y coordinates to its width.",
            ("axis", "transpose", "constant", "layout", "permute"),
        ),
        D(
            "half_pixel_left_out",
            "pooled",
            "shift",
            "The half pixel is not taken off the sampling coordinates (aligned=False).",
            ("constant", "drop_term"),
        ),
        D(
            "flattened_channels_last",
            "logits",
            "layout",
            "The pooled features are flattened with channels last, where the weights expect them first.",
            ("permute", "transpose", "axis"),
        ),
        D(
            "union_counts_overlap_twice",
            "iou",
            "drop_term",
            "The intersection is not subtracted from the union.",
            ("function", "factor", "other"),
        ),
        D(
            "compensated_by_the_wrong_box",
            "output",
            "axis",
            "The decay is compensated by the largest overlap of the suppressed box instead of the suppressing one's.",
            ("transpose", "swap", "other", "function"),
        ),
    ]
