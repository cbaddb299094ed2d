"""Volume rendering with its backward, a bidirectional GRU, a 4-bit by 8-bit product, graph attention on CSR."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randint, randn, sigmoid, step


def _ray_weights(dtype):
    i = torch.arange(23 * 3, dtype=torch.float64).reshape(23, 3)
    return torch.sin(1.7 * i + 0.3).to(dtype)


def _render_loss(result):
    rgb, depth = result["rgb"], result["depth"]
    return (rgb * _ray_weights(rgb.dtype)).sum() + 0.1 * depth.sum()


@program("q09", variants=("f32", "bf16", "bf16reg"), wide=("edges", "tau", "trans", "acc", "grad:background"))
class volume_rendering:
    """NeRF's quadrature for 23 rays of 17 samples, and its backward by hand; the port carries transmittance over tiles of 8."""

    loss = staticmethod(_render_loss)

    def make(g):
        edges = 2 + torch.cumsum(rand(g, 23, 18, low=0.05, high=0.35), 1)
        return dict(
            raw=randn(g, 23, 17, scale=1.2, shift=-0.3),
            color=rand(g, 23, 17, 3),
            edges=edges,
            length=rand(g, 23, low=1.0, high=1.6),
            background=rand(g, 3, low=0.5, high=1.0),
        )

    def reference(raw, color, edges, length, background):
        sigma = step("sigma", F.softplus(raw))
        tau = step("tau", sigma * (edges[:, 1:] - edges[:, :-1]) * length[:, None])
        alpha = step("alpha", 1 - torch.exp(-tau))
        trans = step("trans", torch.exp(-(tau.cumsum(1) - tau)))
        w = step("weights", alpha * trans)
        acc = step("acc", w.sum(1))
        rgb = torch.einsum("ns,nsc->nc", w, color) + (1 - acc)[:, None] * background
        mid = (edges[:, 1:] + edges[:, :-1]) / 2
        return {"rgb": rgb, "depth": (w * mid).sum(1) / (acc + 0.01)}

    def port(P: Port):
        raw, color, edges, length, bg = P["raw"], P["color"], P["edges"], P["length"], P["background"]
        dt = raw.dtype
        if P.d("relu_density"):
            sigma = np.maximum(raw, 0)
        else:
            sigma = np.maximum(raw, 0) + np.log1p(np.exp(-np.abs(raw)))
        sigma = P.put("sigma", sigma)
        delta = np.diff(edges, axis=1)
        if P.d("widths_of_next_bin"):
            delta = np.concatenate([delta[:, 1:], delta[:, -1:]], 1)
        dist = delta if P.d("ray_length_missing") else delta * length[:, None]
        tau = P.put("tau", sigma * dist)
        if P.d("absorption_first_order"):
            alpha = np.minimum(tau, 1)
        else:
            alpha = -np.expm1(-tau)
        alpha = P.put("alpha", alpha)
        trans = np.empty_like(tau)
        if P.d("from_back_to_front"):
            run = np.cumsum(tau[:, ::-1], 1)[:, ::-1] - tau
            trans = np.exp(-run)
        else:
            for n in range(23):
                carry = P.f(1.0)
                for s0 in range(0, 17, 8):
                    if P.d("carry_restarts_in_tile"):
                        carry = P.f(1.0)
                    for s in range(s0, min(s0 + 8, 17)):
                        if P.d("own_sample_in_transmittance"):
                            carry = carry * np.exp(-tau[n, s])
                            trans[n, s] = carry
                        else:
                            trans[n, s] = carry
                            carry = carry * np.exp(-tau[n, s])
                        if P.d("transmittance_in_bf16"):
                            carry = bf16(carry)
        trans = P.put("trans", trans)
        w = alpha * trans
        if P.d("last_sample_unwritten"):
            w = np.concatenate([w[:, :16], np.zeros((23, 1), dt)], 1)
        w = P.put("weights", w)
        acc = P.put("acc", np.stack([w[:, s] for s in range(17)]).sum(0))
        c = color
        if P.d("colors_planar"):
            c = np.ascontiguousarray(color).reshape(23, 3, 17).transpose(0, 2, 1)
        if P.d("bgr_colors"):
            c = color[:, :, ::-1]
        rgb = np.stack([(w * c[:, :, i]).sum(1) for i in range(3)], 1)
        clear = (1 + acc) if P.d("background_sign") else (1 - acc)
        rgb = rgb + clear[:, None] * bg
        P.put("rgb", rgb)
        mid = (edges[:, 1:] + edges[:, :-1]) / 2
        if P.d("depth_not_normalised"):
            depth = (w * mid).sum(1)
        else:
            depth = (w * mid).sum(1) / (acc + P.f(0.01))
        P.put("depth", depth)
        # backward
        up = _ray_weights(torch.float64).to(P.ct).numpy()
        a = acc + P.f(0.01)
        gw = np.einsum("nsc,nc->ns", color, up)
        if not P.d("background_not_in_gradient"):
            gw = gw - (up @ bg)[:, None]
        gw = gw + P.f(0.1) * (mid / a[:, None] - ((w * mid).sum(1) / (a * a))[:, None])
        prod = gw * w
        later = np.zeros_like(prod)
        for n in range(23):
            total = P.f(0)
            for s in range(16, -1, -1):
                if P.d("suffix_with_own_sample"):
                    total = total + prod[n, s]
                    later[n, s] = total
                else:
                    later[n, s] = total
                    total = total + prod[n, s]
        gtau = gw * trans * np.exp(-tau) - later
        graw = gtau * np.diff(edges, axis=1) * length[:, None]
        if not P.d("softplus_not_differentiated"):
            graw = graw * sigmoid(raw)
        P.put("grad:raw", graw)
        P.put("grad:color", w[:, :, None] * up[:, None, :])
        each = up * (1 - acc)[:, None]
        if P.d("background_adds_lost"):
            each = each * (np.random.default_rng(9).random((23, 1)) > 0.25)
        P.put("grad:background", each.sum(0))

    defects = [
        D("relu_density", "sigma", "function", "ReLU in place of softplus"),
        D("widths_of_next_bin", "tau", "shift", "each sample has the width of the bin after it"),
        D("ray_length_missing", "tau", "factor", "widths aren't multiplied by the ray's length"),
        D("absorption_first_order", "alpha", "function", "min(tau, 1) in place of 1 - exp(-tau)"),
        D(
            "from_back_to_front",
            "trans",
            "flip",
            "the optical depth is summed from the far end",
            accept=("sign", "axis", "other"),
        ),
        D(
            "carry_restarts_in_tile",
            "trans",
            "stale",
            "each tile of 8 samples starts at transmittance 1",
            accept=("truncate", "drop_term", "factor", "other"),
        ),
        D(
            "own_sample_in_transmittance",
            "trans",
            "shift",
            "the running product includes the sample itself",
            accept=("mask", "factor"),
        ),
        D("transmittance_in_bf16", "trans", "precision", "the running product is kept in bfloat16"),
        D(
            "last_sample_unwritten",
            "weights",
            "zero",
            "the 17th sample, beyond two tiles, has weight zero",
            accept=("truncate", "mask"),
        ),
        D(
            "colors_planar",
            "rgb",
            "layout",
            "the colors' memory is read as (3, 17) a ray",
            accept=("transpose", "permute"),
        ),
        D("bgr_colors", "rgb", "permute", "the samples' channels are blue, green, red", accept=("flip", "swap")),
        D("background_sign", "rgb", "sign", "1 + acc instead of 1 - acc"),
        D(
            "depth_not_normalised",
            "depth",
            "factor",
            "the depth isn't divided by the sum of weights",
            accept=("drop_term",),
        ),
        D("background_not_in_gradient", "grad:raw", "drop_term", "the gradient ignores the background's share"),
        D(
            "suffix_with_own_sample",
            "grad:raw",
            "shift",
            "the sum over later samples includes the sample itself",
            accept=("mask",),
        ),
        D(
            "softplus_not_differentiated",
            "grad:raw",
            "factor",
            "the chain rule's sigmoid(raw) is left out",
            accept=("function",),
        ),
        D(
            "background_adds_lost",
            "grad:background",
            "race",
            "a quarter of the rays' contributions is lost",
            accept=("truncate", "drop_term", "mask", "other"),
        ),
    ]


