"""The PPO loss with advantages, filtered back-projection, Gaussian process regression."""

from __future__ import annotations

import math

import numpy as np
import torch

from benchmark.base import D, Port, program, rand, randint, randn, step


@program("v04", wide=("logp", "old_logp", "advantages", "norm_adv", "output"))
class ppo_loss:
    """Clipped policy and value losses with generalised advantages. The port goes over the vocabulary online in tiles
    of 16, solves the recurrence of advantages by composing blocks of 4, and merges statistics row by row."""

    def make(g):
        logits = randn(g, 4, 14, 37, scale=1.3)
        tokens = randint(g, 0, 37, 4, 14)
        old = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0] + randn(g, 4, 14, scale=0.3)
        old_values = randn(g, 4, 14, scale=0.8, shift=0.3)
        return dict(
            logits=logits,
            tokens=tokens,
            old_logp=old,
            old_values=old_values,
            values=old_values + randn(g, 4, 14, scale=0.4),
            rewards=randn(g, 4, 14, scale=0.7, shift=0.1),
            lens=torch.tensor([14, 9, 12, 6]) - randint(g, 0, 3, 4),
        )

    def reference(logits, tokens, old_logp, old_values, values, rewards, lens):
        gamma, lam, clip = 0.98, 0.92, 0.2
        lp_all = torch.log_softmax(logits, -1)
        logp = step("logp", lp_all.gather(-1, tokens[..., None])[..., 0])
        entropy = step("entropy", -(lp_all.exp() * lp_all).sum(-1))
        mask = (torch.arange(14) < lens[:, None]).to(logits.dtype)
        carry, later = torch.zeros_like(rewards[:, 0]), []
        for t in reversed(range(14)):
            following = old_values[:, t + 1] * mask[:, t + 1] if t < 13 else 0.0
            delta = rewards[:, t] + gamma * following - old_values[:, t]
            carry = (delta + gamma * lam * carry) * mask[:, t]
            later.append(carry)
        adv = step("advantages", torch.stack(later[::-1], 1))
        returns = step("returns", (adv + old_values) * mask)
        count = mask.sum()
        mean = (adv * mask).sum() / count
        var = (((adv - mean) * mask) ** 2).sum() / (count - 1)
        white = step("norm_adv", (adv - mean) * torch.rsqrt(var + 1e-8) * mask)
        ratio = torch.exp(logp - old_logp)
        policy = step("policy", -torch.minimum(ratio * white, ratio.clamp(1 - clip, 1 + clip) * white))
        near = old_values + (values - old_values).clamp(-clip, clip)
        worst = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        value = step("value_loss", 0.5 * worst * mask)
        return ((policy + 0.5 * value - 0.01 * entropy) * mask).sum() / count

    def port(P: Port):
        logits, tokens, lens = P["logits"].reshape(56, 37), P["tokens"].reshape(56), P["lens"]
        gamma, lam, clip = 0.98, 0.92, P.f(0.2)
        m = np.full(56, -np.inf, logits.dtype)
        l, dot = np.zeros(56, logits.dtype), np.zeros(56, logits.dtype)
        for v in range(0, 37, 16):
            tile = logits[:, v : v + 16]
            new = np.maximum(m, tile.max(1))
            fix, e = np.exp(m - new), np.exp(tile - new[:, None])
            l = l * fix + e.sum(1)
            if P.d("entropy_sum_not_rescaled"):
                dot = dot + (e * tile).sum(1)
            else:
                dot = dot * fix + (e * tile).sum(1)
            m = new
        lse = m + np.log(l)
        pick = np.roll(tokens, -1) if P.d("logp_of_the_next_token") else tokens
        logp = P.put("logp", (logits[np.arange(56), pick] - lse).reshape(4, 14))
        entropy = P.put("entropy", (lse - dot / l).reshape(4, 14))

        old, rewards = P["old_values"], P["rewards"]
        inside = np.arange(14)[None] < lens[:, None]
        adv = np.zeros((4, 14), old.dtype)
        g, gl = P.f(gamma), P.f(gamma * lam)
        for b in range(4):
            n = int(lens[b])
            follow = np.zeros(n, old.dtype)
            follow[:-1] = old[b, 1:n]
            if P.d("value_of_padding_after_the_end") and n < 14:
                follow[-1] = old[b, n]
            delta = rewards[b, :n] + g * follow - old[b, :n]
            carry = P.f(0)
            for first in reversed(range(0, n, 4)):  # inside a block with no carry, then the carry to all of it at once
                size = min(4, n - first)
                local, acc = np.empty(size, old.dtype), P.f(0)
                for i in reversed(range(size)):
                    acc = delta[first + i] + gl * acc
                    local[i] = acc
                local = local + carry * gl ** P.f(np.arange(size, 0, -1))
                adv[b, first : first + size] = local
                carry = local[0]
        adv = P.put("advantages", adv)
        ret = P.put("returns", np.where(inside, adv + old, 0).astype(old.dtype))

        count, mean, m2 = 0, P.f(0), P.f(0)
        for b in range(4):
            row = adv[b, : int(lens[b])]
            k, rm = len(row), row.sum() / len(row)
            delta = rm - mean
            m2 = m2 + ((row - rm) ** 2).sum() + delta * delta * P.f(count * k / (count + k))
            mean = mean + delta * P.f(k / (count + k))
            count += k
        var = m2 / (count if P.d("variance_over_n") else count - 1)
        white = P.put("norm_adv", np.where(inside, (adv - mean) / np.sqrt(var + P.f(1e-8)), 0).astype(adv.dtype))

        ratio = np.exp(logp - P["old_logp"])
        if P.d("larger_of_the_two_gains"):
            policy = np.minimum(-white * ratio, -white * np.clip(ratio, 1 - clip, 1 + clip))
        else:  # by the sign of the advantage, only one bound can be active
            policy = -white * np.where(white > 0, np.minimum(ratio, 1 + clip), np.maximum(ratio, 1 - clip))
        policy = P.put("policy", policy)

        new = P["values"]
        near = np.minimum(np.maximum(new, old - clip), old + clip)
        far = np.maximum(np.abs(new - ret), np.abs(near - ret))
        value = P.put("value_loss", np.where(inside, far * far / 2, 0).astype(adv.dtype))

        total = P.f(0)
        for b in range(4):
            s = slice(0, int(lens[b]))
            total = total + policy[b, s].sum() + value[b, s].sum() / 2 - P.f(0.01) * entropy[b, s].sum()
        P.put("output", total / (56 if P.d("mean_over_padding_too") else count))

    defects = [
        D("logp_of_the_next_token", "logp", "shift", "Log-probabilities are picked for the token one position later."),
        D(
            "entropy_sum_not_rescaled",
            "entropy",
            "factor",
            "The running sum for the entropy is not rescaled when the running maximum grows.",
            ("scale", "drop_term", "stale", "function", "other"),
        ),
        D(
            "value_of_padding_after_the_end",
            "advantages",
            "mask",
            "The last token's advantage takes the value of the padding after the end instead of zero.",
            ("stale", "shift", "drop_term", "truncate"),
        ),
        D(
            "variance_over_n",
            "norm_adv",
            "ddof",
            "The variance of the advantages is over n instead of n - 1.",
            ("factor", "scale"),
        ),
        D(
            "larger_of_the_two_gains",
            "policy",
            "function",
            "The larger instead of the smaller of clipped and unclipped gain is taken.",
            ("sign", "swap", "mask", "other"),
        ),
        D(
            "mean_over_padding_too",
            "output",
            "factor",
            "The sum over real tokens is divided by the number of all positions.",
            ("scale", "mask", "constant"),
        ),
    ]


