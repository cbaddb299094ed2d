"""A quantised pair of layers, a selective state-space layer, and a step of a diffusion sampler."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randint, randn, sigmoid, silu, step

H_SCALE, H_ZERO = 3 / 128, 10
"""Static quantisation of the hidden layer."""


@program("ba01", variants=("f32", "bf16"), wide=("act_scale", "acc"))
class quantised_layers:
    """A layer of 4-bit weights in groups of 16 on activations that are quantised token by token after smoothing, GELU,
    and a layer of 8-bit weights on a hidden layer that has a static zero point. The port unpacks bytes and works the
    summed dimension in tiles; it takes the zero point out of the second product by the weights' sums."""

    def make(g):
        return dict(
            x=randn(g, 9, 48) * torch.exp(randn(g, 48, scale=0.6)),
            smooth=torch.exp(randn(g, 48, scale=0.5)),
            qweight=randint(g, 0, 2**32, 20, 6),  # eight nibbles a word, the lowest first
            scales=rand(g, 20, 3, low=0.02, high=0.08),
            zeros=randint(g, 4, 12, 20, 3),
            bias=randn(g, 20, scale=0.6),
            w2=randint(g, -127, 128, 10, 20),
            w2_scale=rand(g, 10, low=0.002, high=0.01),
            residual=randn(g, 9, 10),
        )

    def reference(x, smooth, qweight, scales, zeros, bias, w2, w2_scale, residual):
        x = step("smoothed", x / smooth)
        act_scale = step("act_scale", x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127)
        act_q = step("act_q", torch.round(x / act_scale).clamp(-127, 127))
        nibbles = ((qweight[..., None] >> torch.arange(0, 32, 4)) & 15).reshape(20, 3, 16)
        weight = step("weight", ((nibbles - zeros[..., None]) * scales[..., None]).reshape(20, 48))
        linear = step("linear", (act_q @ weight.T) * act_scale + bias)
        hidden = step("hidden", F.gelu(linear, approximate="tanh"))
        hidden_q = step("hidden_q", (torch.round(hidden / H_SCALE) + H_ZERO).clamp(0, 255))
        acc = step("acc", (hidden_q - H_ZERO) @ w2.to(x.dtype).T)
        return acc * (H_SCALE * w2_scale) + residual

    def port(P: Port):
        x, smooth = P["x"], P["smooth"]
        dt = x.dtype
        y = np.empty_like(x)
        for k in range(0, 48, 32):
            part = smooth[:16] if P.d("smoothing_index_restarts_in_second_tile") and k else smooth[k : k + 32]
            y[:, k : k + 32] = x[:, k : k + 32] / part
        y = P.put("smoothed", y)

        top = y.max(1) if P.d("largest_value_without_its_sign") else np.maximum(y.max(1), -y.min(1))
        act_scale = P.put("act_scale", (np.maximum(top, P.f(1e-6)) / P.f(127))[:, None])
        act_q = P.put("act_q", np.clip(np.rint(y / act_scale), -127, 127))

        packed = P["qweight"].astype("<u4").view(np.uint8).reshape(20, 24)
        low, high = packed & 15, packed >> 4
        if P.d("high_nibble_first"):
            low, high = high, low
        scales, zeros = P["scales"], P["zeros"]
        weight = np.empty((20, 48), dt)
        for k in range(48):
            group = k // 16
            if P.d("group_parameters_one_element_early"):
                group = min((k + 1) // 16, 2)
            nibble = (high if k % 2 else low)[:, k // 2].astype(dt)
            weight[:, k] = (nibble - zeros[:, group].astype(dt)) * scales[:, group]
        weight = P.put("weight", weight)

        acc = np.zeros((9, 20), dt)
        for k in range(0, 48, 16):
            acc += act_q[:, k : k + 16] @ weight[:, k : k + 16].T
            if P.d("tiles_summed_in_half"):
                acc = bf16(acc)
        if P.d("bias_before_dequantisation"):
            linear = (acc + P["bias"]) * act_scale
        else:
            linear = acc * act_scale + P["bias"]
        linear = P.put("linear", linear)

        if P.d("gelu_of_the_error_function"):
            erf = np.vectorize(math.erf)(linear / math.sqrt(2))
            hidden = linear * (1 + erf) / 2
        else:
            hidden = linear * sigmoid(P.f(2 * math.sqrt(2 / math.pi)) * (linear + P.f(0.044715) * linear**3))
        hidden = P.put("hidden", hidden.astype(dt))

        highest = 127 if P.d("hidden_saturates_as_if_signed") else 255
        hidden_q = P.put("hidden_q", np.minimum(np.maximum(np.rint(hidden / P.f(H_SCALE)) + H_ZERO, 0), highest))

        w2 = P["w2"].astype(dt)
        sums = np.zeros(10, dt)
        for k in range(0, 16 if P.d("zero_point_of_full_tiles_only") else 20, 8):
            sums += w2[:, k : k + 8].sum(1)
        acc = P.put("acc", np.einsum("nk,ok->no", hidden_q, w2) - H_ZERO * sums)

        w2_scale = P["w2_scale"]
        if P.d("scale_of_first_channel_for_all"):
            w2_scale = w2_scale[:1]
        P.put("output", acc * w2_scale * P.f(H_SCALE) + P["residual"])

    defects = [
        D(
            "smoothing_index_restarts_in_second_tile",
            "smoothed",
            "shift",
            "In the second tile of columns the smoothing factors are read from the start again.",
            ("stale", "layout", "permute", "other", "swap"),
        ),
        D(
            "largest_value_without_its_sign",
            "act_scale",
            "function",
            "The row's scale comes from its largest value, not from its largest absolute value.",
            ("drop_term", "sign", "mask"),
        ),
        D(
            "high_nibble_first",
            "weight",
            "swap",
            "The high nibble of each byte is taken as the first weight; the low one is.",
            ("layout", "permute", "transpose", "flip"),
        ),
        D(
            "group_parameters_one_element_early",
            "weight",
            "shift",
            "The last weight of a group is dequantised with the scale and the zero point of the group after it.",
            ("stale", "other", "mask"),
        ),
        D(
            "tiles_summed_in_half",
            "linear",
            "precision",
            "The sum over tiles is rounded to bfloat16 after each tile; it should be kept in float32.",
        ),
        D(
            "bias_before_dequantisation",
            "linear",
            "other",
            "The bias is added before the multiplication with the token's scale and is scaled too.",
            ("factor", "scale", "swap"),
        ),
        D(
            "gelu_of_the_error_function",
            "hidden",
            "function",
            "GELU is taken with the error function; the model has the approximation by tanh.",
            ("constant", "precision"),
        ),
        D(
            "hidden_saturates_as_if_signed",
            "hidden_q",
            "constant",
            "Quantised hidden values are clamped at 127; they are unsigned and go up to 255.",
            ("truncate", "function", "mask"),
        ),
        D(
            "zero_point_of_full_tiles_only",
            "acc",
            "truncate",
            "The zero point's correction sums the weights of full tiles only, without the last four columns.",
            ("drop_term", "mask"),
        ),
        D(
            "scale_of_first_channel_for_all",
            "output",
            "axis",
            "Every output channel is dequantised with the scale of channel 0.",
            ("scale", "factor", "constant", "other", "layout"),
        ),
    ]


@program("ba02", variants=("bf16", "f32", "bf16reg"), wide=("dt", "decay", "states", "h0", "A_log"))
class selective_scan:
    """A layer of a selective state-space model: a short causal convolution, softplus of the step, a scan with three
    heads, a skip, a gate and a norm in two groups. The port scans in chunks of 4 and carries the state over."""

    def make(g):
        return dict(
            x=randn(g, 2, 13, 12),
            z=randn(g, 2, 13, 12, scale=1.5),
            dt_raw=randn(g, 2, 13, 3),
            b=randn(g, 2, 13, 5),
            c=randn(g, 2, 13, 5),
            h0=randn(g, 2, 3, 4, 5),
            A_log=rand(g, 3, low=-1.0, high=0.7),
            skip=randn(g, 3, scale=0.3, shift=1.0),
            dt_bias=randn(g, 3, scale=0.5, shift=-0.5),
            conv_w=randn(g, 12, 4, scale=0.6),
            conv_b=randn(g, 12, scale=0.2),
            norm_w=randn(g, 12, scale=0.2, shift=1.0),
        )

    def reference(x, z, dt_raw, b, c, h0, A_log, skip, dt_bias, conv_w, conv_b, norm_w):
        u = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv_w[:, None], conv_b, groups=12)
        u = step("conv", F.silu(u).transpose(1, 2))
        dt = step("dt", F.softplus(dt_raw + dt_bias))
        decay = step("decay", torch.exp(-torch.exp(A_log) * dt))
        heads = u.reshape(2, 13, 3, 4)
        h, states = h0, []
        for t in range(13):
            new = (dt[:, t, :, None] * heads[:, t])[..., None] * b[:, t, None, None]
            h = decay[:, t, :, None, None] * h + new
            states.append(h)
        states = step("states", torch.stack(states, 1))
        y = torch.einsum("bthpn,btn->bthp", states, c) + skip[:, None] * heads
        y = step("y", y.reshape(2, 13, 12))
        y = step("gated", y * F.silu(z)).reshape(2, 13, 2, 6)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return y.reshape(2, 13, 12) * norm_w

    def port(P: Port):
        x, w, cb = P["x"], P["conv_w"], P["conv_b"]
        dt_ = x.dtype
        if P.d("convolution_taps_reversed"):
            w = w[:, ::-1]
        u, past = np.empty_like(x), np.zeros((3, 12), dt_)
        for n in range(2):
            if not P.d("convolution_state_not_cleared"):
                past = np.zeros((3, 12), dt_)
            for t in range(13):
                taps = np.concatenate([past, x[n, t : t + 1]])
                u[n, t] = silu((taps * w.T).sum(0) + cb)
                past = taps[1:]
        u = P.put("conv", u)

        raw, bias = P["dt_raw"], P["dt_bias"]
        if P.d("bias_of_step_after_softplus"):
            dt = np.log1p(np.exp(raw)) + bias
        else:
            dt = np.log1p(np.exp(raw + bias))
        dt = P.put("dt", dt)
        rate = np.exp(P["A_log"])
        decay = np.exp(-rate * dt)
        decay = P.put("decay", bf16(decay) if P.d("decay_kept_in_half") else decay)

        b, c = P["b"], P["c"]
        if P.d("input_and_output_maps_exchanged"):
            b, c = c, b
        heads = u.reshape(2, 13, 3, 4)
        states = np.zeros((2, 13, 3, 4, 5), dt_)
        for n in range(2):
            for h in range(3):
                carry = P["h0"][n, h]
                gain = dt[n, :, h]
                if P.d("zero_order_hold_for_input"):
                    gain = (1 - decay[n, :, h]) / rate[h]
                for s in range(0, 13, 4):
                    e = min(s + 4, 13)
                    through = np.cumprod(decay[n, s:e, h])
                    for t in range(s, e):
                        first = through[t - s]
                        if P.d("carry_decays_one_step_less"):
                            first = through[t - s - 1] if t > s else P.f(1)
                        total = first * carry
                        for j in range(s, t + 1):
                            left = through[t - s] / through[j - s]
                            total = total + left * gain[j] * np.outer(heads[n, j, h], b[n, j])
                        states[n, t, h] = total
                    carry = states[n, e - 1, h]
        states = P.put("states", states)

        y = np.empty((2, 13, 3, 4), dt_)
        skipped = x.reshape(2, 13, 3, 4) if P.d("skip_of_input_before_convolution") else heads
        for n in range(2):
            buffer = np.zeros((4, 5), dt_)
            for s in range(0, 13, 4):
                rows = min(4, 13 - s)
                if rows == 4 or not P.d("output_map_not_loaded_for_short_chunk"):
                    buffer[:rows] = c[n, s : s + rows]
                for r in range(rows):
                    y[n, s + r] = states[n, s + r] @ buffer[r] + P["skip"][:, None] * skipped[n, s + r]
        y = P.put("y", y.reshape(2, 13, 12))
        y = P.put("gated", y * silu(P["z"]))

        out = np.empty_like(y)
        width = 12 if P.d("norm_over_all_groups") else 6
        for k in range(0, 12, width):
            part = y[..., k : k + width]
            out[..., k : k + width] = part / np.sqrt((part * part).mean(-1, keepdims=True) + P.f(1e-5))
        P.put("output", out * P["norm_w"])

    defects = [
        D(
            "convolution_taps_reversed",
            "conv",
            "flip",
            "The convolution's taps are applied in reversed order of time.",
            ("permute", "layout", "swap"),
        ),
        D(
            "convolution_state_not_cleared",
            "conv",
            "stale",
            "The second sequence starts with the last three tokens of the first in the convolution's state.",
            ("zero", "shift", "mask", "other"),
        ),
        D(
            "bias_of_step_after_softplus",
            "dt",
            "other",
            "The bias of the step is added after softplus; it belongs inside.",
            ("function", "swap", "drop_term"),
        ),
        D(
            "decay_kept_in_half",
            "decay",
            "precision",
            "The decays are rounded to bfloat16; they should stay in float32.",
        ),
        D(
            "input_and_output_maps_exchanged",
            "states",
            "swap",
            "B and C are taken from each other's place: states are fed with C and read out with B.",
            ("layout", "permute", "other"),
        ),
        D(
            "zero_order_hold_for_input",
            "states",
            "function",
            "The input enters with (1 - exp(-a dt)) / a, a zero-order hold; the model takes dt itself.",
            ("factor", "scale", "other"),
        ),
        D(
            "carry_decays_one_step_less",
            "states",
            "shift",
            "The state carried into a chunk is decayed by the steps before the token, without the token's own.",
            ("factor", "drop_term", "scale", "other"),
        ),
        D(
            "output_map_not_loaded_for_short_chunk",
            "y",
            "stale",
            "The last chunk, of one token, reads C of the chunk before it, which is still in the buffer.",
            ("shift", "mask", "truncate"),
        ),
        D(
            "skip_of_input_before_convolution",
            "y",
            "other",
            "The skip takes the layer's input; it should take what came out of the convolution.",
            ("stale", "swap"),
        ),
        D(
            "norm_over_all_groups",
            "output",
            "axis",
            "The mean square is taken over all twelve channels, not in each group of six.",
            ("function", "factor", "scale", "other"),
        ),
    ]


@program("ba03", variants=("f32", "bf16"), wide=("alphas", "sigma"))
class sampler_step:
    """A step of a diffusion sampler: a cosine schedule, guidance with its deviation put back, x0 of a velocity, dynamic
    thresholding, and a step of 8 with eta 0.7. The port has the schedule in closed form and goes image by image."""

    def make(g):
        return dict(
            x=randn(g, 3, 4, 5, 5),
            cond=randn(g, 3, 4, 5, 5, scale=0.9) + randn(g, 3, 1, 1, 1, scale=0.3),
            uncond=randn(g, 3, 4, 5, 5, scale=0.9),
            noise=randn(g, 3, 4, 5, 5),
            t=torch.tensor([5, 20, 35])[torch.randperm(3, generator=g)],
        )

    def reference(x, cond, uncond, noise, t):
        f = torch.cos((torch.arange(41, dtype=x.dtype) / 40 + 0.008) / 1.008 * math.pi / 2).square()
        alphas = step("alphas", torch.cumprod(1 - (1 - f[1:] / f[:-1]).clamp(max=0.999), 0))
        guided = step("guided", uncond + 3 * (cond - uncond))
        dims = (1, 2, 3)
        back = guided * (cond.std(dims, keepdim=True) / guided.std(dims, keepdim=True))
        v = step("rescaled", 0.7 * back + 0.3 * guided)
        a = alphas[t][:, None, None, None]
        x0 = step("x0", a.sqrt() * x - (1 - a).sqrt() * v)
        s = torch.quantile(x0.abs().flatten(1), 0.9, dim=1).clamp(min=1)[:, None, None, None]
        x0 = step("clipped", torch.maximum(torch.minimum(x0, s), -s) / s)
        eps = step("eps", (x - a.sqrt() * x0) / (1 - a).sqrt())
        before = t - 8
        ap = alphas[before.clamp(min=0)]
        sigma = step("sigma", 0.7 * ((1 - ap) / (1 - alphas[t]) * (1 - alphas[t] / ap)).sqrt())[:, None, None, None]
        ap = ap[:, None, None, None]
        mean = ap.sqrt() * x0 + (1 - ap - sigma.square()).sqrt() * eps
        return mean + sigma * noise * (before >= 0)[:, None, None, None]

    def port(P: Port):
        x, cond, uncond, t = P["x"], P["cond"], P["uncond"], P["t"]
        dt = x.dtype
        f = np.cos((np.arange(41) / P.f(40) + P.f(0.008)) / P.f(1.008) * P.f(np.pi / 2)).astype(dt) ** 2
        if P.d("schedule_multiplied_in_half"):
            alphas, total = np.empty(40, dt), np.float16(1)
            for i in range(40):
                total = np.float16(total * np.float16(max(f[i + 1] / f[i], 0.001)))
                alphas[i] = total
        elif P.d("schedule_starts_at_one"):
            alphas = f[:40] / f[0]
        else:
            alphas = f[1:] / f[0]
            alphas[39] = alphas[38] * P.f(0.001)
        alphas = P.put("alphas", alphas)

        if P.d("guidance_from_conditional"):
            guided = 4 * cond - 3 * uncond
        else:
            guided = 3 * cond - 2 * uncond
        guided = P.put("guided", guided)

        def deviation(z, ddof=1):
            d = z - z.mean()
            return np.sqrt((d * d).sum() / (z.size - ddof))

        v = np.empty_like(x)
        for n in range(3):
            of_guided = deviation(guided[n], 0 if P.d("one_deviation_of_population") else 1)
            v[n] = guided[n] * (P.f(0.3) + P.f(0.7) * deviation(cond[n]) / of_guided)
        v = P.put("rescaled", v)

        x0 = np.empty_like(x)
        for n in range(3):
            a = alphas[t[n]]
            move = np.sqrt(1 - a) * v[n]
            x0[n] = np.sqrt(a) * x[n] + (move if P.d("velocity_added") else -move)
        x0 = P.put("x0", x0)

        clipped = np.empty_like(x)
        for n in range(3):
            line = np.sort(np.abs(x0[n]).reshape(-1))
            if P.d("quantile_without_interpolation"):
                s = line[90]
            else:
                s = line[89] + P.f(0.9 * 99 - 89) * (line[90] - line[89])
            clipped[n] = np.clip(x0[n] / max(s, P.f(1)), -1, 1)
        clipped = P.put("clipped", clipped)

        eps = np.empty_like(x)
        for n in range(3):
            a = alphas[t[n]]
            known = x0[n] if P.d("noise_of_unclipped_image") else clipped[n]
            eps[n] = (x[n] - np.sqrt(a) * known) / np.sqrt(1 - a)
        eps = P.put("eps", eps)

        before = t - (1 if P.d("previous_time_is_one_before") else 8)
        ap, a = alphas[np.maximum(before, 0)], alphas[t]
        sigma = P.put("sigma", P.f(0.7) * np.sqrt((1 - ap) * (ap - a) / ((1 - a) * ap)))

        out = np.empty_like(x)
        for n in range(3):
            left = 1 - ap[n] if P.d("direction_keeps_all_variance") else 1 - ap[n] - sigma[n] ** 2
            out[n] = np.sqrt(ap[n]) * clipped[n] + np.sqrt(left) * eps[n]
            if before[n] >= 0 or P.d("noise_in_last_step"):
                out[n] += sigma[n] * P["noise"][n]
        P.put("output", out)

    defects = [
        D(
            "schedule_multiplied_in_half",
            "alphas",
            "precision",
            "The cumulative product of the schedule is kept in float16.",
        ),
        D(
            "schedule_starts_at_one",
            "alphas",
            "shift",
            "The cumulative product leaves out its own step: each entry is that of the step before, the first is one.",
            ("constant", "other"),
        ),
        D(
            "guidance_from_conditional",
            "guided",
            "function",
            "The guidance starts from the conditional prediction; the weight 3 is meant from the unconditional one.",
            ("constant", "factor", "scale", "swap", "other", "stale"),
        ),
        D(
            "one_deviation_of_population",
            "rescaled",
            "ddof",
            "The deviation of the guided prediction divides by n, that of the conditional one by n - 1.",
            ("factor", "scale", "constant"),
        ),
        D(
            "velocity_added",
            "x0",
            "sign",
            "The velocity is added where it should be subtracted.",
        ),
        D(
            "quantile_without_interpolation",
            "clipped",
            "function",
            "The threshold is the sorted value at 90; the quantile lies between those at 89 and 90.",
            ("shift", "constant", "factor", "scale", "other"),
        ),
        D(
            "noise_of_unclipped_image",
            "eps",
            "stale",
            "The noise is computed with the image before thresholding.",
            ("swap", "other", "function", "drop_term"),
        ),
        D(
            "previous_time_is_one_before",
            "sigma",
            "shift",
            "The previous time is t - 1; the sampler goes in steps of 8. Both sigma and the update read that entry.",
            ("constant", "other"),
        ),
        D(
            "direction_keeps_all_variance",
            "output",
            "drop_term",
            "The variance of the fresh noise is not taken off the direction's.",
            ("function", "factor"),
        ),
        D(
            "noise_in_last_step",
            "output",
            "mask",
            "The image that reaches the end gets fresh noise too.",
            ("other", "drop_term", "zero"),
        ),
    ]