@program("q10", variants=("f32", "f16", "f16reg"))
class gru_bidirectional:
    """A GRU both ways over padded sequences, pooled by the mean; the port goes sequence by sequence, hidden units in tiles of 4."""

    def make(g):
        return dict(
            x=randn(g, 9, 5, 7),
            w_ih=randn(g, 2, 33, 7, scale=0.5),
            w_hh=randn(g, 2, 33, 11, scale=0.4),
            b_ih=randn(g, 2, 33, scale=0.3),
            b_hh=randn(g, 2, 33, scale=0.5),
            lengths=torch.tensor([9, 6, 4, 8, 7]),
        )

    def reference(x, w_ih, w_hh, b_ih, b_hh, lengths):
        sides = []
        for d, side in enumerate(("forward", "backward")):
            xp = step(f"{side}_in", x @ w_ih[d].T + b_ih[d])
            h = x.new_zeros(5, 11)
            rows = [None] * 9
            for t in range(9) if d == 0 else range(8, -1, -1):
                hp = h @ w_hh[d].T + b_hh[d]
                r = torch.sigmoid(xp[t, :, :11] + hp[:, :11])
                z = torch.sigmoid(xp[t, :, 11:22] + hp[:, 11:22])
                n = torch.tanh(xp[t, :, 22:] + r * hp[:, 22:])
                h = torch.where((t < lengths)[:, None], (1 - z) * n + z * h, h)
                rows[t] = torch.where((t < lengths)[:, None], h, 0.0)
            sides.append(step(side, torch.stack(rows)))
        both = step("both", torch.cat(sides, -1))
        return both.sum(0) / lengths[:, None]

    def port(P: Port):
        x, wi, wh, bi, bh, lengths = (P[n] for n in ("x", "w_ih", "w_hh", "b_ih", "b_hh", "lengths"))
        dt = x.dtype
        sides = []
        for d, side in enumerate(("forward", "backward")):
            xp = np.empty((9, 5, 33), dt)
            for b in range(5):
                src = x[:, b]
                if P.d("batch_first_memory") and d == 0:
                    src = np.ascontiguousarray(x).reshape(5, 9, 7)[b]
                xp[:, b] = src @ wi[d].T + bi[0 if P.d("bias_of_other_side") else d]
            xp = P.put(f"{side}_in", xp)
            out = np.zeros((9, 5, 11), dt)
            for b in range(5):
                h = np.zeros(11, dt)
                last = h
                length = int(lengths[b])
                if P.d("length_one_less"):
                    length -= 1
                times = list(range(length)) if d == 0 else list(range(length - 1, -1, -1))
                if d == 1 and P.d("backward_starts_in_padding"):
                    times = list(range(8, -1, -1))
                for t in times:
                    hp = np.empty(33, dt)
                    w = wh[d]
                    if P.d("recurrent_weights_transposed"):
                        w = np.concatenate([w[i : i + 11].T for i in (0, 11, 22)])
                    src = last if P.d("state_of_two_before") else h
                    for u in range(0, 33, 4):
                        if P.d("hidden_sum_stops_at_8"):
                            hp[u : u + 4] = w[u : u + 4, :8] @ src[:8]
                        else:
                            hp[u : u + 4] = w[u : u + 4] @ src
                    g = xp[t, b]
                    r, z = sigmoid(g[:11] + hp[:11] + bh[d, :11]), sigmoid(g[11:22] + hp[11:22] + bh[d, 11:22])
                    if P.d("gates_in_order_z_r"):
                        r, z = z, r
                    if P.d("reset_before_bias"):
                        n = np.tanh(g[22:] + r * hp[22:] + bh[d, 22:])
                    elif P.d("recurrent_bias_of_n_missing"):
                        n = np.tanh(g[22:] + r * hp[22:])
                    else:
                        n = np.tanh(g[22:] + r * (hp[22:] + bh[d, 22:]))
                    new = z * n + (1 - z) * h if P.d("z_and_one_minus_z") else n + z * (h - n)
                    last, h = h, new
                    if t < length:
                        out[t, b] = h
                if d == 1 and P.d("backward_not_reversed_back"):
                    out[: len(times), b] = out[: len(times), b][::-1].copy()
            if d == 1 and P.d("backward_units_unwritten"):
                out[:, :, 8:] = 0
            sides.append(P.put(side, out))
        if P.d("sides_exchanged"):
            sides.reverse()
        if P.d("sides_interleaved"):
            both = np.stack(sides, -1).reshape(9, 5, 22)
        else:
            both = np.concatenate(sides, -1)
        both = P.put("both", both)
        total = np.zeros((5, 22), dt)
        for t in range(9):
            total += both[t]
        P.put("output", total / (P.f(9) if P.d("mean_over_padding_too") else lengths[:, None].astype(dt)))

    defects = [
        D(
            "batch_first_memory",
            "forward_in",
            "layout",
            "x, stored (time, batch), is read as (batch, time)",
            accept=("transpose", "permute"),
        ),
        D(
            "bias_of_other_side",
            "backward_in",
            "stale",
            "the backward side uses the forward side's input bias",
            accept=("swap", "shift", "other"),
        ),
        D(
            "length_one_less",
            "forward",
            "shift",
            "the last token of each sequence isn't seen",
            accept=("truncate", "mask", "zero"),
        ),
        D(
            "recurrent_weights_transposed",
            "forward",
            "transpose",
            "each 11 x 11 recurrent matrix is used the other way round",
        ),
        D(
            "state_of_two_before",
            "forward",
            "stale",
            "the products use the state of two times before",
            accept=("shift",),
        ),
        D(
            "hidden_sum_stops_at_8",
            "forward",
            "truncate",
            "hidden units 8 to 10 are not in the recurrent sums",
            accept=("drop_term",),
        ),
        D(
            "gates_in_order_z_r",
            "forward",
            "permute",
            "reset and update gates are in the other order",
            accept=("swap",),
        ),
        D(
            "reset_before_bias",
            "forward",
            "other",
            "the reset gate does not multiply the recurrent bias",
            accept=("factor", "function"),
        ),
        D("recurrent_bias_of_n_missing", "forward", "drop_term", "the recurrent bias of n is left out"),
        D("z_and_one_minus_z", "forward", "swap", "z and 1 - z are exchanged", accept=("function", "sign")),
        D("backward_starts_in_padding", "backward", "mask", "the backward side runs through the padding first"),
        D("backward_not_reversed_back", "backward", "flip", "the backward side's outputs are left in reversed time"),
        D(
            "backward_units_unwritten",
            "backward",
            "zero",
            "hidden units 8 to 10 of the backward side are zero",
            accept=("truncate",),
        ),
        D("sides_exchanged", "both", "swap", "the backward side comes first", accept=("permute",)),
        D(
            "sides_interleaved",
            "both",
            "layout",
            "the two sides are interleaved instead of one after the other",
            accept=("permute", "axis"),
        ),
        D(
            "mean_over_padding_too",
            "output",
            "scale",
            "divided by 9 instead of by the length",
            accept=("mask", "constant", "factor"),
        ),
    ]