@program("v05", variants=("f32", "f16", "f16reg"), wide=("weighted", "position", "output"))
class back_projection:
    """Fan-beam tomography with a flat detector. The reference filters with FFTs; the port has the taps of the filter,
    of which even ones but the middle are zero, and gathers for each pixel, two angles at a time."""

    def make(g):
        u = (torch.arange(25, dtype=torch.float64) - 12) * 1.2
        angles = torch.arange(16, dtype=torch.float64) * (2 * math.pi / 16)
        sino = torch.zeros(16, 25, dtype=torch.float64)
        for _ in range(3):
            x, y = (float(t) for t in rand(g, 2, low=-3.0, high=3.0))
            centre = 40 * (x * angles.cos() + y * angles.sin()) / (40 + x * angles.sin() - y * angles.cos())
            width = float(rand(g, 1, low=2.0, high=4.0))
            sino += torch.exp(-(((u - centre[:, None]) / width) ** 2)) * float(rand(g, 1, low=1.0, high=2.5))
        return dict(sino=sino + randn(g, 16, 25, scale=0.05))

    def reference(sino):
        dist, pitch, height, width = 40.0, 1.2, 11, 9
        u = (torch.arange(25, dtype=sino.dtype) - 12) * pitch
        w = step("weighted", sino * dist / torch.sqrt(dist**2 + u**2))
        n = torch.arange(-24, 25)
        taps = torch.where(n % 2 == 0, 0.0, -1 / (math.pi * n.to(sino.dtype).where(n != 0, 1.0)) ** 2)
        taps = torch.where(n == 0, 0.25, taps).to(sino.dtype) / pitch
        spectrum = torch.fft.rfft(w, 80) * torch.fft.rfft(taps, 80)
        f = step("filtered", torch.fft.irfft(spectrum, 80)[:, 24:49])
        beta = torch.arange(16, dtype=sino.dtype)[:, None, None] * (2 * math.pi / 16)
        x = torch.arange(width, dtype=sino.dtype) - 4.0
        y = (5.0 - torch.arange(height, dtype=sino.dtype))[:, None]
        depth = dist + x * beta.sin() - y * beta.cos()
        pos = step("position", dist * (x * beta.cos() + y * beta.sin()) / depth / pitch + 12)
        low = pos.detach().floor().long().clamp(0, 23)
        frac = pos - low
        flat = low.flatten(1)
        a, b = (f.gather(1, flat + k).view_as(pos) for k in (0, 1))
        s = step("sampled", a * (1 - frac) + b * frac)
        magnify = step("magnify", (dist / depth) ** 2)
        return (s * magnify).sum(0) * (math.pi / 16)

    def port(P: Port):
        sino = P["sino"]
        middle = 12.5 if P.d("detector_centre_at_half_its_count") else 12.0
        tan = P.f((np.arange(25) - middle) * 1.2 / 40)
        w = P.put("weighted", sino / np.sqrt(1 + tan * tan))

        f = w * P.f(0.25 / 1.2)
        for k in range(1, 25, 2):  # both neighbours at odd distance k
            both = np.zeros_like(w)
            if P.d("filter_goes_round_the_detector"):
                both = np.roll(w, k, 1) + np.roll(w, -k, 1)
            else:
                both[:, k:] += w[:, :-k]
                both[:, :-k] += w[:, k:]
            f = f - both * P.f(1 / (1.2 * math.pi**2 * k * k))
        f = P.put("filtered", f)

        pos, mag = np.empty((16, 11, 9), sino.dtype), np.empty((16, 11, 9), sino.dtype)
        xs, ys = P.f(np.arange(9) - 4)[None], P.f(5 - np.arange(11))[:, None]
        for i in range(16):
            c, s = P.f(math.cos(math.pi * i / 8)), P.f(math.sin(math.pi * i / 8))
            ratio = 1 / (1 + (xs * s - ys * c) * P.f(1 / 40))
            along = xs * c - ys * s if P.d("rotation_sign") else xs * c + ys * s
            pos[i] = along * ratio * P.f(1 / 1.2) + 12
            mag[i] = ratio * ratio
        pos = P.put("position", pos)

        low = np.clip(np.floor(pos).astype(np.int64), 0, 23)
        frac = pos - P.f(low)
        angle = np.arange(16)[:, None, None]
        a, b = f[angle, low], f[angle, low + 1]
        if P.d("interpolation_weights_exchanged"):
            a, b = b, a
        smp = P.put("sampled", a + (b - a) * frac)
        mag = P.put("magnify", mag)

        image = np.zeros((11, 9), sino.dtype)
        lost = np.random.default_rng(3).random((11, 9)) < 0.1
        for i in range(0, 16, 2):
            part = smp[i] * mag[i] + smp[i + 1] * mag[i + 1]
            if P.d("two_blocks_add_without_atomics") and i == 10:  # one block's sum is overwritten in some pixels
                part = np.where(lost, smp[i + 1] * mag[i + 1], part)
            image = image + part
            if P.d("image_summed_in_half"):
                image = image.astype(np.float16).astype(sino.dtype)
        P.put("output", image * P.f(math.pi / 16))

    defects = [
        D(
            "detector_centre_at_half_its_count",
            "weighted",
            "shift",
            "The cosine weight has its centre at 25 / 2 instead of 24 / 2, half a pixel off.",
            ("constant", "ddof"),
        ),
        D(
            "filter_goes_round_the_detector",
            "filtered",
            "other",
            "The filter is circular for want of padding: values of the far end of the detector take part.",
            ("mask", "shift", "stale", "function", "zero", "axis"),
        ),
        D(
            "rotation_sign",
            "position",
            "sign",
            "The sine term of the rotated coordinate is taken off instead of added.",
            ("flip", "transpose", "axis"),
        ),
        D(
            "interpolation_weights_exchanged",
            "sampled",
            "swap",
            "The weights of the lower and the upper detector pixel are exchanged.",
            ("flip", "function", "permute"),
        ),
        D(
            "two_blocks_add_without_atomics",
            "output",
            "race",
            "In some pixels one angle's share is lost since two blocks add to the image at once.",
            ("drop_term", "stale", "mask", "zero"),
        ),
        D("image_summed_in_half", "output", "precision", "The image is summed in float16."),
    ]


