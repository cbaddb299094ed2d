"""A mixture of experts, an audio front end, Muon, and decoding over an int8 cache."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from benchmark.base import D, Port, bf16, program, rand, randint, randn, silu, step


@program("t01", variants=("f32", "bf16", "bf16reg"), wide=("logits", "gates", "importance", "aux"))
class mixture_of_experts_top2:
    """203 tokens, some of them padding, to two of eight experts of 64 places each; first choices before second ones.

    The port counts by a stable sort of (choice, token), multiplies in tiles of 16 channels, and walks a token's rows.
    """

    def make(g):
        x = randn(g, 203, 52, scale=1.5, shift=0.4)
        x[187:] = 0
        return dict(
            x=x,
            n_valid=torch.tensor(187),
            norm_weight=randn(g, 52, scale=0.1, shift=1.0),
            w_router=randn(g, 8, 52, scale=0.15),
            b_router=torch.tensor([1.2, 0.1, -0.4, 0.6, 0.0, -0.8, 0.3, -0.2], dtype=torch.float64),
            w_gate=randn(g, 8, 52, 72, scale=0.14),
            w_up=randn(g, 8, 52, 72, scale=0.14),
            w_down=randn(g, 8, 72, 52, scale=0.12),
        )

    def reference(x, n_valid, norm_weight, w_router, b_router, w_gate, w_up, w_down):
        T, D_, E, C = 203, 52, 8, 64
        valid = torch.arange(T) < n_valid
        normed = step("normed", x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm_weight)
        logits = step("logits", normed @ w_router.T + b_router)
        expert = step("expert", torch.where(valid[:, None], logits.topk(2).indices, -1))
        chosen = logits.gather(1, expert.clamp(min=0))
        gates = step("gates", chosen.softmax(-1) * valid[:, None])
        queue = expert.T.reshape(-1)
        one_hot = (queue[:, None] == torch.arange(E)).long()
        at = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1).view(2, T).T
        slot = step("slot", torch.where((at < C) & (expert >= 0), at, -1))
        row = torch.where(slot >= 0, expert * C + slot, E * C)
        buffer = x.new_zeros(E * C + 1, D_).index_copy(0, row.flatten(), normed.repeat_interleave(2, 0))
        buffer = step("buffer", buffer[:-1].view(E, C, D_))
        hidden = step("hidden", F.silu(buffer @ w_gate) * (buffer @ w_up))
        done = step("expert_out", hidden @ w_down)
        rows = F.pad(done.reshape(E * C, D_), (0, 0, 0, 1))[row]
        combined = step("combined", (rows * gates[..., None]).sum(1))
        importance = step("importance", (logits.softmax(-1) * valid[:, None]).sum(0) / n_valid)
        load = (expert[:, :1] == torch.arange(E)).sum(0) / n_valid.to(x.dtype)
        return {"output": x + combined, "aux": E * (load * importance).sum()}

    def port(P: Port):
        x, n = P["x"], int(P["n_valid"])
        T, K, E, C, H = 203, 52, 8, 64, 72
        squares = np.zeros(T, x.dtype)
        for c in range(0, K, 16):
            squares += np.einsum("tc,tc->t", x[:, c : c + 16], x[:, c : c + 16])
        rstd = 1 / np.sqrt(squares / K + 1e-5)
        normed = P.put("normed", (x * P["norm_weight"]) * rstd[:, None])
        logits = np.tile(P["b_router"], (T, 1))
        for c in range(0, K, 16):
            logits += normed[:, c : c + 16] @ P["w_router"][:, c : c + 16].T
        logits = P.put("logits", logits)

        # Two maxima in one pass over the experts, as in registers.
        best, second = np.full(T, -np.inf), np.full(T, -np.inf)
        i1, i2 = np.full(T, -1), np.full(T, -1)
        for e in range(E):
            v = logits[:, e]
            new = v > best
            runner = ~new & (v > second)
            second = np.where(new, best, np.where(runner, v, second))
            i2 = np.where(new, i1, np.where(runner, e, i2))
            best, i1 = np.where(new, v, best), np.where(new, e, i1)
        expert = np.stack([i1, i2], 1).astype(np.int64)
        expert[n:] = -1
        expert = P.put("expert", expert)
        gates = np.zeros((T, 2), x.dtype)
        for t in range(n):
            gap = logits[t, expert[t, 0]] - logits[t, expert[t, 1]]
            gates[t, 1] = 1 / (1 + np.exp(gap))
            gates[t, 0] = 1 / (1 + np.exp(-gap))
            if P.d("gates_of_all_experts"):
                e = np.exp(logits[t] - logits[t].max())
                gates[t] = e[expert[t]] / e.sum()
        gates = P.put("gates", gates)

        slot = np.full((T, 2), -1, np.int64)
        order = np.argsort(expert.T.reshape(-1), kind="stable")  # by expert, then choice, then token
        start, count = 0, {}
        for i in order:
            k, t = divmod(int(i), T)
            e = expert[t, k]
            if e < 0:
                continue
            at = count.get(e, 0)
            count[e] = at + 1
            slot[t, k] = at if at < C else -1
        slot = P.put("slot", slot)
        buffer = np.zeros((E, C, K), x.dtype)
        for t in range(n):
            for k in range(2):
                if slot[t, k] >= 0:
                    buffer[expert[t, k], slot[t, k]] = normed[t]
        buffer = P.put("buffer", buffer)

        gate, up = np.zeros((E, C, H), x.dtype), np.zeros((E, C, H), x.dtype)
        last = K // 16 * 16 if P.d("last_channels_of_tile_left_out") else K
        for c in range(0, last, 16):
            part = buffer[:, :, c : c + 16]
            gate += np.matmul(part, P["w_gate"][:, c : c + 16])
            up += np.matmul(part, P["w_up"][:, c : c + 16])
        if P.d("silu_of_up"):
            gate, up = up, gate
        hidden = P.put("hidden", up * gate * (0.5 * np.tanh(0.5 * gate) + 0.5))
        out = np.empty((E, C, K), x.dtype)
        for e in range(E):
            for r in range(0, C, 24):
                out[e, r : r + 24] = hidden[e, r : r + 24] @ P["w_down"][e]
        out = P.put("expert_out", out)

        combined = np.zeros_like(x)
        for t in range(n):
            for k in (1, 0):
                s = slot[t, k]
                if s < 0:
                    if not P.d("dropped_tokens_read_last_slot"):
                        continue
                combined[t] += gates[t, k] * out[expert[t, k], s]
        combined = P.put("combined", combined)
        importance = np.zeros(E, x.dtype)
        for t0 in range(0, n, 32):
            e = np.exp(logits[t0 : min(t0 + 32, n)])
            importance += (e / e.sum(1, keepdims=True)).sum(0)
        importance = P.put("importance", importance / n)
        P.put("output", x + combined)
        load = np.bincount(expert[:n, 0], minlength=E).astype(x.dtype)
        P.put("aux", (load @ importance) * P.f(E / n))

    defects = [
        D(
            "gates_of_all_experts",
            "gates",
            "scale",
            "the two gates are of a softmax over all experts and not divided by their sum",
            accept=("factor", "drop_term", "function", "other"),
        ),
        D(
            "last_channels_of_tile_left_out",
            "hidden",
            "truncate",
            "the last four channels, no whole tile, are not multiplied",
            accept=("drop_term", "mask", "zero"),
        ),
        D("silu_of_up", "hidden", "swap", "silu is of the up projection and not of the gate"),
        D(
            "dropped_tokens_read_last_slot",
            "combined",
            "mask",
            "a dropped choice, slot -1, reads its expert's last place",
            accept=("shift", "other", "stale"),
        ),
    ]


def mel_filters(bins: int, bands: int, rate: float = 16000.0) -> torch.Tensor:
    """Triangles of equal width in mels."""
    mel = torch.linspace(0, 2595 * math.log10(1 + rate / 2 / 700), bands + 2, dtype=torch.float64)
    edges = 700 * (10 ** (mel / 2595) - 1)
    f = torch.linspace(0, rate / 2, bins, dtype=torch.float64)[:, None]
    rise = (f - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - f) / (edges[2:] - edges[1:-1])
    return torch.minimum(rise, fall).clamp(min=0)


@program(
    "t02",
    variants=("f32", "f16", "f16reg"),
    wide=("audio", "filters", "emph", "framed", "power", "mel", "log_mel", "mean", "std"),
)
class audio_front_end:
    """Two signals with an offset, the second padded: emphasis, STFT, 26 mel bands, log, norm, depthwise convolution.

    The port folds a frame at its middle and multiplies by tables, has filters as spans, and merges means of chunks.
    """

    def make(g):
        t = torch.arange(5000, dtype=torch.float64)
        audio = torch.stack([0.6 * (0.05 * t + 1e-5 * t * t).sin(), 0.3 * (0.31 * t).sin() + 0.2 * (1.1 * t).sin()])
        audio = audio + randn(g, 2, 5000, scale=0.08, shift=3.0)
        audio[1, 3710:] = 0
        return dict(
            audio=audio,
            lengths=torch.tensor([5000, 3710]),
            filters=mel_filters(129, 26),
            weight=randn(g, 26, 5, scale=0.4),
            bias=randn(g, 26, scale=0.2),
        )

    def reference(audio, lengths, filters, weight, bias):
        emph = step("emph", torch.cat([audio[:, :1], audio[:, 1:] - 0.97 * audio[:, :-1]], 1))
        padded = F.pad(emph[:, None], (128, 128), mode="reflect")[:, 0]
        window = F.pad(torch.hann_window(200, periodic=True, dtype=audio.dtype), (28, 28))
        framed = step("framed", padded.unfold(1, 256, 80) * window)
        spectrum = torch.fft.rfft(framed)
        power = step("power", spectrum.real.square() + spectrum.imag.square())
        mel = step("mel", (power @ filters).transpose(1, 2))
        log_mel = step("log_mel", mel.clamp(min=1e-6).log())
        count = (lengths // 80 + 1)[:, None]
        inside = (torch.arange(63) < count)[:, None]
        mean = step("mean", (log_mel * inside).sum(-1) / count)
        centred = (log_mel - mean[..., None]) * inside
        std = step("std", (centred.square().sum(-1) / (count - 1)).sqrt())
        normed = step("normed", centred / (std[..., None] + 1e-5))
        conv = step("conv", F.conv1d(normed, weight[:, None], bias, padding=2, groups=26))
        return ((normed + F.silu(conv)) * inside)[..., ::2].transpose(1, 2)

    def port(P: Port):
        audio, lengths = P["audio"], P["lengths"]
        B, N, W, HOP, M = 2, 5000, 256, 80, 26
        flat = audio.reshape(-1)
        before = np.roll(flat, 1)
        before[0] = 0
        if not P.d("emphasis_over_signals"):
            before[N] = 0
        emph = P.put("emph", (flat - 0.97 * before).reshape(B, N))
        n = np.arange(200)
        window = np.zeros(W)
        window[28:228] = np.sin(np.pi * n / (199 if P.d("symmetric_window") else 200)) ** 2
        window = P.f(window)
        frames = 1 + N // HOP
        framed = np.empty((B, frames, W), audio.dtype)
        for t in range(frames):
            at = np.abs(np.arange(W) + t * HOP - W // 2)
            at = np.where(at >= N, 2 * (N - 1) - at, at)
            framed[:, t] = emph[:, at] * window
        framed = P.put("framed", framed)

        turn = np.arange(W) * (2 * np.pi / W)
        cos, sin = P.f(np.cos(turn)), P.f(np.sin(turn))
        k, j = np.arange(129), np.arange(1, 128)
        even = framed[..., 1:128] + framed[..., :128:-1]
        odd = framed[..., 1:128] - framed[..., :128:-1]
        angle = np.outer(j, k) % W
        re = even @ cos[angle] + framed[..., :1] + framed[..., 128:129] * P.f((-1.0) ** k)
        im = odd @ sin[angle]
        power = P.put("power", re * re + im * im)
        filters = P["filters"]
        mel = np.zeros((B, M, frames), audio.dtype)
        for m in range(M):
            (some,) = np.nonzero(filters[:, m])
            lo, hi = some[0], some[-1] + 1
            mel[:, m] = power[..., lo:hi] @ filters[lo:hi, m]
        mel = P.put("mel", mel)
        log_mel = P.put("log_mel", np.log2(np.maximum(mel, P.f(1e-6))) * P.f(math.log(2)))

        mean, m2 = np.zeros((B, M), audio.dtype), np.zeros((B, M), audio.dtype)
        count = [int(length) // HOP + 1 for length in lengths]
        for b in range(B):
            have = 0
            for t in range(0, count[b], 16):
                part = log_mel[b, :, t : min(t + 16, count[b])]
                size = part.shape[1]
                its = part.mean(1)
                shift = its - mean[b]
                m2[b] += ((part - its[:, None]) ** 2).sum(1) + shift * shift * P.f(have * size / (have + size))
                mean[b] += shift * P.f(size / (have + size))
                have += size
            m2[b] /= have if P.d("population_variance") else have - 1
        mean = P.put("mean", mean)
        std = P.put("std", np.sqrt(m2))
        normed = np.zeros_like(log_mel)
        for b in range(B):
            inv = 1 / (std[b] + 1e-5)
            normed[b, :, : count[b]] = (log_mel[b, :, : count[b]] - mean[b][:, None]) * inv[:, None]
        normed = P.put("normed", normed)
        weight = P["weight"]
        if P.d("taps_from_behind"):
            weight = weight[:, ::-1]
        ring = [np.zeros((B, M), audio.dtype) for _ in range(5)]  # the last five frames
        conv = np.empty_like(normed)
        for t in range(frames + 2):
            ring[t % 5] = normed[:, :, t] if t < frames else np.zeros((B, M), audio.dtype)
            if t >= 2:
                conv[:, :, t - 2] = P["bias"] + sum(weight[:, tap] * ring[(t - 4 + tap) % 5] for tap in range(5))
        conv = P.put("conv", conv)
        out = np.zeros((B, (frames + 1) // 2, M), audio.dtype)
        for b in range(B):
            for t in range(0, count[b], 2):
                out[b, t // 2] = normed[b, :, t] + silu(conv[b, :, t])
        P.put("output", out)

    defects = [
        D(
            "emphasis_over_signals",
            "emph",
            "mask",
            "the second signal's first sample has the last one of the first signal before it",
            accept=("shift", "stale", "other"),
        ),
        D(
            "symmetric_window",
            "framed",
            "constant",
            "the window is symmetric, of period 199, and not periodic",
            accept=("function", "factor", "scale", "shift", "ddof"),
        ),
        D(
            "population_variance",
            "std",
            "ddof",
            "divided by the number of frames and not by one less",
            ("factor", "scale"),
        ),
        D(
            "taps_from_behind",
            "conv",
            "flip",
            "a convolution and not a correlation: the taps are reversed",
            ("permute",),
        ),
    ]


@program(
    "t03",
    variants=("bf16", "f32", "bf16reg"),
    wide=tuple(f"{p}_{n}" for p in "ab" for n in ("weight", "momentum", "buf", "norm")) + ("w_a", "w_b", "m_a", "m_b"),
)
class muon_step:
    """Muon for a wide and a tall matrix: momentum, five Newton-Schulz iterations, decay; weights and momentum returned.

    The port has the upper tiles of a product only and mirrors them, splits long sums, and keeps two buffers.
    """

    def make(g):
        def gradient(rows, cols):
            low = randn(g, rows, 6) @ randn(g, 6, cols)
            return 2e-3 * low + randn(g, rows, cols, scale=1e-3)

        return dict(
            w_a=randn(g, 100, 168, scale=0.06),
            g_a=gradient(100, 168),
            m_a=gradient(100, 168),
            w_b=randn(g, 150, 72, scale=0.03, shift=0.25),
            g_b=gradient(150, 72),
            m_b=gradient(150, 72),
        )

    def reference(w_a, g_a, m_a, w_b, g_b, m_b):
        result = {}
        for n, w, grad, m in (("a", w_a, g_a, m_a), ("b", w_b, g_b, m_b)):
            buf = step(f"{n}_buf", 0.95 * m + 0.05 * grad)
            update = step(f"{n}_update", 0.05 * grad + 0.95 * buf)
            norm = step(f"{n}_norm", update.square().sum().sqrt())
            rows, cols = w.shape
            x = update.T if rows > cols else update
            x = step(f"{n}_x", x / (norm + 1e-7))
            for _ in range(5):
                gram = step(f"{n}_gram", x @ x.T)
                poly = step(f"{n}_poly", -4.775 * gram + 2.0315 * gram @ gram)
                x = step(f"{n}_x", 3.4445 * x + poly @ x)
            x = x.T if rows > cols else x
            result[f"{n}_weight"] = w * (1 - 0.02 * 0.1) - 0.02 * max(1, rows / cols) ** 0.5 * x
            result[f"{n}_momentum"] = buf
        return result

    def port(P: Port):
        TILE = 32
        for n in "ab":
            w, grad, buf = P[f"w_{n}"], P[f"g_{n}"], P[f"m_{n}"]
            buf += P.f(0.05) * (grad - buf)
            buf = P.put(f"{n}_buf", buf)
            update = P.put(f"{n}_update", grad + P.f(0.95) * (buf - grad))
            most = np.abs(update).max()
            total = P.f(0)
            for r in range(0, len(update), TILE):
                total = total + ((update[r : r + TILE] / most) ** 2).sum()
            norm = P.put(f"{n}_norm", most * np.sqrt(total))
            tall = w.shape[0] > w.shape[1]
            x = np.ascontiguousarray(update.T) if tall else update
            x = P.put(f"{n}_x", x * (1 / (norm + P.f(1e-7))))
            size, long = x.shape
            gram_before = None
            for i in range(5):
                gram = np.zeros((size, size), x.dtype)
                for r in range(0, size, TILE):
                    for c in range(r, size, TILE):
                        tile = sum(
                            x[r : r + TILE, k : k + 64] @ x[c : c + TILE, k : k + 64].T for k in range(0, long, 64)
                        )
                        gram[r : r + TILE, c : c + TILE] = tile
                        if c > r:
                            plain = P.d("mirrored_tiles_not_transposed") and tile.shape == (TILE, TILE)
                            gram[c : c + TILE, r : r + TILE] = tile if plain else tile.T
                gram = P.put(f"{n}_gram", gram)
                right = gram
                if P.d("other_buffer_of_gram") and i > 0:
                    right = gram_before
                poly = P.f(2.0315) * (gram @ right)
                poly[:] += P.f(-4.775) * gram
                gram_before = gram
                poly = P.put(f"{n}_poly", poly)
                new = np.empty_like(x)
                for c in range(0, long, TILE):
                    new[:, c : c + TILE] = poly @ x[:, c : c + TILE] + P.f(3.4445) * x[:, c : c + TILE]
                x = P.put(f"{n}_x", new)
            rows, cols = x.shape if P.d("shape_factor_after_transposing") else w.shape
            lr = P.f(0.02 * math.sqrt(max(1.0, rows / cols)))
            if not P.d("weights_not_decayed"):
                w -= P.f(0.02 * 0.1) * w
            P.put(f"{n}_weight", w - lr * (x.T if tall else x))
            P.put(f"{n}_momentum", buf)

    defects = [
        D(
            "mirrored_tiles_not_transposed",
            "a_gram",
            "transpose",
            "tiles below the diagonal are copies of those above, not transposed",
            accept=("layout", "permute"),
        ),
        D(
            "other_buffer_of_gram",
            "a_poly#2",
            "stale",
            "from the second iteration, the square has the Gram matrix of the iteration before as one factor",
            accept=("other", "swap"),
        ),
        D(
            "weights_not_decayed",
            "a_weight",
            "drop_term",
            "the weight decay is left out",
            accept=("factor", "scale", "constant", "zero"),
        ),
        D(
            "shape_factor_after_transposing",
            "b_weight",
            "factor",
            "the factor of the shape is that of the transposed matrix, and so one for the tall matrix",
            accept=("scale", "swap", "constant", "drop_term", "transpose", "axis"),
        ),
    ]


@program(
    "t04",
    variants=("f32", "bf16", "bf16reg"),
    wide=("v", "key_scales", "value_scales", "k_rope", "k_scale", "v_scale", "k_scales", "v_scales", "scores", "lse"),
)
class int8_cache_decode:
    """One token of five sequences, one of them empty: eight heads on two of keys, window of 64, four sinks, int8 cache.

    The port goes through partitions of 32 tokens, skips those out of sight, scales after the product, and merges.
    """

    def make(g):
        v = randn(g, 5, 2, 32)
        v[1, 0, 16:] = 0
        return dict(
            q=randn(g, 5, 8, 32, scale=1.3),
            k=randn(g, 5, 2, 32) + 3 * (torch.arange(32) % 11 == 4),
            v=v,
            key_cache=randint(g, -127, 128, 5, 203, 2, 32).to(torch.int8),
            value_cache=randint(g, -127, 128, 5, 203, 2, 32).to(torch.int8),
            key_scales=rand(g, 5, 203, 2, 2, low=0.004, high=0.02),
            value_scales=rand(g, 5, 203, 2, 2, low=0.002, high=0.03),
            lengths=torch.tensor([203, 77, 130, 3, 0]),
            w_o=randn(g, 96, 256, scale=0.1),
        )

    def reference(q, k, v, key_cache, value_cache, key_scales, value_scales, lengths, w_o):
        position = (lengths - 1).clamp(min=0)
        inv_freq = 10000.0 ** (-torch.arange(0, 32, 2, dtype=q.dtype) / 32)
        angles = (position[:, None] * inv_freq)[:, None]
        cos, sin = angles.cos(), angles.sin()

        def rotated(y):
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q = step("q_rope", rotated(q))
        k = step("k_rope", rotated(k))
        active, b = lengths > 0, torch.arange(5)
        cached = {}
        for n, new, codes, scales in (("k", k, key_cache, key_scales), ("v", v, value_cache, value_scales)):
            blocks = new.unflatten(-1, (2, 16))
            scale = step(f"{n}_scale", blocks.abs().amax(-1).clamp(min=1e-8) / 127)
            code = step(f"{n}_codes", (blocks / scale[..., None]).round().flatten(-2).to(torch.int8))
            code = torch.where(active[:, None, None], code, codes[b, position])
            scale = torch.where(active[:, None, None], scale, scales[b, position])
            codes = step(f"{n}_cache", codes.index_put((b, position), code))
            scales = step(f"{n}_scales", scales.index_put((b, position), scale))
            cached[n] = (codes.to(q.dtype).unflatten(-1, (2, 16)) * scales[..., None]).flatten(-2)
        s = torch.arange(203)
        seen = (s < lengths[:, None]) & ((s < 4) | (s >= lengths[:, None] - 64))
        seen = seen[:, None]
        scores = torch.einsum("bgnd,bsgd->bgns", q.view(5, 2, 4, 32), cached["k"]).flatten(1, 2) / 32**0.5
        scores = step("scores", torch.where(seen, scores, 0.0))
        hidden = scores.masked_fill(~seen, -1e30)
        lse = step("lse", torch.where(active[:, None], hidden.logsumexp(-1), 0.0))
        p = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
        context = torch.einsum("bgns,bsgd->bgnd", p.view(5, 2, 4, 203), cached["v"])
        context = step("context", context.reshape(5, 8, 32))
        return context.flatten(1) @ w_o.T

    def port(P: Port):
        q, k, v, lengths = P["q"], P["k"], P["v"], P["lengths"]
        dtype = q.dtype
        table = np.arange(203)[:, None] * 10000.0 ** (-np.arange(16) / 16)
        cos, sin = P.f(np.cos(table)), P.f(np.sin(table))
        position = np.maximum(lengths - 1, 0)

        def rotated(y, interleaved):
            out = np.empty_like(y)
            c, s = cos[position][:, None], sin[position][:, None]
            one, two = (slice(0, 32, 2), slice(1, 32, 2)) if interleaved else (slice(0, 16), slice(16, 32))
            out[..., one] = y[..., one] * c - y[..., two] * s
            out[..., two] = y[..., one] * s + y[..., two] * c
            return out

        q = P.put("q_rope", rotated(q, P.d("neighbours_rotated_in_query")))
        k = P.put("k_rope", rotated(k, False))
        held = {}
        for n, new, codes, scales in (
            ("k", k, P["key_cache"], P["key_scales"]),
            ("v", v, P["value_cache"], P["value_scales"]),
        ):
            scale, code = np.empty((5, 2, 2), dtype), np.empty((5, 2, 32), np.int8)
            for block in range(2):
                part = new[..., 16 * block : 16 * block + 16]
                scale[..., block] = np.maximum(np.maximum(part.max(-1), -part.min(-1)), P.f(1e-8)) / 127
            scale = P.put(f"{n}_scale", scale)
            for block in range(2):
                part = new[..., 16 * block : 16 * block + 16]
                code[..., 16 * block : 16 * block + 16] = np.rint(part / scale[..., block, None])
            code = P.put(f"{n}_codes", code)
            for b in range(5):
                if lengths[b] > 0:
                    codes[b, lengths[b] - 1] = code[b]
                    scales[b, lengths[b] - 1] = scale[b]
            held[n] = P.put(f"{n}_cache", codes), P.put(f"{n}_scales", scales)

        window = 65 if P.d("window_one_longer") else 64
        scores = np.zeros((5, 8, 203), dtype)
        part_of = {}
        for b in range(5):
            n = int(lengths[b])
            for s0 in range(0, n, 32):
                s = np.arange(s0, min(s0 + 32, n))
                s = s[(s < 4) | (s >= n - window)]
                if len(s):
                    part_of.setdefault(b, []).append(s)
        codes, scales = held["k"]
        for b, parts in part_of.items():
            for s in parts:
                for g in range(2):
                    heads = slice(4 * g, 4 * g + 4)
                    dots = 0
                    for block in range(2):
                        d = slice(16 * block, 16 * block + 16)
                        dots = dots + (q[b, heads, d] @ codes[b, s, g, d].astype(dtype).T) * scales[b, s, g, block]
                    scores[b, heads][:, s] = dots * P.f(32**-0.5)
        scores = P.put("scores", scores)
        codes, scales = held["v"]
        LOG2E = P.f(math.log2(math.e))
        lse, context = np.zeros((5, 8), dtype), np.zeros((5, 8, 32), dtype)
        half = bf16 if P.d("context_in_bfloat16") else lambda y: y
        for b, parts in part_of.items():
            n = int(lengths[b])
            for g in range(2):
                heads = slice(4 * g, 4 * g + 4)
                m, total = np.full(4, P.f(-np.inf)), np.zeros(4, dtype)
                acc = np.zeros((4, 32), dtype)
                for s in parts:
                    s = s[(s < 4) | (s >= n - 64)]
                    if not len(s):
                        continue
                    x = scores[b, heads][:, s] * LOG2E
                    new = np.maximum(m, x.max(1))
                    p = np.exp2(x - new[:, None])
                    keep = np.exp2(m - new)
                    total = total * keep + p.sum(1)
                    part = np.empty((4, 32), dtype)
                    for block in range(2):
                        d = slice(16 * block, 16 * block + 16)
                        by = scales[b, s, g, 0 if P.d("first_scale_for_both_blocks") else block]
                        part[:, d] = (p * by) @ codes[b, s, g, d].astype(dtype)
                    acc = half(half(acc * keep[:, None]) + half(part))
                    m = new
                context[b, heads] = acc / total[:, None]
                lse[b, heads] = m / LOG2E + np.log(total)
        lse = P.put("lse", lse)
        context = P.put("context", context)
        out = np.zeros((5, 96), dtype)
        flat = context.reshape(5, 256)
        for c in range(0, 256, 64):
            out += flat[:, c : c + 64] @ P["w_o"][:, c : c + 64].T
        P.put("output", out)

    defects = [
        D(
            "neighbours_rotated_in_query",
            "q_rope",
            "layout",
            "the query is rotated in pairs of neighbours and not of halves",
            accept=("permute", "swap", "other"),
        ),
        D(
            "window_one_longer",
            "scores",
            "mask",
            "the window has 65 tokens in it",
            accept=("shift", "constant"),
        ),
        D(
            "first_scale_for_both_blocks",
            "context",
            "scale",
            "the values' second block has the scale of the first",
            accept=("factor", "shift", "stale", "swap"),
        ),
        D("context_in_bfloat16", "context", "precision", "partitions are summed up in bfloat16"),
    ]
