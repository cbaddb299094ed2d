"""A guided diffusion sampler, a vocabulary-parallel cross entropy, stencils with a conjugate-gradient solve."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, program, rand, randint, randn, silu, step


@program("u05", variants=("f32", "f16", "f16reg", "bf16"), wide=(
    "noise", "angles", "log_snr", "guided", "x0", "latent", "output", "thumbnail", "statistics",
))  # fmt: skip
class guided_sampler:
    """DPM-Solver++(2M) in four steps, classifier-free guidance, a network of two convolutions and an adaptive norm.

    The port has the first convolution by im2col in tiles, the second one by Winograd F(2x2, 3x3) on a map of 21 x 17,
    group statistics merged from parts, and unconditional and conditional halves one after the other.
    """

    def make(g):
        return dict(
            noise=randn(g, 2, 4, 21, 17),
            timesteps=torch.tensor([901.0, 623.0, 352.0, 118.0, 3.0], dtype=torch.float64),
            null_class=randn(g, 32, scale=0.5),
            classes=randn(g, 2, 32, scale=1.2),
            w_time=randn(g, 48, 32, scale=0.25),
            b_time=randn(g, 48, scale=0.3),
            w_mod=randn(g, 64, 48, scale=0.12),
            conv_in=randn(g, 32, 4, 3, 3, scale=0.2),
            bias_in=randn(g, 32, shift=1.0),
            gamma=randn(g, 32, scale=0.2, shift=1.0),
            beta=randn(g, 32, scale=0.2),
            conv_out=randn(g, 4, 32, 3, 3, scale=0.014),
            bias_out=randn(g, 4, scale=0.1),
        )

    def reference(noise, timesteps, null_class, classes, w_time, b_time, w_mod, conv_in, bias_in, gamma, beta, conv_out, bias_out):  # fmt: skip
        freqs = 10000.0 ** (-torch.arange(16, dtype=noise.dtype) / 16)
        angles = step("angles", timesteps.to(noise.dtype)[:4, None] * freqs)
        alpha = (timesteps.to(noise.dtype) / 1000 * 1.5).cos()
        sigma = (timesteps.to(noise.dtype) / 1000 * 1.5).sin()
        log_snr = step("log_snr", (alpha / sigma).log())
        sigma, alpha = torch.rsqrt(1 + (2 * log_snr).exp()), torch.rsqrt(1 + (-2 * log_snr).exp())
        context = torch.cat([null_class.expand(2, 32), classes])
        x, old = noise, None
        for i in range(4):
            wave = torch.cat([angles[i].sin(), angles[i].cos()])
            emb = step("emb", F.silu((wave + context) @ w_time.T + b_time))
            scale, shift = step("modulation", emb @ w_mod.T).chunk(2, 1)
            hidden = step("hidden", F.conv2d(torch.cat([x, x]), conv_in, bias_in, padding=1))
            y = F.group_norm(hidden, 8, gamma, beta, 1e-5)
            y = step("normed", F.silu(y * (1 + scale[..., None, None]) + shift[..., None, None]))
            eps = step("eps", F.conv2d(y, conv_out, bias_out, padding=1))
            uncond, cond = eps.chunk(2)
            guided = step("guided", uncond + 4.5 * (cond - uncond))
            x0 = step("x0", ((x - sigma[i] * guided) / alpha[i]).clamp(-6.0, 6.0))
            h = log_snr[i + 1] - log_snr[i]
            d = x0
            if 0 < i < 3:
                r = (log_snr[i] - log_snr[i - 1]) / h
                d = x0 + (x0 - old) / (2 * r)
            x = step("latent", sigma[i + 1] / sigma[i] * x - alpha[i + 1] * torch.expm1(-h) * d)
            old = x0
        statistics = torch.stack([x.mean((1, 2, 3)), x.std((1, 2, 3))], 1)
        return {"output": x, "thumbnail": F.avg_pool2d(x, 3, 2, 1), "statistics": statistics}

    def port(P: Port):
        x, steps = P["noise"], P["timesteps"].astype(P["noise"].dtype)
        f = x.dtype
        B, H, W = 2, 21, 17
        base = 1000.0 if P.d("base_of_a_thousand") else 10000.0
        freqs = np.exp(-math.log(base) / 16 * np.arange(16)).astype(f)
        angles = P.put("angles", np.outer(steps[:4], freqs))
        # cot by half angles, in double as tables of schedules are made on the host
        exact = P["timesteps"].astype(np.float64) * 0.0015
        log_snr = P.put("log_snr", (-np.log(np.tan(exact))).astype(f))
        ratio = np.exp(log_snr)
        sigma = 1 / np.sqrt(1 + ratio * ratio)
        alpha = ratio * sigma
        w_in = P["conv_in"].reshape(32, 36)
        to_tile = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], f)
        taps = P["conv_out"]
        if P.d("taps_of_true_convolution"):
            taps = taps[:, :, ::-1, ::-1]
        u = np.einsum("ai,ocij,bj->aboc", to_tile, taps, to_tile)
        from_map = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], f)
        to_map = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], f)
        history = [None, None]  # two buffers for x0
        for i in range(4):
            wave = np.concatenate([np.sin(angles[i]), np.cos(angles[i])])
            shared = P["w_time"] @ wave + P["b_time"]
            emb = np.stack([shared + P["w_time"] @ c for c in (P["null_class"], P["null_class"], *P["classes"])])
            emb = P.put("emb", silu(emb))
            modulation = P.put("modulation", emb @ P["w_mod"].T)

            # the first convolution is the same for both halves
            column = np.zeros((B, 36, H * W), f)
            for c in range(4):
                for ky in range(3):
                    for kx in range(3):
                        y0, y1, x0_, x1 = max(0, 1 - ky), min(H, H + 1 - ky), max(0, 1 - kx), min(W, W + 1 - kx)
                        place = column[:, c * 9 + ky * 3 + kx].reshape(B, H, W)
                        place[:, y0:y1, x0_:x1] = x[:, c, y0 + ky - 1 : y1 + ky - 1, x0_ + kx - 1 : x1 + kx - 1]
            hidden = np.empty((B, 32, H * W), f)
            for t in range(0, H * W, 128):
                hidden[..., t : t + 128] = w_in @ column[..., t : t + 128]
            hidden = (hidden + P["bias_in"][:, None]).reshape(B, 32, H, W)
            hidden = P.put("hidden", np.concatenate([hidden, hidden]))

            if P.d("groups_of_every_eighth_channel"):
                grouped = hidden.reshape(4, 4, 8, H * W).swapaxes(1, 2)
            else:
                grouped = hidden.reshape(4, 8, 4, H * W)
            mean, m2, n = np.zeros((4, 8), f), np.zeros((4, 8), f), 0
            for c in range(4):
                for t in range(0, H * W, 120):
                    part = grouped[:, :, c, t : t + 120]
                    k, at = part.shape[-1], part.mean(-1)
                    delta = at - mean
                    m2 = m2 + np.square(part - at[..., None]).sum(-1) + delta * delta * P.f(n * k / (n + k))
                    mean = mean + delta * P.f(k / (n + k))
                    n += k
            rstd = 1 / np.sqrt(m2 / n + P.f(1e-5))
            if P.d("groups_of_every_eighth_channel"):
                mean, rstd = np.tile(mean, 4), np.tile(rstd, 4)
            else:
                mean, rstd = np.repeat(mean, 4, 1), np.repeat(rstd, 4, 1)
            gain = (1 + modulation[:, :32]) * P["gamma"] * rstd
            offset = (1 + modulation[:, :32]) * P["beta"] + modulation[:, 32:]
            y = (hidden - mean[..., None, None]) * gain[..., None, None] + offset[..., None, None]
            y = P.put("normed", silu(y))

            padded = np.zeros((4, 32, H + 3, W + 3), f)
            padded[:, :, 1 : H + 1, 1 : W + 1] = y
            eps = np.empty((4, 4, H + 1, W + 1), f)
            for ty in range(0, H, 2):
                tiles = np.stack([padded[:, :, ty : ty + 4, tx : tx + 4] for tx in range(0, W, 2)])
                tiles = np.einsum("ai,tncij,bj->abtnc", from_map, tiles, from_map, optimize=True)
                product = np.einsum("abtnc,aboc->abtno", tiles, u, optimize=True)
                out = np.einsum("pa,abtno,qb->tnopq", to_map, product, to_map, optimize=True)
                for k, tx in enumerate(range(0, W, 2)):
                    eps[:, :, ty : ty + 2, tx : tx + 2] = out[k]
            eps = P.put("eps", eps[:, :, :H, :W] + P["bias_out"][:, None, None])

            s = P.f(4.5)
            guided = P.put("guided", s * eps[B:] + (1 - s) * eps[:B])
            x0 = np.clip((x - sigma[i] * guided) / alpha[i], P.f(-6), P.f(6))
            x0 = P.put("x0", x0)
            h = log_snr[i + 1] - log_snr[i]
            last = history[(i + 1) % 2]
            if P.d("x0_of_two_steps_ago") and i > 1:
                last = history[i % 2]
            history[i % 2] = x0
            now = sigma[i + 1] / sigma[i] * x + alpha[i + 1] * (1 - np.exp(-h)) * x0
            if 0 < i < 3:
                r = (log_snr[i] - log_snr[i - 1]) / h
                now = now + alpha[i + 1] * (1 - np.exp(-h)) * (x0 - last) / (2 * r)
            x = P.put("latent", now)
        P.put("output", x)
        border = np.zeros((B, 4, H + 2, W + 2), f)
        border[:, :, 1:-1, 1:-1] = x
        rows = border[:, :, 0:-2:2] + border[:, :, 1:-1:2] + border[:, :, 2::2]
        P.put("thumbnail", (rows[..., 0:-2:2] + rows[..., 1:-1:2] + rows[..., 2::2]) / 9)
        flat = x.reshape(B, -1)
        mean = flat.mean(1)
        P.put("statistics", np.stack([mean, np.sqrt(np.square(flat - mean[:, None]).sum(1) / (flat.shape[1] - 1))], 1))

    defects = [
        D(
            "base_of_a_thousand",
            "angles",
            "constant",
            "frequencies of the time embedding have the base 1000 and not 10000",
            accept=("factor", "scale", "function"),
        ),
        D(
            "groups_of_every_eighth_channel",
            "normed",
            "layout",
            "a group of the norm is every eighth channel and not four channels in a row",
            accept=("permute", "axis"),
        ),
        D(
            "taps_of_true_convolution",
            "eps",
            "flip",
            "the second convolution's taps are turned around in both directions",
            accept=("transpose", "permute", "layout"),
        ),
        D(
            "x0_of_two_steps_ago",
            "latent#3",
            "stale",
            "the second order takes the estimate of two steps ago, from the wrong one of two buffers",
            accept=("shift", "race", "swap"),
        ),
    ]


@program("u06", variants=("f32", "bf16", "bf16reg"), wide=(
    "bias", "lse", "target_logit", "mean_logit", "row_loss", "z", "loss", "z_mean", "grad:weight", "grad:bias",
))  # fmt: skip
class parallel_cross_entropy:
    """Smoothed cross entropy with a z-loss over a vocabulary of 1003, padded to 1026 for three ranks; ignored tokens.

    Each rank of the port goes through its part in chunks of 100 with a running maximum; ranks are merged after that,
    and backward forms the gradient of a chunk's logits and adds it up at once.
    """

    def make(g):
        targets = randint(g, 0, 1003, 70)
        targets[[3, 17, 18, 19, 44, 69]] = -100
        targets[[5, 6, 7, 8, 9]] = torch.tensor([341, 342, 683, 684, 1002])
        return dict(
            hidden=randn(g, 70, 48, shift=0.2),
            weight=randn(g, 1026, 48, scale=0.25),
            bias=randn(g, 1026, scale=0.5, shift=3.0),
            targets=targets,
        )

    def reference(hidden, weight, bias, targets):
        logits = step("logits", hidden @ weight[:1003].T + bias[:1003])
        valid = targets != -100
        lse = step("lse", logits.logsumexp(-1))
        picked = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        picked = step("target_logit", torch.where(valid, picked, 0.0))
        mean = step("mean_logit", logits.mean(-1))
        row = step("row_loss", torch.where(valid, 0.9 * (lse - picked) + 0.1 * (lse - mean), 0.0))
        z = step("z", torch.where(valid, 0.002 * lse**2, 0.0))
        count = valid.sum()
        return {"loss": (row.sum() + z.sum()) / count, "z_mean": z.sum() / count, "count": count}

    def loss(result):
        return result["loss"]

    def port(P: Port):
        x, w, bias, targets = P["hidden"], P["weight"], P["bias"], P["targets"]
        N, V, part = 70, 1003, 342
        logits = np.empty((N, V), x.dtype)
        for lo in range(0, V, 100):
            hi = min(lo + 100, V)
            logits[:, lo:hi] = (w[lo:hi] @ x.T).T + bias[lo:hi]
        logits = P.put("logits", logits)
        tops, sums, picked, totals = [], [], np.zeros(N, x.dtype), np.zeros(N, x.dtype)
        for rank in range(3):
            first, end = rank * part, min((rank + 1) * part, V)
            m, s = np.full(N, -np.inf, x.dtype), np.zeros(N, x.dtype)
            for lo in range(first, end, 100):
                chunk = logits[:, lo : min(lo + 100, end)]
                top = np.maximum(m, chunk.max(1))
                if not P.d("sum_not_rescaled"):
                    s = s * np.exp(m - top)
                s = s + np.exp(chunk - top[:, None]).sum(1)
                m = top
                totals += chunk.sum(1)
            tops.append(m)
            sums.append(s)
            own = (targets >= first) & (targets < end)
            local = np.where(own, targets - first, 0)
            picked += np.where(own, logits[:, first:end][np.arange(N), local], P.f(0))
        top = np.maximum.reduce(tops)
        lse = P.put("lse", top + np.log(sum(s * np.exp(m - top) for m, s in zip(tops, sums, strict=True))))
        picked = P.put("target_logit", picked)
        mean = P.put("mean_logit", totals / P.f(1026 if P.d("mean_over_padded_vocabulary") else V))
        valid = (targets != -100).astype(x.dtype)
        row = P.put("row_loss", valid * (lse - P.f(0.9) * picked - P.f(0.1) * mean))
        z = np.square(lse) * P.f(0.002)
        z = P.put("z", z if P.d("z_of_ignored_tokens") else z * valid)
        count = int((targets >= 0).sum())
        P.put("loss", row.sum() / count + z.sum() / count)
        P.put("z_mean", z.sum() * P.f(1 / count))
        P.put("count", np.int64(count))

        dx, dw, db = np.zeros_like(x), np.zeros_like(w), np.zeros_like(bias)
        gain = valid * (1 + P.f(0.004) * lse) / count
        for rank in range(3):
            first, end = rank * part, min((rank + 1) * part, V)
            mine = np.zeros_like(x)
            for lo in range(first, end, 100):
                hi = min(lo + 100, end)
                d = np.exp(logits[:, lo:hi] - lse[:, None]) * gain[:, None] - (valid * P.f(0.1 / V / count))[:, None]
                for n in np.flatnonzero((targets >= lo) & (targets < hi)):
                    d[n, targets[n] - lo] -= P.f(0.9 / count)
                mine += d @ w[lo:hi]
                dw[lo:hi] = d.T @ x
                db[lo:hi] = d.sum(0)
            if not (P.d("last_rank_not_in_sum") and rank == 2):
                dx += mine
        P.put("grad:hidden", dx)
        P.put("grad:weight", dw)
        P.put("grad:bias", db)

    defects = [
        D(
            "sum_not_rescaled",
            "lse",
            "drop_term",
            "the running sum isn't multiplied by the exponential when a chunk has a larger maximum",
            accept=("factor", "scale", "stale", "other"),
        ),
        D(
            "mean_over_padded_vocabulary",
            "mean_logit",
            "constant",
            "the mean of the logits is over 1026 padded entries and not 1003",
            accept=("factor", "scale", "mask", "ddof"),
        ),
        D(
            "z_of_ignored_tokens",
            "z",
            "mask",
            "ignored tokens have a z-loss too",
            accept=("drop_term", "other"),
        ),
        D(
            "last_rank_not_in_sum",
            "grad:hidden",
            "truncate",
            "the gradient of hidden states lacks the last rank's part of the vocabulary",
            accept=("drop_term", "mask", "race", "zero"),
        ),
    ]


@program("u07", variants=("f32", "f16", "f16reg"), wide=(
    "b", "ap", "alpha", "solution", "residual", "residual_norm", "beta", "direction", "true_norm", "energy",
))  # fmt: skip
class heat_and_wave:
    """Explicit heat flow on 131 x 93 cells, an implicit step by conjugate gradients, and a damped wave.

    Rows are periodic, the left side is a wall of given temperature, the right one is insulated. The port works in tiles
    of 32 x 32 with halos, and applies the matrix as a stencil with an assembled diagonal.
    """

    def make(g):
        return dict(
            u0=randn(g, 131, 93, scale=6.0, shift=31.0),
            wall=randn(g, 131, scale=4.0, shift=55.0),
            kappa=randn(g, 131, 93, scale=0.5).exp(),
            source=randn(g, 131, 93, scale=2.0, shift=0.5),
            speed=rand(g, 131, 93, low=0.1, high=0.45),
            wave_old=randn(g, 131, 93, scale=0.4),
            wave_now=randn(g, 131, 93, scale=0.4),
            pulse=randn(g, 5, shift=1.5),
        )

    def reference(u0, wall, kappa, source, speed, wave_old, wave_now, pulse):
        def harmonic(a, b):
            return 2 * a * b / (a + b)

        inner = harmonic(kappa[:, 1:], kappa[:, :-1])
        kx = step("kx", torch.cat([2 * kappa[:, :1], inner, torch.zeros_like(kappa[:, :1])], 1))
        ky = step("ky", harmonic(kappa, kappa.roll(-1, 0)))

        def spread(u, side):
            along = kx * (torch.cat([u, u[:, -1:]], 1) - torch.cat([side[:, None], u], 1))
            down = ky * (u.roll(-1, 0) - u)
            return along.diff(dim=1) + down - down.roll(1, 0)

        u = u0.clone()
        for _ in range(3):
            u += 0.06 * spread(u, wall)
            u = step("temperature", u)

        def matrix(v):
            return v - 2.5 * spread(v, torch.zeros_like(wall))

        b = u + source
        b[:, 0] += 2.5 * kx[:, 0] * wall
        b = step("b", b)
        x = u
        r = step("residual", b - matrix(x))
        p, rr, norms = r, (r * r).sum(), []
        for _ in range(6):
            ap = step("ap", matrix(p))
            alpha = step("alpha", rr / (p * ap).sum())
            x = step("solution", x + alpha * p)
            r = step("residual", r - alpha * ap)
            before, rr = rr, (r * r).sum()
            norms.append(step("residual_norm", rr.sqrt()))
            beta = step("beta", rr / before)
            p = step("direction", r + beta * p)
        true_norm = (b - matrix(x)).norm()

        old, now = wave_old.clone(), wave_now.clone()
        traces = []
        for t in range(5):
            held = F.pad(now, (1, 1, 1, 1))
            lap = held[:-2, 1:-1] + held[2:, 1:-1] + held[1:-1, :-2] + held[1:-1, 2:] - 4 * now
            old *= -0.98
            old += 1.98 * now + speed**2 * lap
            old[65, 40] += pulse[t]
            old, now = now.clone(), step("wave", old)
            traces.append(now[::13, 88])
        energy = ((now - old) ** 2).sum() / 2
        return {"true_norm": true_norm, "traces": torch.stack(traces), "energy": energy, "cooled": x.mean(1)}

    def port(P: Port):
        k = P["kappa"]
        f, (Y, X) = k.dtype, k.shape
        kx = np.zeros((Y, X + 1), f)
        kx[:, 0] = k[:, 0] + k[:, 0]
        kx[:, 1:X] = 2 / (1 / k[:, 1:] + 1 / k[:, :-1])
        kx = P.put("kx", kx)
        ky = P.put("ky", 2 / (1 / k + 1 / np.concatenate([k[1:], k[:1]])))
        above = np.concatenate([ky[-1:], ky[:-1]])
        diagonal = kx[:, 1:] + kx[:, :-1] + ky + above

        def neighbours(u, side, wrap=True):
            """What comes in from the four sides, tile by tile with a halo of one cell."""
            out = np.empty_like(u)
            for y0 in range(0, Y, 32):
                for x0 in range(0, X, 32):
                    y1, x1 = min(y0 + 32, Y), min(x0 + 32, X)
                    tile = np.zeros((y1 - y0 + 2, x1 - x0 + 2), u.dtype)
                    rows = np.arange(y0 - 1, y1 + 1)
                    a, b = max(x0 - 1, 0), min(x1 + 1, X)
                    tile[:, a - x0 + 1 : b - x0 + 1] = u[rows % Y, a:b]
                    if not wrap:
                        tile[(rows < 0) | (rows >= Y)] = 0
                    if x0 == 0:
                        tile[1:-1, 0] = side[y0:y1]
                    at = slice(y0, y1), slice(x0, x1)
                    out[at] = kx[y0:y1, x0:x1] * tile[1:-1, :-2] + kx[y0:y1, x0 + 1 : x1 + 1] * tile[1:-1, 2:]
                    out[at] += above[at] * tile[:-2, 1:-1] + ky[at] * tile[2:, 1:-1]
            return out

        u, wall, c = P["u0"], P["wall"], P.f(0.06)
        for _ in range(3):
            if P.d("in_place_without_barrier"):
                for y0 in range(0, Y, 32):  # a band of tiles reads what the band above has written
                    u[y0 : y0 + 32] += c * (neighbours(u, wall) - diagonal * u)[y0 : y0 + 32]
            else:
                u = u * (1 - c * diagonal) + c * neighbours(u, wall)
            u = P.put("temperature", u)

        nothing, c = np.zeros_like(wall), P.f(2.5)

        def matrix(v, wrap=True):
            return (1 + c * diagonal) * v - c * neighbours(v, nothing, wrap)

        def dot(a, b):
            return np.add.reduce([np.vdot(a[y : y + 32], b[y : y + 32]) for y in range(0, Y, 32)])

        b = u + P["source"]
        b[:, 0] += kx[:, 0] * c * wall
        b = P.put("b", b)
        x = u
        r = P.put("residual", b - matrix(x))
        p, rr = r, dot(r, r)
        for _ in range(6):
            ap = P.put("ap", matrix(p, wrap=not P.d("rows_not_periodic")))
            alpha = P.put("alpha", rr / dot(p, ap))
            x = P.put("solution", x + alpha * p)
            r = P.put("residual", r - alpha * ap)
            before, rr = rr, dot(r, r)
            P.put("residual_norm", np.sqrt(rr))
            beta = P.put("beta", rr / before)
            p = P.put("direction", (r - beta * p) if P.d("direction_subtracted") else (r + beta * p))
        wide = np.float64
        rest = b.astype(wide) - x.astype(wide) * (1 + 2.5 * diagonal.astype(wide))
        rest = rest + 2.5 * neighbours(x.astype(wide), nothing)
        P.put("true_norm", P.f(math.sqrt(np.square(rest).sum())))

        buffers = [P["wave_old"], P["wave_now"]]
        speed, traces = P["speed"], np.empty((5, 11), f)
        factor = speed if P.d("speed_not_squared") else speed * speed
        for t in range(5):
            old, now = buffers[t % 2], buffers[(t + 1) % 2]
            for y0 in range(0, Y, 32):
                for x0 in range(0, X, 32):
                    y1, x1 = min(y0 + 32, Y), min(x0 + 32, X)
                    tile = np.zeros((y1 - y0 + 2, x1 - x0 + 2), f)
                    a, e, l, m = max(y0 - 1, 0), min(y1 + 1, Y), max(x0 - 1, 0), min(x1 + 1, X)
                    tile[a - y0 + 1 : e - y0 + 1, l - x0 + 1 : m - x0 + 1] = now[a:e, l:m]
                    at = slice(y0, y1), slice(x0, x1)
                    around = (tile[:-2, 1:-1] + tile[2:, 1:-1]) + (tile[1:-1, :-2] + tile[1:-1, 2:])
                    own = P.f(1.98) - 4 * factor[at]
                    old[at] = own * tile[1:-1, 1:-1] + factor[at] * around - P.f(0.98) * old[at]
            old[65, 40] += P["pulse"][t]
            buffers[t % 2] = P.put("wave", old)
            traces[t] = buffers[t % 2][::13, 88]
        P.put("traces", traces)
        P.put("energy", np.square(buffers[0] - buffers[1]).sum() / 2)
        P.put("cooled", x @ np.full(X, 1 / X, f))

    defects = [
        D(
            "in_place_without_barrier",
            "temperature",
            "race",
            "a band of tiles reads the row above after it was written in the same step",
            accept=("stale", "other", "shift"),
        ),
        D(
            "rows_not_periodic",
            "ap",
            "zero",
            "the solver's matrix takes zero beyond the first and last row, not the row of the other end",
            accept=("drop_term", "mask", "truncate"),
        ),
        D(
            "direction_subtracted",
            "direction",
            "sign",
            "the old direction is subtracted and not added",
        ),
        D(
            "speed_not_squared",
            "wave",
            "scale",
            "the Laplacian is multiplied by the speed and not by its square",
            accept=("factor", "function", "drop_term"),
        ),
    ]