@program("q11", variants=("f32", "bf16"), wide=("x_scale", "scales"))
class int4_linear:
    """Activations in int8 a token, weights in packed 4 bits in groups of 16 with zero points; the port works by groups."""

    def make(g):
        return dict(
            x=randn(g, 13, 48) * (0.3 + 2 * rand(g, 13, 1)),
            packed=randint(g, 0, 256, 20, 24),
            scales=rand(g, 20, 3, low=0.01, high=0.06),
            zeros=randint(g, 5, 11, 20, 3),
            bias=randn(g, 20, scale=0.5),
        )

    def reference(x, packed, scales, zeros, bias):
        w = step("unpacked", torch.stack([packed & 15, packed >> 4], -1).reshape(20, 48))
        xs = step("x_scale", x.abs().amax(1) / 127 + 1e-6)
        xq = step("xq", torch.round(x / xs[:, None]).clamp(-127, 127).long())
        centred = w.reshape(20, 3, 16) - zeros[:, :, None]
        acc = step("acc", torch.einsum("mgk,ngk->mng", xq.reshape(13, 3, 16), centred))
        y = step("scaled", (acc.to(x.dtype) * scales).sum(-1) * xs[:, None])
        return torch.clamp(y + bias, -6, 6)

    def port(P: Port):
        x, packed, scales, zeros, bias = (P[n] for n in ("x", "packed", "scales", "zeros", "bias"))
        dt = x.dtype
        w = np.empty((20, 48), np.int64)
        low, high = packed % 16, packed // 16
        if P.d("nibbles_exchanged"):
            low, high = high, low
        if P.d("nibbles_signed"):
            low, high = np.where(low > 7, low - 16, low), np.where(high > 7, high - 16, high)
        if P.d("halves_instead_of_pairs"):
            w[:, :24], w[:, 24:] = low, high
        else:
            w[:, 0::2], w[:, 1::2] = low, high
        w = P.put("unpacked", w)
        amax = np.maximum(x.max(1), -x.min(1))
        if P.d("largest_without_abs"):
            amax = x.max(1)
        if P.d("scale_of_whole_tensor"):
            amax = np.full(13, amax.max(), dt)
        levels = P.f(128 if P.d("levels_128") else 127)
        if P.d("scale_eps_large"):
            xs = np.maximum(amax / levels, P.f(0.02))
        else:
            xs = amax / levels + P.f(1e-6)
        xs = P.put("x_scale", xs)
        ratio = x / xs[:, None]
        if P.d("truncated_to_integer"):
            ratio = np.trunc(ratio)
        xq = np.rint(ratio).astype(np.int64)
        if P.d("clamped_to_seven_bits"):
            xq = np.clip(xq, -63, 63)
        if P.d("unsigned_eight_bits"):
            xq = np.clip(xq, 0, 255)
        xq = P.put("xq", np.clip(xq, -127, 127) if not P.d("unsigned_eight_bits") else xq)
        acc = np.zeros((13, 20, 3), np.int64)
        for g in range(3):
            xg, wg = xq[:, 16 * g : 16 * g + 16], w[:, 16 * g : 16 * g + 16]
            if P.d("last_four_of_group"):
                xg, wg = xg[:, :12], wg[:, :12]
            z = zeros[:, g]
            if P.d("zeros_read_group_major"):
                z = np.ascontiguousarray(zeros).reshape(3, 20)[g]
            if P.d("zero_plus_one"):
                z = z + 1
            dot = np.zeros((13, 20), np.int64)
            for k in range(xg.shape[1]):
                dot += xg[:, k : k + 1] * wg[:, k][None]
            sx = xg.sum(1, keepdims=True)
            if P.d("zero_correction_sign"):
                acc[:, :, g] = dot + sx * z
            elif P.d("zero_correction_missing"):
                acc[:, :, g] = dot
            else:
                acc[:, :, g] = dot - sx * z
        if P.d("eleven_bits_wrap"):
            acc = (acc + 2048) % 4096 - 2048
        if P.d("accumulators_raced"):
            lost = np.random.default_rng(11).random((13, 20)) < 0.06
            acc[:, :, 1] = np.where(lost, 0, acc[:, :, 1])
        acc = P.put("acc", acc)
        y = np.zeros((13, 20), dt)
        for g in range(3):
            sc = scales[:, 0 if P.d("first_groups_scale") else g]
            y += acc[:, :, g].astype(dt) * sc
            if P.d("dequantised_in_bf16"):
                y = bf16(y)
        y = y * (xs[np.maximum(np.arange(13) - 1, 0)] if P.d("scale_of_row_above") else xs)[:, None]
        if P.d("scales_squared"):
            y = y * xs[:, None]
        y = P.put("scaled", y)
        if P.d("bias_before_clamp_missing"):
            out = np.clip(y, -6, 6) + bias
        elif P.d("clamped_below_at_zero"):
            out = np.clip(y + bias, 0, 6)
        else:
            out = np.clip(y + bias, -6, 6)
        P.put("output", out)

    defects = [
        D("nibbles_exchanged", "unpacked", "swap", "the high nibble comes first", accept=("permute", "flip", "layout")),
        D(
            "nibbles_signed",
            "unpacked",
            "other",
            "nibbles above 7 are taken as negative",
            accept=("function", "sign", "constant"),
        ),
        D(
            "halves_instead_of_pairs",
            "unpacked",
            "layout",
            "low nibbles are the first 24 columns, high ones the last 24, instead of alternating",
            accept=("permute",),
        ),
        D("largest_without_abs", "x_scale", "function", "max(x) instead of max(|x|)", accept=("sign",)),
        D(
            "scale_of_whole_tensor",
            "x_scale",
            "axis",
            "the largest value is over all tokens instead of one",
            accept=("other",),
        ),
        D("levels_128", "x_scale", "constant", "divided by 128 instead of 127", accept=("scale",)),
        D(
            "scale_eps_large",
            "x_scale",
            "eps",
            "a floor of 0.02 instead of 1e-6 added",
            accept=("constant", "function"),
        ),
        D(
            "truncated_to_integer",
            "xq",
            "function",
            "truncated towards zero instead of rounded",
            accept=("precision", "other"),
        ),
        D("clamped_to_seven_bits", "xq", "constant", "clamped to +-63 instead of +-127", accept=("mask",)),
        D(
            "unsigned_eight_bits",
            "xq",
            "function",
            "clamped to 0..255, so negative values are lost",
            accept=("zero", "sign", "constant", "mask"),
        ),
        D(
            "last_four_of_group",
            "acc",
            "truncate",
            "the last 4 of each group's 16 products are left out",
            accept=("drop_term",),
        ),
        D(
            "zeros_read_group_major",
            "acc",
            "layout",
            "zero points, stored 20 x 3, are read as 3 x 20",
            accept=("transpose", "permute"),
        ),
        D(
            "zero_plus_one",
            "acc",
            "shift",
            "zero points are one too large, as in GPTQ's first files",
            accept=("constant",),
        ),
        D("zero_correction_sign", "acc", "sign", "the zero point's part is added instead of taken off"),
        D("zero_correction_missing", "acc", "drop_term", "the zero points are left out"),
        D(
            "eleven_bits_wrap",
            "acc",
            "other",
            "the accumulator wraps around at 12 bits",
            accept=("precision", "function"),
        ),
        D(
            "accumulators_raced",
            "acc",
            "race",
            "6% of the middle group's sums are lost",
            accept=("zero", "drop_term", "mask", "other"),
        ),
        D(
            "first_groups_scale",
            "scaled",
            "stale",
            "all groups are scaled by the first group's scale",
            accept=("axis", "shift", "other"),
        ),
        D("dequantised_in_bf16", "scaled", "precision", "the sum over groups is kept in bfloat16"),
        D(
            "scale_of_row_above",
            "scaled",
            "shift",
            "a token is scaled by the scale of the token before",
            accept=("stale",),
        ),
        D("scales_squared", "scaled", "factor", "the token's scale is multiplied in twice"),
        D(
            "bias_before_clamp_missing",
            "output",
            "other",
            "the bias is added after the clamp instead of before",
            accept=("permute", "swap"),
        ),
        D(
            "clamped_below_at_zero",
            "output",
            "constant",
            "clamped to 0..6 instead of -6..6",
            accept=("mask", "function", "zero"),
        ),
    ]


