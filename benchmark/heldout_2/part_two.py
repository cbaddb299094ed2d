"""Parts of image and field models: guided diffusion, a convolution by im2col, a Fourier layer."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, randn, silu, step


def gelu(x: np.ndarray) -> np.ndarray:
    """The one with tanh."""
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


@program("r04", variants=("bf16", "f32"), wide=("betas", "alphas", "time", "threshold", "sigma"))
class guided_ddim:
    """Three steps of DDIM with noise, a model of v, guidance with a rescaled deviation, and dynamic thresholds.

    The port works on samples one by one, in alpha and sigma, and runs the model on both halves of a doubled batch.
    """

    def make(g):
        return dict(
            x=randn(g, 3, 4, 6, 5),
            cond=randn(g, 3, 10),
            null=randn(g, 10, scale=0.5),
            w_in=randn(g, 12, 4, scale=0.5),
            w_time=randn(g, 12, 8, scale=0.4),
            w_cond=randn(g, 12, 10, scale=0.3),
            w_out=randn(g, 4, 12, scale=0.35),
            noise=randn(g, 3, 3, 4, 6, 5),
        )

    def reference(x, cond, null, w_in, w_time, w_cond, w_out, noise):
        betas = step("betas", torch.linspace(0.03**0.5, 0.35**0.5, 40, dtype=x.dtype) ** 2)
        alphas = step("alphas", (1 - betas).cumprod(0))

        def model(x, time, c):
            bias = w_time @ time + c @ w_cond.T
            h = F.silu(torch.einsum("oc,bchw->bohw", w_in, x) + bias[..., None, None])
            return torch.einsum("co,bohw->bchw", w_out, h)

        for i, t in enumerate((31, 21, 11)):
            a, before = alphas[t], alphas[t - 10]
            freq = 10000 ** (-torch.arange(4, dtype=x.dtype) / 4)
            time = step("time", torch.cat([(t * freq).cos(), (t * freq).sin()]))
            v_null = step("v_null", model(x, time, null.expand_as(cond)))
            v_cond = step("v_cond", model(x, time, cond))
            v = step("v_guided", v_null + 3.5 * (v_cond - v_null))
            ratio = v_cond.std((1, 2, 3), keepdim=True) / v.std((1, 2, 3), keepdim=True)
            v = step("v_rescaled", 0.7 * v * ratio + 0.3 * v)
            x0 = step("x0", a.sqrt() * x - (1 - a).sqrt() * v)
            s = step("threshold", x0.abs().flatten(1).quantile(0.9, 1).clamp(min=1))[:, None, None, None]
            x0 = step("x0_clipped", x0.clamp(-s, s) / s)
            eps = step("eps", (x - a.sqrt() * x0) / (1 - a).sqrt())
            sigma = step("sigma", 0.6 * ((1 - before) / (1 - a) * (1 - a / before)).sqrt())
            x = step("x_next", before.sqrt() * x0 + (1 - before - sigma**2).sqrt() * eps + sigma * noise[i])
        return (x / 2 + 0.5).clamp(0, 1)

    def port(P: Port):
        x, noise = P["x"], P["noise"]
        low, high = math.sqrt(0.03), math.sqrt(0.35)
        betas = P.put("betas", P.f([(low + (high - low) * i / 39) ** 2 for i in range(40)]))
        alphas, run = [], 1.0
        for beta in betas:
            run = run * (1 - beta)
            alphas.append(run)
        alphas = P.put("alphas", P.f(alphas))

        def model(x, time, c):
            h = np.einsum("bchw,oc->bhwo", x, P["w_in"]) + (P["w_time"] @ time + c @ P["w_cond"].T)[:, None, None]
            return (silu(h) @ P["w_out"].T).transpose(0, 3, 1, 2)

        for i, t in enumerate((31, 21, 11)):
            time = np.empty(8, x.dtype)
            for j in range(4):
                angle = t * 10000 ** (-j / (3 if P.d("frequencies_up_to_the_last") else 4))
                if P.d("sine_first"):
                    time[j], time[j + 4] = math.sin(angle), math.cos(angle)
                else:
                    time[j], time[j + 4] = math.cos(angle), math.sin(angle)
            time = P.put("time", time)
            conditions = [np.tile(P["null"], (3, 1)), P["cond"]]
            both = model(np.concatenate([x, x]), time, np.concatenate(conditions))
            if P.d("halves_of_batch_exchanged"):
                both = np.concatenate([both[3:], both[:3]])
            v_null, v_cond = P.put("v_null", both[:3]), P.put("v_cond", both[3:])
            if P.d("guidance_from_conditional"):  # (1 + w) c - w u
                v = v_cond + P.f(3.5) * (v_cond - v_null)
            else:
                v = v_cond * P.f(3.5) - v_null * P.f(2.5)
            v = P.put("v_guided", v)
            rescaled = np.empty_like(v)
            for b in range(3):
                own, all_ = v_cond[b].std(), v[b].std()
                rescaled[b] = v[b] * (P.f(0.7) * own / all_ + P.f(0.3))
            v = P.put("v_rescaled", rescaled)

            a, before = alphas[t], alphas[t - 10]
            if P.d("last_alpha_is_one") and i == 2:
                before = P.f(1)
            alpha, rest = np.sqrt(a), np.sqrt(1 - a)
            if P.d("taken_for_noise"):
                x0 = (x - rest * v) / alpha
            else:
                x0 = alpha * x - rest * v
            x0 = P.put("x0", x0)
            s = np.empty(3, x.dtype)
            for b in range(3):
                values = np.sort((x0[b] if P.d("quantile_of_signed") else np.abs(x0[b])).ravel())
                at = 0.9 * (values.size - 1)
                i0 = int(at)
                s[b] = max(values[i0] + P.f(at - i0) * (values[i0 + 1] - values[i0]), 1)
            s = P.put("threshold", s)
            clipped = P.put("x0_clipped", np.stack([np.clip(x0[b] / s[b], -1, 1) for b in range(3)]))
            eps = P.put("eps", (x - alpha * (x0 if P.d("noise_of_unclipped") else clipped)) / rest)
            sigma = P.put("sigma", P.f(0.6) * np.sqrt((1 - before) / (1 - a) * (before - a) / before))
            direction = np.sqrt(1 - before - (0 if P.d("sigma_not_taken_off") else sigma * sigma))
            drawn = noise[0 if P.d("same_noise_again") else i]
            x = P.put("x_next", np.sqrt(before) * clipped + direction * eps + sigma * drawn)
        P.put("output", np.clip((x + 1) / 2, 0, 1))

    defects = [
        D(
            "sine_first",
            "time",
            "swap",
            "the time's sines come before its cosines",
            accept=("permute", "function", "other"),
        ),
        D(
            "frequencies_up_to_the_last",
            "time",
            "shift",
            "frequencies are spread over 3 and not 4: the last is 1/10000",
            accept=("ddof", "scale", "factor", "constant"),
        ),
        D("halves_of_batch_exchanged", "v_null", "swap", "the two halves of the doubled batch are exchanged"),
        D(
            "guidance_from_conditional",
            "v_guided",
            "swap",
            "the difference is added to the conditional result",
            accept=("scale", "constant", "factor", "other"),
        ),
        D("taken_for_noise", "x0", "function", "the model's v is taken for its noise", accept=("other", "swap")),
        D(
            "quantile_of_signed",
            "threshold",
            "function",
            "the threshold is a quantile of signed values",
            accept=("drop_term", "sign", "other"),
        ),
        D(
            "noise_of_unclipped",
            "eps",
            "stale",
            "the noise is that of x0 before its threshold",
            accept=("other", "swap"),
        ),
        D("sigma_not_taken_off", "x_next", "drop_term", "the direction's length doesn't leave out the noise's share"),
        D("same_noise_again", "x_next#2", "stale", "each step adds the first step's noise", accept=("shift",)),
        D(
            "last_alpha_is_one",
            "sigma#3",
            "constant",
            "the last step goes to alpha = 1",
            accept=("zero", "other", "factor"),
        ),
    ]


@program("r05", variants=("f32", "bf16"))
class grouped_convolution:
    """A grouped, dilated convolution by im2col, GELU, average pooling, a transposed convolution, and gradients.

    The port gathers by indices; the transposed convolution scatters, and the gradients go back by col2im.
    """

    def make(g):
        return dict(
            x=randn(g, 2, 6, 11, 9),
            w=randn(g, 8, 3, 3, 2, scale=0.3),
            bias=randn(g, 8, scale=0.3),
            w_up=randn(g, 8, 5, 3, 3, scale=0.3),
            b_up=randn(g, 5, scale=0.3),
        )

    def reference(x, w, bias, w_up, b_up):
        cols = step("cols", F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 2), stride=(2, 1)))
        y = torch.einsum("gok,bgkl->bgol", w.view(2, 4, 18), cols.view(2, 2, 18, 66)).reshape(2, 8, 6, 11)
        y = step("conv", y + bias[:, None, None])
        y = step("act", F.gelu(y, approximate="tanh"))
        y = step("pool", F.avg_pool2d(y, 3, stride=1, padding=1, count_include_pad=False))
        return F.conv_transpose2d(y, w_up, b_up, stride=2, padding=1, output_padding=1)

    def loss(output):
        n = output.numel()
        return (output * ((torch.arange(n, dtype=output.dtype).view(output.shape) * 5 % 13) - 6) / 8).sum()

    def port(P: Port):
        x, w, w_up = P["x"], P["w"], P["w_up"]
        if P.d("upsampling_weight_read_out_first"):
            w_up = w_up.reshape(5, 8, 3, 3).swapaxes(0, 1)
        B, C, H, W, OH, OW = 2, 6, 11, 9, 6, 11
        taps = [(c, i, j) for c in range(C) for i in range(3) for j in range(2)]
        if P.d("channels_innermost"):
            taps = [(c, i, j) for i in range(3) for j in range(2) for c in range(C)]
        dilation = 1 if P.d("dilation_forgotten") else 2

        def places(i, j):
            """Rows and columns of the input that a tap reads, and which of them are inside."""
            r, s = np.arange(OH) * 2 + i - 1, np.arange(OW) + j * dilation - 2
            return r, s, ((r >= 0) & (r < H))[:, None] & ((s >= 0) & (s < W))[None]

        cols = np.zeros((B, C * 6, OH, OW), x.dtype)
        for n, (c, i, j) in enumerate(taps):
            r, s, inside = places(i, j)
            read = x[:, c, np.clip(r, 0, H - 1)[:, None], np.clip(s, 0, W - 1)[None]]
            cols[:, n] = read if P.d("border_repeated") else read * inside
        cols = P.put("cols", cols.reshape(B, C * 6, OH * OW))

        conv = np.empty((B, 8, OH * OW), x.dtype)
        flat = w.reshape(8, 18)
        for o in range(8):
            group = o % 2 if P.d("groups_interleaved") else o // 4
            conv[:, o] = np.einsum("k,bkl->bl", flat[o], cols[:, group * 18 : group * 18 + 18]) + P["bias"][o]
        conv = P.put("conv", conv.reshape(B, 8, OH, OW))
        if P.d("exact_gelu"):
            erf = torch.erf(torch.from_numpy(conv / math.sqrt(2))).numpy()
            act = conv * (1 + erf) / 2
        else:
            act = gelu(conv)
        act = P.put("act", act)

        pad = np.pad(act, ((0, 0), (0, 0), (1, 1), (1, 1)))
        inside = np.pad(np.ones((OH, OW), x.dtype), 1)
        total, count = np.zeros_like(act), np.zeros((OH, OW), x.dtype)
        for i in range(3):
            for j in range(3):
                total += pad[:, :, i : i + OH, j : j + OW]
                count += inside[i : i + OH, j : j + OW]
        pool = P.put("pool", total / (9 if P.d("padding_counted") else count))

        full = np.zeros((B, 5, 15, 25), x.dtype)
        for i in range(3):
            for j in range(3):
                tap = w_up[:, :, 2 - i, 2 - j] if P.d("kernel_flipped") else w_up[:, :, i, j]
                full[:, :, i : i + 11 : 2, j : j + 21 : 2] += np.einsum("bchw,co->bohw", pool, tap)
        out = full[:, :, 1:13, 1:23] + P["b_up"][:, None, None]
        P.put("output", out)

        w_up = P["w_up"]
        n = out.size
        g = P.f((np.arange(n).reshape(out.shape) * 5 % 13 - 6) / 8)
        back = np.zeros((B, 5, 15, 25), x.dtype)
        back[:, :, 1:13, 1:23] = g
        d_pool, d_up = np.zeros_like(pool), np.zeros_like(w_up)
        for i in range(3):
            for j in range(3):
                part = back[:, :, i : i + 11 : 2, j : j + 21 : 2]
                d_pool += np.einsum("bohw,co->bchw", part, w_up[:, :, i, j])
                d_up[:, :, i, j] = np.einsum("bchw,bohw->co", pool, part)
        share = np.pad(d_pool / count, ((0, 0), (0, 0), (1, 1), (1, 1)))
        d_act = sum(share[:, :, i : i + OH, j : j + OW] for i in range(3) for j in range(3))
        inner = math.sqrt(2 / math.pi) * (conv + 0.044715 * conv**3)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * conv**2)
        t = np.tanh(inner)
        d_conv = (d_act * ((1 + t) / 2 + conv * (1 - t * t) * slope / 2)).reshape(B, 8, OH * OW)
        d_w, d_x = np.zeros_like(flat), np.zeros_like(x)
        d_cols = np.zeros_like(cols)
        for o in range(8):
            k = slice(o // 4 * 18, o // 4 * 18 + 18)
            each = np.einsum("bl,bkl->bk", d_conv[:, o], cols[:, k])
            d_w[o] = each[-1] if P.d("weight_gradient_of_last_sample") else each.sum(0)
            d_cols[:, k] += flat[o][:, None] * d_conv[:, o, None]
        d_cols = d_cols.reshape(B, C * 6, OH, OW)
        for n, (c, i, j) in enumerate(taps):
            r, s, ok = places(i, j)
            rows, columns = r[ok.any(1)], s[ok.any(0)]
            part = d_cols[:, n][:, ok.any(1)][:, :, ok.any(0)]
            at = np.ix_(np.arange(B), [c], rows, columns)
            if P.d("taps_overwrite_each_other"):
                d_x[at] = part[:, None]
            else:
                d_x[at] += part[:, None]
        P.put("grad:x", d_x)
        P.put("grad:w", d_w.reshape(w.shape))
        P.put("grad:bias", d_conv.sum((0, 2)))
        P.put("grad:w_up", d_up)

    defects = [
        D(
            "border_repeated",
            "cols",
            "mask",
            "outside the image its border is repeated, and not zero",
            accept=("other", "function"),
        ),
        D(
            "channels_innermost",
            "cols",
            "permute",
            "rows of the columns have channels innermost, as in NHWC",
            accept=("layout", "transpose"),
        ),
        D(
            "dilation_forgotten",
            "cols",
            "constant",
            "taps are one column apart and not two",
            accept=("shift", "factor", "scale"),
        ),
        D(
            "groups_interleaved",
            "conv",
            "permute",
            "output channels take groups in turn",
            accept=("layout", "swap", "other"),
        ),
        D("exact_gelu", "act", "function", "GELU with erf in place of tanh"),
        D(
            "padding_counted",
            "pool",
            "factor",
            "means at the border are divided by 9, with the padding",
            accept=("scale", "mask", "other"),
        ),
        D("kernel_flipped", "output", "flip", "the transposed convolution's kernel is flipped", accept=("other",)),
        D(
            "upsampling_weight_read_out_first",
            "output",
            "layout",
            "w_up's memory is read with the 5 outputs first",
            accept=("transpose", "permute"),
        ),
        D(
            "taps_overwrite_each_other",
            "grad:x",
            "race",
            "col2im writes where it should add",
            accept=("other", "drop_term", "stale"),
        ),
        D(
            "weight_gradient_of_last_sample",
            "grad:w",
            "drop_term",
            "only the last sample's gradient is kept",
            accept=("truncate", "stale", "race", "axis"),
        ),
    ]


@program("r06", variants=("f32", "bf16"), seeds=2)
class fourier_layer:
    """A Fourier neural operator's layer on 12 x 10 points: coordinates, few modes, a spectral slope, a bypass.

    The port has discrete Fourier transforms by matrices; complex numbers are two reals in steps.
    """

    def make(g):
        return dict(
            x=randn(g, 2, 3, 12, 10),
            lift=randn(g, 5, 5, scale=0.5),
            w_pos=randn(g, 5, 5, 3, 4, 2, scale=0.3),
            w_neg=randn(g, 5, 5, 3, 4, 2, scale=0.3),
            w_slope=randn(g, 5, 5, scale=0.05),
            w_bypass=randn(g, 5, 5, scale=0.4),
            bias=randn(g, 5, scale=0.3),
        )

    def reference(x, lift, w_pos, w_neg, w_slope, w_bypass, bias):
        rows = torch.linspace(0, 1, 12, dtype=x.dtype)[:, None].expand(12, 10)
        columns = torch.linspace(0, 1, 10, dtype=x.dtype)[None].expand(12, 10)
        grid = torch.stack([rows, columns]).expand(2, 2, 12, 10)
        y = step("lifted", torch.einsum("oc,bchw->bohw", lift, torch.cat([x, grid], 1)))
        spectrum = step("spectrum", torch.view_as_real(torch.fft.rfft2(y, norm="ortho")))
        z = torch.view_as_complex(spectrum.contiguous())
        mixed = torch.zeros_like(z)
        mixed[:, :, :3, :4] = torch.einsum("bihw,iohw->bohw", z[:, :, :3, :4], torch.view_as_complex(w_pos))
        mixed[:, :, -3:, :4] = torch.einsum("bihw,iohw->bohw", z[:, :, -3:, :4], torch.view_as_complex(w_neg))
        mixed = torch.view_as_complex(step("mixed", torch.view_as_real(mixed)).contiguous())
        spatial = step("spatial", torch.fft.irfft2(mixed, s=(12, 10), norm="ortho"))
        k = 2 * math.pi * torch.arange(6, dtype=x.dtype)
        k = torch.where(torch.arange(6) == 5, 0.0, k)
        slope = step("slope", torch.fft.irfft2(1j * k * z, s=(12, 10), norm="ortho"))
        bypass = step("bypass", torch.einsum("oc,bchw->bohw", w_bypass, y) + bias[:, None, None])
        return F.gelu(spatial + bypass + torch.einsum("oc,bchw->bohw", w_slope, slope), approximate="tanh")

    def port(P: Port):
        x = P["x"]
        H, W = 12, 10
        y = np.einsum("oc,bchw->bohw", P["lift"][:, :3], x)
        for i in range(H):
            for j in range(W):
                r, c = P.f(i / (H - 1)), P.f(j / (W - 1))
                if P.d("coordinates_exchanged"):
                    r, c = c, r
                if P.d("coordinates_without_end"):
                    r, c = P.f(i / H), P.f(j / W)
                y[:, :, i, j] += P["lift"][:, 3] * r + P["lift"][:, 4] * c
        y = P.put("lifted", y)

        def wave(n, m, sign):
            """exp(sign * 2 pi i k x / n) for m frequencies, as cosines and sines."""
            angle = 2 * math.pi / n * (np.outer(np.arange(n), np.arange(m)) % n)
            c, s = P.f(np.cos(angle)), P.f(sign * np.sin(angle))
            if P.d("twiddles_in_half"):
                c, s = (np.asarray(v, np.float16).astype(v.dtype) for v in (c, s))
            return c, s

        sign = 1 if P.d("exponent_sign") else -1
        cw, sw = wave(W, 6, sign)
        ch, sh = wave(H, H, sign)
        re, im = y @ cw, y @ sw
        left = lambda m, v: np.einsum("hk,bchw->bckw", m, v)  # noqa: E731
        re, im = left(ch, re) - left(sh, im), left(ch, im) + left(sh, re)
        norm = P.f(1 if P.d("not_normed") else 1 / math.sqrt(H * W))
        z = P.put("spectrum", np.stack([re, im], -1) * norm)

        mixed = np.zeros_like(z)
        for row in range(6):
            high = row >= 3
            weight = P["w_neg"] if high else P["w_pos"]
            at = row if not high or P.d("negative_rows_not_at_end") else H - 6 + row
            for col in range(4):
                w = weight[:, :, row % 3, col]
                if P.d("weights_in_out_exchanged"):
                    w = w.swapaxes(0, 1)
                a = z[:, :, at, col]
                cross = a[..., 1] @ w[..., 1]
                mixed[:, :, at, col, 0] = a[..., 0] @ w[..., 0] + (cross if P.d("square_of_i") else -cross)
                mixed[:, :, at, col, 1] = a[..., 0] @ w[..., 1] + a[..., 1] @ w[..., 0]
        mixed = P.put("mixed", mixed)

        def inverse(re, im, doubled=True):
            ch, sh = wave(H, H, 1)
            cw, sw = wave(W, 6, 1)
            re, im = left(ch.T, re) - left(sh.T, im), left(ch.T, im) + left(sh.T, re)
            twice = P.f([1, 2, 2, 2, 2, 1]) if doubled else P.f([1] * 6)
            return ((re * twice) @ cw.T - (im * twice) @ sw.T) * P.f(1 / math.sqrt(H * W))

        spatial = P.put("spatial", inverse(mixed[..., 0], mixed[..., 1], not P.d("mirrored_half_left_out")))
        k = P.f(2 * math.pi * np.arange(6))
        k[5] = 0
        if P.d("slope_along_rows"):
            k = P.f(2 * math.pi * np.array([0, 1, 2, 3, 4, 5, 0, -5, -4, -3, -2, -1]))[:, None]
        slope = P.put("slope", inverse(-k * z[..., 1], k * z[..., 0]))
        bypass = P.put("bypass", np.einsum("bchw,oc->bohw", y, P["w_bypass"]) + P["bias"][:, None, None])
        P.put("output", gelu(spatial + bypass + np.einsum("bchw,oc->bohw", slope, P["w_slope"])))

    defects = [
        D(
            "coordinates_exchanged",
            "lifted",
            "swap",
            "the two coordinates are exchanged, as by meshgrid's other indexing",
            accept=("transpose", "permute", "axis"),
        ),
        D(
            "coordinates_without_end",
            "lifted",
            "ddof",
            "coordinates are i / n and not i / (n - 1)",
            accept=("scale", "factor", "constant", "shift"),
        ),
        D(
            "not_normed",
            "spectrum",
            "scale",
            "the transform isn't divided by the root of the number of points",
            accept=("factor",),
        ),
        D("exponent_sign", "spectrum", "sign", "the transform has the inverse's exponent", accept=("flip",)),
        D("twiddles_in_half", "spectrum", "precision", "cosines and sines are in half precision"),
        D(
            "negative_rows_not_at_end",
            "mixed",
            "shift",
            "the negative modes are rows 3 to 5 and not the last three",
            accept=("layout", "permute", "other"),
        ),
        D(
            "weights_in_out_exchanged",
            "mixed",
            "transpose",
            "weights have inputs and outputs exchanged",
            accept=("permute", "swap"),
        ),
        D("square_of_i", "mixed", "sign", "the product of two imaginary parts is added"),
        D(
            "mirrored_half_left_out",
            "spatial",
            "drop_term",
            "the inverse doesn't count the frequencies that aren't stored",
            accept=("scale", "factor", "truncate"),
        ),
        D("slope_along_rows", "slope", "axis", "the slope is along the rows' axis", accept=("transpose", "swap")),
    ]
