"""Decoding on a quantised, paged cache with split keys, and a speech front end with a CTC loss."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randint, randn, step

WINDOW = 13


@program("bb01", variants=("f32",))
class quantised_decode:
    """One token of grouped-query attention: normed and rotated query, the new key quantised to 8 bits in groups of 4, a
    paged cache of codes (keys by token, values by head), a sliding window, keys split in three, and a sink for each
    head. The port walks pages and tokens one by one."""

    def make(g):
        return dict(
            q=randn(g, 4, 6, 8, scale=1.3),
            k_new=randn(g, 4, 2, 8),
            v_new=randn(g, 4, 2, 8),
            q_w=randn(g, 8, scale=0.25, shift=1.2),
            k_cache=randint(g, -127, 128, 24, 4, 2, 8),
            k_scale=rand(g, 24, 4, 2, 2, low=0.004, high=0.022),
            v_cache=randint(g, -127, 128, 24, 2, 4, 8),
            v_scale=rand(g, 24, 2, 4, low=0.004, high=0.02),
            table=torch.randperm(24, generator=g).view(4, 6),
            lens=torch.tensor([5, 8, 14, 19])[torch.randperm(4, generator=g)],
            sink=randn(g, 6, scale=0.6),
        )

    def reference(q, k_new, v_new, q_w, k_cache, k_scale, v_cache, v_scale, table, lens, sink):
        angle = lens[:, None] * 10000 ** (-torch.arange(0, 8, 2, dtype=q.dtype) / 8)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def rotated(x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q = step("q_rope", rotated(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) * q_w))
        k = step("k_rope", rotated(k_new)).reshape(4, 2, 2, 4)
        scale = step("new_scale", k.abs().amax(-1) / 127)
        codes = step("k_codes", torch.round(k / scale[..., None]).clamp(-127, 127).reshape(4, 2, 8))

        keys = (k_cache.to(q.dtype).unflatten(-1, (2, 4)) * k_scale[..., None]).flatten(-2)
        values = (v_cache.to(q.dtype) * v_scale[..., None]).permute(0, 2, 1, 3)
        at = torch.arange(24)
        new = (at == lens[:, None])[..., None, None]
        new_key = (codes.view(4, 2, 2, 4) * scale[..., None]).reshape(4, 1, 2, 8)
        keys = torch.where(new, new_key, keys[table].reshape(4, 24, 2, 8))
        values = torch.where(new, v_new[:, None], values[table].reshape(4, 24, 2, 8))
        valid = ((at <= lens[:, None]) & (at > lens[:, None] - WINDOW))[:, None].expand(4, 6, 24)
        s = torch.einsum("bkgd,btkd->bkgt", q.view(4, 2, 3, 8), keys).reshape(4, 6, 24) / 8**0.5
        s = step("scores", torch.where(valid, s, torch.zeros_like(s))).view(4, 6, 3, 8)

        valid = valid.reshape(4, 6, 3, 8)
        used = valid.any(-1)
        top = torch.where(used, s.masked_fill(~valid, -1e30).amax(-1), torch.zeros_like(s[..., 0]))
        top = step("part_max", top)
        p = torch.exp(torch.where(valid, s - top[..., None], torch.full_like(s, -1e30)))
        total = step("part_sum", p.sum(-1))
        wide = values.repeat_interleave(3, 2).view(4, 3, 8, 6, 8)
        acc = step("part_acc", torch.einsum("bhst,bsthd->bhsd", p, wide))
        highest = torch.maximum(top.masked_fill(~used, -1e30).amax(-1), sink)
        weight = torch.exp(torch.where(used, top - highest[..., None], torch.full_like(top, -1e30)))
        return (weight[..., None] * acc).sum(2) / ((weight * total).sum(2) + torch.exp(sink - highest))[..., None]

    def port(P: Port):
        q, k_new, table, lens, sink = P["q"], P["k_new"], P["table"], P["lens"].tolist(), P["sink"]
        dt = q.dtype

        def turn(x, position):
            out = np.empty_like(x)
            for i in range(4):
                a = P.f(position * 10000 ** (-2 * i / 8))
                c, s = np.cos(a), np.sin(a)
                out[..., i] = x[..., i] * c - x[..., i + 4] * s
                out[..., i + 4] = x[..., i + 4] * c + x[..., i] * s
            return out

        rms = np.sqrt(np.einsum("bhd,bhd->bh", q, q) / P.f(8) + P.f(1e-6))[..., None]
        normed = q / rms * P["q_w"]
        back = 1 if P.d("query_at_last_cached_position") else 0
        q = P.put("q_rope", np.stack([turn(normed[b], lens[b] - back) for b in range(4)]))
        k = P.put("k_rope", np.stack([turn(k_new[b], lens[b]) for b in range(4)]))

        scale = np.empty((4, 2, 2), dt)
        for j in range(2):
            part = k[..., 4 * j : 4 * j + 4]
            scale[..., j] = (
                part.max(-1) if P.d("largest_value_without_abs") else np.maximum(part.max(-1), -part.min(-1))
            )
        scale = P.put("new_scale", scale / P.f(127))
        wide = np.repeat(scale, 4, -1)
        raw = k / wide
        codes = np.trunc(raw) if P.d("cast_truncates") else np.rint(raw)
        codes = P.put("k_codes", np.minimum(np.maximum(codes, -127), 127))

        k_cache, k_scale, v_cache, v_scale = P["k_cache"], P["k_scale"], P["v_cache"], P["v_scale"]
        flat_v = v_cache.reshape(24, -1)
        scores = np.zeros((4, 6, 24), dt)
        for b in range(4):
            n = lens[b]
            last = n // 4 * 4 if P.d("pages_rounded_down") else n
            for t in range(max(n - WINDOW + 1, 0), n + 1):
                if last <= t < n:
                    continue
                page = table[b, t // 4]
                for h in range(6):
                    kv = h % 2 if P.d("query_heads_interleaved") else h // 3
                    total = P.f(0)
                    for e in range(8):
                        if t == n:
                            key = codes[b, kv, e] * wide[b, kv, e]
                        else:
                            group = e % 2 if P.d("scale_of_interleaved_group") else e // 4
                            key = P.f(k_cache[page, t % 4, kv, e]) * k_scale[page, t % 4, kv, group]
                        total = total + q[b, h, e] * key
                    scores[b, h, t] = total * P.f(1 / math.sqrt(8))
        scores = P.put("scores", scores)

        span = [[(max(n - WINDOW + 1, 8 * s), min(n + 1, 8 * s + 8)) for s in range(3)] for n in lens]
        top = np.zeros((4, 6, 3), dt)
        for b in range(4):
            for s, (lo, hi) in enumerate(span[b]):
                if lo < hi:
                    top[b, :, s] = scores[b, :, lo:hi].max(-1)
        top = P.put("part_max", top)
        total = np.zeros((4, 6, 3), dt)
        acc = np.zeros((4, 6, 3, 8), dt)
        for b in range(4):
            for h in range(6):
                kv = h // 3
                for s, (lo, hi) in enumerate(span[b]):
                    for t in range(lo, hi):
                        p = np.exp(scores[b, h, t] - top[b, h, s])
                        total[b, h, s] += p
                        if P.d("row_sum_in_bf16"):
                            total[b, h, s] = bf16(total[b, h, s])
                        if t == lens[b]:
                            acc[b, h, s] += p * P["v_new"][b, kv]
                            continue
                        page, o = table[b, t // 4], t % 4
                        row = (o * 2 + kv) if P.d("values_with_strides_of_keys") else (kv * 4 + o)
                        v = flat_v[page, 8 * row : 8 * row + 8].astype(dt) * v_scale[page, kv, o]
                        acc[b, h, s] += p * v
        total, acc = P.put("part_sum", total), P.put("part_acc", acc)

        out = np.empty((4, 6, 8), dt)
        for b in range(4):
            for h in range(6):
                m, den, num = sink[h], P.f(1), np.zeros(8, dt)
                for s, (lo, hi) in enumerate(span[b]):
                    if lo >= hi:
                        continue
                    higher = max(m, top[b, h, s])
                    old, new = np.exp(m - higher), np.exp(top[b, h, s] - higher)
                    den = den * old + new * total[b, h, s]
                    num = num * (P.f(1) if P.d("accumulator_not_rescaled") else old) + new * acc[b, h, s]
                    m = higher
                if P.d("sink_added_by_every_split"):
                    den = den + (sum(lo < hi for lo, hi in span[b]) - 1) * np.exp(sink[h] - m)
                out[b, h] = num / den
        P.put("output", out)

    defects = [
        D(
            "query_at_last_cached_position",
            "q_rope",
            "shift",
            "The query is rotated by the position of the last cached token, one less than its own.",
            ("constant", "other"),
        ),
        D(
            "largest_value_without_abs",
            "new_scale",
            "function",
            "The scale of a group is taken from its largest value, not from its largest absolute value.",
            ("sign", "other", "drop_term", "mask"),
        ),
        D(
            "cast_truncates",
            "k_codes",
            "function",
            "The cast to 8 bits truncates toward zero; it should round to nearest.",
            ("precision", "other"),
        ),
        D(
            "pages_rounded_down",
            "scores",
            "truncate",
            "The number of pages is rounded down, so that cached tokens in a page that is not full are left out.",
            ("mask", "zero", "drop_term"),
        ),
        D(
            "query_heads_interleaved",
            "scores",
            "layout",
            "Query head h reads key head h % 2; it should be h // 3.",
            ("permute", "swap"),
        ),
        D(
            "scale_of_interleaved_group",
            "scores",
            "layout",
            "Element e of a cached key is dequantised by scale e % 2 of its token and head; it should be e // 4.",
            ("permute", "swap", "other", "axis"),
        ),
        D(
            "row_sum_in_bf16",
            "part_sum",
            "precision",
            "The sum of exponentials is kept in bfloat16 while it is accumulated.",
            ("other",),
        ),
        D(
            "values_with_strides_of_keys",
            "part_acc",
            "layout",
            "Cached values, stored as [page, head, token], are read with the strides of keys, [page, token, head].",
            ("transpose", "permute", "swap", "axis"),
        ),
        D(
            "accumulator_not_rescaled",
            "output",
            "drop_term",
            "When a later split has a higher maximum, the accumulated output is not rescaled (the sum is).",
            ("factor", "scale", "other", "function"),
        ),
        D(
            "sink_added_by_every_split",
            "output",
            "factor",
            "Every split that is not empty adds the sink to the denominator; it should be added once.",
            ("scale", "other", "constant", "drop_term"),
        ),
    ]


SR, NFFT, HOP, WIN = 8000, 32, 10, 24


@program("bb02", variants=("f32",))
class speech_ctc:
    """Pre-emphasis, a power spectrum, mel filters, log features normed over an utterance's own frames, a strided
    convolution and a CTC loss by scaled forward variables. The port takes the spectrum by sums of cosines and sines,
    and has the forward variables in logarithms."""

    def make(g):
        lens = torch.tensor([220, 173, 140])[torch.randperm(3, generator=g)]
        wave = randn(g, 3, 220)
        wave = wave + 0.7 * torch.cat([wave[:, :1], wave[:, :-1]], 1) + 0.15
        wave = wave * rand(g, 1, 220, low=0.3, high=1.6) * (torch.arange(220) < lens[:, None])
        targets = randint(g, 1, 7, 3, 4)
        targets[:, 2] = targets[:, 1]
        targets[:, 3] = (targets[:, 2] + randint(g, 0, 5, 3)) % 6 + 1
        return dict(
            wave=wave,
            lens=lens,
            targets=targets,
            target_lens=torch.tensor([4, 3, 4])[torch.randperm(3, generator=g)],
            w_conv=randn(g, 10, 8, 3, scale=0.35),
            b_conv=randn(g, 10, scale=0.4),
            w_out=randn(g, 7, 10, scale=0.6),
            b_out=randn(g, 7, scale=0.6),
        )

    def reference(wave, lens, targets, target_lens, w_conv, b_conv, w_out, b_out):
        dt = wave.dtype
        before = torch.cat([wave[:, :1], wave[:, :-1]], 1)
        y = step("emph", (wave - 0.97 * before) * (torch.arange(220) < lens[:, None]))
        window = torch.hann_window(WIN, periodic=True, dtype=dt)
        spectrum = torch.stft(y, NFFT, HOP, WIN, window, center=True, pad_mode="reflect", return_complex=True)
        power = step("power", torch.view_as_real(spectrum).square().sum(-1).transpose(1, 2))

        top, low = (2595 * math.log10(1 + f / 700) for f in (SR / 2, 100.0))
        points = 700 * (10 ** (torch.linspace(low, top, 10, dtype=dt) / 2595) - 1)
        bins = torch.arange(NFFT // 2 + 1, dtype=dt) * SR / NFFT
        rise = (bins - points[:-2, None]) / (points[1:-1] - points[:-2])[:, None]
        fall = (points[2:, None] - bins) / (points[2:] - points[1:-1])[:, None]
        filters = torch.minimum(rise, fall).clamp(min=0) * (2 / (points[2:] - points[:-2]))[:, None]
        mel = step("mel", power @ filters.T)

        frames = 1 + lens // HOP
        valid = (torch.arange(23) < frames[:, None])[..., None]
        log = torch.log(mel + 1e-3)
        mean = (log * valid).sum(1, keepdim=True) / frames[:, None, None]
        var = ((log - mean).square() * valid).sum(1, keepdim=True) / (frames[:, None, None] - 1)
        feat = step("feat", (log - mean) / (var.sqrt() + 1e-5) * valid)

        sub = step("sub", F.relu(F.conv1d(feat.transpose(1, 2), w_conv, b_conv, stride=2, padding=1)).transpose(1, 2))
        logp = step("logp", F.log_softmax(F.linear(sub, w_out, b_out), -1))

        steps = (frames - 1) // 2 + 1
        labels = torch.zeros(3, 9, dtype=torch.int64)
        labels[:, 1::2] = targets
        state = torch.arange(9)
        p = logp.exp().gather(2, labels[:, None].expand(3, 12, 9)) * (state < 2 * target_lens[:, None] + 1)[:, None]
        skip = torch.zeros(3, 9, dtype=torch.bool)
        skip[:, 2:] = (labels[:, 2:] != 0) & (labels[:, 2:] != labels[:, :-2])
        a = p[:, 0] * (state < 2)
        size = a.sum(1, keepdim=True)
        a, logs, kept = a / size, size.log(), []
        kept.append(a)
        for t in range(1, 12):
            new = (a + F.pad(a, (1, -1)) + F.pad(a, (2, -2)) * skip) * p[:, t]
            size = new.sum(1, keepdim=True)
            on = (t < steps)[:, None]
            a = torch.where(on, new / size, a)
            logs = logs + torch.where(on, size.log(), torch.zeros_like(size))
            kept.append(a)
        alpha = step("alpha", torch.stack(kept, 1))
        ends = alpha[:, -1].gather(1, 2 * target_lens[:, None] - torch.arange(2)).sum(1)
        return -(logs[:, 0] + ends.log()) / target_lens

    def port(P: Port):
        wave, lens, targets, target_lens = P["wave"], P["lens"].tolist(), P["targets"], P["target_lens"].tolist()
        dt = wave.dtype
        y = np.zeros_like(wave)
        for b in range(3):
            for t in range(lens[b]):
                prev = wave[b, t - 1] if t else wave[b, 0]
                if P.d("no_sample_before_a_block") and t and t % 64 == 0:
                    prev = P.f(0)
                y[b, t] = wave[b, t] - P.f(0.97) * prev
        y = P.put("emph", y)

        length = WIN - 1 if P.d("symmetric_window") else WIN
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WIN) / length)
        n = np.arange(WIN) + (NFFT - WIN) // 2
        angle = 2 * np.pi * np.outer(n, np.arange(17)) / NFFT
        cos, sin = P.f(window[:, None] * np.cos(angle)), P.f(window[:, None] * np.sin(angle))
        power = np.empty((3, 23, 17), dt)
        for f in range(23):
            at = f * HOP - NFFT // 2 + n
            if P.d("padding_repeats_the_edge"):
                at = np.where(at < 0, -at - 1, np.where(at >= 220, 439 - at, at))
            else:
                at = np.where(at < 0, -at, np.where(at >= 220, 438 - at, at))
            part = y[:, at]
            power[:, f] = (part @ cos) ** 2 + (part @ sin) ** 2
        power = P.put("power", power)

        def to_mel(f):
            return 2595 * np.log10(1 + f / 700)

        edges = [700 * (10 ** (m / 2595) - 1) for m in np.linspace(to_mel(100.0), to_mel(SR / 2), 10)]
        mel = np.zeros((3, 23, 8), dt)
        for m in range(8):
            left, mid, right = edges[m : m + 3]
            area = 1.0 if P.d("filters_not_normed_by_area") else 2 / (right - left)
            for k in range(17):
                f = k * SR / NFFT
                if left < f < right:
                    w = (f - left) / (mid - left) if f < mid else (right - f) / (right - mid)
                    mel[..., m] += power[..., k] * P.f(w * area)
        mel = P.put("mel", mel)

        frames = [1 + n // HOP for n in lens]
        feat = np.zeros((3, 23, 8), dt)
        for b in range(3):
            log = np.log(np.maximum(mel[b], P.f(1e-3)) if P.d("floor_in_place_of_sum") else mel[b] + P.f(1e-3))
            count = 23 if P.d("padding_in_the_statistics") else frames[b]
            used = log[:count]
            mean = used.sum(0) / P.f(count)
            std = np.sqrt(((used - mean) ** 2).sum(0) / P.f(count - 1))
            feat[b, : frames[b]] = (log[: frames[b]] - mean) / (std + P.f(1e-5))
        feat = P.put("feat", feat)

        padded = np.zeros((3, 25, 8), dt)
        padded[:, 1:24] = feat
        sub = np.zeros((3, 12, 10), dt)
        for o in range(23 // 2 if P.d("frames_halved_downward") else 12):
            lin = P["b_conv"] + np.einsum("bkc,ock->bo", padded[:, 2 * o : 2 * o + 3], P["w_conv"])
            sub[:, o] = np.maximum(lin, 0)
        sub = P.put("sub", sub)

        lin = sub @ P["w_out"].T + P["b_out"]
        top = lin.max(-1, keepdims=True)
        logp = P.put("logp", lin - (top + np.log(np.exp(lin - top).sum(-1, keepdims=True))))

        alpha, loss = np.zeros((3, 12, 9), dt), np.empty(3, dt)
        for b in range(3):
            states, count = 2 * target_lens[b] + 1, (frames[b] - 1) // 2 + 1
            labels = [int(targets[b, s // 2]) if s % 2 else 0 for s in range(states)]
            a = np.full(9, -np.inf, dt)
            a[0], a[1] = logp[b, 0, 0], logp[b, 0, labels[1]]
            for t in range(12):
                if 0 < t < count:
                    old = a if P.d("forward_variables_in_place") else a.copy()
                    for s in range(states):
                        v = old[s]
                        if s > 0:
                            v = np.logaddexp(v, old[s - 1])
                        if s > 1 and labels[s] and (labels[s] != labels[s - 2] or P.d("repeated_labels_skip_blank")):
                            v = np.logaddexp(v, old[s - 2])
                        a[s] = v + logp[b, t, labels[s]]
                size = np.logaddexp.reduce(a)
                alpha[b, t] = np.exp(a - size)
            end = a[states - 2] if P.d("last_blank_left_out") else np.logaddexp(a[states - 1], a[states - 2])
            loss[b] = -end / P.f(target_lens[b])
        P.put("alpha", alpha)
        P.put("output", loss)

    defects = [
        D(
            "no_sample_before_a_block",
            "emph",
            "zero",
            "The sample before each block of 64 is taken as zero, because the halo of the block is not loaded.",
            ("mask", "drop_term", "stale", "shift", "other", "truncate"),
        ),
        D(
            "symmetric_window",
            "power",
            "constant",
            "The Hann window is the symmetric one, with a period of 23; it should be periodic, with 24.",
            ("ddof", "function", "factor", "other", "shift", "scale"),
        ),
        D(
            "padding_repeats_the_edge",
            "power",
            "shift",
            "Reflection at the ends repeats the edge sample, so that padding is one sample off.",
            ("other", "flip", "mask", "function"),
        ),
        D(
            "filters_not_normed_by_area",
            "mel",
            "scale",
            "The mel filters are not divided by their area.",
            ("factor", "drop_term", "constant"),
        ),
        D(
            "floor_in_place_of_sum",
            "feat",
            "eps",
            "The small constant is a floor under the mel power; it should be added before the logarithm.",
            ("function", "other", "constant", "mask"),
        ),
        D(
            "padding_in_the_statistics",
            "feat",
            "mask",
            "Mean and deviation go over all 23 frames, with the padding after an utterance's end.",
            ("other", "ddof", "axis"),
        ),
        D(
            "frames_halved_downward",
            "sub",
            "truncate",
            "The number of subsampled frames is rounded down: the last one, of 12, is never written.",
            ("zero", "mask"),
        ),
        D(
            "repeated_labels_skip_blank",
            "alpha",
            "mask",
            "Two equal labels may follow each other without a blank; that transition should not be allowed.",
            ("drop_term", "other"),
        ),
        D(
            "forward_variables_in_place",
            "alpha",
            "race",
            "Forward variables are updated in place, so that a state reads the new ones of the states before it.",
            ("stale", "other", "shift"),
        ),
        D(
            "last_blank_left_out",
            "output",
            "drop_term",
            "The loss takes the last label's state alone; the blank after it should be added.",
            ("truncate", "other", "mask"),
        ),
    ]
