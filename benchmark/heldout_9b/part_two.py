"""A state-space mixer on packed documents, and a head with its loss and gradients by hand."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randint, randn, step


@program("bb03", variants=("bf16", "f32", "bf16reg"))
class state_space_mixer:
    """The mixer of a selective state-space model: a causal depthwise convolution with a carried state, a scan with
    decay by head over packed documents, a skip, a gate and a root-mean-square norm. The port scans in chunks of 8
    tokens by products of matrices."""

    def make(g):
        start = torch.zeros(2, 22, dtype=torch.int64)
        start[0, 3 + int(randint(g, 0, 4, 1))] = 1
        start[1, 10 + int(randint(g, 0, 4, 1))] = 1
        return dict(
            xbc=randn(g, 2, 22, 22),
            z=randn(g, 2, 22, 12),
            dt_raw=randn(g, 2, 22, 3, scale=0.8),
            start=start,
            conv_state=randn(g, 2, 22, 3),
            h0=randn(g, 2, 3, 4, 5, scale=0.8),
            conv_w=randn(g, 22, 4, scale=0.55),
            conv_b=randn(g, 22, scale=0.3),
            dt_bias=rand(g, 3, low=-0.9, high=-0.3),
            a_log=rand(g, 3, low=-2.2, high=-0.6),
            skip_w=torch.tensor([0.5, -1.0, 1.4], dtype=torch.float64)[torch.randperm(3, generator=g)]
            + randn(g, 3, scale=0.1),
            norm_w=randn(g, 12, scale=0.3, shift=1.0),
        )

    def reference(xbc, z, dt_raw, start, conv_state, h0, conv_w, conv_b, dt_bias, a_log, skip_w, norm_w):
        seg = start.cumsum(1)
        seg_full = torch.cat([torch.zeros(2, 3, dtype=seg.dtype), seg], 1)
        full = torch.cat([conv_state, xbc.transpose(1, 2)], 2)
        acc = conv_b[:, None].expand(2, 22, 22)
        for k in range(4):
            acc = acc + conv_w[:, k, None] * full[:, :, k : k + 22] * (seg_full[:, k : k + 22] == seg)[:, None]
        conv = step("conv", F.silu(acc).transpose(1, 2))
        x, b, c = conv[..., :12].reshape(2, 22, 3, 4), conv[..., 12:17], conv[..., 17:]
        dt = step("dt", F.softplus(dt_raw + dt_bias))
        decay = step("decay", torch.exp(-torch.exp(a_log) * dt))
        h, ys = h0, []
        for t in range(22):
            h = torch.where(start[:, t, None, None, None] == 1, torch.zeros_like(h), h)
            new = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None, :]
            h = decay[:, t, :, None, None] * h + new
            ys.append((h * c[:, t, None, None, :]).sum(-1))
        y = step("scan", torch.stack(ys, 1))
        step("state", h)
        y = step("skip", y + skip_w[:, None] * x)
        y = step("gate", y.reshape(2, 22, 12) * F.silu(z))
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * norm_w

    def port(P: Port):
        xbc, start, w = P["xbc"], P["start"], P["conv_w"]
        dtype = xbc.dtype
        if P.d("taps_reversed"):
            w = w[:, ::-1]
        conv = np.empty((2, 22, 22), dtype)
        for n in range(2):
            rows = np.concatenate([P["conv_state"][n].T, xbc[n]])
            for t in range(22):
                s = P["conv_b"].copy()
                for lag in range(4):
                    s += w[:, 3 - lag] * rows[t + 3 - lag]
                    if start[n, t - lag] and t >= lag and not P.d("taps_reach_over_a_start"):
                        break
                conv[n, t] = s / (1 + np.exp(-s))
        conv = P.put("conv", conv)
        x, b, c = conv[..., :12].reshape(2, 22, 3, 4), conv[..., 12:17], conv[..., 17:22]
        if P.d("input_and_output_vectors_swapped"):
            b, c = c, b

        raw, bias = P["dt_raw"], P["dt_bias"]
        if P.d("bias_after_softplus"):
            dt = np.log1p(np.exp(raw)) + bias
        else:
            dt = np.log1p(np.exp(raw + bias))
        dt = P.put("dt", dt)
        rate = P["a_log"] if P.d("rate_is_still_a_logarithm") else -np.exp(P["a_log"])
        decay = P.put("decay", np.exp(dt * rate))

        y, state = np.zeros((2, 22, 3, 4), dtype), np.empty((2, 3, 4, 5), dtype)
        for n in range(2):
            for h in range(3):
                carry = P["h0"][n, h]
                for lo in range(0, 22, 8):
                    hi = min(lo + 8, 22)
                    size = hi - lo
                    d = np.where(start[n, lo:hi] == 1, P.f(0), decay[n, lo:hi, h])
                    through = np.zeros((size, size), dtype)
                    for j in range(size):
                        through[j, j] = 1
                        for i in range(j + 1, size):
                            through[i, j] = through[i - 1, j] * d[i]
                    inner = (c[n, lo:hi] @ b[n, lo:hi].T) * through * dt[n, lo:hi, h]
                    from_start = np.cumprod(d)
                    reach = from_start
                    if P.d("carry_decays_one_token_late"):
                        reach = np.concatenate([np.ones(1, dtype), from_start[:-1]])
                    outer = reach[:, None] * (c[n, lo:hi] @ carry.T)
                    if size < 8 and P.d("short_chunk_without_carry"):
                        outer = outer * 0
                    y[n, lo:hi, h] = inner @ x[n, lo:hi, h] + outer
                    state[n, h] = carry
                    weight = (through[-1] * dt[n, lo:hi, h])[:, None]
                    carry = from_start[-1] * carry + (weight * x[n, lo:hi, h]).T @ b[n, lo:hi]
                if not P.d("state_before_the_last_chunk"):
                    state[n, h] = carry
        y = P.put("scan", y)
        P.put("state", state)

        skip_w = np.repeat(P["skip_w"], 4)
        if P.d("skip_weight_by_channel_modulo_heads"):
            skip_w = np.tile(P["skip_w"], 4)
        y = P.put("skip", y + (skip_w * conv[..., :12]).reshape(2, 22, 3, 4))
        z = P["z"]
        y = P.put("gate", z / (1 + np.exp(-z)) * y.reshape(2, 22, 12))
        mean = np.einsum("ntc,ntc->nt", y, y)[..., None] / 12
        if P.d("norm_over_each_head"):
            heads = y.reshape(2, 22, 3, 4)
            mean = np.repeat((heads * heads).sum(-1) / 4, 4, -1)
        P.put("output", y / np.sqrt(mean + P.f(1e-5)) * P["norm_w"])

    defects = [
        D(
            "taps_reversed",
            "conv",
            "flip",
            "The taps of the convolution are in reverse order: the first weight meets the newest token.",
            ("permute", "layout", "swap"),
        ),
        D(
            "taps_reach_over_a_start",
            "conv",
            "mask",
            "The convolution reads tokens of the document before; these should count as zero.",
            ("zero", "stale", "other"),
        ),
        D(
            "bias_after_softplus",
            "dt",
            "other",
            "The bias of the time step is added after the softplus, not before it.",
            ("function", "swap", "drop_term"),
        ),
        D(
            "rate_is_still_a_logarithm",
            "decay",
            "function",
            "The logarithm of the rate is used as the rate: minus its exponential is meant.",
            ("drop_term", "other", "sign"),
        ),
        D(
            "input_and_output_vectors_swapped",
            "scan",
            "swap",
            "The vectors B, which writes to the state, and C, which reads it, are taken for each other.",
            ("transpose", "permute", "layout"),
        ),
        D(
            "carry_decays_one_token_late",
            "scan",
            "shift",
            "The state that comes into a chunk lacks the decay of the token itself: an exclusive product of decays.",
            ("drop_term", "factor", "other", "scale"),
        ),
        D(
            "short_chunk_without_carry",
            "scan",
            "drop_term",
            "In the last chunk, which is short, the contribution of the state before it is left out.",
            ("zero", "truncate", "mask", "other"),
        ),
        D(
            "state_before_the_last_chunk",
            "state",
            "stale",
            "The state that is handed on is that before the last chunk, without its tokens.",
            ("truncate", "drop_term", "shift", "other"),
        ),
        D(
            "skip_weight_by_channel_modulo_heads",
            "skip",
            "layout",
            "Channel i has the skip weight of head i % 3; it should be i // 4.",
            ("permute", "swap", "axis"),
        ),
        D(
            "norm_over_each_head",
            "output",
            "axis",
            "The mean square is taken over each head's 4 channels, not over all 12.",
            ("other", "scale", "factor"),
        ),
    ]


CAP, SMOOTH, ZLOSS = 4.0, 0.1, 0.02


@program("bb04", variants=("f32",))
class head_and_loss:
    """A root-mean-square norm with a gain about one, a capped head and a smoothed cross entropy with a penalty on the
    normaliser, averaged over labels that are not ignored; gradients. The port goes over the vocabulary in tiles of 8,
    and recomputes for each gradient what it needs."""

    def make(g):
        labels = randint(g, 0, 23, 18)
        labels[torch.randperm(18, generator=g)[:5]] = -100
        return dict(
            x=randn(g, 18, 10) * torch.exp(rand(g, 18, 1, low=-4.5, high=0.6)),
            gain=randn(g, 10, scale=0.3),
            w=randn(g, 23, 10, scale=0.7),
            bias=randn(g, 23, scale=0.5),
            labels=labels,
        )

    def reference(x, gain, w, bias, labels):
        r = step("rstd", torch.rsqrt(x.square().mean(-1) + 1e-5))
        y = step("normed", x * r[:, None] * (1 + gain))
        z = step("logits", CAP * torch.tanh(F.linear(y, w, bias) / CAP))
        lse = step("lse", torch.logsumexp(z, -1))
        valid = labels >= 0
        hit = z.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        loss = lse - (1 - SMOOTH) * hit - SMOOTH * z.mean(-1) + ZLOSS * lse.square()
        loss = step("token_loss", torch.where(valid, loss, torch.zeros_like(loss)))
        return loss.sum() / valid.sum()

    def port(P: Port):
        x, gain, w, bias, labels = P["x"], P["gain"], P["w"], P["bias"], P["labels"]
        dt = x.dtype
        ms = np.einsum("nd,nd->n", x, x) / P.f(10)
        if P.d("eps_outside_the_root"):
            r = 1 / (np.sqrt(ms) + P.f(1e-5))
        else:
            r = 1 / np.sqrt(ms + P.f(1e-5))
        r = P.put("rstd", r)
        unit = x * r[:, None]
        y = P.put("normed", unit * gain if P.d("gain_about_zero") else unit + unit * gain)

        z = np.zeros((18, 23), dt) + bias
        for k in range(0, 8 if P.d("inner_loop_of_whole_tiles") else 10, 4):
            z += np.einsum("nk,vk->nv", y[:, k : k + 4], w[:, k : k + 4])
        z = P.put("logits", P.f(CAP) * np.tanh(z / P.f(CAP)))

        m, s = np.full(18, -np.inf, dt), np.zeros(18, dt)
        for v in range(0, 23, 8):
            tile = z[:, v : v + 8]
            if P.d("vocabulary_padded_with_zeros"):
                tile = np.pad(tile, ((0, 0), (0, 8 - tile.shape[1])))
            higher = np.maximum(m, tile.max(1))
            old = P.f(1) if P.d("sum_not_rescaled") else np.exp(m - higher)
            s = s * old + np.exp(tile - higher[:, None]).sum(1)
            m = higher
        lse = P.put("lse", m + np.log(s))

        loss = np.zeros(18, dt)
        for n in range(18):
            if labels[n] < 0:
                continue
            hit, rest = z[n, labels[n]], z[n].sum()
            if P.d("smoothing_over_other_classes"):
                mixed = P.f(1 - SMOOTH) * hit + P.f(SMOOTH / 22) * (rest - hit)
            else:
                mixed = P.f(1 - SMOOTH) * hit + P.f(SMOOTH / 23) * rest
            loss[n] = lse[n] - mixed + P.f(ZLOSS) * lse[n] * lse[n]
        loss = P.put("token_loss", loss)
        count = int((labels >= 0).sum())
        P.put("output", loss.sum() / P.f(18 if P.d("ignored_labels_in_the_count") else count))

        dz = np.exp(z - lse[:, None]) * (1 + 2 * P.f(ZLOSS) * lse[:, None]) - P.f(SMOOTH / 23)
        for n in range(18):
            if labels[n] >= 0:
                dz[n, labels[n]] -= P.f(1 - SMOOTH)
            else:
                dz[n] = 0
        dz = dz / P.f(count)
        dpre = dz * (1 - (z / P.f(CAP)) ** 2)
        dy = dpre @ w
        dgain, tiles = np.zeros(10, dt), 0
        for n in range(0, 18, 6):
            part = (dy[n : n + 6] * unit[n : n + 6]).sum(0)
            dgain, tiles = part if P.d("tiles_of_rows_overwrite") else dgain + part, tiles + 1
        g = dy + dy * gain
        inner = (g * unit).sum(1, keepdims=True) / P.f(10)
        dx = r[:, None] * (g if P.d("gradient_without_that_of_the_norm") else g - unit * inner)
        P.put("grad:x", dx)
        P.put("grad:gain", dgain)
        for_w = dz * (1 - z * z) if P.d("slope_of_the_cap_undivided") else dpre
        P.put("grad:w", np.einsum("nv,nd->vd", for_w, y))
        P.put("grad:bias", dpre.sum(0))

    defects = [
        D(
            "eps_outside_the_root",
            "rstd",
            "eps",
            "The small constant is added to the root; it should be added to the mean square.",
            ("function", "other"),
        ),
        D(
            "gain_about_zero",
            "normed",
            "drop_term",
            "The gain is applied as it is stored; one should be added to it.",
            ("constant", "other", "factor"),
        ),
        D(
            "inner_loop_of_whole_tiles",
            "logits",
            "truncate",
            "The loop over features ends with the last whole tile of 4: features 8 and 9 are left out.",
            ("mask", "zero", "drop_term"),
        ),
        D(
            "sum_not_rescaled",
            "lse",
            "drop_term",
            "When a tile has a higher maximum, the sum so far is not rescaled to it.",
            ("factor", "scale", "other", "function"),
        ),
        D(
            "vocabulary_padded_with_zeros",
            "lse",
            "mask",
            "The last tile is padded with a logit of zero, which is counted; it should be minus infinity.",
            ("constant", "other", "zero"),
        ),
        D(
            "smoothing_over_other_classes",
            "token_loss",
            "ddof",
            "The smoothing is spread over the 22 other classes, not over all 23.",
            ("constant", "factor", "other", "scale", "mask"),
        ),
        D(
            "ignored_labels_in_the_count",
            "output",
            "mask",
            "The mean divides by all 18 tokens; ignored ones should not count.",
            ("factor", "scale", "constant", "ddof"),
        ),
        D(
            "gradient_without_that_of_the_norm",
            "grad:x",
            "drop_term",
            "The gradient of the input lacks the term that comes through the reciprocal root.",
            ("other",),
        ),
        D(
            "tiles_of_rows_overwrite",
            "grad:gain",
            "race",
            "Tiles of 6 rows write the gradient of the gain over each other; they should be added.",
            ("truncate", "drop_term", "stale", "mask", "other"),
        ),
        D(
            "slope_of_the_cap_undivided",
            "grad:w",
            "factor",
            "The weight's gradient has the slope of the cap as 1 - z^2, without dividing the logit by the cap.",
            ("constant", "function", "scale", "other", "drop_term"),
        ),
    ]