@program("v06", variants=("f32",), seeds=6)
class gaussian_process:
    """Regression with a Matern 5/2 kernel. The port factors the matrix in panels of 8 in place, solves by
    substitution, and gets test variances from one solve a test point."""

    def make(g):
        x = randn(g, 37, 4)
        y = torch.sin(1.3 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + randn(g, 37, scale=0.3, shift=1.5)
        return dict(
            x=x,
            x_new=randn(g, 11, 4, scale=0.8),
            y=y,
            log_length=randn(g, 4, scale=0.2, shift=0.35),
            log_signal=randn(g, 1, scale=0.1, shift=0.15),
            log_noise=randn(g, 1, scale=0.1, shift=-1.1),
            mean=randn(g, 1, scale=0.2, shift=1.3),
        )

    def reference(x, x_new, y, log_length, log_signal, log_noise, mean):
        def squares(a, b):
            return (((a[:, None] - b[None]) / log_length.exp()) ** 2).sum(-1)

        def matern(d2):
            r = (5 * d2).clamp(min=1e-30).sqrt()
            return (2 * log_signal).exp() * (1 + r + 5 * d2 / 3) * (-r).exp()

        d2 = step("sqdist", squares(x, x))
        k = step("kernel", matern(d2) + (2 * log_noise).exp() * torch.eye(37, dtype=x.dtype))
        low = step("chol", torch.linalg.cholesky(k))
        alpha = step("alpha", torch.cholesky_solve((y - mean)[:, None], low)[:, 0])
        cross = step("cross", matern(squares(x_new, x)))
        step("predicted", mean + cross @ alpha)
        v = torch.linalg.solve_triangular(low, cross.T, upper=False)
        step("variance", (2 * log_signal).exp() - (v**2).sum(0))
        return 0.5 * (y - mean) @ alpha + low.diagonal().log().sum() + 18.5 * math.log(2 * math.pi)

    def port(P: Port):
        x, xn, mean = P["x"], P["x_new"], P["mean"]
        resid = P["y"] - mean
        signal = np.exp(2 * P["log_signal"])[0]
        inv = np.exp(-P["log_length"])

        def squares(a, b, weight):
            d2 = np.zeros((len(a), len(b)), a.dtype)
            for k in range(4):
                for c in range(0, len(b), 16):
                    diff = a[:, k, None] - b[None, c : c + 16, k]
                    d2[:, c : c + 16] += diff * diff * weight[k]
            return d2

        def matern(d2):
            r = np.sqrt(5 * d2)
            third = P.f(1 if P.d("five_thirds_as_integers") else 5 / 3)
            return signal * np.exp(-r) * (third * d2 + r + 1)

        d2 = P.put("sqdist", squares(x, x, inv if P.d("length_not_squared") else inv * inv))
        k = matern(d2)
        k[np.arange(37), np.arange(37)] += np.exp(2 * P["log_noise"])[0]
        k = P.put("kernel", k)

        a = np.tril(k)
        for j in range(0, 37, 8):
            e = min(j + 8, 37)
            for c in range(j, e):  # panel
                a[c, c] = np.sqrt(a[c, c])
                a[c + 1 : e, c] /= a[c, c]
                for r in range(c + 1, e):
                    a[r:e, r] -= a[r:e, c] * a[r, c]
            unsolved = a[e:, j:e].copy()
            for c in range(j, e):
                a[e:, c] = (a[e:, c] - a[e:, j:c] @ a[c, j:c]) / a[c, c]
            panel = a[e:, j:e]
            if P.d("update_reads_unsolved_panel") and j == 16:
                panel = unsolved
            a[e:, e:] -= np.tril(panel @ panel.T)
        low = P.put("chol", np.tril(a))

        def forward(b):
            b = b.copy()
            for i in range(37):
                b[i] = (b[i] - low[i, :i] @ b[:i]) / low[i, i]
            return b

        half = forward(resid)
        if P.d("second_solve_not_transposed"):
            alpha = forward(half)
        else:
            alpha = half.copy()
            for i in reversed(range(37)):  # columns, from the last
                alpha[i] = alpha[i] / low[i, i]
                alpha[:i] -= low[i, :i] * alpha[i]
        alpha = P.put("alpha", alpha)

        cross = P.put("cross", matern(squares(xn, x, inv * inv)))
        pred = np.zeros(11, x.dtype)
        for c in range(0, 37, 16):
            pred = pred + cross[:, c : c + 16] @ alpha[c : c + 16]
        P.put("predicted", pred if P.d("prior_mean_not_added_back") else pred + mean)
        explained = P.f([(v * v).sum() for v in (forward(row) for row in cross)])
        P.put("variance", signal + explained if P.d("variance_grows_by_data") else signal - explained)
        P.put("output", resid @ alpha / 2 + np.log(np.prod(np.diag(low))) + P.f(18.5 * math.log(2 * math.pi)))

    defects = [
        D(
            "length_not_squared",
            "sqdist",
            "factor",
            "Squared differences are divided by the length scales, not by their squares.",
            ("function", "scale", "drop_term"),
        ),
        D(
            "five_thirds_as_integers",
            "kernel",
            "constant",
            "The kernel has 1, from an integer division of 5 by 3, for 5/3.",
            ("factor", "truncate", "scale", "function"),
        ),
        D(
            "update_reads_unsolved_panel",
            "chol",
            "stale",
            "The third panel's trailing update reads the panel as it was before its triangular solve.",
            ("race", "shift", "function", "other"),
        ),
        D(
            "second_solve_not_transposed",
            "alpha",
            "transpose",
            "The second triangular solve is with the factor again instead of its transpose.",
            ("function", "axis", "swap", "other"),
        ),
        D(
            "prior_mean_not_added_back",
            "predicted",
            "drop_term",
            "Predictions lack the prior mean, which was taken off the observations.",
            ("shift", "constant"),
        ),
        D(
            "variance_grows_by_data",
            "variance",
            "sign",
            "What the data explain is added to the prior variance instead of taken off.",
        ),
    ]