@program("q12", variants=("f32", "bf16"), wide=("x_mean",))
class graph_attention_csr:
    """A GAT layer with 3 heads on a CSR graph of 40 nodes, and a norm over the nodes; the port goes row by row, 4 edges at once."""

    def make(g):
        degree = randint(g, 0, 9, 40)
        degree[7] = degree[31] = 0
        degree[39] = 5
        ptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
        return dict(
            x=randn(g, 40, 13),
            w=randn(g, 24, 13, scale=0.35),
            a_src=randn(g, 3, 8, scale=0.5),
            a_dst=randn(g, 3, 8, scale=0.5),
            gamma=randn(g, 24, scale=0.2, shift=1.0),
            beta=randn(g, 24, scale=0.3),
            ptr=ptr,
            col=randint(g, 0, 40, int(ptr[-1])),
        )

    def reference(x, w, a_src, a_dst, gamma, beta, ptr, col):
        h = step("h", (x @ w.T).reshape(40, 3, 8))
        el = step("el", (h * a_src).sum(-1))
        er = step("er", (h * a_dst).sum(-1))
        row = torch.repeat_interleave(torch.arange(40), ptr[1:] - ptr[:-1])
        e = step("edge", F.leaky_relu(el[col] + er[row], 0.2))
        p = torch.exp(e - e.max())
        total = torch.zeros_like(el).index_add(0, row, p)
        alpha = step("alpha", p / total[row])
        agg = torch.zeros_like(h).index_add(0, row, alpha[:, :, None] * h[col])
        agg = step("agg", agg.reshape(40, 24))
        mean = step("x_mean", agg.mean(0))
        var = (agg - mean).square().mean(0)
        y = step("normed", (agg - mean) / torch.sqrt(var + 1e-5) * gamma + beta)
        return F.elu(y)

    def port(P: Port):
        x, w, a_src, a_dst, gamma, beta, ptr, col = (
            P[n] for n in ("x", "w", "a_src", "a_dst", "gamma", "beta", "ptr", "col")
        )
        dt = x.dtype
        h = np.zeros((40, 3, 8), dt)
        for i in range(0, 40, 16):
            xi = x[i : i + 16]
            if P.d("last_block_reads_previous") and i == 32:
                xi = x[24:32]
            for k in range(3):
                wk = w[k::3] if P.d("heads_strided") else w[8 * k : 8 * k + 8]
                h[i : i + 16, k] = xi @ wk.T
        h = P.put("h", h)
        a1, a2 = (a_dst, a_src) if P.d("attention_vectors_swapped") else (a_src, a_dst)
        if P.d("el_over_heads"):
            el = np.einsum("nkd,kd->nd", h, a1)[:, :3]
        else:
            el = np.einsum("nkd,kd->nk", h, a1)
        el = P.put("el", el)
        er = P.put("er", np.einsum("nkd,kd->nk", h, a2))
        e = np.zeros((len(col), 3), dt)
        for i in range(40):
            for j in range(ptr[i], ptr[i + 1]):
                s = el[i] + er[col[j]] if P.d("ends_swapped") else el[col[j]] + er[i]
                slope = P.f(0.01 if P.d("leaky_slope") else 0.2)
                e[j] = np.where(s > 0, s, slope * s)
        if P.d("edge_sign"):
            e = -e
        e = P.put("edge", e)
        alpha = np.zeros_like(e)
        for i in range(40):
            a, b = int(ptr[i]), int(ptr[i + 1])
            if a == b:
                continue
            ei = e[a:b]
            m = ei.max(0)
            ex = np.exp(ei - m)
            tot = ex.sum(0)
            if P.d("softmax_sum_four_edges"):
                tot = ex[:4].sum(0)
            if P.d("total_over_heads"):
                tot = np.full(3, tot.sum(), dt)
            if P.d("exp_in_bf16"):
                ex = bf16(ex)
            alpha[a:b] = ex / tot
        if P.d("last_row_unwritten"):
            alpha[ptr[39] :] = 0
        alpha = P.put("alpha", alpha)
        agg = np.zeros((40, 3, 8), dt)
        for i in range(40):
            a, b = int(ptr[i]), int(ptr[i + 1])
            if P.d("row_ends_one_early"):
                b = max(a, b - 1)
            acc = np.zeros((3, 8), dt)
            for j in range(a, b):
                src = col[j]
                acc += alpha[j][:, None] * h[src]
            if a == int(ptr[i + 1]) and P.d("isolated_rows_keep_before") and i:
                acc = agg[i - 1]
            agg[i] = acc
        if P.d("edges_lost_in_adds"):
            lost = np.random.default_rng(12).random(len(col)) < 0.05
            for i in range(40):
                for j in range(int(ptr[i]), int(ptr[i + 1])):
                    if lost[j]:
                        agg[i] -= alpha[j][:, None] * h[col[j]]
        flat = agg.transpose(0, 2, 1).reshape(40, 24) if P.d("heads_last_in_output") else agg.reshape(40, 24)
        flat = P.put("agg", flat)
        count = P.f(38 if P.d("mean_of_connected_only") else 40)
        mean = P.put("x_mean", flat.sum(0) / count)
        sq = ((flat - mean) ** 2).sum(0)
        var = sq / P.f(39 if P.d("variance_unbiased") else 40)
        root = np.sqrt(var + P.f(1e-2 if P.d("norm_eps") else 1e-5))
        if P.d("gamma_beta_swapped"):
            y = (flat - mean) / root * beta + gamma
        elif P.d("mean_not_taken_off"):
            y = flat / root * gamma + beta
        else:
            y = (flat - mean) / root * gamma + beta
        y = P.put("normed", y)
        out = np.where(y > 0, y, np.expm1(np.minimum(y, 0)))
        if P.d("relu_for_elu"):
            out = np.maximum(y, 0)
        P.put("output", out)

    defects = [
        D(
            "last_block_reads_previous",
            "h",
            "stale",
            "nodes 32 to 39 get the products of nodes 24 to 31",
            accept=("shift", "layout"),
        ),
        D(
            "heads_strided",
            "h",
            "permute",
            "head k takes rows k, k + 3, ... of the weight instead of 8 in a row",
            accept=("layout",),
        ),
        D("attention_vectors_swapped", "el", "swap", "a_src and a_dst are exchanged"),
        D("el_over_heads", "el", "axis", "summed over heads instead of channels"),
        D("ends_swapped", "edge", "swap", "source and target of an edge are exchanged", accept=("transpose",)),
        D("leaky_slope", "edge", "constant", "slope 0.01 instead of 0.2"),
        D("edge_sign", "edge", "sign", "the edges' scores are negated"),
        D(
            "softmax_sum_four_edges",
            "alpha",
            "truncate",
            "only a row's first 4 edges are in the sum",
            accept=("mask", "drop_term"),
        ),
        D("total_over_heads", "alpha", "axis", "divided by the sum over edges and heads"),
        D("exp_in_bf16", "alpha", "precision", "exp is rounded to bfloat16"),
        D(
            "last_row_unwritten",
            "alpha",
            "zero",
            "the last node's edges are never written",
            accept=("truncate", "shift"),
        ),
        D(
            "row_ends_one_early",
            "agg",
            "shift",
            "each row's last edge is left out",
            accept=("truncate", "mask", "drop_term"),
        ),
        D(
            "isolated_rows_keep_before",
            "agg",
            "stale",
            "nodes without edges get the row before instead of zeros",
            accept=("mask", "zero"),
        ),
        D(
            "edges_lost_in_adds",
            "agg",
            "race",
            "5% of the edges' contributions are lost",
            accept=("drop_term", "mask", "truncate", "other"),
        ),
        D(
            "heads_last_in_output",
            "agg",
            "layout",
            "(heads, 8) is stored as (8, heads)",
            accept=("transpose", "permute"),
        ),
        D(
            "mean_of_connected_only",
            "x_mean",
            "scale",
            "divided by 38 instead of 40",
            accept=("constant", "mask", "ddof", "shift", "factor"),
        ),
        D("variance_unbiased", "normed", "ddof", "the variance is over 39 instead of 40", accept=("scale",)),
        D("norm_eps", "normed", "eps", "1e-2 instead of 1e-5", accept=("constant",)),
        D("gamma_beta_swapped", "normed", "swap", "gamma and beta are exchanged"),
        D("mean_not_taken_off", "normed", "drop_term", "the mean isn't subtracted"),
        D("relu_for_elu", "output", "function", "ReLU in place of ELU", accept=("zero",)),
    ]
